"""Packing and unpacking trits on the GPU: the launches.

trits (N, K) int8 have unit stride on the last axis; packed is contiguous. Errors in the input are reported by
flags, one per block. Formats come in three families, each with its CUDA C++ kernels and their readable twins:

    lines     ternary_pack.cu          numba_cuda/ternary_pack.py           a line of units per row or a few rows
    blocks    ternary_pack_blocks.cu   numba_cuda/ternary_pack_blocks.py    of GGUF files, each with its scale
    tiles     ternary_pack_tiles.cu    numba_cuda/ternary_pack_tiles.py     of bitnet.cpp's table lookups
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import alignment, row_stride, side_by_side
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["BLOCKS", "LINES", "variants"]


@dataclass(frozen=True)
class Lines:
    """Division of rows into lines of units, as drawn in ``ternary_pack.cu``."""

    macro: str
    columns: int  # of a unit
    packed_bytes: int  # of an access to packed
    rows: int = 1  # of a line
    pad_units: int = 1  # lines are padded to multiples of this number of units


LINES = {
    "w2": Lines("kW2", 16, 4, pad_units=4),
    "hf_bitnet": Lines("kHfBitnet", 16, 16, rows=4),
    "planes": Lines("kPlanes", 16, 2, pad_units=2),
    "base3": Lines("kBase3", 20, 4),
    "i2_s": Lines("kI2S", 64, 16),
    "bitnet_gpu": Lines("kBitnetGpu", 1, 4, rows=16),
}
BLOCKS = {"tq1_0": ("kTq1", 256, 16), "tq2_0": ("kTq2", 256, 16), "q2_0": ("kQ2", 64, 32)}
"""Macro, weights of a block, blocks that a warp takes at a time."""
_TILES = {"tl1": "kTl1", "tl2": "kTl2", "pairs": "kTl2Pairs"}

_THREADS, _TILE_THREADS = 256, 128
_PIECE = 4 * _THREADS  # units of a line that a block takes at a time
_BLOCKS_PER_SM = 16
_TRIPLES = 96  # columns of tl2 that a warp takes, of 32 rows


@dataclass(frozen=True)
class _Task:
    """One conversion. The workspace ``flags`` is not 0 if a trit is invalid, a scale does not fit, or packed bytes
    are such as no encoder writes.

    ``which``: pack or unpack. ``scale``: of blocks to pack, float32 (1 or N, 1 or blocks of a row). ``tile``: of
    tiles, BM, BK and bm.
    """

    which: str
    trits: Tensor
    packed: Tensor
    format: str
    scale: Tensor | None
    tile: tuple[int, int, int]
    twins: bool

    @classmethod
    def of(cls, spec: Spec, builder: Builder, which: str, twins: bool) -> _Task:
        trits, packed = spec.tensor("trits"), spec.tensor("packed").reshape(-1)
        format, scale = spec["format"], spec.get("scale")
        if which == "unpack":
            packed = packed[: spec["need"]]
        elif format in BLOCKS and scale is None:
            scale = builder.constant(np.ones((1, 1), np.float32), "scale")
        return cls(which, trits, packed, format, scale, spec["tile"], twins)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``pack`` and ``unpack`` launch."""
    for which in ("pack", "unpack"):
        for lines in LINES.values():
            yield Variant(_kernel(which, "", lines.macro), _THREADS)
        for macro, _, _ in BLOCKS.values():
            yield Variant(_kernel(which, "_blocks", macro), _THREADS)
        for macro in _TILES.values():
            yield Variant(_kernel(which, "_tiles", macro), _TILE_THREADS)


def _lower(spec: Spec, builder: Builder, which: str, twins: bool) -> None:
    if spec["by_numpy"]:
        builder.note(f"NumPy, on the host: {spec['by_numpy']}")
        return
    t = _Task.of(spec, builder, which, twins)
    family = _lines if t.format in LINES else _blocks if t.format in BLOCKS else _tiles
    family(t, builder, _BLOCKS_PER_SM * builder.sms)


for _which in ("pack", "unpack"):
    lowers(f"ternary_{_which}", "raw")(partial(_lower, which=_which, twins=False))
    lowers(f"ternary_{_which}", "numba")(partial(_lower, which=_which, twins=True))


# ---- lines -------------------------------------------------------------------------------------------------

# Shape of ternary_pack.cu
_LINES_SHAPE = np.dtype(
    [(name, np.int64) for name in ("stride", "pitch", "k")]
    + [(name, np.int32) for name in ("lines", "n", "units", "whole", "packed_whole")],
    align=True,
)


