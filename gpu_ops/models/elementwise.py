"""What models do to arrays without an op: copies, sums and factors, in place, by the array's own library."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.core.allocator import allocator, empty_like
from gpu_ops.core.checks import computing_dtype

__all__ = ["added", "copied", "softcapped", "times"]

_QUIET = np.errstate(all="ignore")  # inf where a number overflows, as on a GPU and in the ops
_CHUNK = 1 << 18  # logits that are float32 at a time: 1 MiB


def copied(x: Any, to: Any = None) -> Any:
    """``x`` in ``to``, or in a new contiguous array."""
    if to is None:
        to = empty_like(x, "copy")
    if _runs():
        bits = np.dtype(f"u{x.dtype.itemsize}")  # CuPy does not know bfloat16
        to.view(bits)[...] = x.view(bits)
    return to


@_QUIET
def added(y: Any, more: Any) -> Any:
    """``y + more``, in place."""
    if more is not None and _runs():
        y += more
    return y


@_QUIET
def times(y: Any, factor: float) -> Any:
    """``y * factor``, in place."""
    if factor != 1.0 and _runs():
        y *= factor
    return y


@_QUIET
def softcapped(y: Any, cap: float) -> Any:
    """``cap * tanh(y / cap)``, in place and rounded once; ``y`` where the cap is 0. ``y`` is contiguous."""
    if cap and _runs():
        flat, kind = y.reshape(-1), computing_dtype(y.dtype.name)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            wide = part.astype(kind)
            wide *= 1 / cap
            np.tanh(wide, out=wide)
            wide *= cap
            part[...] = wide
    return y


def _runs() -> bool:
    """Whether there are numbers, not only a plan of memory."""
    instead = allocator()
    return instead is None or instead.runs
