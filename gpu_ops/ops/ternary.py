"""Ternary (1.58-bit) weights: quantise, pack, unpack, multiply."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast, get_args

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.device import Device, host_function
from gpu_ops.core.dispatch import Choice, Plan, choose, op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.ternary_checks import (
    check_integers,
    check_scale,
    check_trits,
    fits,
    matrix_shape,
    on_host,
    pack,
    unpack,
)
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.formats.ternary_packing import Packing, pack_there, unpack_there, why_numpy
from gpu_ops.ops.ternary_matmul import ternary_matmul
from gpu_ops.ops.ternary_scales import group_size_of, not_finite, quantize, threshold_of
from gpu_ops.reference.ternary import Method
from gpu_ops.reference.ternary_formats import FORMATS

__all__ = ["ternary_matmul", "ternary_pack", "ternary_quantize", "ternary_unpack"]

_NUMPY_ONLY = {"cpu numba": "packing is NumPy code (about 1 ns per weight); it has no kernel"}


@op(cuda=True)
def ternary_quantize(
    w: Any,
    *,
    method: str = "absmean",
    group_size: int | None = None,
    threshold: float | None = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
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
    name = "ternary_quantize"
    arrays = Arrays(name)
    w_ = arrays.read("w", w)
    if w_.ndim != 2:
        raise ShapeError(f"{name}: w has shape {w_.shape}; expected (N, K), output features first")
    dtype = checks.float_dtype(name, w=w_)
    chosen = cast(Method, checks.one_of(name, "method", method, get_args(Method)))
    group = group_size_of(name, group_size, w_.shape[1])
    limit = threshold_of(name, chosen, threshold)
    n, k = w_.shape
    choice = choose(name, device, backend, arrays, cannot=_cannot_quantize(dtype, k, group))

    def compute(on: Device | None) -> tuple[Array, Array]:
        length = group if group is not None and group != -1 else k
        codes = arrays.new((n, -(-k // 64) * 16), np.uint8, "codes")
        scale = arrays.new((1 if group is None else n, k // length), np.float32, "scale")
        how: dict[str, Any] = {"per_tensor": group is None, "method": chosen, "threshold": limit}
        host_function("ternary_quantize.quantize", on, choice.backend)(w_, codes, scale, run=length, **how)
        return codes, scale

    def run() -> TernaryMatrix:
        if choice.backend == "reference" or not w_.size:
            from gpu_ops.reference import ternary as reference

            weights = w_ if w_.size else np.zeros((n, k), np.float32)  # of no weights, none need be fetched
            if not np.isfinite(weights).all():
                raise not_finite(name)
            trits, scale = reference.ternary_quantize(
                weights, method=chosen, group_size=group, threshold=limit
            )
            codes = reference.ternary_pack(trits, "w2")
            return TernaryMatrix._trusted(codes, check_scale(scale, (n, k)), (n, k), "w2")
        with arrays.on(choice) as on:
            if on is None:
                return TernaryMatrix._trusted(*quantize(name, w_, chosen, group, limit), (n, k), "w2")
            matrix = TernaryMatrix._made_on(on, choice.backend, *compute(on), group, k)
        return matrix

    def again() -> Callable[..., Any]:
        return lambda w, **_: TernaryMatrix._trusted(*quantize(name, w, chosen, group, limit), (n, k), "w2")

    per = {None: "per tensor", -1: "per row"}.get(group, f"per group of {group}")
    problem = f"{n} x {k} {dtype}, {chosen} {per}"
    remembered = again if choice.compiled and w_.size else None
    return Plan(name, choice, problem, lambda: _config(choice, arrays, compute, w_), run, again=remembered)


def _cannot_quantize(dtype: str, k: int, group: int | None) -> dict[str, str]:
    if dtype == "float64":
        return {"raw": "float64 has Numba kernels only"}
    if group is not None and group != -1 and group % 64:
        return {"raw": f"group_size {group} is not a multiple of 64"}
    return {"raw": f"K={k} is beyond 31 bits"} if k >= 1 << 31 else {}


def _config(choice: Choice, arrays: Arrays, compute: Callable[[Device | None], Any], w: Array) -> str:
    if choice.backend == "reference" or not w.size:
        return "NumPy, float64"
    if choice.device != "cpu":
        return arrays.launches(choice, compute)
    return "fused statistics, encode and pack"


@op(cuda=True)
def ternary_pack(
    trits: Any, format: str, *, scale: Any = None, device: str | None = None, backend: str | None = None
) -> Plan:
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
    name = "ternary_pack"
    arrays = Arrays(name)
    fmt = FORMATS[checks.one_of(name, "format", format, FORMATS)]
    t = arrays.read("trits", trits)
    check_integers(name, t)
    embedded = None if scale is None else _embedded_scale(name, scale, t.shape, fmt.name, fmt.block_scale)
    choice = choose(name, device, backend, arrays, cannot=_NUMPY_ONLY)
    fits(name, (t.shape[0], t.shape[1]), fmt)
    because = why_numpy(t.shape, "" if t.dtype == np.int8 else f"trits are {t.dtype}")

    def compute(on: Device | None) -> tuple[Array, Array]:
        packed = arrays.new(fmt.packed_shape((t.shape[0], t.shape[1])), np.uint8, "packed")
        return packed, pack_there(on, choice.backend, t, packed, fmt, embedded)

    def by_numpy() -> Array:
        return pack(name, check_trits(name, on_host(t)), fmt, None if embedded is None else on_host(embedded))

    def again() -> Callable[..., Any]:
        def ternary_pack(trits: Array, *_: Any, scale: Any = None, **options: Any) -> Array:
            block = fmt.name, fmt.block_scale
            embedded = None if scale is None else _embedded_scale(name, scale, trits.shape, *block)
            return pack(name, check_trits(name, trits), fmt, embedded)

        return ternary_pack

    packing = Packing(choice, arrays, compute, by_numpy, because)
    return Plan(
        name,
        choice,
        f"{t.shape[0]} x {t.shape[1]} trits to {fmt.name}, {fmt.bits_per_weight:.4g} bits per weight",
        packing.config,
        lambda: packing.run(strict=True),
        again=again if choice.device == "cpu" else None,
    )


@op(cuda=True)
def ternary_unpack(
    packed: Any,
    shape: tuple[int, int],
    format: str,
    *,
    strict: bool = True,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
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
    name = "ternary_unpack"
    arrays = Arrays(name)
    data = arrays.read("packed", packed)
    fmt = FORMATS[checks.one_of(name, "format", format, FORMATS)]
    size = matrix_shape(name, shape)
    strict = checks.flag(name, "strict", strict)
    choice = choose(name, device, backend, arrays, cannot=_NUMPY_ONLY)
    fits(name, size, fmt)
    need = math.prod(fmt.packed_shape(size))
    sound = data.dtype == np.uint8 and (data.size == need or (data.size > need and not strict))
    because = why_numpy(size, "" if sound else "the bytes are not those of the shape")

    def compute(on: Device | None) -> tuple[Array, Array]:
        trits = arrays.new(size, np.int8, "trits")
        return trits, unpack_there(on, choice.backend, data.ravel()[:need], trits, fmt)

    def by_numpy() -> Array:
        return unpack(name, on_host(data), size, fmt, strict=strict)

    def again() -> Callable[..., Any]:
        return lambda packed, *_, **options: unpack(name, packed, size, fmt, strict=strict)

    packing = Packing(choice, arrays, compute, by_numpy, because)
    problem = f"{data.size} bytes of {fmt.name} to {size[0]} x {size[1]} trits"
    return Plan(
        name,
        choice,
        f"{problem}, {'strict' if strict else 'lenient'}",
        packing.config,
        lambda: packing.run(strict=strict),
        again=again if choice.device == "cpu" else None,
    )


def _embedded_scale(name: str, scale: Any, shape: tuple[int, ...], format: str, block: int) -> Array:
    if not block:
        others = ", ".join(f.name for f in FORMATS.values() if f.block_scale)
        raise OptionError(f"{name}: format {format!r} keeps scales apart; only {others} embed scale=")
    array = np.asarray(scale) if isinstance(scale, (int, float)) else Arrays(name).read("scale", scale)
    if array.dtype.kind != "f" and not isinstance(scale, (int, float)):
        raise DTypeError(f"{name}: scale is {array.dtype}; expected float32")
    n, k = shape
    if array.shape not in ((), (n,), (n, k // block)):
        allowed = f"(), ({n},) or ({n}, {k // block}): one per {block} weights"
        raise ShapeError(f"{name}: scale has shape {array.shape}; expected {allowed}")
    return array if array.dtype == np.float32 else on_host(array).astype(np.float32)
