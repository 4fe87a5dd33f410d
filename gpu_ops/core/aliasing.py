"""Overlap and layout of arrays, from shapes, strides and addresses alone; the same on every device."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["is_row_major", "overlap", "overlaps_itself", "same_memory"]

Array: TypeAlias = npt.NDArray[Any]  # or a CuPy array, which has the same attributes


def is_row_major(x: Array) -> bool:
    """Whether the leading axes merge into one without a copy."""
    axes = [(n, stride) for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n != 1]
    return not x.size or all(outer == n * stride for (_, outer), (n, stride) in itertools.pairwise(axes))


def _address_view(x: Any) -> Array:
    """A NumPy array at the addresses of ``x``, to compare bytes with; its memory is never touched."""
    if isinstance(x, np.ndarray):
        return x
    interface = {
        "shape": x.shape,
        "strides": x.strides,
        "typestr": f"|V{x.itemsize}",
        "data": (x.data.ptr, True),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def same_memory(a: Array, b: Array) -> bool:
    """Whether two arrays of one shape are the same elements in memory."""
    a, b = _address_view(a), _address_view(b)
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0] and a.strides == b.strides


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays may have a byte in common."""
    if not a.size or not b.size:
        return False
    a, b = _address_view(a), _address_view(b)
    if not np.may_share_memory(a, b):  # disjoint address ranges: the common case, cheap
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # NumPy's stub is too narrow
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(x: Array) -> bool:
    """Whether two elements may share a byte; False if every axis steps past all bytes that smaller steps reach."""
    if not x.size or x.ndim == 0:
        return False
    reach = x.itemsize
    for stride, n in sorted((abs(stride), n) for n, stride in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False
