"""Partition of a problem by the tensor-core attention kernel: tile, rows, parts of keys; candidates of autotune.

Pure Python, needs no GPU. ``select_config`` takes every tile of ``_TILES`` that the device can run and orders them
by :func:`_cost`. The model ranks tiles; it does not predict microseconds:

===================  ==================================================================================
work of a block      BLOCK_M times the keys of whole tiles, padding included; or its bytes, if more
blocks per SM        those that run together on it, the fullest SM: that is the time (waves)
1 + 4 / warps        warps that share an SM: the softmax of one overlaps the multiplications of others
1 + 8 / warp's rows  a fragment of K and V read from shared memory serves 16 or 32 rows
1 + 8 / BLOCK_N      two barriers and the addresses of a tile, for BLOCK_N keys; 12 for three barriers
===================  ==================================================================================
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gpu_ops.kernels.attention.problem import q_in_registers, shared_bytes
from gpu_ops.kernels.common.arguments import power_of_two
from gpu_ops.kernels.common.tuning import Space
from gpu_ops.kernels.compiler.cubin import REGISTERS_PER_SM, RESERVED, DeviceLimits

__all__ = [
    "SPACE",
    "DeviceLimits",
    "ForwardConfig",
    "ForwardProblem",
    "ForwardTile",
    "bucket",
    "candidates",
    "configs",
    "label",
    "legal_tiles",
    "select_config",
]

Mask = Literal["kNone", "kCausal", "kLocal"]

# By itemsize. float32 beyond 256: no tile of Q and K fits in 99 KB.
MAX_HEAD_DIM = {2: 512, 4: 256}
# Registers of S, O and Q, by itemsize: with 45 to 95 others, below the limit of 255. 3 x TF32 needs more.
_MAX_ACCUMULATORS = {2: 160, 4: 128}
# If K and V have rows of one size and scores are only scaled, 63 others are enough: see Forward in the kernel. With
# 128 keys they are not always (pages spill, as does sm_120): autotune measures such tiles.
_MAX_ACCUMULATORS_LEAN, _MAX_BLOCK_N_LEAN = 192, 64
_MAX_COLUMNS = {2: 256, 4: 192}  # of O in a block: float32 with 256 spills 100 registers
_OTHER_REGISTERS = 70  # in addition to those, as ptxas counts on sm_80
# Bytes of K and V that an SM gets from L2 while its tensor cores do 16 x 8 x 16: A100 66, H100 50, RTX 4090 120.
_BYTES_PER_PRODUCT = 64
# 3 instructions for a code of K or V, of the 256 that an SM issues in that time.
_CODES_PER_PRODUCT = 85
_SECOND_LAUNCH = 1500  # products: 2 us of an SM of an A100
_MIN_KEYS_PER_SPLIT = 256  # with fewer, the partial results are as large as the keys
_MAX_SPLITS = 128


@dataclass(frozen=True)
class ForwardTile:
    """BLOCK_M rows by BLOCK_N keys on WARPS_M x WARPS_N warps, with one or two buffers for K."""

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int = 1
    one_k: bool = False

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_rows(self) -> int:
        return self.block_m // self.warps_m


# In order of preference where the model sees no difference. All of mma.sync, on every architecture from sm_80 on.
_TILES = (
    # two blocks per SM: head_dim 64 with Q in registers, 128 where an SM has two times 80 KB
    ForwardTile(128, 64, 4),
    # head_dim 32: half the barriers of the first; autotune tries it with 64 as well, where two blocks fit
    ForwardTile(128, 128, 4),
    # head_dim 160; 128 with bias or similar options, which leave no registers for 64 keys
    ForwardTile(128, 32, 4),
    # head_dim 96 and 128 on cards with 99 KB: 48 KB, two blocks per SM. Short sequences
    ForwardTile(64, 64, 4),
    # head_dim 192 and 256 on cards with 163 KB and more: 8 warps in the one block that fits
    ForwardTile(128, 64, 8),
    # head_dim 256: 96 KB, the one block of cards with 99 KB, or two where an SM has 227 KB
    ForwardTile(64, 64, 4, one_k=True),
    ForwardTile(128, 32, 4, one_k=True),  # head_dim 128 on cards with 99 KB: 48 KB, two blocks per SM
    ForwardTile(64, 32, 4),  # float32 up to 128: 64 KB; head_dim 256 with bias or similar on cards with 99 KB
    ForwardTile(64, 16, 4),  # float32 with head_dim 256 on cards with 163 KB; head_dim 512
    ForwardTile(32, 64, 2),  # 17 to 32 rows
    ForwardTile(32, 16, 2),  # the widest heads on cards with 99 KB
    # decode, head_dim 64: the rows of a GQA group once, keys divided among four warps
    ForwardTile(16, 128, 1, 4),
    ForwardTile(16, 64, 1, 4),  # decode, head_dim 128: 48 KB of keys and values, two blocks per SM
    ForwardTile(16, 32, 1, 2),  # decode, head_dim 256 on cards with 99 KB
)


@dataclass(frozen=True)
class ForwardProblem:
    """Properties of a call that decide its tile. ``seqlen_q``, ``seqlen_k``: the longest sequence, or bounds."""

    itemsize: int
    batch: int
    nheads: int
    nheads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    mask: Mask = "kNone"
    window: int = 0  # keys that a row of a local mask sees at most
    block_mask: bool = False
    dropout: bool = False
    varlen: bool = False
    paged: bool = False
    quantized: bool = False  # keys and values of one byte
    lean: bool = True  # plain scores, and no window over sequences of different lengths
    num_splits: int = 0  # 0: choose
    wide_out: bool = False  # float32 results of 16-bit inputs

    @property
    def group(self) -> int:
        return self.nheads // self.nheads_kv


@dataclass(frozen=True)
class ForwardConfig:
    """A launch: the kernel's size macros, and its number of blocks."""

    tile: ForwardTile
    head_dim: int  # HEAD_DIM, as head_dim_v and value_parts
    head_dim_v: int
    value_parts: int
    pack_gqa: bool
    num_splits: int
    grid: tuple[int, int, int]
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps


