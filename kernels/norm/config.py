"""Assignment of rows to the threads of a GPU in RMSNorm and LayerNorm. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_ops.kernels.compiler.cubin import RESERVED
from gpu_ops.kernels.program import MAX_GRID

__all__ = ["BackwardConfig", "RowConfig", "select_backward", "select_forward"]

_WARP = 32
_BLOCK = 128  # threads of a block that has several rows
_SCRATCH = 512  # limit of static shared memory in bytes: reduce.cuh

# Vectors of a row up to | threads per row, None: as many warps as it takes | vectors per thread, in registers.
# A vector is 16 bytes if cols allow. Two per thread are two loads in flight; a thread of a short row has two
# rather than one so that a warp has more rows, and a sum fewer shuffles.
_FORWARD = (
    (8, 4, 2),  # head_dim 64 in 16 bits: 8 rows per warp
    (16, 8, 2),  # head_dim 128, the most common QK norm
    (32, 16, 2),
    (64, 32, 2),  # 512 columns: the longest row with its weights in registers
    (128, 32, 4),  # 1024 columns: a whole warp, and still no barrier
    (256, None, 2),  # more bytes per warp would leave too few blocks: 128 threads
    # 8192 columns: at most 256 threads, so that 5 blocks (48 registers) hide each other's barriers
    (1024, None, 4),
    # longer rows: shared memory, then that of a team of blocks
)

# By sums per column, 1 in RMSNorm, 2 in LayerNorm; longer rows: a team. 4096 columns: 4 blocks of 288 threads.
# Then x and dy in 32 or 24 registers: threads as below, up to 576, with which two blocks fit.
_BACKWARD = {
    1: ((8, 4, 2), (16, 8, 2), (32, 16, 2), (64, 32, 2), (512, None, 2), (2304, None, 4)),
    # A vector per thread: the sums of two would leave a 2048-thread SM room for half of its warps.
    2: ((8, 8, 1), (16, 16, 1), (32, 32, 1), (256, None, 1), (512, None, 2), (1728, None, 3)),
}

_BACKWARD_WARPS = 36  # warps of the backward pass that fit on an SM with 56 registers

# Blocks of a team: three on an SM, from three teams, hide each other's waits. In the backward pass three vectors per
# thread, or 8 single elements, leave registers for the exchange.
_TEAM_BLOCKS, _TEAM_THREADS, _TEAM_VECS, _TEAM_SINGLES = 3, 384, 3, 8

# Roundings that a sum in dweight may suffer: 60 * 2^-24 of sum |dy n| is 3.6e-6.
_MAX_ROUNDINGS = 56


@dataclass(frozen=True)
class RowConfig:
    """A row belongs to a part of a block, to a block, or to a team of blocks that must run at the same time."""

    vec: int  # adjacent elements that a thread owns
    access: int  # elements per memory access: vec, or 1 where an array is not aligned
    vecs: int  # vectors per thread in registers; 0: they are in shared memory
    shared_vecs: int  # vectors per thread that shared memory has room for; a team reads the rest again
    threads_per_row: int  # of a block
    rows_per_block: int
    team: int  # blocks; 0: a row has no more than one
    block_cols: int  # columns of a team's block
    grid: int
    shared_bytes: int  # dynamic

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block

    def on_chip(self, cols: int) -> int:
        """Elements of a row that are read from global memory once."""
        block = (self.vecs + self.shared_vecs) * self.threads_per_row * self.vec
        blocks, last = divmod(cols, self.block_cols)
        return blocks * min(self.block_cols, block) + min(last, block)


@dataclass(frozen=True)
class BackwardConfig:
    """A row belongs to a part of a block, to a block, or to a team of blocks that must run at the same time."""

    vec: int
    access: int
    vecs: int  # vectors per thread in registers; 0: a row is read twice
    threads_per_row: int  # of a block
    rows_per_block: int
    team: int  # blocks; 0: a row has no more than one
    block_cols: int  # columns of a team's block
    grid: int
    parts: int  # of the rows, each with its sums of dweight
    shared_bytes: int  # dynamic

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block


def select_forward(
    rows: int, cols: int, itemsize: int, *, alignment: int, sms: int, smem_per_block_optin: int
) -> RowConfig:
    """Configuration of the forward kernel for a problem.

    ``alignment``: bytes that divide every address and row stride. It decides how vectors are fetched, not by whom,
    so that the same numbers give the same bits at any address.
    """
    vec, access, n_vecs = _vectors(cols, itemsize, alignment)
    for limit, threads_per_row, vecs in _FORWARD:
        if n_vecs <= limit:
            threads = threads_per_row or _round_up(-(-n_vecs // vecs), _WARP)
            per_block = _BLOCK // threads if threads_per_row else 1
            # If the weights stay in registers a block processes many rows, otherwise one.
            resident = sms * 9 if per_block > 1 and vecs == 2 else MAX_GRID[0]
            grid = min(-(-rows // per_block), resident)
            return RowConfig(vec, access, vecs, 0, threads, per_block, 0, cols, grid, 0)

    grid, slot = min(rows, MAX_GRID[0]), max(4, vec * itemsize)
    shared = n_vecs * slot
    if (blocks := min(3, _fit(shared, smem_per_block_optin))) > 1:
        # As many threads as 56 registers each allow, in as many blocks as their rows fit, at most three.
        threads = {2: 576, 3: 384}[blocks]
        return RowConfig(vec, access, 0, -(-n_vecs // threads), threads, 1, 0, cols, grid, shared)

    max_vecs = _team_room(smem_per_block_optin) // (_TEAM_THREADS * slot)  # vectors per thread
    teams, team, block_vecs = _teams(rows, n_vecs, max_vecs * _TEAM_THREADS, sms)
    shared_vecs = min(max_vecs, -(-block_vecs // _TEAM_THREADS))
    return RowConfig(
        *(vec, access, 0, shared_vecs, _TEAM_THREADS, 1, team, block_vecs * vec, teams * team),
        shared_bytes=min(block_vecs, shared_vecs * _TEAM_THREADS) * slot,
    )


def select_backward(
    rows: int, cols: int, itemsize: int, *, sums: int, alignment: int, sms: int, smem_per_block_optin: int
) -> BackwardConfig:
    """Configuration of the backward kernel. ``sums``: 1 (dweight) or 2 (dbias too)."""
    vec, access, n_vecs = _vectors(cols, itemsize, alignment)
    for limit, threads_per_row, vecs in _BACKWARD[sums]:
        if n_vecs > limit:
            continue
        threads = threads_per_row or _round_up(-(-n_vecs // vecs), _WARP)
        per_block = _BLOCK // threads if threads_per_row else 1
        shared = sums * _sums_bytes(n_vecs, vec, vecs, threads, per_block)
        by_registers = _BACKWARD_WARPS * _WARP // (threads * per_block)
        blocks = min(by_registers, _fit(shared, smem_per_block_optin))
        if blocks < 2:  # of 1024 threads: half of some SMs' capacity, and none reads while it writes
            break
        if not threads_per_row:  # no more blocks fit, but more threads may: 288, 384, 576, not 256, 320, 512
            threads = max(threads, _BACKWARD_WARPS // blocks * _WARP)
        # Number of blocks that run at a time, or whole waves of them until the sums are short enough.
        tiles = -(-rows // per_block)
        parts = _parts(tiles, sms * blocks, _MAX_ROUNDINGS - per_block)
        return BackwardConfig(vec, access, vecs, threads, per_block, 0, cols, parts, parts, shared)

    vecs = _TEAM_SINGLES if vec == 1 else _TEAM_VECS
    column = 4 * vec * sums  # bytes
    max_vecs = min(vecs * _TEAM_THREADS, _team_room(smem_per_block_optin) // column // _WARP * _WARP)
    teams, team, block_vecs = _teams(rows, n_vecs, max_vecs, sms)
    if block_vecs > max_vecs:
        vecs = 0
    shared = column * block_vecs if vecs else 0
    parts = _parts(rows, teams, _MAX_ROUNDINGS - 1)
    return BackwardConfig(
        vec, access, vecs, _TEAM_THREADS, 1, team, block_vecs * vec, teams * team, parts, shared
    )


def _teams(rows: int, n_vecs: int, most: int, sms: int) -> tuple[int, int, int]:
    """Number of teams, blocks per team, and vectors of a row per block.

    As few blocks per row as can keep it, ``most`` vectors each, or more so that all SMs have work. A row that
    is longer than the card can hold gets all blocks.
    """
    resident = sms * _TEAM_BLOCKS
    teams = min(rows, resident // min(resident, -(-n_vecs // most)))
    block_vecs = max(_TEAM_THREADS, _round_up(-(-n_vecs // (resident // teams)), _WARP))
    return teams, -(-n_vecs // block_vecs), block_vecs


def _team_room(smem_per_block_optin: int) -> int:
    """Bytes of dynamic shared memory for a team's block."""
    return (smem_per_block_optin + RESERVED) // _TEAM_BLOCKS // 128 * 128 - RESERVED - _SCRATCH


def _parts(tiles: int, at_a_time: int, longest: int) -> int:
    """Number of parts of the rows: whole waves, enough that no part has more than ``longest`` tiles."""
    return min(tiles, -(-tiles // (longest * at_a_time)) * at_a_time)


def _vectors(cols: int, itemsize: int, alignment: int) -> tuple[int, int, int]:
    """Elements per vector, elements per access, vectors per row."""
    vec = 16 // itemsize if cols * itemsize % 16 == 0 else 1
    return vec, vec if alignment % (vec * itemsize) == 0 else 1, cols // vec


def _fit(shared: int, smem_per_block_optin: int) -> int:
    """Blocks that an SM's shared memory has room for: it is allocated in units of 128 bytes."""
    return (smem_per_block_optin + RESERVED) // _round_up(shared + _SCRATCH + RESERVED, 128)


def _sums_bytes(n_vecs: int, vec: int, vecs: int, threads: int, rows_per_block: int) -> int:
    """Bytes of the sums of dweight of a block's columns, in the layout of ``backward.cu``."""
    wave = 128 // min(16, 4 * vec)
    stride = threads * rows_per_block + threads % wave
    slots = n_vecs if rows_per_block == 1 else vecs * stride
    return 4 * vec * _round_up(slots, wave)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
