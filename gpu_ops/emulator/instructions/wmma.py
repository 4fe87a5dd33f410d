"""Products of tiles whose fragments have no documented layout (``wmma``).

The layout here is that of ``mma.sync`` (:mod:`.matrix`), extended to 16 and 32 rows and columns; element i of an f16
and an f32 accumulator are at the same place. Fragments of f16 have 8 registers even if fewer hold the tile: those
are then repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from gpu_ops.emulator.instructions import unknown
from gpu_ops.emulator.instructions.matrix import (
    ACCUMULATORS,
    DECODE,
    ELEMENT_BITS,
    Mma,
    accumulator,
    gather,
    multiplies,
    scatter,
)
from gpu_ops.emulator.syntax import Array

_TILES = ("m16n16k16", "m8n32k16", "m32n8k16")
# Shapes by the type of A and B, and the types of C and D.
_SHAPES = {
    "f16": (_TILES, ("f16", "f32")),
    "bf16": (_TILES, ("f32",)),
    "s8": (_TILES, ("s32",)),
    "u8": (_TILES, ("s32",)),
    "tf32": (("m16n16k8",), ("f32",)),
    "f64": (("m8n8k4",), ("f64",)),
    "s4": (("m8n8k32",), ("s32",)),
    "u4": (("m8n8k32",), ("s32",)),
    "b1": (("m8n8k128",), ("s32",)),
}
_LANE = np.arange(32)


@dataclass(frozen=True)
class Fragment:
    """Layout of a tile of ``rows`` x ``columns`` elements in a warp; B is transposed, so its rows are those of n.

    ``word`` is the bytes of a register. Of ``registers``, the first ``count`` hold the tile.
    """

    operand: str
    rows: int
    columns: int
    bits: int
    word: int
    registers: int
    pairs: bool = False  # two registers per pair of columns: accumulators of 32 and 64 bits

    @property
    def per_word(self) -> int:
        return 8 * self.word // self.bits

    @property
    def count(self) -> int:
        return self.rows * self.columns // (32 * self.per_word)

    def place(self, register: int) -> tuple[Array, Array]:
        """Row and first column of each lane's part of a register."""
        groups = self.rows // 8
        row, t = _LANE // 4, _LANE % 4
        if self.pairs:
            pair = register // 2
            return 8 * (pair % groups) + row, 8 * (pair // groups) + 2 * t + register % 2
        return 8 * (register % groups) + row, self.per_word * (4 * (register // groups) + t)

    def is_along(self, layout: str) -> bool:
        """Whether the elements of a register are neighbours in memory."""
        return layout == ("col" if self.operand == "b" else "row")

    def leading(self, layout: str) -> int:
        """Default distance of rows (columns) in memory, in elements."""
        return self.columns if self.is_along(layout) else self.rows


@cache
def fragment(operand: str, shape: str, ptx_type: str) -> Fragment:
    """Fragment of operand a, b, c or d with elements of a type."""
    sizes = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", shape)
    known = any(
        shape in shapes and ptx_type in ((name,) if operand in "ab" else results)
        for name, (shapes, results) in _SHAPES.items()
    )
    if sizes is None or not known:
        raise unknown("wmma", (operand, shape, ptx_type))
    m, n, k = (int(size) for size in sizes.groups())
    inputs = operand in "ab"
    bits = ELEMENT_BITS[ptx_type] if inputs else 8 * np.dtype(ACCUMULATORS[ptx_type]).itemsize
    rows, columns, word = n if operand == "b" else m, k if inputs else n, max(4, bits // 8)
    registers = 8 if inputs and ptx_type == "f16" else rows * columns * bits // (8 * word * 32)
    return Fragment(operand, rows, columns, bits, word, registers, not inputs and bits >= 32)


_NAME = re.compile(
    r"mma\.(?:(?P<combine>and|xor)\.popc\.)?sync\.aligned\.(?:row|col)\.(?:row|col)\.(?P<shape>\w+)"
    r"\.(?P<d>\w+)(?:\.(?P<a>\w+)\.(?P<b>\w+))?\.(?P<c>f16|f32|f64|s32)(?P<satfinite>\.satfinite)?(?:\.r[nzmp])?"
)


@cache
def mma(modifiers: tuple[str, ...]) -> Mma:
    """Product with these modifiers, such as mma.sync.aligned.row.col.m16n16k16.f32.f32."""
    match = _NAME.fullmatch(".".join(modifiers))
    if match is None:
        raise unknown("wmma", modifiers)
    a_type, b_type = match["a"] or "f16", match["b"] or "f16"
    shape, combine = match["shape"], match["combine"]
    shapes, results = _SHAPES.get(a_type, ((), ()))
    exists = a_type == b_type and shape in shapes and {match["c"], match["d"]} <= set(results)
    if not exists or bool(combine) != (a_type == "b1"):
        raise unknown("wmma", modifiers)
    a, b = fragment("a", shape, a_type), fragment("b", shape, b_type)
    c, d = fragment("c", shape, match["c"]), fragment("d", shape, match["d"])
    saturate, bits = bool(match["satfinite"]), (np.uint64 if d.word == 8 else np.uint32)
    c_dtype, d_dtype = ACCUMULATORS[match["c"]], ACCUMULATORS[match["d"]]
    peak = {"u8": "s8", "u4": "s4"}.get(a_type, a_type)
    ways = multiplies(peak, combine)

    def run(
        left: Sequence[Array], right: Sequence[Array], addend: Sequence[Array], truncating: bool = False
    ) -> list[Array]:
        multiply = ways[truncating]
        x = DECODE[a_type](gather(left[: a.count], a.rows))
        y = DECODE[b_type](gather(right[: b.count], b.rows)).swapaxes(1, 2)
        z = accumulator(addend, c.rows, c_dtype)
        if c_dtype is d_dtype:
            return list(scatter(multiply(x, y, z, saturate), bits))
        wide_addend = z.astype(np.float32 if truncating else np.float64)  # one is f16, the other f32
        return list(scatter(multiply(x, y, wide_addend, saturate).astype(d_dtype), bits))

    word = "b64" if a.word == 8 else "b32"
    return Mma(
        (a.registers, word),
        (b.registers, word),
        (c.registers, "b64" if c.word == 8 else "b32"),
        (d.registers, "b64" if d.word == 8 else "b32"),
        a.rows * b.rows * a.columns,
        peak,
        run,
    )
