"""Quantise weights to ternary (1.58 bits)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast, get_args

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.device import HOST
from gpu_ops.core.op import op
from gpu_ops.errors import ShapeError
from gpu_ops.formats.ternary_checks import (
    check_scale,
    not_finite,
)
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.kernels.program import Builder, Lower, Spec, lowers
from gpu_ops.ops.weights.ternary_scales import group_size_of, quantize, threshold_of
from gpu_ops.reference.weights.ternary import Method

__all__ = ["ternary_quantize"]


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
