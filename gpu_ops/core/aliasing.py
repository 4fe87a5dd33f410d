"""How arrays lie in memory: asked of shapes, strides and addresses, alike on either device."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["merges", "overlap", "overlaps_itself", "same"]

Array: TypeAlias = npt.NDArray[Any]  # or a CuPy array, which answers the same questions


def merges(x: Array) -> bool:
    """Whether the axes before the last are one axis, as they lie in memory."""
    axes = [(n, stride) for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n != 1]
    return not x.size or all(outer == n * stride for (_, outer), (n, stride) in itertools.pairwise(axes))


def _addresses(x: Any) -> Array:
    """A NumPy array at the addresses of ``x``: to ask which bytes two share, never to read."""
    if isinstance(x, np.ndarray):
        return x
    from gpu_ops.core.cuda_arrays import footprint

    return footprint(x)


def same(a: Array, b: Array) -> bool:
    """Whether two arrays of one shape are the same elements in memory."""
    a, b = _addresses(a), _addresses(b)
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0] and a.strides == b.strides


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays may have a byte in common."""
    if not a.size or not b.size:
        return False
    a, b = _addresses(a), _addresses(b)
    if not np.may_share_memory(a, b):  # disjoint address ranges: the common case, cheap
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # NumPy's stub is too narrow
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(x: Array) -> bool:
    """Whether two elements may have a byte in common: not if every axis steps over all that smaller steps reach."""
    if not x.size or x.ndim == 0:
        return False
    reach = x.itemsize
    for stride, n in sorted((abs(stride), n) for n, stride in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False
