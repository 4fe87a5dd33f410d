"""Partition of matrix products: tile, stages, parts of K. Pure Python, needs no GPU.

``select_config`` orders every tile of ``_TILES`` that the device can run by :func:`_cost`, a model that
ranks tiles and does not predict microseconds:

=========================  ============================================================================
work of a block            its tile times K, edges included; or the bytes it loads from L2, if they take longer
blocks per SM              those of the fullest SM: that is the time (waves)
1 + 16 / rows + 16 / cols  of a warp: each fragment read from shared memory serves the whole other side
1 + 2 / warps              warps that share an SM: one waits for its tile while others multiply
=========================  ============================================================================

Up to ``FEW`` rows only the weights' bytes matter: ``select_few`` configures ``gemv.cu``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from gpu_ops.kernels.compiler.cubin import REGISTERS_PER_SM, RESERVED, DeviceLimits

__all__ = [
    "FEW",
    "DeviceLimits",
    "FewConfig",
    "MatmulConfig",
    "MatmulProblem",
    "MatmulTile",
    "select_config",
    "select_few",
]

FEW = 16  # rows of x that gemv.cu takes: two tiles of mma's 8 columns

# BLOCK_K in bytes: four steps of a tensor core between two barriers; two where three stages of four would not fit
_ROW_BYTES = (128, 64)
_MIN_STAGES, _MAX_STAGES = 3, 4  # two would wait for memory
_MAX_ACCUMULATORS = {2: 128, 4: 64}  # per thread, by itemsize:  floats are also held split in two
_OTHER_REGISTERS = 80
# Bytes that an SM gets from L2 while its tensor cores do 16 x 8 x 16: A100 66, H100 50, RTX 4090 120.
_BYTES_PER_PRODUCT = 64
_SECOND_LAUNCH = 1500  # products: 2 us of an SM of an A100
_MIN_SPLIT_BYTES = 512  # of K: with fewer the pipeline is never full
_MAX_SPLITS = 16
_FEW_WARPS, _VECTORS_BYTES = 8, 64  # of gemv.cu: bytes of a row that a group of lanes reads at a time


@dataclass(frozen=True)
class MatmulTile:
    """BLOCK_M x BLOCK_N of the result, on WARPS_M x WARPS_N warps."""

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        return self.block_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.block_n // self.warps_n


# In order of preference at equal cost. All use mma.sync, on every architecture from sm_80 on.
_TILES = (
    # 16 bits: 64 x 64 per warp, two blocks per SM in 64 KB (99 KB cards: 48) each
    MatmulTile(128, 128, 2, 2),
    MatmulTile(128, 128, 4, 2),  # float32: 32 x 64 per warp, the most that operands split in two allow
    MatmulTile(64, 128, 2, 2),  # up to 64 rows; results too small for the tiles above to reach every SM
    MatmulTile(64, 64, 2, 2),  # the same, smaller still
    MatmulTile(32, 128, 1, 2),  # 17 to 32 rows: half as much padding
)


@dataclass(frozen=True)
class MatmulProblem:
    """Properties of a call that decide its tile. ``k`` includes all pairs whose products are summed."""

    itemsize: int
    m: int
    n: int
    k: int
    batch: int = 1  # products in one launch
    gated: bool = False  # n columns of gate and n of up
    splittable: bool = False  # parts of K may go to a workspace


@dataclass(frozen=True)
class MatmulConfig:
    """A launch of ``gemm_sm80.cu``."""

    tile: MatmulTile
    block_k: int
    stages: int
    splits: int
    blocks: int  # grid.x
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps


@dataclass(frozen=True)
class FewConfig:
    """A launch of ``gemv.cu``."""

    rows: int
    tokens: int
    unroll: int
    splits: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * _FEW_WARPS


@functools.lru_cache(maxsize=4096)
def select_config(problem: MatmulProblem, device: DeviceLimits) -> MatmulConfig:
    """Cheapest tile by the model above; of tiles within 2 %, which it cannot distinguish, the first."""
    ranked = list(_configs(problem, device))
    least = min(cost for cost, _ in ranked)
    return next(config for cost, config in ranked if cost <= 1.02 * least)


def legal_tiles(
    itemsize: int, gated: bool, smem_per_block_optin: int
) -> Iterator[tuple[MatmulTile, int, int, int]]:
    """Tiles that fit in a block's registers and shared memory, with bytes of BLOCK_K, stages, and shared memory.

    Stages are as many as leave room for the blocks that registers allow.
    """
    for tile in _TILES:
        if _accumulators(tile) > _MAX_ACCUMULATORS[itemsize]:
            continue
        if gated and tile.warp_n < 64:
            continue  # sums are written in rows of 128 bytes: 32 columns of the result
        room = (smem_per_block_optin + RESERVED) // min(_by_registers(tile), 3) - RESERVED
        # the rows of gate and up that alternate in a tile belong to different threads
        for row in _ROW_BYTES if tile.warps > 2 or not gated else _ROW_BYTES[1:]:
            stage = (tile.block_m + tile.block_n) * row
            stages = min(room // stage, _MAX_STAGES)
            if stages >= _MIN_STAGES:
                break
        stages = max(stages, _MIN_STAGES)
        if stages * stage <= smem_per_block_optin:
            yield tile, row, stages, stages * stage


def _configs(p: MatmulProblem, device: DeviceLimits) -> Iterator[tuple[float, MatmulConfig]]:
    tiles = legal_tiles(p.itemsize, p.gated, device.smem_per_block_optin)
    for (tile, row, stages, shared), split in itertools.product(tiles, (False, True)):
        block_k = row // p.itemsize
        columns = tile.block_n // 2 if p.gated else tile.block_n
        blocks = -(-p.m // tile.block_m) * -(-p.n // columns)
        resident = _resident(tile, shared, device)
        splits = 1
        if split:
            splits = min(
                device.sms * resident // (blocks * p.batch), p.k * p.itemsize // _MIN_SPLIT_BYTES, _MAX_SPLITS
            )
            if splits < 2 or not p.splittable:
                continue
        config = MatmulConfig(tile, block_k, stages, splits, blocks, shared)
        yield _cost(p, config, resident, device.sms), config


def _cost(p: MatmulProblem, config: MatmulConfig, resident: int, sms: int) -> float:
    """Time of the fullest SM, in products of 16 x 8 x 16 on its tensor cores."""
    tile = config.tile
    k = -(-p.k // (config.splits * config.block_k)) * config.block_k
    multiply = tile.block_m * tile.block_n * k / 2048 * (3 if p.itemsize == 4 else 1) * p.itemsize / 2
    load = (tile.block_m + tile.block_n) * k * p.itemsize / _BYTES_PER_PRODUCT
    slow = 1 + 16 / tile.warp_m + 16 / tile.warp_n
    on_one = -(-config.blocks * config.splits * p.batch // sms)
    together = min(on_one, resident) * tile.warps
    cost = on_one * max(multiply * slow * (1 + 2 / together), load)
    if config.splits > 1:  # parts are written and read again, in float
        cost += 2 * config.splits * p.m * p.n * 4 / sms / _BYTES_PER_PRODUCT + _SECOND_LAUNCH
    return cost


def _accumulators(tile: MatmulTile) -> int:
    return tile.warp_m * tile.warp_n // 32


def _by_registers(tile: MatmulTile) -> int:
    registers = _accumulators(tile) + _OTHER_REGISTERS
    return max(1, REGISTERS_PER_SM // (32 * tile.warps * registers))


def _resident(tile: MatmulTile, shared: int, device: DeviceLimits) -> int:
    """Blocks that are resident on an SM at a time."""
    by_shared = (device.smem_per_block_optin + RESERVED) // (shared + RESERVED)
    return max(1, min(_by_registers(tile), by_shared))


def select_few(
    m: int, n: int, k: int, itemsize: int, gated: bool, device: DeviceLimits, *, least_rows: int = 8
) -> FewConfig:
    """Configuration for up to ``FEW`` rows. ``least_rows``: that a block takes; they change no parts of K.

    A block reads all of x, from L1 and L2, for ROWS rows of each matrix: x may take half as much as the weights. It
    has 256 threads with up to 128 bytes in flight each; with fewer than four such blocks per SM some SMs would be
    done long before others, and k is divided. A gated result cannot be.
    """
    matrices = 2 if gated else 1
    rows = 8
    while rows * matrices < 2 * m and rows < 32:
        rows *= 2
    groups = rows // 8 * matrices
    # vectors in flight per lane; floats are also split in two
    unroll = (8 if itemsize == 2 else 4) // groups
    blocks = -(-n // rows)
    elements = _FEW_WARPS * unroll * _VECTORS_BYTES // itemsize
    splits = 1 if gated else max(1, min(4 * device.sms // blocks, -(-k // elements), _MAX_SPLITS))
    rows = max(rows, least_rows)
    return FewConfig(rows, 8 if m <= 8 else 16, unroll, splits, -(-n // rows))
