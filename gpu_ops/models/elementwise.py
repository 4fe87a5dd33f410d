"""Elementwise operations of models without an op: copies, sums and factors, in place, by the array's library."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.core.allocator import allocator, empty_like
from gpu_ops.core.checks import computing_dtype
from gpu_ops.kernels.recording import on_host

__all__ = ["added", "copied", "softcapped", "times"]

_QUIET = np.errstate(all="ignore")  # overflow gives inf, as on a GPU and in the ops
_CHUNK = 1 << 18  # number of logits that are float32 at a time: 1 MiB


def copied(x: Any, to: Any = None) -> Any:
    """Copy ``x`` to ``to``, or to a new contiguous array."""
    if to is None:
        to = empty_like(x, "copy")
    if _runs():
        on_host(_copy, x, to)
    return to


def added(y: Any, more: Any) -> Any:
    """Add ``more`` to ``y`` in place, unless None."""
    if more is not None and _runs():
        on_host(_add, y, more)
    return y


def times(y: Any, factor: float) -> Any:
    """Multiply ``y`` by ``factor`` in place."""
    if factor != 1.0 and _runs():
        on_host(_multiply, y, factor)
    return y


def softcapped(y: Any, cap: float) -> Any:
    """Compute ``cap * tanh(y / cap)`` in place, rounded once; no change if the cap is 0. ``y`` is contiguous."""
    if cap and _runs():
        on_host(_softcap, y, cap)
    return y


def _copy(x: Any, target: Any) -> None:
    bits = np.dtype(f"u{x.dtype.itemsize}")  # CuPy does not know bfloat16
    target.view(bits)[...] = x.view(bits)


@_QUIET
def _add(y: Any, more: Any) -> None:
    y += more


@_QUIET
def _multiply(y: Any, factor: float) -> None:
    y *= factor


@_QUIET
def _softcap(y: Any, cap: float) -> None:
    flat, acc_dtype = y.reshape(-1), computing_dtype(y.dtype.name)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        values = part.astype(acc_dtype)
        values *= 1 / cap
        np.tanh(values, out=values)
        values *= cap
        part[...] = values


def _runs() -> bool:
    """Whether arrays hold numbers, and not only a plan of memory."""
    current = allocator()
    return current is None or current.runs
