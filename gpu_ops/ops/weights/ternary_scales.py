"""Scopes, thresholds and scales of ternary quantisation."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.ternary_checks import not_finite
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.reference.weights.ternary import DEFAULT_THRESHOLD, Method

__all__ = ["group_size_of", "quantize", "threshold_of"]


def group_size_of(name: str, group_size: Any, k: int) -> int | None:
    if group_size is None:
        return None
    group = checks.integer(name, "group_size", group_size, low=-1)
    if group == -1:
        return -1
    if group == 0:
        raise OptionError(f"{name}: group_size=0; None is per tensor, -1 per row, g >= 1 per g weights")
    if k == 0 or k % group:
        raise ShapeError(f"{name}: group_size={group} does not divide K={k}")
    return group


def threshold_of(name: str, method: Method, threshold: Any) -> float | None:
    if method == "absmean":
        if threshold is not None:
            raise OptionError(f"{name}: method 'absmean' takes no threshold; 'twn' and others do")
        return None
    if threshold is None:
        if method == "manual":
            raise OptionError(f"{name}: method 'manual' needs threshold=, the |w| below which a weight is 0")
        return DEFAULT_THRESHOLD[method]
    low = -math.inf if method == "meanstd" else 0.0
    value = checks.number(name, "threshold", threshold, low=low)
    if method == "percentile" and value > 100:
        raise OptionError(f"{name}: threshold={value:g} is no percentile; expected 0..100")
    return value


@functools.cache
@uninterrupted
def _kernels() -> ModuleType:
    from gpu_ops.kernels.weights.cpu import ternary

    return ternary


def quantize(
    name: str, w: Array, method: Method, group_size: int | None, threshold: float | None
) -> tuple[Array, Array]:
    """Compute w2 codes and scale by the kernels: statistics, a limit per scope, then codes."""
    kernels = _kernels()
    n, k = w.shape
    group = k if group_size is None or group_size == -1 else group_size
    size = n * k if group_size is None else group

    scopes = 1 if group_size is None else n, k // group
    limit, scale = np.empty(scopes), np.empty(scopes, np.float32)

    def limits(of: str, center: Array) -> None:
        statistics = kernels.statistics(w, group, center)
        if not kernels.limits(of, threshold or 0.0, size, statistics, limit, scale):
            raise not_finite(name)

    origin = np.zeros((1, k // group))
    if method == "meanstd":
        limits("mean", origin)
        limits(method, limit)
    else:
        limits("mean" if method == "percentile" else method, origin)
    if method == "percentile":
        assert threshold is not None
        magnitude = np.abs(w.astype(np.float64)).reshape(-1, size)
        limit[...] = np.percentile(magnitude, threshold, axis=1).reshape(scopes)
    codes, count, kept = kernels.encode(w, group, limit)
    if method != "absmean" and not kernels.scales(count, kept, scale):
        raise not_finite(name)
    shape: tuple[int, ...] = () if group_size is None else (n,) if group_size == -1 else (n, k // group)
    return codes, scale.reshape(shape)
