"""A matrix of packed weights: runs of rows, each in a block format of GGUF, bitsandbytes, GPTQ and others."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call
from gpu_ops.core.checks import FLOAT_DTYPES, one_of
from gpu_ops.core.device import CudaDevice
from gpu_ops.errors import DTypeError, FormatError, GpuOpsError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, write_file
from gpu_ops.formats.packed_part import PIECE, PackedPart, merged
from gpu_ops.formats.safetensors import SafetensorsFile, header_of
from gpu_ops.formats.ternary_checks import matrix_shape
from gpu_ops.kernels.program import Layout
from gpu_ops.kernels.weights.packed_panels import GPU_LANES, BlockLayout, PackedShape
from gpu_ops.reference.weights import packed_bitsandbytes
from gpu_ops.reference.weights.packed_formats import FORMATS, PLAIN, PackedFormat, encode

__all__ = ["WRITTEN", "PackedMatrix", "check_activations", "quantize"]

WRITTEN = tuple(name for name, format in FORMATS.items() if format.encode is not None)
"""Formats of :func:`quantize`."""

_KIND = "PackedMatrix 1"  # of files, with the version of their layout


class PackedMatrix:
    """Weights (N, K) in a block format of 2 to 8 bits, or floats, which products read as they are.

    ``describe_formats()`` lists the formats. Immutable. A product on the CPU repacks the blocks into panels the first
    time, without loss, and frees them; :meth:`blocks` makes them again. Packed floats are for the CPU, where products
    with few tokens read them faster than an array.

    Parameters
    ----------
    blocks : uint8 array (N, bytes of a row)
        Blocks as in files of the format. Not copied.
    shape : (int, int)
        ``(N, K)``: output and input features; K is a multiple of the format's block.
    format : str
        q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, tq1_0, tq2_0, nf4, fp4,
        nf4_nested or fp4_nested, whose blocks are as large as K allows;
        int4, uint4, int8, uint8 or e4m3 with groups of 128, 64 or 32 weights, such as int4_g128; bfloat16, float16 or
        float32.
    columns : int array (K,), optional
        Input feature of each stored column, a permutation: GPTQ's order of activations. Products add up in the
        stored order, with the bits of ``linear(x[:, columns], w.dequantize()[:, columns])``.
    dtype : dtype, optional
        Of rows that :func:`embedding` returns; default float32.
    activations : {"native", "int8"}
        Form in which :func:`linear` multiplies x, unless its call says otherwise.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        The bytes or K do not fit the format.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> w = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    >>> packed = gpu_ops.quantize(w, "q4_k")
    >>> packed
    PackedMatrix((64, 256), q4_k, 4.5 bits per weight)
    >>> x = np.ones((2, 256), np.float32)
    >>> np.array_equal(gpu_ops.linear(x, packed), gpu_ops.linear(x, packed.dequantize()))
    True
    """

    ndim = 2
    in_place_of_array = "multiply with gpu_ops.linear(x, w), or unpack it: w.dequantize()"
    __array_ufunc__ = None  # so that x @ w with a NumPy x raises TypeError: this class has no __rmatmul__

    def __init__(
        self,
        blocks: Any,
        shape: tuple[int, int],
        format: str,
        *,
        columns: Any = None,
        dtype: npt.DTypeLike = np.float32,
        activations: str = "native",
    ) -> None:
        name = "PackedMatrix"
        one_of(name, "format", format, FORMATS)
        rows, cols = matrix_shape(name, shape)
        fmt = FORMATS[format].for_columns(cols)
        data = Call(name).read("blocks", blocks, contiguous=True)
        if data.dtype != np.uint8:
            raise DTypeError(f"{name}: blocks is {data.dtype}; expected uint8 (other bytes: .view(np.uint8))")
        check_columns(name, fmt, cols)
        expected = rows, cols // fmt.block * fmt.nbytes
        if data.shape != expected:
            raise ShapeError(
                f"{name}: blocks has shape {data.shape}; expected {expected} for {format} of ({rows}, {cols})"
            )
        order = None if columns is None else _permutation(name, columns, cols)
        self._set((PackedPart(fmt, rows, cols, data),), dtype, activations, order)

    def _set(
        self, parts: tuple[PackedPart, ...], dtype: npt.DTypeLike, activations: str, columns: Array | None
    ) -> None:
        self._parts, self._columns = parts, columns
        self._on_devices: dict[int | None, Any] = {}
        self._shape = sum(part.rows for part in parts), parts[0].cols
        self._formats = tuple((part.rows, part.format.name) for part in parts)
        self._activations = check_activations("PackedMatrix", activations, self)
        self._dtype = np.dtype(dtype)
        if self._dtype not in FLOAT_DTYPES.values():
            raise DTypeError(f"PackedMatrix: dtype is {self._dtype}; allowed: {', '.join(FLOAT_DTYPES)}")
        self._call_key = self._shape, self._formats, self._dtype, self._activations, columns is None

    @classmethod
    def joined(cls, matrices: Sequence[PackedMatrix]) -> PackedMatrix:
        """Matrix of the rows of ``matrices``, one after the other; each keeps its format."""
        if not matrices or any(not isinstance(matrix, cls) for matrix in matrices):
            raise DTypeError("PackedMatrix.joined: expected a list of PackedMatrix")
        if len({matrix.shape[1] for matrix in matrices}) > 1:
            shapes = ", ".join(str(matrix.shape) for matrix in matrices)
            raise ShapeError(f"PackedMatrix.joined: the matrices have shapes {shapes}; K must be the same")
        columns = matrices[0]._columns
        if any(not _same_order(columns, matrix._columns) for matrix in matrices):
            raise OptionError("PackedMatrix.joined: the matrices store their columns in different orders")
        result = object.__new__(cls)
        parts = [part for matrix in matrices for part in matrix._parts]
        parts = [part for part in parts if part.rows] or parts[:1]
        runs = (list(run) for _, run in itertools.groupby(parts, lambda part: part.format.name))
        joined = tuple(run[0] if len(run) == 1 else merged(run) for run in runs)
        result._set(joined, matrices[0]._dtype, matrices[0]._activations, columns)
        return result

    def with_activations(self, activations: str) -> PackedMatrix:
        """Matrix of these weights, in the same memory, with another default for the products."""
        result = object.__new__(PackedMatrix)
        result._set(self._parts, self._dtype, activations, self._columns)
        return result

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of rows that :func:`embedding` returns."""
        return self._dtype

    @property
    def activations(self) -> str:
        """Form in which :func:`linear` multiplies x by default."""
        return self._activations

    @property
    def columns(self) -> Array | None:
        """Input feature of each stored column, int32 (K,); None if they are stored in order."""
        return self._columns

    @property
    def formats(self) -> tuple[tuple[int, str], ...]:
        """Runs of rows: their number and format."""
        return self._formats

    @property
    def nbytes(self) -> int:
        """Bytes held: codes and scales."""
        return sum(part.nbytes for part in self._parts)

    @property
    def file_nbytes(self) -> int:
        """Bytes of the blocks in a file."""
        return sum(part.rows * (part.cols // part.format.block) * part.format.nbytes for part in self._parts)

    @property
    def bits_per_weight(self) -> float:
        """``8 * nbytes / (N * K)``."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))

    @property
    def has_integers(self) -> bool:
        """Whether all values of codes are int8, as int8 activations need."""
        return all(part.layout.has_integers for part in self._parts)

    @property
    def is_plain(self) -> bool:
        """Whether some rows are floats."""
        return any(part.layout.is_plain for part in self._parts)

    @property
    def activation_blocks(self) -> tuple[tuple[int, int], ...]:
        """Runs of rows: their number, and the elements of x that int8 activations scale together."""
        return tuple((part.rows, part.format.block) for part in self._parts)

    @property
    def call_key(self) -> tuple[Any, ...]:
        """Key of calls with this matrix: all that their validation and program depend on."""
        return self._call_key

    @property
    def packed_shape(self) -> PackedShape:
        """Shape and layouts, for programs."""
        parts = tuple((part.rows, part.layout) for part in self._parts)
        return PackedShape(*self.shape, parts, self._columns is not None)

    @property
    def device_layout(self) -> Layout:
        """Layout of the buffer that :meth:`on` returns for a GPU."""
        sizes = (part.panels_shape(GPU_LANES) for part in self._parts)
        order = 0 if self._columns is None else self._columns.nbytes
        return Layout.contiguous((sum(map(math.prod, sizes)) + order,), np.uint8)

    def on(self, device: Any) -> Any:
        """Weights as the kernels of ``device`` read them: the matrix itself on the CPU; on a GPU and the emulator
        (None) the panels of all parts and then ``columns`` in one buffer, which is made once."""
        if device is not None and not isinstance(device, CudaDevice):
            return self
        key = None if device is None else device.ordinal
        buffer = self._on_devices.get(key)
        if buffer is None:
            arrays = [part.packed(GPU_LANES).reshape(-1) for part in self._parts]
            arrays += [] if self._columns is None else [self._columns.view(np.uint8)]
            host = np.concatenate(arrays)
            buffer = self._on_devices.setdefault(key, host if device is None else device.upload(host))
        return buffer

    @property
    def call_arrays(self) -> tuple[Array, ...]:
        """Arrays in host memory, which results may not overlap."""
        return tuple(array for part in self._parts for array in part.arrays())

    def blocks(self) -> list[Array]:
        """Blocks of each run of rows, uint8 (rows, bytes), as in files. Bytes of tq1_0 that encode the same digits as
        its encoder's may be those after a product: the weights are the same."""
        return [part.blocks() for part in self._parts]

    def panels(self, lanes: int) -> list[tuple[BlockLayout, int, Array]]:
        """Layout, rows and panels of each run of rows, for CPU kernels with ``lanes`` rows per vector."""
        return [(part.layout, part.rows, part.panels(lanes)) for part in self._parts]

    @typed_memory_errors("PackedMatrix.dequantize")
    def dequantize(self, dtype: npt.DTypeLike = np.float32) -> Array:
        """Weights as an array (N, K), computed in float32 as the format defines and rounded to ``dtype``."""
        target = np.dtype(dtype)
        if target not in FLOAT_DTYPES.values():
            raise DTypeError(
                f"PackedMatrix.dequantize: dtype is {target}; allowed: {', '.join(FLOAT_DTYPES)}"
            )
        result, first = np.empty(self.shape, target), 0
        for part in self._parts:
            part.decode(result[first : first + part.rows], self._columns)
            first += part.rows
        return result

    @typed_memory_errors("PackedMatrix.to")
    def to(self, format: str) -> PackedMatrix:
        """Weights in another format: decoded and encoded again, for native activations. ``self`` if all rows have
        that format."""
        if all(name == format for _, name in self.formats):
            return self
        return quantize(self.dequantize(), format, dtype=self._dtype)

    def rows(self, order: Array) -> PackedMatrix:
        """Rows in another order: ``order`` are their indices. OptionError if the matrix has several formats."""
        if len(self._parts) > 1:
            names = " and ".join(name for _, name in self.formats)
            raise OptionError(f"PackedMatrix.rows: the rows are {names}; reorder a matrix of one format")
        (part,) = self._parts
        return PackedMatrix(
            part.blocks()[order],
            (len(order), part.cols),
            part.format.name,
            columns=self._columns,
            dtype=self._dtype,
            activations=self._activations,
        )

    def save(self, path: Any) -> None:
        """Write the matrix to one file. An old file is replaced when the new one is complete.

        It is a safetensors file with the blocks of each run of rows, ``blocks.0`` and so on (U8), and ``columns``
        (I32) if the matrix has them.
        FileError if it cannot be written.
        """
        op = "PackedMatrix.save"
        target = path_of(op, path)
        fields = {"shape": self.shape, "formats": self.formats, "dtype": self._dtype.name}
        layout = json.dumps({**fields, "activations": self._activations})
        metadata = {"gpu_ops.kind": _KIND, "gpu_ops.layout": layout}
        arrays = {f"blocks.{i}": array for i, array in enumerate(self.blocks())}
        tensors: dict[str, Any] = {name: ("U8", array.shape) for name, array in arrays.items()}
        if self._columns is not None:
            tensors["columns"], arrays["columns"] = ("I32", self._columns.shape), self._columns
        data = (array.reshape(-1).view(np.uint8) for array in arrays.values())
        write_file(op, target, [header_of(tensors, metadata), *data])

    @classmethod
    @typed_memory_errors("PackedMatrix.load")
    def load(cls, path: Any) -> PackedMatrix:
        """Read a file of :meth:`save`. FormatError if it is another or damaged; FileError if it cannot be read."""
        op = "PackedMatrix.load"
        where = path_of(op, path)
        with opened(op, where) as file:
            contents = SafetensorsFile(op, where, file)
            if contents.metadata.get("gpu_ops.kind") != _KIND:
                raise FormatError(f"{op}: {where} is no file of PackedMatrix.save")
            try:
                layout = json.loads(contents.metadata.get("gpu_ops.layout", ""))
                dtype, cols = FLOAT_DTYPES[layout["dtype"]], layout["shape"][1]
                columns = contents.read("columns") if "columns" in contents.tensors else None
                parts = [
                    cls(contents.read(f"blocks.{i}"), (rows, cols), name, columns=columns, dtype=dtype)
                    for i, (rows, name) in enumerate(layout["formats"])
                ]
                return cls.joined(parts).with_activations(layout.get("activations", "native"))
            except (GpuOpsError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                raise FormatError(f"{op}: {where}: {error}") from error

    @staticmethod
    def describe_formats() -> str:
        """Return the table of formats, as Markdown."""
        from gpu_ops.reference.weights.packed_formats import describe_formats

        return describe_formats()

    def __array__(self, *_: Any, **__: Any) -> Array:
        """Raise an error: NumPy would make an array of one object."""
        raise DTypeError(f"PackedMatrix: it is packed, and no array; {self.in_place_of_array}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_devices": {}}

    def __repr__(self) -> str:
        formats = list(dict.fromkeys(name for _, name in self.formats))
        return (
            f"PackedMatrix({self.shape}, {' and '.join(formats)}, {self.bits_per_weight:.4g} bits per weight)"
        )


def _permutation(op: str, columns: Any, cols: int) -> Array:
    order = Call(op).read("columns", columns)
    if order.dtype.kind not in "iu" or order.shape != (cols,):
        raise ShapeError(f"{op}: columns is {order.dtype} {order.shape}; expected integers ({cols},)")
    if not np.array_equal(np.sort(order), np.arange(cols)):
        raise OptionError(f"{op}: columns is no permutation of 0 to {cols - 1}")
    return order.astype(np.int32)


def _same_order(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def check_activations(op: str, activations: Any, weight: PackedMatrix) -> str:
    """Check the form of activations for a weight."""
    mode = one_of(op, "activations", activations, ("native", "int8"))
    if mode == "int8" and not weight.has_integers:
        names = ", ".join(dict.fromkeys(name for _, name in weight.formats))
        raise OptionError(f"{op}: activations='int8' needs codes of integers, and {names} has floats")
    return mode


def check_columns(op: str, format: PackedFormat, cols: int) -> None:
    least = format.least_block
    if cols % least:
        raise ShapeError(
            f"{op}: K is {cols}; rows of {format.name} are blocks of {least}, so K must be a multiple of {least}"
        )


@typed_memory_errors("quantize")
def quantize(w: Any, format: str, *, dtype: npt.DTypeLike | None = None) -> PackedMatrix:
    """Quantise a matrix (N, K) of floats to a packed format, or pack the floats.

    Parameters
    ----------
    w : array (N, K)
        float16, bfloat16, float32 or float64, finite unless floats are packed; K is a multiple of the format's block.
    format : str
        q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4, q4_k, q5_k, q6_k, tq1_0, tq2_0, nf4 or fp4: codes and scales are
        those of the format's own package, llama.cpp (without an importance matrix) or bitsandbytes (blocks of 64).
        nf4_nested or fp4_nested: bitsandbytes' double quantisation, whose scales are bytes, 4.13 to 4.2 bits per
        weight where 1024 divides K. The mean of the scales is rounded to float32 once.
        int4, uint4, int8, uint8 or e4m3 with groups, such as int4_g128. bfloat16, float16 or float32: weights rounded
        to that dtype, in the order in which products on the CPU read them.
    dtype : dtype, optional
        :attr:`PackedMatrix.dtype` of the result; default that of ``w``.

    Returns
    -------
    PackedMatrix

    Raises
    ------
    OptionError, ShapeError, DTypeError
        An unknown format, one that is only read, a K that does not fit, or a weight that is not finite.

    Notes
    -----
    Root mean square error of normal weights, of their standard deviation: q8_0 0.005, q6_k 0.018, q5_k 0.036,
    q5_0 0.043, q4_k 0.071, iq4_nl 0.076, q4_0 0.086, nf4 and nf4_nested 0.092, mxfp4 0.114, fp4 0.122. tq1_0 and
    tq2_0 are for weights that are ternary already, which they keep exactly; others lose 0.81.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> w = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    >>> packed = gpu_ops.quantize(w, "q8_0")
    >>> packed.nbytes, bool(abs(packed.dequantize() - w).max() < 0.004)
    (68, True)
    """
    fmt = FORMATS[one_of("quantize", "format", format, FORMATS)]
    if fmt.encode is None:
        raise OptionError(f"quantize: {format} is only read; formats that are written: {', '.join(WRITTEN)}")
    weights = Call("quantize").read("w", w)
    if weights.dtype not in FLOAT_DTYPES.values():
        raise DTypeError(f"quantize: w is {weights.dtype}; allowed: {', '.join(FLOAT_DTYPES)}")
    if weights.ndim != 2:
        raise ShapeError(f"quantize: w has shape {weights.shape}; expected (N, K)")
    check_columns("quantize", fmt, weights.shape[1])
    rows, cols = weights.shape
    flat = FORMATS[fmt.nests or format]  # scales are nested when all of them are known
    blocks = np.empty((rows, cols // flat.block * flat.nbytes), np.uint8)
    step = max(1, PIECE // max(1, cols))
    for first in range(0, rows, step):
        with np.errstate(over="ignore"):  # float64
            part = np.asarray(weights[first : first + step], np.float32)
        if format not in PLAIN and not np.isfinite(part).all():
            raise OptionError("quantize: w holds NaN or infinity, which no code can carry on")
        blocks[first : first + step] = encode(flat, part.reshape(-1, flat.block)).reshape(len(part), -1)
    if fmt.nests:
        fmt = fmt.for_columns(cols)
        blocks = packed_bitsandbytes.nested(fmt.block, blocks.reshape(-1, flat.nbytes))
        blocks = blocks.reshape(rows, cols // fmt.block * fmt.nbytes)
    return PackedMatrix(blocks, (rows, cols), format, dtype=weights.dtype if dtype is None else dtype)
