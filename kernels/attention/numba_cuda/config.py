"""Configuration of the Numba attention kernel: tiles, features, and number of parts of the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gpu_ops.kernels.attention.problem import LOG2E, PLAIN, Features

__all__ = [
    "LN2",
    "LOG2E",
    "ROWS",
    "ROW_THREADS",
    "THREADS",
    "NumbaForwardConfig",
    "count_splits",
    "select_config",
]

THREADS = 128
ROW_THREADS = 16  # threads that share a row: half a warp
ROWS = THREADS // ROW_THREADS
LN2 = math.log(2.0)  # scores are kept in powers of 2: exp2 is an instruction

# Rows of the problem up to | block_m. Each staged key serves block_m rows, of which a thread has block_m / 8 in
# registers. Decoding with few heads per key head reads keys once, so more rows would only add arithmetic.
_BLOCK_M = ((8, 8), (16, 16), (32, 32))
# By itemsize: 8 rows per thread, or 4 in float64, where a number takes two registers.
_BLOCK_M_MAX = {4: 64, 8: 32}

# head_dim_v up to | columns of V per block. Wider values are shared among blocks, each of which computes the scores
# again: more columns would not fit in registers.
_SLAB = ((16, 16), (32, 32), (64, 64), (96, 96))
_SLAB_MAX = 128


@dataclass(frozen=True)
class NumbaForwardConfig:
    """A kernel: its tiles and its features. A feature that is False costs nothing."""

    dtype: str
    block_m: int  # rows per block
    block_n: int  # keys per tile
    chunk: int  # columns of Q and K in shared memory at a time
    slab: int  # columns of V and O per block
    chunk_v: int  # rows of V in shared memory at a time
    scores: Features = PLAIN
    masked: bool = False  # causal or a window
    paged: bool = False
    codes: str = ""  # the dtype of quantized pages
    split: bool = False  # keys in parts, one block each
    wide_out: bool = False  # out in float32 where q is not
    wide_lse: bool = False  # lse in float64

    @property
    def itemsize(self) -> int:
        """Bytes per number in the compute type."""
        return 8 if self.dtype == "float64" else 4

    @property
    def out(self) -> str:
        """The dtype of out."""
        return "float32" if self.wide_out else self.dtype

    @property
    def in_powers_of_e(self) -> bool:
        """Whether scores are in natural units. Otherwise softmax_scale already includes the factor log2(e)."""
        return not self.scores.plain

    @property
    def stride(self) -> int:
        """Elements between rows of Q or K in shared memory.

        The padding of 16 bytes lets eight threads that read 16 bytes each, from eight rows, hit all 32 banks once.
        """
        return self.chunk + 16 // self.itemsize

    @property
    def stride_p(self) -> int:
        """Row stride of P. Half a warp writes 16 keys of one row, the other half of the next, 16 banks further."""
        return self.block_n + 16

    @property
    def staged(self) -> int:
        """Elements of the shared memory that Q and K, and then V, pass through."""
        return max((self.block_m + self.block_n) * self.stride, self.chunk_v * self.slab)

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block: numbers, and the tables of row offsets, queries, heads and scales."""
        numbers = self.staged + self.block_m * self.stride_p
        of_keys = 8 + 8 + (8 if self.codes else 0)
        return numbers * self.itemsize + self.block_m * (8 + 4 + 4) + self.block_n * of_keys

    @property
    def label(self) -> str:
        """Label, for example ``attention_forward[float32,64x64,slab 64,masked]``."""
        words = [self.dtype, f"{self.block_m}x{self.block_n}", f"slab {self.slab}"]
        words += [*(["masked"] if self.masked else []), *self.scores.words]
        words += [self.codes] if self.codes else []
        words += [flag for flag in ("paged", "split", "wide_out", "wide_lse") if getattr(self, flag)]
        return f"attention_forward[{','.join(words)}]"


def select_config(
    dtype: str, head_dim: int, head_dim_v: int, rows: int, scores: Features = PLAIN, **features: Any
) -> NumbaForwardConfig:
    """Choose the tiles. ``rows``: queries of the longest sequence times query heads per key head.

    ==========  ==========================================================================================
    block_n     64 keys, 32 in float64: P takes 20 KB, or 6 KB if a block has 16 rows
    chunk       32 columns, 16 in float64 and for small heads: a warp reads whole rows of a chunk
    chunk_v     as many rows as fit in the place of Q and K, up to a tile: fewer barriers
    ==========  ==========================================================================================
    """
    itemsize = 8 if dtype == "float64" else 4
    max_block_m = _BLOCK_M_MAX[itemsize]
    block_m = min(next((size for limit, size in _BLOCK_M if rows <= limit), max_block_m), max_block_m)
    block_n, chunk = (32, 16) if itemsize == 8 else (64, 16 if head_dim <= 16 else 32)
    slab = next((size for limit, size in _SLAB if head_dim_v <= limit), _SLAB_MAX)
    staged = (block_m + block_n) * (chunk + 16 // itemsize)
    chunk_v = next(n for n in (64, 32, 16, 8) if n <= block_n and (n * slab <= staged or n == 8))
    return NumbaForwardConfig(dtype, block_m, block_n, chunk, slab, chunk_v, scores, **features)


def count_splits(config: NumbaForwardConfig, blocks: int, seqlen_k: int, sms: int) -> int:
    """Parts to split the keys into: enough for two blocks per SM, each with at least four tiles of keys."""
    wanted = -(-2 * sms // max(blocks, 1))
    return max(1, min(wanted, seqlen_k // (4 * config.block_n), THREADS))
