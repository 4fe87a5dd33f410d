"""Layout in which kernels read packed weights: *panels*, repacked once from a format's blocks, without loss.

    panel            LANES rows, all blocks of K in order; rows past the matrix are zeros
    block of a panel scales [LANES]; minimums [LANES]; run scales [runs][LANES]; run minimums [runs][LANES]; planes

A code of up to 8 bits is split into a low and a high plane of 8, 4, 2 or 1 bits. A plane of p bits is a sequence of
vectors of 32-bit lanes, one lane per row; bits p g and up of byte i of vector j are of weight 4 (8 / p) j + 4 g + i.
So four neighbours in K are the four bytes of a lane after one shift and one mask: the operand of a 4 x int8 dot
product. The codes of plain floats are their bytes: a lane holds one float32, or two neighbours of 16 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

GPU_LANES = 32  # rows of a panel on a GPU, whatever its architecture: a warp


class BlockLayout(NamedTuple):
    """Fields of a format's blocks, which kernels are compiled for."""

    name: str
    block: int  # weights
    run: int  # weights that share a scale
    bits: int  # of a weight
    scale_bytes: int  # 0: no scale, 1: exponent of a power of two, 2: float16, 4: float32, 8: two of them
    has_run_scales: bool
    has_minimum: bool
    has_run_minimums: bool
    offset: int | None  # subtracted from a code that is an integer
    table: tuple[float, ...]  # values of the codes, if they are not; empty for floats
    scale_values: bytes = b""
    """float32 values of the 256 codes of nested scales, which run scales then are: a run's scale is its value, times
    the first of the block's two scales, plus the second. Bytes keep their hash."""

    @property
    def has_integers(self) -> bool:
        """Whether all values are int8, so that int8 activations give exact sums."""
        if not self.table:
            return self.offset is not None
        return all(value == int(value) and -128 <= value <= 127 for value in self.table)

    @property
    def is_nested(self) -> bool:
        """Whether scales of runs are codes."""
        return bool(self.scale_values)

    @property
    def is_e4m3(self) -> bool:
        """Whether codes are float8 e4m3fn."""
        return self.offset is None and not self.table and self.bits == 8

    @property
    def is_plain(self) -> bool:
        """Whether weights are floats of the dtype :attr:`name`."""
        return self.bits > 8

    @property
    def codes(self) -> int:
        """Codes of a block."""
        return self.block * self.bits // 8 if self.is_plain else self.block

    @property
    def has_zeros(self) -> bool:
        """Whether run minimums are zero points: subtracted from codes."""
        return self.has_run_minimums and not self.has_minimum

    @property
    def planes(self) -> tuple[int, int]:
        """Bits of the low and of the high plane."""
        if self.is_plain:
            return 8, 0
        low = 1 << (self.bits.bit_length() - 1)
        return low, self.bits - low

    @property
    def runs(self) -> int:
        return self.block // self.run

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a block of a panel."""
        per_run = self.has_run_scales + self.has_run_minimums
        return self.scale_bytes + 2 * self.has_minimum + self.runs * per_run + self.block * self.bits // 8


class PackedShape(NamedTuple):
    """Shape of a packed matrix, and its runs of rows: all that programs depend on."""

    rows: int
    cols: int
    parts: tuple[tuple[int, BlockLayout], ...]
    """Rows and layout of each run."""
    reordered: bool
    """Whether the matrix stores its columns in another order."""


class Columns(NamedTuple):
    """Fields of a matrix (rows, blocks of K, ...), as a format splits them."""

    codes: Array
    scale: Any  # array or None
    run_scales: Any
    minimum: Any
    run_minimums: Any


def panel_bytes(layout: BlockLayout, lanes: int, cols: int) -> int:
    """Bytes of a panel of a matrix with ``cols`` columns."""
    return cols // layout.block * layout.row_bytes * lanes


def pack_panels(layout: BlockLayout, fields: Columns, lanes: int) -> Array:
    """Panels (panels, bytes) uint8 of a matrix's fields, each (rows, blocks, ...)."""
    rows, blocks, _ = fields.codes.shape
    panels = -(-rows // lanes)
    result = np.empty((panels, blocks, layout.row_bytes * lanes), np.uint8)
    start = 0
    for field in (fields.scale, fields.minimum, fields.run_scales, fields.run_minimums):
        if field is not None:
            by_column = np.ascontiguousarray(_by_lanes(field, lanes).swapaxes(2, 3))
            part = by_column.view(np.uint8).reshape(panels, blocks, -1)
            result[:, :, start : start + part.shape[2]] = part
            start += part.shape[2]
    codes, shift = _by_lanes(fields.codes, lanes), 0
    for bits in layout.planes:
        if bits:
            part = _pack_plane(codes >> np.uint8(shift) if shift else codes, bits)
            result[:, :, start : start + part.shape[2]] = part
            start += part.shape[2]
            shift += bits
    return result.reshape(panels, -1)


def unpack_panels(layout: BlockLayout, panels: Array, rows: int, lanes: int) -> Columns:
    """Inverse of :func:`pack_panels`."""
    count = len(panels)
    data = panels.reshape(count, -1, layout.row_bytes * lanes)
    start = 0

    def field(columns: int, dtype: Any) -> Array:
        nonlocal start
        size = columns * lanes * np.dtype(dtype).itemsize
        part = np.ascontiguousarray(data[:, :, start : start + size]).view(dtype)
        start += size
        by_row = part.reshape(count, -1, columns, lanes).transpose(0, 3, 1, 2)
        return np.asarray(by_row.reshape(count * lanes, -1, columns)[:rows])

    scale_dtypes = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float32}
    columns = 2 if layout.is_nested else 1
    scale = field(columns, scale_dtypes[layout.scale_bytes]) if layout.scale_bytes else None
    minimum = field(1, np.float16) if layout.has_minimum else None
    run_dtype = np.uint8 if layout.is_nested else np.int8
    run_scales = field(layout.runs, run_dtype) if layout.has_run_scales else None
    run_minimums = field(layout.runs, np.uint8) if layout.has_run_minimums else None
    codes, shift = np.zeros((rows, data.shape[1], layout.codes), np.uint8), 0
    for bits in layout.planes:
        if bits:
            size = layout.codes * bits // 8 * lanes
            codes |= _unpack_plane(data[:, :, start : start + size], bits, lanes)[:rows] << np.uint8(shift)
            start += size
            shift += bits
    return Columns(codes, scale, run_scales, minimum, run_minimums)


