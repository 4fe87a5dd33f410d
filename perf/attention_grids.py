"""Attention's problem shapes with their FLOPs and bytes, and the grids of ``--grid``.

=========  ==========================================================================================
``field``  the grid of attention papers: 16384 tokens, heads * head_dim = 2048, causal and not, forward and backward
``gqa``    one long sequence, 64 query heads on 8 key heads of 128, forward and backward
``decode`` one new query over a cache, by batch, length and grouping
=========  ==========================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

TEXT = re.compile(r"B(\d+) S(?:q(\d+) Sk(\d+)|(\d+)) H(\d+)(?:/(\d+))? D(\d+)$")


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_kv: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"H{self.nheads}" if self.nheads == self.nheads_kv else f"H{self.nheads}/{self.nheads_kv}"
        square = self.seqlen_q == self.seqlen_k
        length = f"S{self.seqlen_q}" if square else f"Sq{self.seqlen_q} Sk{self.seqlen_k}"
        return f"B{self.batch} {length} {heads} D{self.head_dim}"

    @classmethod
    def parse(cls, text: str) -> Shape | None:
        """The inverse of ``str``; None for other text."""
        if not (match := TEXT.match(text)):
            return None
        batch, seqlen_q, seqlen_k, seqlen, nheads, nheads_kv, head_dim = match.groups()
        lengths = int(seqlen_q or seqlen), int(seqlen_k or seqlen)
        return cls(int(batch), *lengths, int(nheads), int(nheads_kv or nheads), int(head_dim))

    @property
    def small(self) -> Shape:
        """One group of heads, at most 160 positions (more than one tile, but not a multiple of the tile)."""
        group = self.nheads // self.nheads_kv
        return Shape(1, min(self.seqlen_q, 160), min(self.seqlen_k, 160), group, 1, self.head_dim)

    def pairs(self, *, causal: bool) -> int:
        """Visible (query, key) pairs: query i sees keys up to i + seqlen_k - seqlen_q when causal."""
        if not causal:
            return self.seqlen_q * self.seqlen_k
        visible = np.arange(self.seqlen_q, dtype=np.int64) + (self.seqlen_k - self.seqlen_q + 1)
        return int(np.clip(visible, 0, self.seqlen_k).sum())

    def flops(self, *, causal: bool, backward: bool = False) -> float:
        """FLOPs by the field's convention: 4 per visible pair and channel (two matmuls).

        Backward has five matmuls, so 2.5 times that: recomputing the scores counts, softmax does not."""
        forward = 4.0 * self.batch * self.nheads * self.pairs(causal=causal) * self.head_dim
        return 2.5 * forward if backward else forward

    def nbytes(self, itemsize: int, *, backward: bool = False) -> float:
        """Bytes moved: reads q, k, v and writes out; backward also reads dout, out, lse and writes dq, dk, dv."""
        q = self.batch * self.seqlen_q * self.nheads * self.head_dim * itemsize
        kv = 2 * self.batch * self.seqlen_k * self.nheads_kv * self.head_dim * itemsize
        return 4 * q + 2 * kv + 4 * self.batch * self.nheads * self.seqlen_q if backward else 2 * q + kv


@dataclass(frozen=True)
class GridCell:
    """One cell of a grid."""

    kind: Literal["forward", "backward", "decode"]
    shape: Shape
    dtype: str
    causal: bool = False


DTYPES = ("bfloat16", "float16", "float32")

TOKENS, WIDTH = 16384, 2048  # of the field's grid: batch * seqlen, nheads * head_dim
FIELD_HEAD_DIMS = (64, 128, 256)
FIELD_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
GQA_LENGTHS = (2048, 4096, 8192, 16384, 32768)
DECODE_BATCHES = (1, 8, 32, 128)
DECODE_LENGTHS = (1024, 4096, 16384, 65536)
DECODE_HEADS = ((32, 8), (64, 8), (32, 1))

LONGEST_FLOAT32 = 4096
"""float32 runs only part of each grid: it takes several times as long, and is rarely used to train or serve."""
LARGEST_FLOAT32_BATCH = 8


def field(dtypes: tuple[str, ...], seqlens: tuple[int, ...]) -> Iterator[GridCell]:
    for dtype in dtypes:
        for head_dim in FIELD_HEAD_DIMS:
            for seqlen in seqlens or _lengths(FIELD_LENGTHS, dtype):
                nheads = WIDTH // head_dim
                shape = Shape(max(1, TOKENS // seqlen), seqlen, seqlen, nheads, nheads, head_dim)
                yield from _training(shape, dtype)


def _training(shape: Shape, dtype: str) -> Iterator[GridCell]:
    for direction in ("forward", "backward"):
        yield from (GridCell(direction, shape, dtype, causal) for causal in (False, True))


def gqa(dtypes: tuple[str, ...], seqlens: tuple[int, ...]) -> Iterator[GridCell]:
    for dtype in dtypes:
        for seqlen in seqlens or _lengths(GQA_LENGTHS, dtype):
            shape = Shape(1, seqlen, seqlen, 64, 8, 128)
            yield from _training(shape, dtype)


def decode(dtypes: tuple[str, ...], seqlens: tuple[int, ...]) -> Iterator[GridCell]:
    for dtype in dtypes:
        for nheads, nheads_kv in DECODE_HEADS:
            for batch in DECODE_BATCHES:
                if dtype == "float32" and batch > LARGEST_FLOAT32_BATCH:
                    continue
                for length in seqlens or _lengths(DECODE_LENGTHS, dtype):
                    yield GridCell("decode", Shape(batch, 1, length, nheads, nheads_kv, 128), dtype)


def _lengths(seqlens: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    return tuple(n for n in seqlens if dtype != "float32" or n <= LONGEST_FLOAT32)


GRIDS = {"field": field, "gqa": gqa, "decode": decode}
