"""Tiles of the tensor-core attention backward kernel. Pure Python, needs no GPU.

A block owns ``rows`` (keys, or queries in the pass that forms dq in a fixed order) and walks tiles of ``columns``.
Tiles are in order of preference. :func:`select_tile` takes the first that fits and lets an SM run at
least ``_ENOUGH_WARPS`` warps: with fewer, the tensor cores idle while warps compute exponentials.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_ops.kernels.compiler.cubin import REGISTERS_PER_SM, RESERVED

__all__ = [
    "MAX_HEAD_DIM",
    "PAD",
    "BackwardTile",
    "bias_shared_bytes",
    "head_dims",
    "head_parts",
    "legal_tiles",
    "select_bias_tile",
    "select_tile",
    "shared_bytes",
]

MAX_HEAD_DIM = 256
PAD = 64  # kPad of backward_shape.cuh: sequences of the padded arrays are whole PAD rows
_ENOUGH_WARPS = 8
# Registers of dk, dv, S and dP, by itemsize: with 60 to 90 others, below the limit of 255.
# 3 x TF32 needs more.
_MAX_ACCUMULATORS = {2: 160, 4: 144}
# 63 others are enough with one option at most, or none if a warp has P and dS of all columns.
_MAX_ACCUMULATORS_LEAN = 192
_OTHER_REGISTERS = 50
_MIN_TILES_TO_DIVIDE = 32  # 2 us each on an A100: below that, two more launches cost what they save


@dataclass(frozen=True)
class BackwardTile:
    """ROWS of a block on WARPS_R warps, shared by WARPS_D; COLUMNS of a tile, STRIP at a time."""

    rows: int
    columns: int
    warps_r: int
    warps_d: int
    strip: int
    stages: int = 1

    @property
    def warps(self) -> int:
        return self.warps_r * self.warps_d

    @property
    def threads(self) -> int:
        return 32 * self.warps


# All of mma.sync, on every architecture from sm_80 on. 128 keys per block: half the atomics of 64.
_TILES = {
    2: (
        # head_dim 64, where an SM has two times 66 KB. 32 keys per warp read q half as often
        BackwardTile(128, 64, 4, 1, 32),
        # head_dim 96 and 128 on cards with 163 KB and more. The same, for 16 KB of P more
        BackwardTile(128, 64, 4, 2, 32),
        # head_dim 64 and 96 on cards with 99 KB; 128 with bias and the like on the others
        BackwardTile(128, 64, 8, 1, 32),
        BackwardTile(128, 32, 8, 1, 32),  # head_dim 128 on cards with 99 KB
        BackwardTile(64, 64, 2, 4, 16),  # head_dim 192 and 256 on cards with 163 KB and more
        BackwardTile(64, 64, 4, 2, 32),  # head_dim 224 there; 160 everywhere
        BackwardTile(64, 32, 4, 2, 16),  # head_dim 192 on cards with 99 KB
        BackwardTile(32, 32, 2, 4, 8),  # head_dim 256 on cards with 99 KB
        # head_dim 224 there, whose 14 units of columns four warps cannot divide
        BackwardTile(32, 32, 2, 2, 16),
    ),
    4: (
        BackwardTile(64, 32, 4, 1, 16),  # head_dim 64
        BackwardTile(64, 32, 4, 2, 16),  # head_dim 128 on cards with 163 KB and more
        BackwardTile(32, 32, 2, 4, 8),  # head_dim 128 on cards with 99 KB; 256 on the others
        BackwardTile(32, 16, 2, 2, 8),  # head_dim 192 and 224 on cards with 99 KB
        BackwardTile(16, 16, 1, 2, 8),  # head_dim 256 there
    ),
}
_BIAS_TILES = {
    2: (BackwardTile(64, 64, 4, 1, 32), BackwardTile(32, 32, 2, 1, 32)),
    4: (BackwardTile(64, 32, 4, 1, 16), BackwardTile(32, 32, 2, 1, 16), BackwardTile(16, 16, 1, 1, 16)),
}


def head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """HEAD_DIM and HEAD_DIM_V: whole 32 columns."""
    return -(-head_dim // 32) * 32, -(-head_dim_v // 32) * 32


def shared_bytes(
    tile: BackwardTile, itemsize: int, head_dim: int, head_dim_v: int, *, keys: bool, wide_lse: bool = False
) -> int:
    """Dynamic shared memory of a block; head_dim and head_dim_v are HEAD_DIM and HEAD_DIM_V. keys: it owns keys."""
    operands = (tile.rows + tile.stages * tile.columns) * (head_dim + head_dim_v)
    weights = tile.rows * tile.columns * (2 if keys and tile.warps_d > 1 else 1)
    statistics = 16 if wide_lse else 8
    return itemsize * (operands + weights) + (statistics * tile.stages * tile.columns if keys else 0)


@functools.cache
def select_tile(
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    smem_per_block_optin: int,
    *,
    options: int = 0,
    wide_lse: bool = False,
    arch: str = "",
) -> BackwardTile:
    """The tile for the kernel's HEAD_DIM and HEAD_DIM_V.

    ``options``: number of ALiBi, bias, block mask and packed sequences that the call uses. Each takes
    registers. ``arch``: such as sm_90; ptxas needs more registers for some than for others.

    Raises
    ------
    LookupError
        No tile fits.
    """
    sizes = itemsize, head_dim, head_dim_v, smem_per_block_optin
    tiles = list(legal_tiles(*sizes, options=options, wide_lse=wide_lse))
    if not tiles:
        raise LookupError(f"no tile for head_dim {head_dim}/{head_dim_v} in {smem_per_block_optin} bytes")
    busiest = max(tiles, key=lambda pair: pair[1])[0]
    tile = next((tile for tile, warps in tiles if warps >= _ENOUGH_WARPS), busiest)
    many = tile.warps_d == 1 and _accumulators(tile, head_dim, head_dim_v) > _MAX_ACCUMULATORS[itemsize]
    # ptxas 12.9 spills 196 bytes of them there (head_dim 64, causal)
    return replace(tile, strip=tile.strip // 2) if many and arch.startswith("sm_10") else tile


def head_parts(blocks: int, group: int, tiles: int, sms: int, *, causal: bool) -> int:
    """Number of parts for the ``group`` query heads of a key head, so that ``blocks`` keep ``sms`` busy.

    A block processes ``tiles`` per head. Parts are written in float32 and read again: 8 % of the work for each.
    Causal blocks have half the work on average, and the longest start first.
    """

    def time(parts: int) -> float:
        busy = -(-blocks * parts // sms) / parts
        if causal:
            busy = max(1 / parts, 0.5 * blocks / sms + 0.1 / parts)
        return busy * (1 + 0.08 * parts * (parts > 1))

    if tiles * group < _MIN_TILES_TO_DIVIDE:
        return 1
    return min((parts for parts in range(1, group + 1) if group % parts == 0), key=time)


def legal_tiles(
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    smem_per_block_optin: int,
    *,
    options: int = 0,
    wide_lse: bool = False,
) -> Iterator[tuple[BackwardTile, int]]:
    """Tiles that fit in a block's registers and shared memory, each with the number of warps that an SM then runs."""
    unit = 32 // itemsize
    for tile in _TILES[itemsize]:
        lean = itemsize == 2 and options <= (1 if tile.warps_d > 1 else 0)
        limit = _MAX_ACCUMULATORS_LEAN if lean else _MAX_ACCUMULATORS[itemsize]
        shared = shared_bytes(tile, itemsize, head_dim, head_dim_v, keys=True, wide_lse=wide_lse)
        registers = _accumulators(tile, head_dim, head_dim_v)
        divided = head_dim % (unit * tile.warps_d) == head_dim_v % (unit * tile.warps_d) == 0
        if shared > smem_per_block_optin or registers > limit or not divided:
            continue
        if not _divides_dq(tile, head_dim // unit):
            continue
        by_registers = REGISTERS_PER_SM // (tile.threads * min(255, registers + _OTHER_REGISTERS))
        blocks = min(by_registers, (smem_per_block_optin + RESERVED) // (shared + RESERVED))
        twice = replace(tile, stages=2)
        shared = shared_bytes(twice, itemsize, head_dim, head_dim_v, keys=True, wide_lse=wide_lse)
        if blocks * (shared + RESERVED) <= smem_per_block_optin + RESERVED:
            tile = twice
        yield tile, tile.warps * blocks


def select_bias_tile(
    itemsize: int, head_dim: int, head_dim_v: int, smem_per_block_optin: int
) -> BackwardTile:
    """Tile of the kernel for the gradient of bias, whose rows are queries."""
    for tile in _BIAS_TILES[itemsize]:
        if bias_shared_bytes(tile, itemsize, head_dim, head_dim_v) <= smem_per_block_optin:
            return tile
    raise LookupError(f"no tile of bias for head_dim {head_dim}/{head_dim_v} in {smem_per_block_optin} bytes")


def bias_shared_bytes(tile: BackwardTile, itemsize: int, head_dim: int, head_dim_v: int) -> int:
    """Dynamic shared memory of the bias kernel: operands, then the sums in float."""
    operands = itemsize * (tile.rows + tile.columns) * (head_dim + head_dim_v)
    return max(operands, 4 * tile.rows * (tile.columns + 1))


def _divides_dq(tile: BackwardTile, units: int) -> bool:
    """Whether the warps can divide a tile of dq_sum, as ``TileDq`` of the kernel does."""
    slabs, powers = tile.columns // 16, (1, 2, 4, 8)
    return any(
        units % n == 0 and slabs % (tile.warps // n) == 0 for n in powers if n <= tile.warps and n <= units
    )


def _accumulators(tile: BackwardTile, head_dim: int, head_dim_v: int) -> int:
    """Registers per thread that hold dk, dv, S and dP."""
    slabs = tile.rows // tile.warps_r // 16
    return slabs * ((head_dim + head_dim_v) // tile.warps_d + 2 * tile.strip) // 2