def _by_lanes(field: Array, lanes: int) -> Array:
    """(rows, blocks, columns) as (panels, blocks, lanes, columns), zeros past the rows."""
    rows, blocks, columns = field.shape
    padded = np.zeros((-(-rows // lanes) * lanes, blocks, columns), field.dtype)
    padded[:rows] = field
    return padded.reshape(-1, lanes, blocks, columns).swapaxes(1, 2)


def _pack_plane(codes: Array, bits: int) -> Array:
    """Plane of the lowest ``bits`` of codes (panels, blocks, lanes, weights): (panels, blocks, bytes)."""
    panels, blocks, lanes, _ = codes.shape
    if bits == 8:  # whole lanes
        words = np.ascontiguousarray(codes).view(np.uint32)
        return np.ascontiguousarray(words.swapaxes(2, 3)).view(np.uint8).reshape(panels, blocks, -1)
    parts = 8 // bits
    groups = (codes & np.uint8((1 << bits) - 1)).reshape(panels, blocks, lanes, -1, parts, 4)
    shifted = groups << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray(np.bitwise_or.reduce(shifted, axis=4).swapaxes(2, 3).reshape(panels, blocks, -1))


def _unpack_plane(plane: Array, bits: int, lanes: int) -> Array:
    """Inverse of :func:`_pack_plane`: codes (rows, blocks, weights)."""
    panels, blocks, _ = plane.shape
    if bits == 8:
        words = np.ascontiguousarray(plane).view(np.uint32).reshape(panels, blocks, -1, lanes)
        by_row = np.ascontiguousarray(words.transpose(0, 3, 1, 2)).view(np.uint8)
        return by_row.reshape(panels * lanes, blocks, -1)
    vectors = plane.reshape(panels, blocks, -1, lanes, 1, 4)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (vectors >> shifts & np.uint8((1 << bits) - 1)).transpose(0, 3, 1, 2, 4, 5)
    return np.asarray(codes.reshape(panels * lanes, blocks, -1))
