"""Checks and results shared by RMSNorm and LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Bound, Call
from gpu_ops.errors import OptionError, ShapeError

__all__ = ["bound", "validate", "write_gradients", "write_outputs"]


def validate(name: str, x: Array, weight: Array, bias: Array | None = None, **like_x: Array | None) -> str:
    """Check shapes and dtypes; return the dtype's name."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ShapeError(f"{name}: x has shape {x.shape}; the last axis is normalised and must not be empty")
    checks.exactly(name, "weight", weight, x.shape[-1:])
    if bias is not None:
        checks.exactly(name, "bias", bias, x.shape[-1:])
    for other, array in like_x.items():
        if array is not None:
            checks.exactly(name, other, array, x.shape)
    return checks.float_dtype(name, x=x, weight=weight, bias=bias, **like_x)


def write_outputs(
    call: Call,
    x: Array,
    has_sum: bool,
    out: Any,
    residual_out: Any,
    statistics: Sequence[str] = (),
    *,
    return_statistics: bool = False,
) -> None:
    """Declare ``y``, which may be x in place, and with ``has_sum`` ``s``, which may be residual in place.

    ``statistics``: names of the results with one number per row, which are always written.
    """
    if residual_out is not None and not has_sum:
        raise OptionError(
            f"{call.op}: residual_out receives x + residual; pass residual= too, and return_sum=True, or omit it"
        )
    call.write("y", x.shape, x.dtype, out, in_place="x", rows=True, item=0)
    if has_sum:
        call.write(
            "s", x.shape, x.dtype, residual_out, argument="residual_out", in_place="residual", rows=True
        )
    dtype, outs = checks.computing_dtype(x.dtype.name), out if return_statistics else None
    for item, name in enumerate(statistics, 1):
        place = call.write(name, x.shape[:-1], dtype, outs, returned=return_statistics, item=item)
        checks.contiguous(call.op, name, place)


def write_gradients(call: Call, x: Array, sums: Mapping[str, Any], dtype: np.dtype[Any], out: Any) -> None:
    """Declare ``dx``, which may be dy in place, and ``sums`` over rows.

    ``sums``: by name, the caller's array to which the sum is added, or None. The option ``added`` lists the added
    ones.
    """
    call.write("dx", x.shape, x.dtype, out, in_place="dy", rows=True, item=0)
    fresh = [name for name, array in sums.items() if array is None]
    for name, array in sums.items():
        if array is None:
            call.write(name, x.shape[-1:], dtype, out, item=1 + fresh.index(name))
        else:
            call.write(name, x.shape[-1:], dtype, array, argument=name, added=True)
    call.option(added=tuple(name for name in sums if name not in fresh))


def bound(call: Call, x: Array, flops: float, details: str = "") -> Bound:
    """Bind a call with these ``flops`` per element of x; ``details`` end its description."""
    rows, cols, dtype = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.name
    return call.bind(
        problem=lambda: f"{rows} rows of {cols} {dtype}{details}",
        unsupported=checks.unsupported(dtype),
        flops=flops * rows * cols,
    )
