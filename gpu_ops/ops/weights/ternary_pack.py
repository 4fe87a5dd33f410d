"""Pack and unpack trits in the published layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.device import HOST, CudaDevice
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.ternary_checks import (
    check_integers,
    check_trits,
    fits,
    matrix_shape,
    number_array,
    on_host,
    pack,
    unpack,
)
from gpu_ops.formats.ternary_packing import tile_of, why_numpy
from gpu_ops.kernels.program import Layout, lowers
from gpu_ops.reference.weights.ternary_formats import FORMATS, TernaryFormat

__all__ = ["ternary_pack", "ternary_unpack"]

_NUMPY_ONLY = {"cpu numba": "packing is NumPy code (about 1 ns per weight); it has no kernel"}


@op(cuda=True, kernels="weights.ternary_pack")
def ternary_pack(
    trits: Any,
    format: str,
    *,
    scale: Any = None,
    check: bool = True,
    device: str | None = None,
    backend: str | None = None,
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
        ``(N,)`` or ``(N, K / block)``; default 1.0. Other formats keep scales separately.
    check : bool
        On a GPU, wait for the kernel and refuse invalid trits and a scale that does not fit. With ``check=False``
        the host does not wait, and such codes are undefined. Arrays in host memory are always checked.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.

    Returns
    -------
    packed : array, uint8

    Raises
    ------
    ShapeError, DTypeError, OptionError, FormatError

    Notes
    -----
    On a GPU, int8 trits are packed and unpacked by kernels, each byte read or written once; wider integers go through
    the host, as ``explain`` reports. If a kernel finds an error, the host repeats the work to report it. The host
    waits for that, once per call: see ``check``, and ``strict`` of :func:`ternary_unpack`.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> gpu_ops.ternary_pack(np.array([[1, 0, -1, 1, 1]], np.int8), "base3")
    array([[221]], dtype=uint8)
    """
    call = Call("ternary_pack", device, backend)
    fmt = FORMATS[checks.one_of(call.op, "format", format, FORMATS)]
    check = checks.flag(call.op, "check", check)
    t = call.read("trits", trits)
    check_integers(call.op, t)
    if fmt.name == "i2_s" and t.shape[1] % 128:  # its blocks span rows
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
        trits = check_trits("ternary_pack", on_host(views["trits"]))
        return pack("ternary_pack", trits, fmt, None if embedded is None else on_host(embedded))

    because = why_numpy(shape, "" if t.dtype == np.int8 else f"trits are {t.dtype}")
    call.option(format=fmt.name, tile=() if because else tile_of(fmt, shape), by_numpy=because)
    strict = check or not call.on_cuda
    return call.bind(
        problem=f"{shape[0]} x {shape[1]} trits to {fmt.name}, {fmt.bits_per_weight:.4g} bits per weight",
        unsupported=_NUMPY_ONLY,
        finish=functools.partial(_checked, name="packed", by_numpy=by_numpy, because=because, strict=strict),
    )


@op(cuda=True, kernels="weights.ternary_pack")
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
        Any shape; its bytes in C order are in the format.
    shape : (int, int)
        ``(N, K)`` of the weights.
    format : str
        Same as in :func:`ternary_pack`.
    strict : bool
        Refuse every byte that no encoder writes: invalid codes, a wrong length, nonzero padding, a scale
        that is not finite. With ``strict=False`` longer input is cut and invalid codes are decoded as by the format's
        published decoder (a 2-bit code 3 gives +2); on a GPU the host then does not wait.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.

    Returns
    -------
    trits : array (N, K), int8
        Scales of tq1_0, tq2_0 and q2_0 are not applied: ``TernaryMatrix(packed, 1.0, shape, format)`` keeps them.

    Raises
    ------
    FormatError
        The bytes do not follow the format; the message has the first error.
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
        return unpack("ternary_unpack", on_host(views["packed"]), size, fmt, strict=strict)

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
    """The kernels' result, or NumPy's on the host or after a kernel found an error, which NumPy reports."""
    if device is HOST or because or (strict and on_host(views["flags"]).any()):
        views[name] = _on_device(by_numpy(views), device)
    return give(name)


for _op in ("ternary_pack", "ternary_unpack"):
    lowers(_op, "reference")(lambda spec, builder: builder.note("NumPy"))


def _on_device(x: Array, device: Any) -> Array:
    if not isinstance(device, CudaDevice) or not isinstance(x, np.ndarray):
        return x
    copy: Array = device.upload(x)
    return copy


def _columns(scale: Any) -> Array:
    """Reshape scales to (1 or N, 1 or blocks), contiguous."""
    columns = scale if scale.ndim == 2 else scale.reshape(scale.size, 1)
    if isinstance(scale, np.ndarray):
        return np.ascontiguousarray(columns)
    import cupy

    copy: Array = cupy.ascontiguousarray(columns)
    return copy


def _embedded_scale(scale: Any, shape: tuple[int, int], fmt: TernaryFormat) -> Array:
    """Check a scale that blocks embed, and return it as float32."""
    name, block = "ternary_pack", fmt.block_scale
    if not block:
        others = ", ".join(f.name for f in FORMATS.values() if f.block_scale)
        raise OptionError(f"{name}: format {fmt.name!r} keeps scales apart; only {others} embed scale=")
    number = number_array(name, scale)
    array = Call(name).read("scale", scale) if number is None else number
    if array.dtype.kind != "f":
        raise DTypeError(f"{name}: scale is {array.dtype}; expected float32")
    n, k = shape
    if array.shape not in ((), (n,), (n, k // block)):
        allowed = f"(), ({n},) or ({n}, {k // block}): one per {block} weights"
        raise ShapeError(f"{name}: scale has shape {array.shape}; expected {allowed}")
    return array if array.dtype == np.float32 else array.astype(np.float32)
