"""Ternary matmul on GPUs: which kernel, which tile, how many blocks. Pure Python; needs no GPU.

few tokens    ternary_gemv: every block quantises the tokens for itself, one launch
more          ternary_quantize, then ternary_gemm on tensor cores
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["GemvConfig", "gemv_config", "gemv_configs"]

UNIT = 64  # codes that a row is padded to, in 16 bytes
_STEP = 2048  # codes that a warp of the GEMV reads of a row at a time

# Tokens up to | rows that a warp of the GEMV may take at a time, best first. More rows share the activations that
# they meet; tokens times rows times four sums are the registers, 75 (three blocks of an SM) to 120 (two).
_GEMV = ((1, (4, 2, 1)), (2, (4, 2, 1)), (4, (2, 1)))
_GEMV_WARPS = 8
_GEMV_SHARED = 64 * 1024  # bytes of q; K up to 65536 of one token, 16384 of four


@dataclass(frozen=True)
class GemvConfig:
    """Tokens and rows at a time, and the grid of blocks of 256 threads."""

    tokens: int
    rows: int
    grid: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 32 * _GEMV_WARPS


def gemv_config(tokens: int, n: int, k: int, groups: int, *, sms: int) -> GemvConfig | None:
    """The GEMV for a problem; None where there are too many tokens, or too long ones."""
    padded = -(-k // _STEP) * _STEP
    for limit, choices in _GEMV:
        if tokens > limit:
            continue
        shared = limit * (padded + (4 * padded // UNIT if groups > 1 else 0))
        if shared > _GEMV_SHARED:
            return None
        resident = sms * (3 if limit == 1 else 2)
        for rows in choices:
            blocks = -(-n // (_GEMV_WARPS * rows))
            if 2 * blocks >= 3 * sms or rows == 1:  # half of the SMs have two blocks at least
                waves = -(-blocks // resident)
                return GemvConfig(limit, rows, -(-blocks // waves), shared)
    return None


def gemv_configs() -> Iterator[tuple[int, int]]:
    """(tokens, rows) of every GEMV."""
    for tokens, choices in _GEMV:
        for rows in choices:
            yield tokens, rows
