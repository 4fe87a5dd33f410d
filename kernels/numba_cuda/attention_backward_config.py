"""Chooses the tiles and features of the Numba kernels for the gradients of attention."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_ops.kernels.numba_cuda.attention_config import ROW_THREADS, ROWS, THREADS

__all__ = ["RESOLUTION", "Config", "Scores", "count_parts", "select_config"]

RESOLUTION = 2.0**-12
"""An lse in base 2 that does not change when this is added is too large to hold the sum of a row: see ``Row``."""

# Columns of a block's accumulators, by itemsize. Wider heads are shared among blocks, each of which computes P and dS
# again. 64 columns of dK and of dV beside S and dP leave no register unused; dQ is one accumulator.
_SLAB = {"keys": {4: 64, 8: 32}, "queries": {4: 128, 8: 64}}


@dataclass(frozen=True)
class Scores:
    """What shapes the scores. A feature that is False costs nothing."""

    dtype: str
    masked: bool = False  # causal or a window
    softcap: bool = False
    alibi: bool = False
    bias: str = ""  # its dtype
    block_mask: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per number in the compute type."""
        return 8 if self.dtype == "float64" else 4

    @property
    def label(self) -> str:
        flags = ("masked", "softcap", "alibi", "bias", "block_mask")
        return ",".join([self.dtype, *(flag for flag in flags if getattr(self, flag))])


@dataclass(frozen=True)
class Config:
    """A kernel of tiles: a block owns ``block_m`` queries or keys, and walks over the others, ``block_n`` at a time."""

    scores: Scores
    block_m: int
    block_n: int
    chunk: int  # columns of Q and K, or of dO and V, in shared memory at a time
    slab: int = 0  # columns of the accumulators; 0: none
    chunk_v: int = 0  # rows of the second factor of their products in shared memory at a time

    @property
    def stride(self) -> int:
        """Elements between rows in shared memory; the padding of 16 bytes avoids bank conflicts."""
        return self.chunk + 16 // self.scores.itemsize

    @property
    def stride_p(self) -> int:
        """The same for P and dS."""
        return self.block_n + 16

    @property
    def staged(self) -> int:
        """Elements of the shared memory that the factors of all products pass through."""
        return max((self.block_m + self.block_n) * self.stride, self.chunk_v * self.slab)

    @property
    def my_rows(self) -> int:
        """Owned queries or keys of a thread."""
        return self.block_m // ROWS

    @property
    def my_columns(self) -> int:
        """Others of a thread."""
        return self.block_n // ROW_THREADS

    @property
    def label(self) -> str:
        """For example ``float32,masked,64x64,slab 64``."""
        return f"{self.scores.label},{self.block_m}x{self.block_n},slab {self.slab}"

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block: numbers, the queries' offsets, heads and statistics, the keys' offsets."""
        itemsize = self.scores.itemsize
        numbers = self.staged + self.block_m * self.stride_p
        tables = self.block_m * 16 + self.block_n * 16  # two int64 for each query and each key
        queries = max(self.block_m, self.block_n)
        return numbers * itemsize + tables + queries * (4 + 4 + 3 * itemsize)


def select_config(scores: Scores, owned: str, dim: int = 0) -> Config:
    """``owned``: "queries" (dQ), "keys" (dK and dV) or "both" (dbias, without accumulators of ``dim`` columns).

    64 x 64 tiles, 32 x 32 in float64, where a number takes two registers. Small heads take chunks of 16 columns.
    """
    wide = scores.itemsize == 8
    block, chunk = (32, 16) if wide else (64, 16 if 0 < dim <= 16 else 32)
    if owned == "both":
        return Config(scores, block, block, chunk)
    most = _SLAB[owned][scores.itemsize]
    slab = next((size for size in (16, 32, 64, 96) if dim <= size <= most), most)
    staged = 2 * block * (chunk + 16 // scores.itemsize)
    chunk_v = next(n for n in (64, 32, 16, 8) if n <= block and n * slab <= staged)
    return Config(scores, block, block, chunk, slab, chunk_v)


def count_parts(blocks: int, units: int, sms: int) -> int:
    """Parts that a sum of ``units`` tiles is divided into, for each of ``blocks``: two blocks per SM, if there are."""
    return max(1, min(units, -(-2 * sms // max(blocks, 1)), THREADS))
