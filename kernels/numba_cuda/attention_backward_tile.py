"""What the Numba kernels for the gradients of attention do with a tile of queries and keys.

A block owns queries and walks over keys ("queries own"), or owns keys and walks over queries. Thread (r, c) of its 8 x
16 grid has owned ones r, r + 8, ... and, for each of them, others c, c + 16, ... The functions are inlined, so that the
tile's numbers stay in registers. They are built once per set of sizes and options.

A hidden key weighs -0, and its dS is -0 too: what a product must skip, even if the other factor is NaN there. A key
that is seen never weighs -0.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float64, int32, uint32
from numba.cuda import libdevice

from gpu_ops.kernels.numba_cuda.attention_backward_config import Config, Scores
from gpu_ops.kernels.numba_cuda.attention_config import LOG2E, ROW_THREADS, ROWS, THREADS
from gpu_ops.kernels.numba_cuda.attention_tile import accumulators, scorer
from gpu_ops.kernels.numba_cuda.dtype import functions
from gpu_ops.kernels.numba_cuda.memory import stager, take

__all__ = ["accumulator",  "differentiator", "keys_locator", "looker", "multiplier", "queries_locator", "scorer_of", "signature", "span"]


@cache
def scorer_of(scores: Scores):
    """A device function: (score, slope of softcap, whether hidden) of a product of a query and a key.

    All kernels use it, so that all of them round a score alike: beside a bias of -1e9 one rounding is exp(64).
    ``low`` and ``high`` bound the keys that the query sees.
    """
    number = functions(scores.dtype).compute
    bias_load = functions(scores.bias or scores.dtype).load
    capped, with_alibi, with_bias = scores.softcap, scores.alibi, bool(scores.bias)
    tanh = libdevice.tanh if number is float64 else libdevice.tanhf
    # Only -inf hides a key: the lowest finite bias plus a score, times log2(e), must stay finite.
    lowest, infinity = -1.2e308 if number is float64 else -2.28e38, float("inf")

    @cuda.jit(device=True, forceinline=True)
    def score_of(product, options, b, head, query, key, diagonal, hide):
        scale, softcap, alibi, bias = options
        score, slope = product * scale, number(1.0)
        if capped:
            share = tanh(score / softcap)
            score, slope = softcap * share, number(1.0) - share * share
        if with_alibi:
            score -= number(alibi[b, head]) * number(abs(query + diagonal - key))
        if with_bias:
            added = number(bias_load(bias[b, head, query, key]))
            hide = hide or added == -infinity
            score += number(lowest) if added < number(lowest) else added
        return score, slope, hide or score == -infinity

    return score_of


@cuda.jit(device=True, forceinline=True)
def span(masked, query, diagonal, left, right, end):
    """The keys that a query sees: from the first to before the last."""
    low, high = int32(0), int32(end)
    if masked:
        low = int32(query + diagonal - left)
        high = min(high, int32(query + diagonal + right + 1))
    return low, high


@cache
def queries_locator(rows: int):
    """A device function: where the rows of a tile lie. A row is a query of one of ``group`` heads from ``head`` on.

    ``statistics`` (3, batch, nheads, seqlen_q): see :mod:`.attention_backward_rows`; ``stats`` are those of the tile.
    """

    @cuda.jit(device=True, forceinline=True)
    def locate(
        places, query_of, head_of, stats, q, dout, statistics, first, n_rows, group, head, entry, start
    ):
        at = int32(cuda.threadIdx.x)
        if at < rows:
            row = min(first + at, n_rows - 1)  # past the end: the last row, which counts once
            query, h = row // group, int32(head) + row % group
            query_of[at], head_of[at] = query, h
            place = start + query
            places[at] = entry * q.strides[0] + place * q.strides[1] + h * q.strides[2]
            places[rows + at] = entry * dout.strides[0] + place * dout.strides[1] + h * dout.strides[2]
            for n in range(3):
                stats[n * rows + at] = statistics[n, entry, h, place]

    return locate


@cache
def keys_locator(keys: int):
    """A device function: where the keys and values of a tile lie; past the end, those of the last one."""

    @cuda.jit(device=True, forceinline=True)
    def locate(places, k, v, first, end, head, entry, start):
        at = int32(cuda.threadIdx.x)
        if at < keys:
            place = start + min(first + at, end - 1)
            places[at] = entry * k.strides[0] + place * k.strides[1] + head * k.strides[2]
            places[keys + at] = entry * v.strides[0] + place * v.strides[1] + head * v.strides[2]

    return locate


@cache
def looker(config: Config, queries_own: bool):
    """A device function: bits of the pairs of a thread that a block mask lets see each other."""
    my_rows, my_columns = config.my_rows, config.my_columns

    @cuda.jit(device=True, forceinline=True)
    def look(visible, b, query_of, head_of, first_key, end, block_q, block_k, r, c):
        seen = uint32(0)
        for i in range(my_rows):
            for j in range(my_columns):
                own, other = r + i * ROWS, c + j * ROW_THREADS
                row, key = (own, other) if queries_own else (other, own)
                key = min(first_key + key, end - 1)
                see = visible[b, head_of[row], query_of[row] // block_q, key // block_k] != 0
                seen |= uint32(see) << uint32(i * my_columns + j)
        return seen

    return look


@cache
def multiplier(config: Config):
    """A device function: products of the rows of two arrays, owned times others, into a tile of registers."""
    scores, chunk, stride = config.scores, config.chunk, config.stride
    number = functions(scores.dtype).compute
    my_rows, my_columns, others = config.my_rows, config.my_columns, config.block_m * config.stride
    stage_own = stager(scores.dtype, THREADS, config.block_m, chunk, stride)
    stage_other = stager(scores.dtype, THREADS, config.block_n, chunk, stride)
    multiply = scorer(number, config.block_m, config.block_n, chunk, stride)
    nothing = 0.0

    @cuda.jit(device=True, forceinline=True)
    def products(tile, staged, own, own_places, own_at, other, other_places, other_at, r, c):
        """The rows' places begin at ``own_at`` and ``other_at`` of the tables."""
        for i in range(my_rows):
            for j in range(my_columns):
                tile[i, j] = nothing
        dim = own.shape[3]
        for column in range(0, dim, chunk):
            cuda.syncthreads()  # no thread reads the staged data any more
            stage_own(staged, 0, own, own_places, own_at, column, dim, own.strides[3])
            stage_other(staged, others, other, other_places, other_at, column, dim, other.strides[3])
            cuda.syncthreads()
            multiply(tile, staged, r, c)

    return products


