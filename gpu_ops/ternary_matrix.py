"""A packed ternary weight matrix: codes, scale, shape and the name of the layout, kept together.

Two layouts of the same size decode each other's bytes into plausible nonsense, so that packed bytes
never travel without their format here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Arrays
from gpu_ops.checks import integer, one_of
from gpu_ops.devices import CudaDevice, Device, EmulatorDevice
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.reference.ternary_formats import FORMATS, TernaryFormat
from gpu_ops.reference.ternary_layouts import LayoutError, block_scales, chunk_bitmap, decode, encode
from gpu_ops.ternary_scales import not_finite

__all__ = ["TernaryMatrix"]


@dataclass(frozen=True, eq=False, repr=False)
class TernaryMatrix:
    """Weights ``W = scale * t`` with trits ``t`` in {-1, 0, +1}, packed.

    Immutable; the arrays are not copied. ``TernaryMatrix.describe_formats()`` lists the formats.

    Parameters
    ----------
    codes : array, uint8
        The packed trits, laid out as ``format`` says. Checked strictly: every invalid code, length or
        padding is refused.
    scale : float or array, float32
        Always multiplies. One number, one per row ``(N,)``, or one per group along K ``(N, K / g)``.
        The block formats tq1_0, tq2_0 and q2_0 embed one more scale per block; ``W`` is then
        ``scale * embedded * t``.
    shape : (int, int)
        ``(N, K)``: output and input features.
    format : str
        planes, base3, hf_bitnet, bitnet_gpu, i2_s, tl1, tl2, tq1_0, tq2_0, q2_0 or w2.

    Raises
    ------
    FormatError
        The codes do not follow the format, or a scale is not finite.
    ShapeError, DTypeError, OptionError
        A wrong shape, dtype or format name.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> w = gpu_ops.ternary_quantize(np.array([[0.9, -1.1, 0.1, 0.0]], np.float32))
    >>> w
    TernaryMatrix((1, 4), format='w2', scale per tensor, 20 bytes)
    >>> w.trits()
    array([[ 1, -1,  0,  0]], dtype=int8)
    >>> w.to("base3").codes
    array([[119]], dtype=uint8)
    """

    codes: Array
    scale: Array
    shape: tuple[int, int]
    format: str
    _converted: dict[str, TernaryMatrix] = field(default_factory=dict, init=False)
    _on_cuda: dict[int, tuple[Array, Array]] = field(default_factory=dict, init=False)  # by device

    def __post_init__(self) -> None:
        fmt = FORMATS[one_of("TernaryMatrix", "format", self.format, FORMATS)]
        shape = matrix_shape("TernaryMatrix", self.shape)
        codes = Arrays("TernaryMatrix").read("codes", self.codes)
        unpack("TernaryMatrix", codes, shape, fmt, strict=True)
        self._set(
            np.ascontiguousarray(codes).reshape(fmt.packed_shape(shape)), self.scale, shape, self.format
        )

    def _set(self, codes: Array | None, scale: Any, shape: tuple[int, int], format: str) -> None:
        if codes is not None:  # else they are on a GPU
            object.__setattr__(self, "codes", _frozen(codes))
        object.__setattr__(self, "scale", _frozen(_scale(scale, shape)))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "format", format)

    @classmethod
    def _trusted(
        cls, codes: Array | None, scale: Array, shape: tuple[int, int], format: str
    ) -> TernaryMatrix:
        """A matrix of codes that were just encoded here: decoding them again would only cost time."""
        matrix = object.__new__(cls)
        matrix._set(codes, scale, shape, format)
        object.__setattr__(matrix, "_converted", {})
        object.__setattr__(matrix, "_on_cuda", {})
        return matrix

    @classmethod
    def _made_on(
        cls, device: Device, codes: Array, scale: Array, group_size: int | None, k: int
    ) -> TernaryMatrix:
        """w2 codes and scale (1 or N, groups) as kernels of ``device`` wrote them; on a GPU, codes stay there."""
        n = codes.shape[0]
        values = on_host(scale)  # waits for the kernels: later calls may come on other streams
        if np.isnan(values).any():
            raise not_finite("ternary_quantize")
        shape: tuple[int, ...] = () if group_size is None else (n,) if group_size == -1 else scale.shape
        if not isinstance(device, CudaDevice):
            return cls._trusted(codes, values.reshape(shape), (n, k), "w2")
        matrix = cls._trusted(None, values.reshape(shape), (n, k), "w2")
        matrix._on_cuda[device.ordinal] = (codes, scale)
        return matrix

    def __getattr__(self, name: str) -> Any:
        """Codes that were made on a GPU are copied to the host when they are first asked for there."""
        if name != "codes" or not self.__dict__.get("_on_cuda"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        codes, _ = next(iter(self._on_cuda.values()))
        object.__setattr__(self, "codes", _frozen(on_host(codes)))
        return self.codes

    @classmethod
    def from_trits(cls, trits: Any, scale: Any = 1.0, *, format: str = "w2") -> TernaryMatrix:
        """Pack an integer array (N, K) of -1, 0, +1."""
        fmt = FORMATS[one_of("TernaryMatrix", "format", format, FORMATS)]
        t = check_trits("TernaryMatrix", Arrays("TernaryMatrix").read("trits", trits))
        return cls._trusted(pack("TernaryMatrix", t, fmt), scale, t.shape, format)

    @staticmethod
    def describe_formats() -> str:
        """The table of formats, as Markdown."""
        from gpu_ops.reference.ternary_formats import describe_formats

        return describe_formats()

    @property
    def nbytes(self) -> int:
        """Bytes held: packed codes and scales."""
        return math.prod(FORMATS[self.format].packed_shape(self.shape)) + int(self.scale.nbytes)

    @property
    def bits_per_weight(self) -> float:
        """``8 * nbytes / (N * K)``: padding and scales included."""
        return 8 * self.nbytes / max(math.prod(self.shape), 1)

    @property
    def group_size(self) -> int | None:
        """None: one scale for the tensor. -1: one per row. g: one per g weights along K."""
        if self.scale.ndim == 0:
            return None
        return -1 if self.scale.ndim == 1 else self.shape[1] // self.scale.shape[1]

    @cached_property
    def density(self) -> float:
        """Share of nonzero trits; 0.0 for an empty matrix."""
        return float(np.count_nonzero(self.trits()) / max(math.prod(self.shape), 1))

    def chunk_bitmap(self) -> Array:
        """Which runs of 128 weights of a row hold any nonzero, one bit each: what a sparse kernel need not read.

        Bit ``c % 8`` of byte ``[n, c // 8]`` is chunk ``c`` of row ``n``; uint8 (N, ceil(K / 1024)), spare bits 0.
        """
        return chunk_bitmap(self.trits())

    def trits(self) -> Array:
        """The trits, (N, K) int8."""
        return decode(self.codes, self.shape, self.format, strict=False)

    def dequantize(self, dtype: Any = np.float32) -> Array:
        """``scale * t`` as a dense (N, K) array of ``dtype``, computed in float64 and rounded once."""
        scale = self._whole_scale().astype(np.float64)
        scale = scale[:, None] if scale.ndim == 1 else scale
        if scale.ndim == 2:
            scale = np.repeat(scale, self.shape[1] // max(scale.shape[1], 1), axis=1)
        return np.asarray(self.trits() * scale).astype(dtype)

    def to(self, format: str) -> TernaryMatrix:
        """The same weights in another format, exactly; ``self`` when it is that format already.

        The scale stays apart: blocks of tq1_0, tq2_0 and q2_0 hold 1.0. To write a block file, embed it:
        ``ternary_pack(w.trits(), "tq2_0", scale=w.scale)``.
        """
        fmt = FORMATS[one_of("TernaryMatrix.to", "format", format, FORMATS)]
        if format == self.format:
            return self
        done = self._converted.get(format)
        if done is None:
            codes = pack("TernaryMatrix.to", self.trits(), fmt)
            done = TernaryMatrix._trusted(codes, self._whole_scale(), self.shape, format)
            if format == "w2":  # what the kernels read: every matmul asks for it
                self._converted[format] = done
        return done

    def on(self, device: Device | None) -> tuple[Array, Array]:
        """Codes, and scale as (1 or N, groups), where the kernels of ``device`` read them; None: on the CPU.

        A CUDA device gets a copy at the first call, of the codes as they lie. It is kept here, freed with the
        matrix, and shared by all calls: nobody writes it.
        """
        rows = 1 if self.scale.ndim == 0 else self.shape[0]
        scale = self.scale.reshape(rows, self.scale.shape[1] if self.scale.ndim == 2 else 1)
        if isinstance(device, CudaDevice):
            held = self._on_cuda.get(device.ordinal)
            if held is None:
                import cupy

                # blocking: later calls may come on other streams
                copies = (cupy.asarray(self.codes, blocking=True), cupy.asarray(scale, blocking=True))
                held = self._on_cuda.setdefault(device.ordinal, copies)
            return held
        codes = self.codes
        if isinstance(device, EmulatorDevice):
            if codes.ctypes.data % 16:  # a part of a file; a GPU's copy is always aligned
                codes = codes.copy()
            device.name("w.codes", codes)
            device.name("w.scale", scale)
        return codes, scale

    def _whole_scale(self) -> Array:
        """``scale`` times the scales that the format embeds, if it does."""
        block = FORMATS[self.format].block_scale
        if not block:
            return self.scale
        embedded = block_scales(self.codes, self.shape, self.format)
        if (embedded == 1).all():
            return self.scale
        scale = self.scale
        if scale.ndim == 2:  # groups on both sides: cut K at every boundary of either
            k = self.shape[1]
            common = math.gcd(k // scale.shape[1], block)
            scale = np.repeat(scale, k // scale.shape[1] // common, axis=1)
            embedded = np.repeat(embedded, block // common, axis=1)
        elif scale.ndim == 1:
            scale = scale[:, None]
        return np.asarray(scale * embedded, np.float32)

    def __repr__(self) -> str:
        per = {0: "per tensor", 1: "per row"}.get(self.scale.ndim, f"per group of {self.group_size}")
        return f"TernaryMatrix({self.shape}, format={self.format!r}, scale {per}, {self.nbytes:,} bytes)"


# --- checks that gpu_ops.ternary shares ----------------------------------------------------------


def matrix_shape(op: str, shape: Any) -> tuple[int, int]:
    """``shape`` as two non-negative Python integers."""
    try:
        sizes = tuple(shape)
    except TypeError:
        sizes = ()
    if len(sizes) != 2:
        raise ShapeError(f"{op}: shape must be (N, K), got {shape!r}")
    n, k = (integer(op, "shape", size, low=0) for size in sizes)
    return n, k


def check_trits(op: str, trits: Array) -> Array:
    """An integer matrix of -1, 0, +1 as int8."""
    check_integers(op, trits)
    if trits.size and (trits.min() < -1 or trits.max() > 1):
        where = tuple(int(i) for i in np.argwhere((trits < -1) | (trits > 1))[0])
        raise FormatError(f"{op}: trits[{where[0]}, {where[1]}] is {trits[where]}; a trit is -1, 0 or +1")
    return trits.astype(np.int8, copy=False)


def check_integers(op: str, trits: Array) -> None:
    """A matrix of signed integers."""
    if not np.issubdtype(trits.dtype, np.signedinteger):
        raise DTypeError(f"{op}: trits is {trits.dtype}; pass a signed integer array of -1, 0, +1 (int8)")
    if trits.ndim != 2:
        raise ShapeError(f"{op}: trits has shape {trits.shape}; expected (N, K)")


def pack(op: str, trits: Array, fmt: TernaryFormat, scale: Array | None = None) -> Array:
    """Encode, with the format's complaints as typed errors."""
    n, k = trits.shape
    fits(op, (n, k), fmt)
    try:
        return encode(trits, fmt.name, scale=scale)
    except LayoutError as error:
        raise FormatError(f"{op}: {error}") from error


def unpack(op: str, packed: Array, shape: tuple[int, int], fmt: TernaryFormat, *, strict: bool) -> Array:
    """Decode, with the format's complaints as typed errors."""
    if packed.dtype != np.uint8:
        raise DTypeError(
            f"{op}: packed codes are {packed.dtype}; expected uint8 (other bytes: .view(np.uint8))"
        )
    fits(op, shape, fmt)
    try:
        return decode(packed, shape, fmt.name, strict=strict)
    except LayoutError as error:
        lenient = op == "ternary_unpack" and strict and packed.size >= math.prod(fmt.packed_shape(shape))
        hint = "; strict=False decodes it all the same" if lenient else ""
        raise FormatError(f"{op}: {error}{hint}") from error


def fits(op: str, shape: tuple[int, int], fmt: TernaryFormat) -> None:
    """The shape, or the format's complaint about it."""
    try:
        fmt.packed_shape(shape)
    except ValueError as error:
        raise ShapeError(f"{op}: {error}") from error


def on_host(array: Any) -> Array:
    """A copy of a CuPy array in host memory; NumPy's as they are."""
    if isinstance(array, np.ndarray):
        return array
    import cupy

    return np.asarray(cupy.asnumpy(array))


def _frozen(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _scale(scale: Any, shape: tuple[int, int]) -> Array:
    """A finite float32 scale whose shape says what it scales."""
    n, k = shape
    if isinstance(scale, (bool, complex, str)):
        raise DTypeError(
            f"TernaryMatrix: scale is {type(scale).__name__}; expected a number or a float32 array"
        )
    if isinstance(scale, (int, float, np.number)):
        scale = np.asarray(scale, np.float32)
    array = Arrays("TernaryMatrix").read("scale", scale)
    if array.dtype != np.float32:
        raise DTypeError(
            f"TernaryMatrix: scale is {array.dtype}; scales are float32: scale.astype(np.float32)"
        )
    fits = array.shape in ((), (n,)) or (
        array.ndim == 2 and array.shape[0] == n and array.shape[1] > 0 and k % array.shape[1] == 0
    )
    if not fits:
        raise ShapeError(
            f"TernaryMatrix: scale has shape {array.shape}; expected () per tensor, ({n},) per row, or "
            f"({n}, G) with G groups that divide K={k}"
        )
    if not np.isfinite(array).all():
        raise OptionError("TernaryMatrix: scale holds NaN or infinity")
    return array
