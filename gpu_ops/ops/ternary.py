"""Ternary (1.58-bit) weights: quantise, pack, unpack, multiply."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast, get_args

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.device import HOST, CudaDevice
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.ternary_checks import (
    check_integers,
    check_scale,
    check_trits,
    fits,
    matrix_shape,
    not_finite,
    on_host,
    pack,
    unpack,
)
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.formats.ternary_packing import tile_of, why_numpy
from gpu_ops.kernels.program import Builder, Layout, Lower, Spec, lowers
from gpu_ops.ops.ternary_matmul import ternary_matmul
from gpu_ops.ops.ternary_scales import group_size_of, quantize, threshold_of
from gpu_ops.reference.ternary import Method
from gpu_ops.reference.ternary_formats import FORMATS, TernaryFormat

__all__ = ["ternary_matmul", "ternary_pack", "ternary_quantize", "ternary_unpack"]

_NUMPY_ONLY = {"cpu numba": "packing is NumPy code (about 1 ns per weight); it has no kernel"}


@op(cuda=True, kernels="ternary_quantize")
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
        two weights lies on the line from one to the other, as NumPy has it.
    group_size : int, optional
        Statistics and scale per tensor (None, default), per row (-1), or per ``group_size`` weights
        along K, which it must divide.
    threshold : float, optional
        See ``method``; default 0.7 (absmax, twn), 50 (percentile), 0 (meanstd). absmean takes none.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    TernaryMatrix
        In the format w2, which the kernels read; ``.to(format)`` converts exactly. NumPy inside; codes made on a
        GPU stay there for ``ternary_matmul``, and are copied to the host when they are asked for.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError

    Notes
    -----
    CUDA C++ kernels read the weights twice; for meanstd three times, for percentile three or, float32, four times.

    absmean: Ma et al., "The Era of 1-bit LLMs", 2024, eq. 1-3. twn: Li et al., "Ternary Weight
    Networks", 2016, eq. 6. The trits follow from the float32 scale that is returned.

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
    call.write("codes", (n, -(-k // 64) * 16), np.uint8)
    call.write("scale", (1 if group is None else n, k // run), np.float32)
    per = {None: "per tensor", -1: "per row"}.get(group, f"per group of {group}")
    return call.bind(
        problem=f"{n} x {k} {dtype}, {chosen} {per}",
        look=_backend,
        unsupported=_unsupported_quantize(dtype, k, group),
        finish=functools.partial(_as_matrix, shape=(n, k), group=group),
        flops=6.0 * n * k,
    )


def _backend(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A matrix whose codes stay on a GPU is converted there by the kernels of the same backend."""
    return {}, {"backend": backend}


def _as_matrix(
    views: dict[str, Any], device: Any, give: Any, *, shape: tuple[int, int], group: int | None
) -> TernaryMatrix:
    """The matrix of the codes and scales that were made; those of a GPU stay there."""
    if device is HOST or not views["w"].size:
        codes, scale = views.get("made") or _by_reference(np.zeros(shape, np.float32), "absmean", group, None)
        return TernaryMatrix._trusted(codes, scale, shape, "w2")
    return TernaryMatrix._made_on(device, views["backend"], views["codes"], views["scale"], group, shape[1])


def _by_reference(
    w: Array, method: Method, group: int | None, threshold: float | None
) -> tuple[Array, Array]:
    from gpu_ops.reference import ternary as reference

    if not np.isfinite(w).all():
        raise not_finite("ternary_quantize")
    trits, scale = reference.ternary_quantize(w, method=method, group_size=group, threshold=threshold)
    return reference.ternary_pack(trits, "w2"), check_scale(scale, w.shape)


def _host_quantizer(quantizer: Callable[..., Any], text: str) -> Lower:
    def lower(spec: Spec, on: Builder) -> None:
        method, group, threshold = spec["method"], spec["group_size"], spec["threshold"]

        def run(views: dict[str, Any]) -> None:
            w = views["w"]
            how = _by_reference if not w.size else quantizer
            views["made"] = how(w, method, group, threshold)

        on.call(run, text if spec.tensor("w").size else "NumPy, float64")

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


