"""RMSNorm fused with int8 quantisation, for the input of an int8 or ternary matmul."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.norm.checks import bound, validate
from gpu_ops.reference.norm.rmsnorm import Casting

__all__ = ["rmsnorm_quant_int8"]

_MOST_COLS = (2**31 - 1) // 127


@op(cuda=True, kernels="norm.rmsnorm_quant")
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
    workspace: Any = None,
) -> Bound:
    """:func:`rmsnorm` quantised to int8 codes with one scale per row: ``y`` is about ``q * scale``.

    With ``absmax = max(max|y|, 1e-5)`` of a row: ``q = round_half_even(y * 127 / absmax)``,
    ``scale = absmax / 127``, ``rowsum`` = sum of the row's codes, which a matmul with weight codes
    ``t + 1`` subtracts.

    Parameters
    ----------
    x, weight, eps, residual, weight_offset
        Same as in :func:`rmsnorm`.
    casting : {"fp32", "llama", "gemma"}
        ``fp32`` and ``gemma`` quantise the unrounded y: the only rounding is to int8. ``llama``
        quantises y in x's dtype, with the roundings of :func:`rmsnorm`.
    out : (q, scale, rowsum), optional
        Arrays that receive the results.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    q : array like x, int8
        In [-127, 127].
    scale : array (...), float32 (float64 for float64)
        NaN when the row contains a NaN, whose code is 0.
    rowsum : array (...), int32
        Rows have at most 16,909,320 elements, so that 127 times as much fits in int32.
    s : array like x
        Only with ``residual``: ``x + residual``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

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
    call = Call("rmsnorm_quant_int8", device, backend, workspace)
    x_, weight_ = call.read("x", x, rows=True), call.read("weight", weight)
    residual_ = call.optional("residual", residual, rows=True)
    dtype = validate(call.op, x_, weight_, residual=residual_)
    if x_.shape[-1] > _MOST_COLS:
        raise ShapeError(
            f"{call.op}: x has rows of {x_.shape[-1]} elements; at most {_MOST_COLS}, whose codes add up to an int32 "
            "rowsum"
        )
    call.option(
        eps=checks.epsilon(call.op, eps, dtype),
        weight_offset=checks.computable(call.op, "weight_offset", weight_offset, dtype),
        casting=checks.one_of(call.op, "casting", casting, get_args(Casting)),
    )
    results: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
        "q": (x_.shape, np.int8),
        "scale": (x_.shape[:-1], checks.computing_dtype(dtype)),
        "rowsum": (x_.shape[:-1], np.int32),
    }
    outs = call.write_each(results, out, rows=True)
    for label, view in zip(results, outs, strict=bool(outs)):
        if label != "q":
            checks.contiguous(call.op, label, view)
    if residual_ is not None:
        call.write("s", x_.shape, x_.dtype)
    return bound(call, x_, flops=6.0, details=f" to int8, casting {casting}")


@lowers("rmsnorm_quant_int8", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.norm.rmsnorm import rmsnorm_quant_int8

    def run(views: Mapping[str, Any]) -> None:
        residual = views.get("residual")
        results = rmsnorm_quant_int8(views["x"], views["weight"], residual=residual, **dict(spec.options))
        store(views, ("q", "scale", "rowsum", "s") if "s" in views else ("q", "scale", "rowsum"), results)

    builder.call(run, "NumPy, float64")
