"""RMSNorm fused with the int8 quantisation that an int8 or ternary matmul takes as input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast, get_args

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays, New, as_rows
from gpu_ops.core.device import Device, host_function
from gpu_ops.core.dispatch import Plan, choose, op
from gpu_ops.errors import ShapeError
from gpu_ops.ops import norm_checks as norm
from gpu_ops.reference.rmsnorm import Casting

__all__ = ["rmsnorm_quant_int8"]


@op(cuda=True)
def rmsnorm_quant_int8(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    residual: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """:func:`rmsnorm`, then int8 codes with one scale per row: ``y`` is about ``q * scale``.

    With ``absmax = max(max|y|, 1e-5)`` of a row: ``q = round_half_even(y * 127 / absmax)``,
    ``scale = absmax / 127``, ``rowsum`` = the sum of the row's codes, which a matmul with weight codes
    ``t + 1`` subtracts.

    Parameters
    ----------
    x, weight, eps, residual, weight_offset
        As in :func:`rmsnorm`.
    casting : {"fp32", "llama", "gemma"}
        ``fp32`` and ``gemma`` quantise the unrounded y: their one rounding is the one to int8. ``llama``
        quantises y in x's dtype, with the roundings of :func:`rmsnorm`.
    out : (q, scale, rowsum), optional
        Arrays that receive the results.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    q : array like x, int8
        In [-127, 127].
    scale : array (...), float32 (float64 for float64)
        NaN when the row holds a NaN, whose code is 0.
    rowsum : array (...), int32
    s : array like x
        Only with ``residual``: ``x + residual``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Notes
    -----
    The activations of BitNet b1.58, Ma et al., "The Era of 1-bit LLMs", 2024. One pass: each element of x is
    read once and each code written once.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.array([[3.0, -4.0, 0.0, 1.0]], np.float32)
    >>> q, scale, rowsum = gpu_ops.rmsnorm_quant_int8(x, np.ones(4, np.float32))
    >>> q, rowsum
    (array([[  95, -127,    0,   32]], dtype=int8), array([0], dtype=int32))
    >>> (q * scale[:, None]).round(2)
    array([[ 1.17, -1.57,  0.  ,  0.4 ]], dtype=float32)
    """
    name = "rmsnorm_quant_int8"
    arrays = Arrays(name)
    x_, weight_ = arrays.read("x", x), arrays.read("weight", weight)
    residual_ = None if residual is None else arrays.read("residual", residual)
    dtype = norm.validate(name, x_, weight_, residual=residual_)
    eps = checks.number(name, "eps", eps, above=0.0)
    weight_offset = checks.number(name, "weight_offset", weight_offset)
    mode = cast(Casting, checks.one_of(name, "casting", casting, get_args(Casting)))
    types = {"q": np.dtype(np.int8), "scale": checks.computing_dtype(dtype), "rowsum": np.dtype(np.int32)}
    outs = _outs(name, arrays, x_, types, out)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))
    rows, cols = math.prod(x_.shape[:-1]), x_.shape[-1]

    def normalise(
        on: Device | None, new: New, x: Array, weight: Array, residual: Array | None, outs: list[Array]
    ) -> list[Array]:
        shapes = (x.shape, x.shape[:-1], x.shape[:-1])
        results = outs or [new(n, t, label) for n, (label, t) in zip(shapes, types.items(), strict=True)]
        s = None if residual is None else new(x.shape, x.dtype, "s")
        host_function("rmsnorm_quant.forward", on, choice.backend)(
            as_rows(x),
            weight,
            None if residual is None else as_rows(residual),
            as_rows(results[0]),
            results[1].reshape(-1),
            results[2].reshape(-1),
            None if s is None else as_rows(s),
            eps=eps,
            weight_offset=weight_offset,
            llama=mode == "llama",
        )
        return results if s is None else [*results, s]

    def compute(on: Device | None) -> list[Array]:
        if choice.backend == "reference":
            from gpu_ops.reference import rmsnorm as reference

            results = list(
                reference.rmsnorm_quant_int8(
                    x_, weight_, eps=eps, residual=residual_, weight_offset=weight_offset, casting=mode
                )
            )
            for target, value in zip(outs, results[:3], strict=bool(outs)):
                target[...] = value
            return results
        return normalise(on, arrays.new, x_, weight_, residual_, outs)

    def run() -> Any:
        with arrays.on(choice) as on:
            given = [arrays.give(r) for r in compute(on)]
            return tuple(given) if out is None else (*out, *given[3:])

    def again() -> Callable[..., Any]:
        new = Arrays(name).new
        return lambda x, weight, *, residual=None, out=(), **_: tuple(
            normalise(None, new, x, weight, residual, list(out or ()))
        )

    return Plan(
        name,
        choice,
        lambda: f"{rows} rows of {cols} {dtype} to int8, casting {mode}",
        lambda: norm.config(choice, rows, cols, arrays, compute),
        run,
        again=again if choice.compiled else None,
    )


def _outs(name: str, arrays: Arrays, x: Array, types: dict[str, np.dtype[Any]], out: Any) -> list[Array]:
    """Writable views of q, scale and rowsum, or an empty list."""
    like = {label: (x.shape if label == "q" else x.shape[:-1], dtype) for label, dtype in types.items()}
    outs = arrays.write_each("out", out, like, rows=True)
    for label, view in zip(types, outs, strict=bool(outs)):
        if label != "q" and not view.flags.c_contiguous:
            raise ShapeError(f"{name}: out {label} must be C-contiguous; pass numpy.empty({view.shape}, ...)")
    return outs
