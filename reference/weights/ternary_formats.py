"""Ternary storage formats, one row each, in a table that checks itself.

A trit ``t`` is -1, 0 or +1; its code is ``t + 1`` unless the row says otherwise. A stored scale always multiplies:
``W = scale * t``. :mod:`ternary_layouts` implements the bit layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FORMATS", "TernaryFormat", "describe_formats", "ternary_format"]

Tile = tuple[int, int, int]  # rows, columns, rows at a time


@dataclass(frozen=True)
class TernaryFormat:
    """A format's name, cost and requirements on a matrix ``(N, K)``.

    ``unit_rows`` x ``unit_cols`` weights take ``unit_bytes``. A matrix that is not a multiple of units is padded if
    ``pads``, otherwise refused. ``linear`` formats count elements over the whole matrix, so only N*K must divide.
    """

    name: str
    unit_rows: int
    unit_cols: int
    unit_bytes: int
    pads: bool
    scale: str
    invalid: str
    used_by: str
    linear: bool = False
    block_scale: int = 0  # weights per embedded fp16 scale; 0 if scales are kept apart
    scale_first: bool = False  # the embedded scale comes first in its block
    steps: int = 0  # a last, narrower tile has a multiple of this many columns; 0: none
    # for shapes with separate tiles
    tiles: Mapping[tuple[int, int], Tile] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """Bits of the packed array per weight, embedded scales included, padding excluded."""
        return 8 * self.unit_bytes / (self.unit_rows * self.unit_cols)

    @property
    def constraint(self) -> str:
        """Description of the requirement on the shape."""
        if self.linear:
            return f"N*K % {self.unit_cols} == 0"
        if self.tiles:
            return (
                self._tile_constraint(self.tile((1, 1)))
                + "; bitnet.cpp's model shapes have tiles of their own"
            )
        parts = [("N", self.unit_rows), ("K", self.unit_cols)]
        if self.pads:
            padded = [f"{axis} padded to {n}" for axis, n in parts if n > 1]
            return "any shape, " + " and ".join(padded)
        return " and ".join(f"{axis} % {n} == 0" for axis, n in parts if n > 1)

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the packed uint8 array; ValueError if ``shape`` does not fit the format."""
        n, k = shape
        if self.linear:
            if n * k % self.unit_cols:
                raise ValueError(self._misfit(shape))
            return (n * k // self.unit_cols * self.unit_bytes,)
        if self.tiles:
            return self._tiled_shape(shape)
        if not self.pads and (n % self.unit_rows or k % self.unit_cols):
            raise ValueError(self._misfit(shape))
        if self.name == "bitnet_gpu":  # tiles, not rows: the bytes of one row are scattered
            return (n * k // 4,)
        return (math.ceil(n / self.unit_rows), math.ceil(k / self.unit_cols) * self.unit_bytes)

    def tile(self, shape: tuple[int, int]) -> Tile:
        """(BM, BK, bm) of a matrix of ``shape``: the tile for which bitnet.cpp generates its kernels."""
        return self.tiles.get(shape, (self.unit_rows, self.unit_cols, 32))

    def _tiled_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """tl1 and tl2: whole tiles of ``unit_bytes``, then steps of pairs at 4 bits each."""
        n, k = shape
        rows, cols, _ = self.tile(shape)
        rest = k % cols
        if n % rows or rest % (self.steps or cols):
            raise ValueError(self._misfit(shape))
        whole = n * (k - rest) * self.unit_bytes // (self.unit_rows * self.unit_cols)
        return (whole + n * rest // 4,)

    def _tile_constraint(self, tile: Tile) -> str:
        rows, cols, _ = tile
        columns = f"(K % {cols}) % {self.steps} == 0" if self.steps else f"K % {cols} == 0"
        return f"N % {rows} == 0 and {columns}"

    def _misfit(self, shape: tuple[int, int]) -> str:
        needs = self._tile_constraint(self.tile(shape)) if self.tiles else self.constraint
        others = ", ".join(repr(f.name) for f in FORMATS.values() if f.pads)
        return (
            f"format {self.name!r} needs {needs}, got shape {tuple(shape)}; "
            f"formats that take any shape: {others}"
        )


def _by_shape(shapes: dict[Tile, list[tuple[int, int]]]) -> dict[tuple[int, int], Tile]:
    return {shape: tile for tile, group in shapes.items() for shape in group}


# The tiles that setup_env.py of bitnet.cpp generates kernels with, for bitnet_b1_58-large, bitnet_b1_58-3B and
# Llama3-8B. Its model files exist in these shapes only; all others get the tile of the format's row. Files made with
# other parameters (its tuned presets) have the same size but another order, known only to their creator.
_TL1_TILES = _by_shape(
    {
        (256, 128, 32): [(1536, 4096), (4096, 1536), (14336, 4096), (1024, 4096)],
        (128, 64, 64): [(1536, 1536), (4096, 14336), (4096, 4096)],
        (160, 64, 32): [(3200, 8640)],
        (320, 128, 64): [(3200, 3200)],
        (320, 64, 32): [(8640, 3200)],
    }
)
_TL2_TILES = _by_shape(
    {
        (256, 96, 32): [(1536, 4096), (4096, 1536), (14336, 4096), (1024, 4096)],
        (128, 192, 32): [(1536, 1536)],
        (160, 96, 32): [(3200, 8640)],
        (320, 96, 32): [(3200, 3200), (8640, 3200)],
        (128, 96, 32): [(4096, 14336), (4096, 4096)],
    }
)


def _row(
    name: str,
    unit: tuple[int, int, int],
    invalid: str,
    used_by: str,
    *,
    pads: bool = False,
    scale: str = "apart",
    **layout: Any,
) -> TernaryFormat:
    """A row of the table. ``unit``: rows, columns and bytes of a unit."""
    return TernaryFormat(name, *unit, pads, scale, invalid, used_by, **layout)


_ROWS = (
    _row(
        "planes",
        (1, 32, 8),
        "both planes set; a set bit in the padding",
        "unsloth-rs: per row, u32 words of a plus plane, then of a minus plane",
        pads=True,
    ),
    _row(
        "base3",
        (1, 5, 1),
        "byte > 242; a padding digit that is not 1",
        "ONNX Runtime WebGPU and others: 5 trits per byte, first one in the lowest digit",
        pads=True,
    ),
    _row(
        "hf_bitnet",
        (4, 1, 1),
        "code 3; a set bit in the padding rows",
        "transformers BitNet checkpoints: row r + i*ceil(N/4) at bits 2i, packed along out_features",
        pads=True,
    ),
    _row(
        "bitnet_gpu",
        (16, 32, 128),
        "code 0 (code is t + 2)",
        "Microsoft BitNet CUDA kernel: 16x32 tiles permuted, 16-code interleaved words",
    ),
    _row(
        "i2_s",
        (1, 128, 32),
        "code 3",
        "bitnet.cpp on x86: 128-weight blocks, most significant bits first; codes only, no trailer",
        linear=True,
    ),
    _row(
        "tl1",
        (256, 128, 8192),
        "a number above 8",
        "bitnet.cpp on ARM: tiles, two base-3 numbers of two trits per byte; codes only, no trailer",
        tiles=_TL1_TILES,
    ),
    _row(
        "tl2",
        (256, 96, 5120),
        "a magnitude above 13; a minus zero; a pair above 8",
        "bitnet.cpp with AVX2: tiles, three trits as a magnitude and a sign, the columns left over as in tl1",
        steps=32,
        tiles=_TL2_TILES,
    ),
    _row(
        "tq1_0",
        (1, 256, 54),
        "a byte that no 5 (4) digits produce; a scale that is not finite",
        "llama.cpp GGUF: base-3 fixed point, 5 trits per byte",
        scale="fp16 per 256 in the block",
        block_scale=256,
    ),
    _row(
        "tq2_0",
        (1, 256, 66),
        "code 3; a scale that is not finite",
        "llama.cpp GGUF: 2-bit codes, least significant bits first",
        scale="fp16 per 256 in the block",
        block_scale=256,
    ),
    _row(
        "q2_0",
        (1, 64, 18),
        "code 3 (llama.cpp's +2); a scale that is not finite",
        "llama.cpp GGUF: the scale, then 2-bit codes, least significant bits first",
        scale="fp16 per 64 in the block",
        block_scale=64,
        scale_first=True,
    ),
    _row(
        "w2",
        (1, 64, 16),
        "code 3; a padding code that is not 1",
        "the kernels here: K-contiguous rows of 16-code interleaved u32 words",
        pads=True,
    ),
)


def _check(rows: tuple[TernaryFormat, ...]) -> dict[str, TernaryFormat]:
    """Table of checked rows. Contradictory rows fail at import, not in use."""
    entropy = math.log2(3)
    for row in rows:
        if row.bits_per_weight < entropy:
            raise AssertionError(f"{row.name}: {row.bits_per_weight} bits cannot hold a trit")
        if row.linear and (row.unit_rows != 1 or row.pads):
            raise AssertionError(f"{row.name}: a linear format has no row unit and no padding")
        if row.block_scale and (row.block_scale != row.unit_cols or "in the block" not in row.scale):
            raise AssertionError(f"{row.name}: an embedded scale belongs to one unit")
        fits = (row.unit_rows * 2, row.unit_cols * 3)
        if math.prod(row.packed_shape(fits)) != 6 * row.unit_bytes:
            raise AssertionError(f"{row.name}: packed_shape disagrees with unit_bytes")
    table = {row.name: row for row in rows}
    if len(table) != len(rows):
        raise AssertionError("two formats share a name")
    return table


FORMATS: dict[str, TernaryFormat] = {row.name: row for row in _ROWS}
_check(_ROWS)


def ternary_format(name: str) -> TernaryFormat:
    """The row of format ``name``; ValueError lists the names."""
    if name not in FORMATS:
        raise ValueError(f"unknown ternary format {name!r}; formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def describe_formats() -> str:
    """The table as Markdown.

    >>> print(describe_formats().splitlines()[0])
    | format | bits/weight | shape | scale | refused | layout |
    """
    lines = ["| format | bits/weight | shape | scale | refused | layout |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {f.name} | {f.bits_per_weight:.4g} | {f.constraint} | {f.scale} | {f.invalid} | {f.used_by} |"
        for f in FORMATS.values()
    ]
    return "\n".join(lines)
