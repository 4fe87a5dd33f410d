"""What one call takes, before it runs, from the shapes of its arrays."""

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
    """The memory of one call: its arguments, results and workspaces, from its own program. Nothing runs.

    Parameters
    ----------
    op : str or function
        ``"attention"``, or ``gpu_ops.attention``.
    *args, **kwargs
        The op's own, by position or name. An array is given as its shape, a tuple, and has ``dtype``; as
        ``(shape, dtype)``, which keyword options such as ``bias`` need too; or as a NumPy array. Index arrays whose
        values a call checks (``cu_seqlens``, ``seqused_k``) have to be real ones.
    dtype : dtype
    device : str, optional
        ``"cpu"``, ``"cuda"`` (the card at hand) or a card of the presets, such as ``"H100 SXM"``.

    Returns
    -------
    Estimate
        ``parts`` are ``arguments`` (given as shapes), ``results`` and ``workspaces``; ``peak`` is their sum.

    Examples
    --------
    >>> from gpu_ops import memory
    >>> shape = (1, 8192, 32, 128)
    >>> found = memory.estimate_call("attention", q=shape, k=shape, v=shape, causal=True, dtype="bfloat16")
    >>> found.parts["results"] >> 20  # beside 4 GiB of scores that are never stored
    64
    """
    one, kind = op_named(_WHO, op), read_dtype(_WHO, dtype)
    named = dict(one.signature.parameters)
    by_place = [p for p in named.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    with Trace(device) as trace:
        given = [_array(trace, p, x, kind) for p, x in zip(by_place, args, strict=False)]
        given += args[len(by_place) :]  # too many: the op says so
        options = {n: _array(trace, named[n], x, kind) if n in named else x for n, x in kwargs.items()}
        arguments = trace.live_bytes
        result = one(tuple(given), options)
        results = trace.live_bytes - arguments
        parts = {"arguments": arguments, "results": results}
        parts["workspaces"] = trace.peak_bytes - arguments - results
        found = Estimate.of(trace, parts)
        del result
    return found


def read_dtype(op: str, dtype: Any) -> np.dtype[Any]:
    """The dtype that is meant."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(
            f"{op}: dtype={dtype!r} is none; pass one such as 'float16' or 'bfloat16'"
        ) from error
    return found


def _array(trace: Trace, parameter: inspect.Parameter, value: Any, dtype: np.dtype[Any]) -> Any:
    """An array without memory for a shape, or a shape and a dtype; lists of them; anything else as it is."""
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
