"""Estimate of one call's memory before it runs, from the shapes of its arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.checks import integer
from gpu_ops.core.op import op_named
from gpu_ops.errors import DTypeError
from gpu_ops.memory.estimate import Estimate
from gpu_ops.memory.trace import Trace

__all__ = ["estimate_call", "read_dtype"]

_WHO = "memory.estimate_call"


def estimate_call(
    op: str | Callable[..., Any],
    *args: Any,
    dtype: npt.DTypeLike = np.float32,
    device: str | None = None,
    **kwargs: Any,
) -> Estimate:
    """Estimate the memory of one call, its arguments, results and workspaces, from its program, without running it.

    Parameters
    ----------
    op : str or function
        ``"attention"``, or ``gpu_ops.attention``.
    *args, **kwargs
        Arguments of the op, by position or name. An array is given as its shape, a tuple, and has ``dtype``; as
        ``(shape, dtype)``, which is also the form for keyword options such as ``bias``; or as a NumPy array. Index
        arrays whose values a call checks (``cu_seqlens``, ``seqused_k``) must be real arrays.
    dtype : dtype
    device : str, optional
        ``"cpu"``, ``"cuda"`` (the installed card) or a card of the presets, such as ``"H100 SXM"``.

    Returns
    -------
    Estimate
        ``parts`` are ``arguments`` (given as shapes), ``results`` and ``workspaces``; ``peak`` is their sum.

    Examples
    --------
    >>> from gpu_ops import memory
    >>> shape = (1, 8192, 32, 128)
    >>> call = memory.estimate_call("attention", q=shape, k=shape, v=shape, causal=True, dtype="bfloat16")
    >>> call.parts["results"] >> 20  # without the 4 GiB of scores, which are never stored
    64
    """
    named_op, default_dtype = op_named(_WHO, op), read_dtype(_WHO, dtype)
    named = dict(named_op.signature.parameters)
    by_place = [p for p in named.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    with Trace(device) as trace:
        arrays = [_array(trace, p, x, default_dtype) for p, x in zip(by_place, args, strict=False)]
        arrays += args[len(by_place) :]  # too many: the op raises an error
        options = {
            n: _array(trace, named[n], x, default_dtype) if n in named else x for n, x in kwargs.items()
        }
        arguments = trace.live_bytes
        result = named_op(tuple(arrays), options)
        results = trace.live_bytes - arguments
        parts = {"arguments": arguments, "results": results}
        parts["workspaces"] = trace.peak_bytes - arguments - results
        estimated = Estimate.of(trace, parts)
        del result
    return estimated


def read_dtype(op: str, dtype: Any) -> np.dtype[Any]:
    """Read a dtype argument."""
    try:
        result: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(
            f"{op}: dtype={dtype!r} is none; pass one such as 'float16' or 'bfloat16'"
        ) from error
    return result


def _array(trace: Trace, parameter: inspect.Parameter, value: Any, dtype: np.dtype[Any]) -> Any:
    """Make an array without memory for a shape, a shape and a dtype, or lists of these; others stay unchanged."""
    name = parameter.name
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple):
        return _empty(trace, name, value[0], read_dtype(_WHO, value[1]))
    takes_arrays = parameter.kind is not inspect.Parameter.KEYWORD_ONLY and parameter.annotation == "Any"
    if takes_arrays and isinstance(value, tuple):
        return _empty(trace, name, value, dtype)
    if takes_arrays and isinstance(value, list):
        return [_array(trace, parameter, x, dtype) for x in value]
    return value


def _empty(trace: Trace, name: str, shape: tuple[Any, ...], dtype: np.dtype[Any]) -> Any:
    sizes = tuple(integer(_WHO, f"{name}: an axis", n, low=0) for n in shape)
    if dtype.hasobject:
        raise DTypeError(f"{_WHO}: {name} cannot have dtype {dtype}")
    return trace.empty(sizes, dtype, name)