def head_dims(itemsize: int, head_dim: int, head_dim_v: int) -> tuple[int, int, int]:
    """HEAD_DIM, HEAD_DIM_V and VALUE_PARTS: multiples of 32 columns, and no more of O than registers hold."""
    parts = -(-head_dim_v // _MAX_COLUMNS[itemsize])
    return _round_up(head_dim, 32), _round_up(-(-head_dim_v // parts), 32), parts


def legal_tiles(
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    smem_per_block_optin: int,
    *,
    split: bool = False,
    quantized: bool = False,
    lean: bool = False,
    measured: bool = False,
) -> Iterator[tuple[ForwardTile, int]]:
    """Tiles for ``rows`` rows per head that fit in a block's registers and shared memory, each with the latter.

    ``head_dim``, ``head_dim_v``: the kernel's HEAD_DIM and HEAD_DIM_V. ``measured``: include tiles that leave so few
    registers that only a measurement shows whether they are faster.
    """
    limit = _MAX_ACCUMULATORS[itemsize]

    def blocks(shared: int) -> int:
        return _blocks_by_shared(shared, smem_per_block_optin)

    for tile in _TILES:
        if tile.warps_n > 1 and rows > tile.block_m:
            continue  # each warp looks at a part of the keys only: four times the loads of rows in four warps
        sizes = (itemsize, tile.block_m, tile.block_n, tile.warps_m, tile.warps_n, head_dim, head_dim_v)
        shared = shared_bytes(*sizes, one_k=tile.one_k, split=split, quantized=quantized)
        if tile.one_k and (
            quantized or q_in_registers(*sizes) or blocks(shared) <= blocks(shared_bytes(*sizes, split=split))
        ):
            continue  # a second buffer is free; quantized keys always have one
        few_left = tile.block_n > _MAX_BLOCK_N_LEAN and not (measured and blocks(shared) > 1)
        roomy = lean and itemsize == 2 and head_dim == head_dim_v and not few_left
        accumulators = _accumulators(tile, itemsize, head_dim, head_dim_v)
        if shared <= smem_per_block_optin and accumulators <= (_MAX_ACCUMULATORS_LEAN if roomy else limit):
            yield tile, shared


@functools.lru_cache(maxsize=4096)  # a search takes 0.2 ms
def select_config(problem: ForwardProblem, device: DeviceLimits) -> ForwardConfig:
    """The cheapest way to run a problem, by the model above.

    GQA heads are packed into rows where that pads fewer of them or reads keys less often. Keys are divided where
    blocks are too few for the SMs, into as many parts as can run at once. More parts, in a
    second wave, cost more than an SM left partly idle.

    Raises
    ------
    LookupError
        No tile fits; see ``MAX_HEAD_DIM``.
    """
    ways = list(configs(problem, device))
    if not ways:
        sizes = f"{problem.head_dim}/{problem.head_dim_v}"
        raise LookupError(f"no tile for head_dim {sizes} in {device.smem_per_block_optin} bytes")
    if problem.num_splits > 1:
        max_splits = max(config.num_splits for _, config in ways)
        ways = [(cost, config) for cost, config in ways if config.num_splits == max_splits]
    least = min(cost for cost, _ in ways)
    # 2 %: less than the model can tell apart
    return next(config for cost, config in ways if cost <= 1.02 * least)


def configs(
    p: ForwardProblem, device: DeviceLimits, *, measured: bool = False
) -> Iterator[tuple[float, ForwardConfig]]:
    """Every legal way to run a problem, with its cost. ``measured``: as in :func:`legal_tiles`."""
    head_dim, head_dim_v, parts = head_dims(p.itemsize, p.head_dim, p.head_dim_v)
    packings = (False, True) if p.group > 1 and not (p.block_mask or p.dropout) else (False,)
    # At the same cost: one block reads the keys of a group, not one per head. A batch of long sequences over pages
    # may also hold sequences that add one query.
    if p.seqlen_q * p.group <= max(tile.block_m for tile in _TILES) or (p.varlen and p.paged):
        packings = packings[::-1]
    splittings = (False,) if p.num_splits == 1 else (False, True)
    for pack, split in itertools.product(packings, splittings):
        rows = p.seqlen_q * (p.group if pack else 1)
        heads = (p.nheads_kv if pack else p.nheads) * parts
        lean = p.lean and not (p.block_mask or p.dropout or p.quantized) and not (p.varlen and split)
        for tile, shared in legal_tiles(
            p.itemsize,
            head_dim,
            head_dim_v,
            rows,
            device.smem_per_block_optin,
            split=split or p.wide_out,
            quantized=p.quantized,
            lean=lean,
            measured=measured and not p.paged,
        ):
            tiles_m = max(-(-rows // tile.block_m), 1)
            resident = _resident(tile, p.itemsize, head_dim, head_dim_v, shared, device)
            splits = 1
            if split:
                splits = p.num_splits or device.sms * resident // (tiles_m * heads * p.batch)
                splits = min(splits, _max_splits(p, tile))
                if splits < 2:
                    continue
            grid = (tiles_m * splits, heads, p.batch)
            config = ForwardConfig(tile, head_dim, head_dim_v, parts, pack, splits, grid, shared)
            yield _cost(p, config, resident, device.sms), config


def _cost(p: ForwardProblem, config: ForwardConfig, resident: int, sms: int) -> float:
    """Time of the fullest SM, in products of 16 x 8 x 16 on its tensor cores."""
    tile = config.tile
    keys = _visible_keys(p, tile) / config.num_splits
    keys = _round_up(max(int(keys), 1), tile.block_n)
    columns = config.head_dim + config.head_dim_v
    multiply = tile.block_m * keys * columns / 2048
    load = keys * columns * (1 if p.quantized else p.itemsize) / _BYTES_PER_PRODUCT
    decode = keys * columns / _CODES_PER_PRODUCT if p.quantized else 0
    slow = (1 + 8 / tile.warp_rows) * (1 + (12 if tile.one_k else 8) / tile.block_n)
    blocks = config.grid[0] * config.grid[1] * config.grid[2]
    on_one = -(-blocks // sms)
    together = min(on_one, resident) * tile.warps
    cost = on_one * max(multiply * slow * (1 + 4 / together) + decode, load)
    if config.num_splits > 1:  # partial results are written and read again, in float
        rows = tile.block_m * blocks / sms
        cost += 2 * rows * config.head_dim_v * 4 / _BYTES_PER_PRODUCT + _SECOND_LAUNCH
    return cost


def _visible_keys(p: ForwardProblem, tile: ForwardTile) -> float:
    """Average number of keys that a block processes."""
    if p.mask == "kLocal" and p.window:
        return min(p.seqlen_k, p.window + tile.block_m)
    if p.mask == "kCausal" and p.seqlen_k <= p.seqlen_q:
        return (p.seqlen_k + tile.block_m) / 2
    return p.seqlen_k


def _max_splits(p: ForwardProblem, tile: ForwardTile) -> int:
    tiles = -(-p.seqlen_k // tile.block_n)
    if p.num_splits:
        return min(tiles, _MAX_SPLITS)
    return min(tiles, p.seqlen_k // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)


def _accumulators(tile: ForwardTile, itemsize: int, head_dim: int, head_dim_v: int) -> int:
    """Registers per thread that hold S, O and, if it is in registers, Q."""
    sizes = (tile.block_m, tile.block_n, tile.warps_m, tile.warps_n, head_dim, head_dim_v)
    steps = head_dim * itemsize // 32 if q_in_registers(itemsize, *sizes) else 0
    return tile.warp_rows // 4 * (tile.block_n // tile.warps_n // 8 + head_dim_v // 8 + steps)


def _resident(
    tile: ForwardTile, itemsize: int, head_dim: int, head_dim_v: int, shared: int, device: DeviceLimits
) -> int:
    """Blocks that are resident on an SM at a time."""
    registers = min(255, _accumulators(tile, itemsize, head_dim, head_dim_v) + _OTHER_REGISTERS)
    by_registers = REGISTERS_PER_SM // (32 * tile.warps * _round_up(registers, 8))
    by_shared = _blocks_by_shared(shared, device.smem_per_block_optin)
    return max(1, min(by_registers, by_shared, 16))


def _blocks_by_shared(shared: int, smem_per_block_optin: int) -> int:
    """Blocks that fit in the shared memory of an SM: that of the largest block, plus its reserved part."""
    return (smem_per_block_optin + RESERVED) // (shared + RESERVED)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# Candidates of ``gpu_ops.autotune`` for the tensor-core attention kernel, and buckets of problems.
#
# A candidate is a tile, whether the heads of a group are packed, and how the keys are split: not at all, or
# into as many parts as the model chooses, half as many, or twice as many. Its label omits the number of parts,
# so that it means the same for other lengths.

_MOST = 8  # tiles with or without packing; up to three ways to split the keys of each
_WORTH_MEASURING = 2.0  # times the least cost by the model; slower tiles are not worth a measurement


@functools.lru_cache(maxsize=64)  # a search takes some milliseconds, and each measured call asks again
def candidates(problem: ForwardProblem, device: DeviceLimits) -> Mapping[str, ForwardConfig]:
    """Candidates by label: the model's choice first, then by modelled cost."""
    ranked = sorted(configs(problem, device, measured=True), key=lambda pair: pair[0])
    if problem.num_splits > 1:  # set by the caller
        max_splits = max(config.num_splits for _, config in ranked)
        ranked = [(cost, config) for cost, config in ranked if config.num_splits == max_splits]
    near = [config for cost, config in ranked if cost <= _WORTH_MEASURING * ranked[0][0]]
    near = list(dict.fromkeys([select_config(problem, device), *near]))[:_MOST]
    ways = {label(config): config for config in near}
    for config in near:
        if config.num_splits > 1 and problem.num_splits == 0:
            for parts, suffix in ((config.num_splits // 2, " / 2"), (config.num_splits * 2, " x 2")):
                other = _divided(problem, device, config, parts)
                if other.num_splits == parts > 1:
                    ways[label(config) + suffix] = other
    return ways


def bucket(problem: ForwardProblem) -> str:
    """Key of a problem: lengths and sequences times key heads rounded up to a power of two; other inputs exactly.

    What the model does not know, such as sinks or pages, changes the kernel but not the merits of a tile.
    """
    p = problem
    head_dim, head_dim_v, parts = head_dims(p.itemsize, p.head_dim, p.head_dim_v)
    words = [
        f"{p.itemsize} bytes",
        f"head_dim {head_dim}/{head_dim_v * parts}",
        f"group {p.group}",
        p.mask,
        f"batch * nheads_kv <= {power_of_two(p.batch * p.nheads_kv)}",
        f"seqlen <= {power_of_two(p.seqlen_q)} x {power_of_two(p.seqlen_k)}",
    ]
    words += [f"window <= {power_of_two(p.window)}"] if p.window else []
    words += ["block mask"] if p.block_mask else []
    words += ["varlen"] if p.varlen else []
    words += ["quantized"] if p.quantized else []
    words += [] if p.lean else ["not lean"]
    words += ["float32 out"] if p.wide_out else []
    words += [f"num_splits {p.num_splits}"] if p.num_splits else []
    return ", ".join(words)


def label(config: ForwardConfig) -> str:
    """Label such as ``16 x 64 on 1 x 4 warps, packed, divided``."""
    t = config.tile
    words = [f"{t.block_m} x {t.block_n} on {t.warps_m} x {t.warps_n} warps"]
    words += ["one K"] if t.one_k else []
    words += ["packed"] if config.pack_gqa else []
    words += ["divided"] if config.num_splits > 1 else []
    return ", ".join(words)


SPACE = Space("attention", ("attention/forward_sm80", "attention/combine"), bucket, select_config, candidates)


def _divided(problem: ForwardProblem, device: DeviceLimits, like: ForwardConfig, parts: int) -> ForwardConfig:
    """Configuration with the tile of ``like`` and the keys in ``parts`` parts, or in as many as there can be."""
    for _, config in configs(replace(problem, num_splits=max(parts, 2)), device, measured=True):
        if (config.tile, config.pack_gqa) == (like.tile, like.pack_gqa) and config.num_splits > 1:
            return config
    return like