def _lines(t: _Task, builder: Builder, most: int) -> None:
    trits, packed, format = t.trits, t.packed, t.format
    if format == "i2_s" and (side_by_side((trits,)) or trits.shape[1] % 128):
        trits = trits.ravel()[None]  # contiguous: blocks may span rows
    n, k = trits.shape
    layout = LINES[format]
    lines = -(-n // layout.rows)
    pitch = packed.size // lines
    unit_columns = layout.columns * layout.pad_units
    units = -(-k // unit_columns) * layout.pad_units
    across = min(lines, most)
    grid = (across, max(1, min(-(-units // _PIECE), most // across)), 1)
    flags = builder.empty((grid[0] * grid[1],), np.int32, "flags")
    arrays = (trits, packed) if t.which == "pack" else (packed, trits)
    if t.twins:
        args = (*arrays, flags, np.int64(lines), np.int64(pitch))
        _twin(builder, "ternary_pack", t.which, format, grid, args)
        return
    shape = np.zeros((), _LINES_SHAPE)
    shape["stride"], shape["pitch"], shape["lines"] = row_stride(trits), pitch, lines
    shape["n"], shape["k"], shape["units"] = n, k, units
    shape["whole"] = alignment((trits,), n) == 16
    whole_lines = pitch % layout.packed_bytes == 0 or lines == 1
    shape["packed_whole"] = whole_lines and alignment((packed,), 1) % layout.packed_bytes == 0
    builder.launch(_kernel(t.which, "", layout.macro), grid, (_THREADS, 1, 1), (*arrays, flags, shape[()]))


# ---- blocks ------------------------------------------------------------------------------------------------

# Shape of ternary_pack_blocks.cu
_BLOCKS_SHAPE = np.dtype(
    [(name, np.int64) for name in ("stride", "blocks", "scale_stride")]
    + [(name, np.int32) for name in ("per_row", "scale_step", "whole", "packed_whole")]
)


def _blocks(t: _Task, builder: Builder, most: int) -> None:
    trits, packed = t.trits, t.packed
    n, k = trits.shape
    macro, weights, of_a_warp = BLOCKS[t.format]
    blocks = n * k // weights
    grid = (min(-(-blocks // (of_a_warp * _THREADS // 32)), most), 1, 1)
    flags = builder.empty(grid[:1], np.int32, "flags")
    arrays: tuple[Tensor, ...] = (packed, trits, flags)
    if t.scale is not None:
        halves = (packed.view(np.float16),) if t.twins else ()
        arrays = (trits, packed, *halves, flags, t.scale)
    if t.twins:
        _twin(builder, "ternary_pack_blocks", t.which, t.format, grid, arrays)
        return
    shape = np.zeros((), _BLOCKS_SHAPE)
    shape["stride"], shape["blocks"], shape["per_row"] = row_stride(trits), blocks, k // weights
    shape["whole"] = alignment((trits,), n) == 16
    shape["packed_whole"] = alignment((packed,), 1) % 4 == 0
    if t.scale is not None:
        rows, columns = t.scale.shape
        shape["scale_stride"] = row_stride(t.scale) if rows > 1 else 0
        shape["scale_step"] = t.scale.strides[1] // t.scale.itemsize if columns > 1 else 0
    builder.launch(_kernel(t.which, "_blocks", macro), grid, (_THREADS, 1, 1), (*arrays, shape[()]))


# ---- tiles -------------------------------------------------------------------------------------------------

# Shape of ternary_pack_tiles.cu
_TILES_SHAPE = np.dtype(
    [("stride", np.int64), ("chunks", np.uint32)]
    + [(name, np.int32) for name in ("first", "rows", "columns", "step", "across", "whole", "packed_whole")],
    align=True,
)


def _tiles(t: _Task, builder: Builder, most: int) -> None:
    trits, packed = t.trits, t.packed
    n, k = trits.shape
    rows, columns, step = t.tile
    # (what, of packed, first column, columns, of a tile, of a chunk, chunks of a warp)
    if t.format == "tl1":
        parts = [("tl1", packed, 0, k, columns, 2048 // step, 1)]
    else:
        rest = k % columns
        triples, pairs = n * (k - rest) * 5 // 24, n * rest // 4
        parts = [
            ("tl2", packed[:triples], 0, k - rest, columns, _TRIPLES, 1),
            ("pairs", packed[triples : triples + pairs], k - rest, rest, 32, 32, 2),
        ]
    parts = [part for part in parts if part[3]]
    warps = _TILE_THREADS // 32
    chunks = [n // step * (width // across) for _, _, _, width, _, across, _ in parts]
    grids = [min(-(-count // (warps * part[-1])), most) for count, part in zip(chunks, parts, strict=True)]
    flags = builder.empty((sum(grids),), np.int32, "flags")
    for i, (what, of, first, width, tile_columns, _, _) in enumerate(parts):
        mine = flags[sum(grids[:i]) : sum(grids[: i + 1])]
        arrays = (trits, of, mine) if t.which == "pack" else (of, trits, mine)
        grid, across = (grids[i], 1, 1), width // tile_columns
        if t.twins:
            sizes = (first, rows, tile_columns, step, across)
            _twin(builder, "ternary_pack_tiles", t.which, what, grid, (*arrays, *map(np.int64, sizes)))
            continue
        shape = np.zeros((), _TILES_SHAPE)
        shape["stride"], shape["chunks"], shape["first"] = row_stride(trits), chunks[i], first
        shape["rows"], shape["columns"], shape["step"], shape["across"] = rows, tile_columns, step, across
        shape["whole"] = alignment((trits,), n) == 16
        shape["packed_whole"] = alignment((of,), 1) == 16
        builder.launch(
            _kernel(t.which, "_tiles", _TILES[what]), grid, (_TILE_THREADS, 1, 1), (*arrays, shape[()])
        )


def _twin(builder: Builder, module: str, which: str, format: str, grid: tuple[int, ...], args: Any) -> None:
    twins = importlib.import_module(f"gpu_ops.kernels.weights.numba_cuda.{module}")
    kernel = (twins.pack_kernel if which == "pack" else twins.unpack_kernel)(format)
    builder.launch(kernel, grid, (twins.THREADS, 1, 1), args)


def _kernel(which: str, family: str, macro: str) -> CudaKernel:
    return CudaKernel(f"weights/ternary_pack{family}", f"ternary_{which}{family}", (("FORMAT", macro),))