@op(cuda=True, kernels="ternary_pack")
def ternary_pack(
    trits: Any, format: str, *, scale: Any = None, device: str | None = None, backend: str | None = None
) -> Bound:
    """Pack trits into one uint8 array of a named format.

    Parameters
    ----------
    trits : array (N, K), signed integer
        -1, 0, +1.
    format : str
        planes, base3, hf_bitnet, bitnet_gpu, i2_s, tl1, tl2, tq1_0, tq2_0, q2_0 or w2: see
        ``TernaryMatrix.describe_formats()`` for layout, bits per weight and constraints.
    scale : float or array, optional
        Only for tq1_0, tq2_0 (blocks of 256 weights) and q2_0 (64), which embed an fp16 scale per block: a number,
        ``(N,)`` or ``(N, K / block)``; 1.0 when absent. Elsewhere scales are kept apart.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    packed : array, uint8

    Raises
    ------
    ShapeError, DTypeError, OptionError, FormatError

    Notes
    -----
    On a GPU, int8 trits are packed and unpacked by kernels, each byte read or written once; wider integers go by way
    of the host, as ``explain`` says. What kernels refuse is looked for again on the host, which says what it is.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> gpu_ops.ternary_pack(np.array([[1, 0, -1, 1, 1]], np.int8), "base3")
    array([[221]], dtype=uint8)
    """
    call = Call("ternary_pack", device, backend)
    fmt = FORMATS[checks.one_of(call.op, "format", format, FORMATS)]
    t = call.read("trits", trits)
    check_integers(call.op, t)
    if fmt.name == "i2_s" and t.shape[1] % 128:  # its blocks lie across rows
        t = call.read("trits", t, contiguous=True)
    shape = (t.shape[0], t.shape[1])
    if scale is not None:
        columns = _columns(_embedded_scale(scale, shape, fmt)).shape
        call.provide("embedded", None, "scale", lambda x, device: _embedded_scale(x, shape, fmt))
        call.provide(
            "scale",
            Layout.contiguous(columns, np.float32),
            "scale",
            lambda x, device: _on_device(_columns(_embedded_scale(x, shape, fmt)), device),
        )
    fits(call.op, shape, fmt)
    call.write("packed", fmt.packed_shape(shape), np.uint8)

    def by_numpy(views: dict[str, Any]) -> Array:
        embedded = views.get("embedded")
        trits = check_trits(call.op, on_host(views["trits"]))
        return pack(call.op, trits, fmt, None if embedded is None else on_host(embedded))

    because = why_numpy(shape, "" if t.dtype == np.int8 else f"trits are {t.dtype}")
    call.option(format=fmt.name, tile=() if because else tile_of(fmt, shape), by_numpy=because)
    return call.bind(
        problem=f"{shape[0]} x {shape[1]} trits to {fmt.name}, {fmt.bits_per_weight:.4g} bits per weight",
        unsupported=_NUMPY_ONLY,
        finish=functools.partial(_checked, name="packed", by_numpy=by_numpy, because=because, strict=True),
    )


