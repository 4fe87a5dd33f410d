"""Elementwise operations of models without an op: copies, sums and factors, in place, by the array's library."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.core.allocator import allocator, empty_like
from gpu_ops.core.checks import computing_dtype

__all__ = ["added", "copied", "softcapped", "times"]

_QUIET = np.errstate(all="ignore")  # overflow gives inf, as on a GPU and in the ops
_CHUNK = 1 << 18  # number of logits that are float32 at a time: 1 MiB


def copied(x: Any, to: Any = None) -> Any:
    """Copy ``x`` to ``to``, or to a new contiguous array."""
    if to is None:
        to = empty_like(x, "copy")
    if _runs():
        bits = np.dtype(f"u{x.dtype.itemsize}")  # CuPy does not know bfloat16
        to.view(bits)[...] = x.view(bits)
    return to


@_QUIET
def added(y: Any, more: Any) -> Any:
    """Add ``more`` to ``y`` in place, unless None."""
    if more is not None and _runs():
        y += more
    return y


@_QUIET
def times(y: Any, factor: float) -> Any:
    """Multiply ``y`` by ``factor`` in place."""
    if factor != 1.0 and _runs():
        y *= factor
    return y


@_QUIET
def softcapped(y: Any, cap: float) -> Any:
    """Compute ``cap * tanh(y / cap)`` in place, rounded once; no change if the cap is 0. ``y`` is contiguous."""
    if cap and _runs():
        flat, acc_dtype = y.reshape(-1), computing_dtype(y.dtype.name)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            values = part.astype(acc_dtype)
            values *= 1 / cap
            np.tanh(values, out=values)
            values *= cap
            part[...] = values
    return y


def _runs() -> bool:
    """Whether arrays hold numbers, and not only a plan of memory."""
    current = allocator()
    return current is None or current.runs
