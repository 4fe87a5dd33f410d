"""Packed ternary weight matrices: codes, scale, shape and the name of the layout, kept together.

Two layouts of the same size decode each other's bytes into plausible nonsense, so packed bytes are never passed
without their format here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call
from gpu_ops.core.checks import one_of
from gpu_ops.core.device import CudaDevice, cuda_device
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.ternary_checks import (
    check_scale,
    check_trits,
    fits,
    matrix_shape,
    not_finite,
    on_host,
    pack,
    unpack,
)
from gpu_ops.formats.ternary_packing import dense, repacked, whole_scale
from gpu_ops.formats.ternary_saved import load_parts, save_parts
from gpu_ops.kernels.program import Layout
from gpu_ops.reference.weights.ternary_formats import FORMATS, TernaryFormat
from gpu_ops.reference.weights.ternary_layouts import chunk_bitmap, decode

__all__ = ["TernaryMatrix"]

_BLOCKS = {"tq1_0", "tq2_0"}
"""Formats of :class:`PackedMatrix` whose bytes are codes of the same name here."""


@dataclass(frozen=True, eq=False, repr=False)
class TernaryMatrix:
    """Weights ``W = scale * t`` with trits ``t`` in {-1, 0, +1}, packed.

    Immutable; the arrays are not copied. ``TernaryMatrix.describe_formats()`` lists the formats.

    Parameters
    ----------
    codes : array, uint8
        Packed trits in the layout ``format``. Checked strictly: every invalid code, length or padding is
        refused.
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
    _lies: tuple[int, str] | None = field(default=None, init=False)  # device and backend that made the codes

    @typed_memory_errors("TernaryMatrix")
    def __post_init__(self) -> None:
        format = one_of("TernaryMatrix", "format", self.format, FORMATS)
        fmt = FORMATS[format]
        shape = matrix_shape("TernaryMatrix", self.shape)
        codes = Call("TernaryMatrix").read("codes", self.codes)
        unpack("TernaryMatrix", codes, shape, fmt, strict=True)
        self._set(
            np.ascontiguousarray(codes).reshape(fmt.packed_shape(shape)),
            check_scale(self.scale, shape),
            shape,
            format,
        )

    def _set(self, codes: Array | None, scale: Array, shape: tuple[int, int], format: str) -> None:
        if codes is not None:  # otherwise they are on a GPU
            object.__setattr__(self, "codes", _frozen(codes))
        object.__setattr__(self, "scale", _frozen(scale))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "format", format)

    in_place_of_array = "multiply with gpu_ops.ternary_matmul(x, w), or unpack it: w.dequantize(), w.trits()"

    __array_ufunc__ = None  # so that x @ w with a NumPy x raises TypeError: this class has no __rmatmul__

    def __array__(self, *_: Any, **__: Any) -> Array:
        """Raise an error: NumPy would make an array of one object."""
        raise DTypeError(f"TernaryMatrix: it is packed, and no array; {self.in_place_of_array}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, whose arrays NumPy has made writable, with read-only arrays."""
        self.__dict__.update(state)
        self.__dict__.pop("_on_host", None)
        for name in ("codes", "scale"):
            if name in state:  # otherwise on a GPU
                self.__dict__[name] = _frozen(state[name])

    @classmethod
    def _trusted(
        cls, codes: Array | None, scale: Array, shape: tuple[int, int], format: str
    ) -> TernaryMatrix:
        """Make a matrix from codes that were just encoded here and a checked scale, without checking them again."""
        matrix = object.__new__(cls)
        matrix._set(codes, scale, shape, format)
        object.__setattr__(matrix, "_converted", {})
        object.__setattr__(matrix, "_on_cuda", {})
        object.__setattr__(matrix, "_lies", None)
        return matrix

    @classmethod
    def _on_gpu(
        cls,
        lies: tuple[int, str],
        held: tuple[Array, Array],
        scale: Array,
        shape: tuple[int, int],
        format: str,
    ) -> TernaryMatrix:
        """Make a matrix whose codes, valid and complete, are only on the device with ordinal ``lies[0]``."""
        matrix = cls._trusted(None, scale, shape, format)
        object.__setattr__(matrix, "_lies", lies)
        matrix._on_cuda[lies[0]] = held
        return matrix

    @classmethod
    def _made_on(
        cls, device: Any, backend: str, codes: Array, scale: Array, group_size: int | None, k: int
    ) -> TernaryMatrix:
        """Make a matrix from w2 codes and scale (1 or N, groups) that kernels of ``device`` wrote; a GPU's codes stay
        there."""
        n = codes.shape[0]
        values = on_host(scale)  # waits for the kernels: later calls may come on other streams
        if not np.isfinite(values).all():
            raise not_finite("ternary_quantize")
        shape: tuple[int, ...] = () if group_size is None else (n,) if group_size == -1 else scale.shape
        values = values.reshape(shape)
        if not isinstance(device, CudaDevice):
            return cls._trusted(codes, values, (n, k), "w2")
        return cls._on_gpu((device.ordinal, backend), (codes, scale), values, (n, k), "w2")

    @property
    def call_key(self) -> tuple[Any, ...]:
        """Key of calls with this matrix: all that their validation and program depend on."""
        return self.shape, self.format, self.scale.shape

    @property
    def call_arrays(self) -> tuple[Array, ...]:
        """Arrays that it holds in host memory, which results may not overlap."""
        codes = self.__dict__.get("codes")
        return (self.scale,) if codes is None else (codes, self.scale)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of the codes and scale that :meth:`on` returns."""
        codes = FORMATS[self.format].packed_shape(self.shape)
        return Layout.contiguous(codes, np.uint8), Layout.contiguous(self._scale_shape, np.float32)

    @property
    def _scale_shape(self) -> tuple[int, int]:
        rows = 1 if self.scale.ndim == 0 else self.shape[0]
        return rows, self.scale.shape[1] if self.scale.ndim == 2 else 1

    def __getattr__(self, name: str) -> Any:
        """Copy codes that were made on a GPU to the host when they are first read there."""
        if name != "codes" or not self.__dict__.get("_on_cuda"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        codes, _ = next(iter(self._on_cuda.values()))
        object.__setattr__(self, "codes", _frozen(on_host(codes)))
        return self.codes

    @classmethod
    @typed_memory_errors("TernaryMatrix.from_trits")
    def from_trits(cls, trits: Any, scale: Any = 1.0, *, format: str = "w2") -> TernaryMatrix:
        """Pack an integer array (N, K) of -1, 0, +1."""
        format = one_of("TernaryMatrix", "format", format, FORMATS)
        fmt = FORMATS[format]
        t = check_trits("TernaryMatrix", Call("TernaryMatrix").read("trits", trits))
        return cls._trusted(pack("TernaryMatrix", t, fmt), check_scale(scale, t.shape), t.shape, format)

    @classmethod
    @typed_memory_errors("TernaryMatrix.joined")
    def joined(cls, matrices: Sequence[TernaryMatrix]) -> TernaryMatrix:
        """Matrix of the rows of ``matrices``, one after the other, in w2, the format that kernels read.

        The scale is one number, or one per row or group if they differ.
        """
        if not matrices or any(not isinstance(matrix, cls) for matrix in matrices):
            raise DTypeError("TernaryMatrix.joined: expected a list of TernaryMatrix")
        if len({matrix.shape[1] for matrix in matrices}) > 1:
            shapes = ", ".join(str(matrix.shape) for matrix in matrices)
            raise ShapeError(f"TernaryMatrix.joined: the matrices have shapes {shapes}; K must be the same")
        scales = [matrix._group_scales() for matrix in matrices]
        groups = math.lcm(*(scale.shape[1] for scale in scales))
        scale: Any = np.concatenate([np.repeat(part, groups // part.shape[1], axis=1) for part in scales])
        if not scale.size:
            scale = 1.0
        elif (scale == scale[0, 0]).all():
            scale = scale[0, 0]
        elif (scale == scale[:, :1]).all():
            scale = scale[:, 0]
        return cls.from_trits(np.concatenate([matrix.trits() for matrix in matrices]), scale)

    @classmethod
    def from_packed(cls, matrix: PackedMatrix) -> TernaryMatrix:
        """Weights of a :class:`PackedMatrix` in tq1_0 or tq2_0, as :func:`gpu_ops.models.load` reads them from GGUF
        files: for int8 activations per token, as BitNet is trained.

        OptionError if the matrix has another format, FormatError if a code is not a trit or a scale is not finite.

        >>> import numpy as np, gpu_ops
        >>> w = np.tile(np.array([0.5, 0, -0.5, 0.5], np.float32), (2, 64))
        >>> packed = gpu_ops.quantize(w, "tq2_0")
        >>> gpu_ops.TernaryMatrix.from_packed(packed)
        TernaryMatrix((2, 256), format='w2', scale per tensor, 132 bytes)
        """
        op = "TernaryMatrix.from_packed"
        if not isinstance(matrix, PackedMatrix):
            raise DTypeError(f"{op}: expected a PackedMatrix, got {type(matrix).__name__}")
        names = {name for _, name in matrix.formats}
        if not names <= _BLOCKS or matrix.columns is not None:
            what = (
                "columns in another order"
                if names <= _BLOCKS
                else f"the format {' and '.join(sorted(names))}"
            )
            raise OptionError(f"{op}: the matrix has {what}; expected {' or '.join(sorted(_BLOCKS))}")
        cols, scale = matrix.shape[1], np.ones((), np.float32)
        try:
            parts = [
                cls(blocks, scale, (rows, cols), name)
                for blocks, (rows, name) in zip(matrix.blocks(), matrix.formats, strict=True)
            ]
        except FormatError as error:
            raise FormatError(f"{op}: {error}") from error
        return cls.joined(parts)

    def _group_scales(self) -> Array:
        """Scale of each row, (N, 1), or of each group of a row, (N, groups)."""
        scale = self._whole_scale()
        return (
            np.broadcast_to(scale, (self.shape[0], 1)) if scale.ndim == 0 else scale.reshape(len(scale), -1)
        )

    def save(self, path: Any) -> None:
        """Write codes, scale, shape and format to one file. An old file is replaced when the new one is complete.

        It is a safetensors file of ``scale`` (F32) and ``codes`` (U8, the bytes of the format). Its metadata are
        ``gpu_ops.kind`` ("TernaryMatrix 1"), ``gpu_ops.format`` (such as "w2") and ``gpu_ops.shape`` ("[N, K]").
        FileError if it cannot be written, OptionError if ``path`` is not a path.

        >>> import tempfile, numpy as np
        >>> from gpu_ops import TernaryMatrix
        >>> w = TernaryMatrix.from_trits(np.array([[1, 0, -1]], np.int8), 0.5, format="base3")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     w.save(f"{folder}/w.safetensors")
        ...     TernaryMatrix.load(f"{folder}/w.safetensors").dequantize()
        array([[ 0.5,  0. , -0.5]], dtype=float32)
        """
        save_parts(path, self.codes, self.scale, self.shape, self.format)

    @classmethod
    def load(cls, path: Any) -> TernaryMatrix:
        """Read the matrix from a file of :meth:`save`. FormatError if the file is another or damaged, FileError if it
        cannot be read (MissingFileError, a FileNotFoundError, if there is none)."""
        return cls._trusted(*load_parts(path))

    @staticmethod
    def describe_formats() -> str:
        """Return the table of formats, as Markdown."""
        from gpu_ops.reference.weights.ternary_formats import describe_formats

        return describe_formats()

    @property
    def nbytes(self) -> int:
        """Bytes held: packed codes and scales."""
        return math.prod(FORMATS[self.format].packed_shape(self.shape)) + int(self.scale.nbytes)

    @property
    def bits_per_weight(self) -> float:
        """``8 * nbytes / (N * K)``, including padding and scales."""
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
        """Bitmap of the runs of 128 weights of a row that have a nonzero; a sparse kernel skips the others.

        Bit ``c % 8`` of byte ``[n, c // 8]`` is chunk ``c`` of row ``n``; uint8 (N, ceil(K / 1024)), spare bits 0.
        """
        return chunk_bitmap(self.trits())

    @typed_memory_errors("TernaryMatrix.trits")
    def trits(self) -> Array:
        """Trits, (N, K) int8, as a NumPy array; codes on a GPU are unpacked there."""
        if self._lies is not None:
            return on_host(self._repacked(self.format))
        return decode(self.codes, self.shape, self.format, strict=False)

    def _repacked(self, format: str) -> Array:
        """Codes in another format, or the trits if it is the same, on the GPU that made these."""
        assert self._lies is not None
        ordinal, backend = self._lies
        device, (codes, _) = cuda_device(ordinal), self._on_cuda[ordinal]
        return repacked(device, backend, codes, self.shape, FORMATS[self.format], FORMATS[format])

    @typed_memory_errors("TernaryMatrix.dequantize")
    def dequantize(self, dtype: Any = np.float32) -> Array:
        """``scale * t`` as a dense (N, K) array of ``dtype``, computed in float64 and rounded once."""
        return dense("TernaryMatrix.dequantize", self.trits(), self._whole_scale(), dtype)

    def to(self, format: str) -> TernaryMatrix:
        """Convert the weights exactly to another format; ``self`` if it has that format already.

        The scale stays separate: blocks of tq1_0, tq2_0 and q2_0 hold 1.0; :func:`write_gguf` embeds it. Codes that
        were made on a GPU are converted there, and stay there.
        """
        if type(format) is str and format == self.format:  # every matmul passes here
            return self
        format = one_of("TernaryMatrix.to", "format", format, FORMATS)
        done = self if format == self.format else self._converted.get(format)
        return done or self._convert(format, FORMATS[format])

    @typed_memory_errors("TernaryMatrix.to")
    def _convert(self, format: str, fmt: TernaryFormat) -> TernaryMatrix:
        if self._lies is not None:
            fits("TernaryMatrix.to", self.shape, fmt)
            held = self._repacked(format), self._on_cuda[self._lies[0]][1]
            done = TernaryMatrix._on_gpu(self._lies, held, self.scale, self.shape, format)
        else:
            codes = pack("TernaryMatrix.to", self.trits(), fmt)
            scale = self._whole_scale()  # checked: a product may be too large
            done = TernaryMatrix._trusted(codes, check_scale(scale, self.shape), self.shape, format)
        if format == "w2":  # the format that kernels read: every matmul requests it
            self._converted[format] = done
        return done

    def on(self, device: Any) -> tuple[Array, Array]:
        """Return codes, and scale as (1 or N, groups), in memory that the kernels of ``device`` read.

        A CUDA device gets a copy of the codes at the first call. It is kept here, freed with the matrix, and shared
        by all calls: it is never written.
        """
        if isinstance(device, CudaDevice):
            held = self._on_cuda.get(device.ordinal)
            if held is None:
                codes, scale = self._on_host
                copies = device.upload(codes), device.upload(scale)
                held = self._on_cuda.setdefault(device.ordinal, copies)
            return held
        if device is None and self.codes.ctypes.data % 16:  # the emulator: a GPU's copy is always aligned
            return self.codes.copy(), self._on_host[1]
        return self._on_host

    @cached_property
    def _on_host(self) -> tuple[Array, Array]:
        return self.codes, self.scale.reshape(self._scale_shape)

    def _whole_scale(self) -> Array:
        """``scale`` times the scales that the format embeds, if any."""
        if self._lies is not None:  # blocks of codes made on a GPU hold 1.0
            return self.scale
        return whole_scale(self.codes, self.scale, self.shape, self.format)

    def __repr__(self) -> str:
        per = {0: "per tensor", 1: "per row"}.get(self.scale.ndim, f"per group of {self.group_size}")
        return f"TernaryMatrix({self.shape}, format={self.format!r}, scale {per}, {self.nbytes:,} bytes)"


def _frozen(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
