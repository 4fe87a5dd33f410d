"""Quantise weights to ternary (1.58 bits)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast, get_args

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.device import HOST
from gpu_ops.core.op import op
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.ternary_checks import (
    check_scale,
    not_finite,
)
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Builder, Lower, Spec, lowers
from gpu_ops.reference.weights.ternary import DEFAULT_THRESHOLD, Method

__all__ = ["group_size_of", "quantize", "ternary_quantize", "threshold_of"]


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


@op(cuda=True, kernels="weights.ternary_quantize")
def ternary_quantize(
    w: Any,
    *,
    method: str = "absmean",
    group_size: int | None = None,
    threshold: float | None = None,
    device: str | None = None,
    backend: str | None = None,
) -> Bound:
    """Quantise weights to ``scale * t``, ``t`` in {-1, 0, +1}.

    ``absmean``: ``scale = max(mean|w|, 1e-5)``, ``t = clip(round_half_even(w / scale), -1, 1)``. The other
    methods: ``t = sign(w)`` where ``|w| > d``, and ``scale = mean|w|`` over those weights, 1 if none.

    Parameters
    ----------
    w : array (N, K)
        Weights, output features first; float16, bfloat16, float32 or float64; finite.
    method : {"absmean", "absmax", "twn", "percentile", "meanstd", "manual"}
        ``d`` is ``threshold * max|w|`` for absmax, ``threshold * mean|w|`` for twn, the ``threshold``-th
        percentile of ``|w|``, ``mean|w| + threshold * std|w|`` for meanstd, ``threshold`` itself for manual.
        On normal weights absmax keeps fewer than 1 % of them, twn about 58 %, absmean 69 %. A percentile between
        two weights is interpolated linearly, as in NumPy.
    group_size : int, optional
        Statistics and scale per tensor (None, default), per row (-1), or per ``group_size`` weights
        along K; it must divide K.
    threshold : float, optional
        See ``method``; default 0.7 (absmax, twn), 50 (percentile), 0 (meanstd). absmean takes none.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.

    Returns
    -------
    TernaryMatrix
        In the format w2, which the kernels read; ``.to(format)`` converts exactly. Holds NumPy arrays; codes made on
        a GPU stay there for ``ternary_matmul``, and are copied to the host when they are read.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError

    Notes
    -----
    CUDA C++ kernels read the weights twice; for meanstd three times, for percentile three or, float32, four times.

    absmean: Ma et al., "The Era of 1-bit LLMs", 2024, eq. 1-3. twn: Li et al., "Ternary Weight
    Networks", 2016, eq. 6. Trits are computed from the returned float32 scale.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> w = gpu_ops.ternary_quantize(np.array([[1.0, -0.2], [-0.9, 0.3]], np.float32))
    >>> w.trits()
    array([[ 1,  0],
           [-1,  0]], dtype=int8)
    >>> print(f"scale {w.scale:.2f}, density {w.density}")
    scale 0.60, density 0.5
    """
    call = Call("ternary_quantize", device, backend)
    w_ = call.read("w", w)
    if w_.ndim != 2:
        raise ShapeError(f"{call.op}: w has shape {w_.shape}; expected (N, K), output features first")
    dtype = checks.float_dtype(call.op, w=w_)
    chosen = checks.one_of(call.op, "method", method, get_args(Method))
    group = group_size_of(call.op, group_size, w_.shape[1])
    limit = threshold_of(call.op, cast(Method, chosen), threshold)
    n, k = w_.shape
    run = group if group is not None and group != -1 else max(k, 1)
    call.option(group_size=group, run=run, per_tensor=group is None, method=chosen, threshold=limit)
    per = {None: "per tensor", -1: "per row"}.get(group, f"per group of {group}")
    return call.bind(
        problem=f"{n} x {k} {dtype}, {chosen} {per}",
        check_values=_backend,
        unsupported=_unsupported_quantize(dtype, k, group),
        finish=functools.partial(_as_matrix, shape=(n, k), group=group),
        flops=6.0 * n * k,
    )


def _backend(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Record the backend: a matrix whose codes stay on a GPU is converted there by its kernels."""
    return {}, {"backend": backend}


def _as_matrix(
    views: dict[str, Any], device: Any, give: Any, *, shape: tuple[int, int], group: int | None
) -> TernaryMatrix:
    """The matrix of the computed codes and scales; those on a GPU stay there."""
    if 0 in shape:
        arrays = _by_reference(np.zeros(shape, np.float32), "absmean", group, None)
        return TernaryMatrix._trusted(*arrays, shape, "w2")
    codes, scale = views["codes"], views["scale"]
    if device is HOST:
        return TernaryMatrix._trusted(codes, scale, shape, "w2")
    return TernaryMatrix._made_on(device, views["backend"], codes, scale, group, shape[1])


def _by_reference(
    w: Array, method: Method, group: int | None, threshold: float | None
) -> tuple[Array, Array]:
    from gpu_ops.reference.weights import ternary as reference

    if not np.isfinite(w).all():
        raise not_finite("ternary_quantize")
    trits, scale = reference.ternary_quantize(w, method=method, group_size=group, threshold=threshold)
    return reference.ternary_pack(trits, "w2"), check_scale(scale, w.shape)


def _host_quantizer(quantizer: Callable[..., Any], text: str) -> Lower:
    def lower(spec: Spec, builder: Builder) -> None:
        method, group, threshold = spec["method"], spec["group_size"], spec["threshold"]

        def run(views: dict[str, Any]) -> None:
            views["codes"], views["scale"] = quantizer(views["w"], method, group, threshold)

        if spec.tensor("w").size:
            builder.call(run, text)
        else:
            builder.note("NumPy, float64")

    return lower


lowers("ternary_quantize", "reference")(_host_quantizer(_by_reference, "NumPy, float64"))
lowers("ternary_quantize", "cpu")(
    _host_quantizer(functools.partial(quantize, "ternary_quantize"), "fused statistics, encode and pack")
)


def _unsupported_quantize(dtype: str, k: int, group: int | None) -> dict[str, str]:
    if dtype == "float64":
        return {"raw": "float64 has Numba kernels only"}
    if group is not None and group != -1 and group % 64:
        return {"raw": f"group_size {group} is not a multiple of 64"}
    return {"raw": f"K={k} is beyond 31 bits"} if k >= 1 << 31 else {}