@cache
def differentiator(config: Config, queries_own: bool, with_slope: bool = True):
    """A device function: from products of a tile, S before scaling and dP, to P and dS in their place.

    ``with_slope``: dS is the gradient of ``softmax_scale * q k^T``; without, that of the bias.
    """
    scores, block_rows = config.scores, config.block_m if queries_own else config.block_n
    number, score_of = functions(scores.dtype).compute, scorer_of(scores)
    masked, with_blocks, capped = scores.masked, scores.block_mask, scores.softcap and with_slope
    my_rows, my_columns = config.my_rows, config.my_columns
    exp2 = libdevice.exp2 if number is float64 else libdevice.exp2f
    hidden, nothing = -0.0, 0.0

    @cuda.jit(device=True, forceinline=True)
    def differentiate(
        s, dp, options, stats, query_of, head_of, b, first, n_rows, first_key, end, diagonal, left, right, seen, r, c
    ):  # fmt: skip
        for i in range(my_rows):
            for j in range(my_columns):
                own, other = r + i * ROWS, c + j * ROW_THREADS
                row, key = (own, other) if queries_own else (other, own)
                query, head, key = query_of[row], head_of[row], int32(first_key + key)
                low, high = span(masked, query, diagonal, left, right, end)
                hide = int32(first + row) >= n_rows or key < low or key >= high
                if with_blocks:
                    hide = hide or (seen >> uint32(i * my_columns + j)) & uint32(1) == 0
                key = min(key, end - 1)
                score, slope, hide = score_of(s[i, j], options, b, head, query, key, diagonal, hide)
                top, rest = take(stats, row), take(stats, block_rows + row)
                weight = exp2((score - top) * number(LOG2E) - rest)
                gradient = weight * (dp[i, j] - take(stats, 2 * block_rows + row))
                if capped:
                    gradient *= slope
                s[i, j] = number(hidden) if hide else weight
                dp[i, j] = number(hidden) if hide else gradient + number(nothing)  # -0 becomes 0

    return differentiate


@cache
def accumulator(config: Config):
    """A device function: ``o += tile X`` for the ``slab`` columns of X from ``first_column`` on.

    The tile is (owned, others) in registers and goes through ``p`` in shared memory; the places of the others' rows of
    X begin at ``at`` of the table.
    """
    scores, slab, chunk_v, others = config.scores, config.slab, config.chunk_v, config.block_n
    my_rows, my_columns, stride_p = config.my_rows, config.my_columns, config.stride_p
    stage = stager(scores.dtype, THREADS, chunk_v, slab, slab)
    number = functions(scores.dtype).compute
    accumulate, accumulate_seen = accumulators(
        number, my_rows, slab // ROW_THREADS, chunk_v, slab, stride_p
    )

    @cuda.jit(device=True, forceinline=True)
    def add(o, tile, p, staged, x, places, at, first_column, r, c):
        cuda.syncthreads()  # no thread reads P or the staged data any more
        for i in range(my_rows):
            for j in range(my_columns):
                p[(r + i * ROWS) * stride_p + c + j * ROW_THREADS] = tile[i, j]
        for first in range(0, others, chunk_v):
            cuda.syncthreads()
            finite = stage(staged, 0, x, places, at + first, first_column, x.shape[3], x.strides[3])
            if cuda.syncthreads_and(int32(finite)):
                accumulate(o, p, staged, first, r, c)
            else:
                accumulate_seen(o, p, staged, first, r, c)

    return add


def signature(scores: Scores, element: str, arrays: int, *more: str) -> str:
    """Of a kernel with ``arrays`` arrays of four axes, ``more`` arguments, statistics, sequences and the options."""
    rank4, computed = "[:, :, :, :]", str(functions(scores.dtype).compute)
    optional = {
        "float32[:, :]": scores.alibi,
        (functions(scores.bias).element if scores.bias else "") + rank4: scores.bias,
        "uint8" + rank4: scores.block_mask,
    }
    types = [element + rank4] * arrays + [*more, computed + "[:, :, :, ::1]", "int64[:, ::1]"]
    types += [array if given else "int32" for array, given in optional.items()]
    return f"void({', '.join([*types, computed, computed, *['int32'] * 4])})"