@op(cuda=True, kernels="ternary_pack")
def ternary_unpack(
    packed: Any,
    shape: tuple[int, int],
    format: str,
    *,
    strict: bool = True,
    device: str | None = None,
    backend: str | None = None,
) -> Bound:
    """Trits of a packed array.

    Parameters
    ----------
    packed : array, uint8
        Any shape; its bytes in C order are those of the format.
    shape : (int, int)
        ``(N, K)`` of the weights.
    format : str
        As in :func:`ternary_pack`.
    strict : bool
        Refuse every byte that no encoder writes: invalid codes, a wrong length, filled padding, a scale
        that is not finite. With ``strict=False`` longer input is cut and invalid codes become what the format's
        published decoder makes of them (a 2-bit code 3 gives +2).
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    trits : array (N, K), int8
        Scales of tq1_0, tq2_0 and q2_0 are not applied: ``TernaryMatrix(packed, 1.0, shape, format)`` keeps them.

    Raises
    ------
    FormatError
        The bytes do not follow the format; names the first offence.
    ShapeError, DTypeError, OptionError

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> gpu_ops.ternary_unpack(np.array([221], np.uint8), (1, 5), "base3")
    array([[ 1,  0, -1,  1,  1]], dtype=int8)
    >>> gpu_ops.ternary_unpack(np.array([250], np.uint8), (1, 5), "base3")
    Traceback (most recent call last):
    gpu_ops.errors.FormatError: ternary_unpack: base3: value 250 at (0, 0) is not 5 base-3 digits (1 such); \
strict=False decodes it all the same
    """
    call = Call("ternary_unpack", device, backend)
    data = call.read("packed", packed, contiguous=True)
    fmt = FORMATS[checks.one_of(call.op, "format", format, FORMATS)]
    size = matrix_shape(call.op, shape)
    strict = checks.flag(call.op, "strict", strict)
    fits(call.op, size, fmt)
    call.write("trits", size, np.int8)

    def by_numpy(views: dict[str, Any]) -> Array:
        return unpack(call.op, on_host(views["packed"]), size, fmt, strict=strict)

    need = math.prod(fmt.packed_shape(size))
    sound = data.dtype == np.uint8 and (data.size == need or (data.size > need and not strict))
    because = why_numpy(size, "" if sound else "the bytes are not those of the shape")
    call.option(format=fmt.name, tile=() if because else tile_of(fmt, size), by_numpy=because, need=need)
    problem = f"{data.size} bytes of {fmt.name} to {size[0]} x {size[1]} trits"
    return call.bind(
        problem=f"{problem}, {'strict' if strict else 'lenient'}",
        unsupported=_NUMPY_ONLY,
        finish=functools.partial(_checked, name="trits", by_numpy=by_numpy, because=because, strict=strict),
    )


def _checked(
    views: dict[str, Any],
    device: Any,
    give: Callable[[str], Any],
    *,
    name: str,
    by_numpy: Callable[[dict[str, Any]], Array],
    because: str,
    strict: bool,
) -> Any:
    """The result of the kernels; NumPy's on the host, or where kernels found a fault: it says which."""
    if device is HOST or because or (strict and on_host(views["flags"]).any()):
        views[name] = _on_device(by_numpy(views), device)
    return give(name)


for _op in ("ternary_pack", "ternary_unpack"):
    lowers(_op, "reference")(lambda spec, on: on.note("NumPy"))


def _on_device(x: Array, device: Any) -> Array:
    if not isinstance(device, CudaDevice) or not isinstance(x, np.ndarray):
        return x
    import cupy

    with device:
        copy: Array = cupy.asarray(x, blocking=True)
    return copy


def _columns(scale: Array) -> Array:
    """As (1 or N, 1 or blocks), contiguous."""
    return np.ascontiguousarray(scale if scale.ndim == 2 else scale.reshape(scale.size, 1))


def _embedded_scale(scale: Any, shape: tuple[int, int], fmt: TernaryFormat) -> Array:
    """A scale that blocks embed, as float32."""
    name, block = "ternary_pack", fmt.block_scale
    if not block:
        others = ", ".join(f.name for f in FORMATS.values() if f.block_scale)
        raise OptionError(f"{name}: format {fmt.name!r} keeps scales apart; only {others} embed scale=")
    array = np.asarray(scale) if isinstance(scale, (int, float)) else Call(name).read("scale", scale)
    if array.dtype.kind != "f" and not isinstance(scale, (int, float)):
        raise DTypeError(f"{name}: scale is {array.dtype}; expected float32")
    n, k = shape
    if array.shape not in ((), (n,), (n, k // block)):
        allowed = f"(), ({n},) or ({n}, {k // block}): one per {block} weights"
        raise ShapeError(f"{name}: scale has shape {array.shape}; expected {allowed}")
    return array if array.dtype == np.float32 else on_host(array).astype(np.float32)
