"""Tiles and features of the Numba kernels for the gradients of attention."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_ops.kernels.attention.numba_cuda.config import ROW_THREADS, ROWS, THREADS
from gpu_ops.kernels.attention.problem import PLAIN, Features

__all__ = ["RESOLUTION", "NumbaBackwardConfig", "NumbaBackwardProblem", "count_parts", "select_config"]

RESOLUTION = 2.0**-12
"""If adding this to an lse in base 2 changes nothing, lse is too coarse: see backward_rows.py."""

# Columns of a block's accumulators, by itemsize. Wider heads are shared among blocks, which compute P and dS each.
_SLAB = (16, 32, 64, 96)
_SLAB_MAX = {4: 128, 8: 64}
_MOST_NUMBERS = 128  # per thread, for S, dP and accumulators; leaves room for the other registers


@dataclass(frozen=True)
class NumbaBackwardProblem:
    """Properties shared by all kernels of a call. A feature that is False costs nothing."""

    dtype: str
    scores: Features = PLAIN
    masked: bool = False  # causal or a window

    @property
    def itemsize(self) -> int:
        """Bytes per number in the compute type."""
        return 8 if self.dtype == "float64" else 4

    @property
    def label(self) -> str:
        return ",".join([self.dtype, *["masked"] * self.masked, *self.scores.words])


@dataclass(frozen=True)
class NumbaBackwardConfig:
    """A kernel: a block owns ``block_m`` queries or keys, and walks over the others, ``block_n`` at a time."""

    problem: NumbaBackwardProblem
    queries_own: bool
    block_m: int
    block_n: int
    chunk: int  # columns of Q and K, or of dO and V, in shared memory at a time
    slab: int = 0  # columns of the accumulators; 0: none
    chunk_v: int = 0  # rows of the second factor of their products in shared memory at a time

    @property
    def stride(self) -> int:
        """Elements between rows in shared memory; the padding of 16 bytes avoids bank conflicts."""
        return self.chunk + 16 // self.problem.itemsize

    @property
    def stride_p(self) -> int:
        """Row stride of P and dS."""
        return self.block_n + 16

    @property
    def staged(self) -> int:
        """Elements of the shared memory that the factors of all products pass through."""
        return max((self.block_m + self.block_n) * self.stride, self.chunk_v * self.slab)

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.block_m if self.queries_own else self.block_n

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return self.block_n if self.queries_own else self.block_m

    @property
    def tile(self) -> tuple[int, int]:
        """Numbers of owned rows and of others of a thread."""
        return self.block_m // ROWS, self.block_n // ROW_THREADS

    @property
    def pairs(self) -> tuple[int, int]:
        """Queries and keys of a thread."""
        return self.tile if self.queries_own else self.tile[::-1]

    @property
    def label(self) -> str:
        """Label, for example ``float32,masked,64x64,slab 64``."""
        return f"{self.problem.label},{self.block_m}x{self.block_n},slab {self.slab}"

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block: numbers, the queries' offsets, heads and statistics, the keys' offsets."""
        itemsize = self.problem.itemsize
        numbers = self.staged + self.block_m * self.stride_p
        return numbers * itemsize + self.rows * (2 * 8 + 2 * 4 + 3 * itemsize) + self.keys * 2 * 8


def select_config(problem: NumbaBackwardProblem, owned: str, dim: int = 0) -> NumbaBackwardConfig:
    """Configuration. ``owned``: "queries" (dQ), "keys" (dK, dV) or "both" (dbias); ``dim``: columns of accumulators.

    ==========  ==========================================================================================
    block_m     64, or 32 where options or the accumulators would leave too few registers; 32 in float64
    block_n     64, 32 in float64: P takes 20 KB or 12 KB
    chunk       32 columns, 16 in float64 and for small heads: a warp reads whole rows of a chunk
    chunk_v     as many rows as fit in the place of Q and K, up to a tile: fewer barriers
    ==========  ==========================================================================================
    """
    is_float64 = problem.itemsize == 8
    block_n, chunk = (32, 16) if is_float64 else (64, 16 if 0 < dim <= 16 else 32)
    if owned == "both":
        return NumbaBackwardConfig(problem, True, block_n, block_n, chunk)
    max_slab = _SLAB_MAX[problem.itemsize]
    slab = next((size for size in _SLAB if dim <= size <= max_slab), max_slab)
    accumulators = (2 if owned == "keys" else 1) * slab
    numbers = 64 * (2 * block_n + accumulators) // THREADS
    has_options = not problem.scores.plain or problem.scores.block_mask
    block_m = 32 if is_float64 or has_options or numbers > _MOST_NUMBERS else 64
    staged = (block_m + block_n) * (chunk + 16 // problem.itemsize)
    chunk_v = next(n for n in (64, 32, 16, 8) if n <= block_n and n * slab <= staged)
    return NumbaBackwardConfig(problem, owned == "queries", block_m, block_n, chunk, slab, chunk_v)


def count_parts(blocks: int, units: int, sms: int) -> int:
    """Parts that a sum of ``units`` tiles is divided into, for each of ``blocks``: enough for two blocks per SM."""
    return max(1, min(units, -(-2 * sms // max(blocks, 1)), THREADS))
