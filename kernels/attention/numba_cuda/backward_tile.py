"""Operations of the Numba kernels for the gradients of attention on a tile of queries and keys.

A block owns queries and walks over keys (``queries_own``), or owns keys and walks over queries. Thread (r, c) of its
8 x 16 grid has owned rows r, r + 8, ... and, for each of them, others c, c + 16, ... The functions are inlined, so
that the tile's numbers stay in registers. They are built once per set of sizes and options.

P and dS of a hidden key are -0. A product must skip these, since the other factor may be NaN there. P and dS of a
visible key are never -0.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float64, int32, uint32
from numba.cuda import libdevice

from gpu_ops.kernels.attention.numba_cuda.backward_config import NumbaBackwardConfig, NumbaBackwardProblem
from gpu_ops.kernels.attention.numba_cuda.config import LOG2E, ROW_THREADS, ROWS, THREADS
from gpu_ops.kernels.attention.numba_cuda.tile import accumulators, keeper, scorer
from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.memory import stager, take
from gpu_ops.kernels.common.numba_cuda.philox import SEED_TYPES

__all__ = [
    "accumulator",
    "differentiator",
    "keys_locator",
    "looker",
    "multiplier",
    "queries_locator",
    "scorers",
    "signature",
    "span",
]


@cache
def scorers(problem: NumbaBackwardProblem):
    """Two device functions that turn the product of a query and a key into a score.

    All kernels use them, because scores must be rounded alike: next to a bias of -1e9, one rounding is a factor of
    exp(64). So the compiler may not fuse their additions and multiplications. The first returns the scaled and capped
    product, and the slope of the cap. The second adds ALiBi and bias, and returns the score in units of log2 as the
    forward kernel rounds it, -inf for a hidden key. For plain scores ``scale`` includes the factor log2(e).
    """
    number, scores = functions(problem.dtype).compute, problem.scores
    bias_load = functions(scores.bias or problem.dtype).load
    capped, with_alibi, with_bias, plain = scores.softcap, scores.alibi, bool(scores.bias), scores.plain
    is_wide = number is float64
    tanh = libdevice.tanh if is_wide else libdevice.tanhf
    plus = libdevice.dadd_rn if is_wide else libdevice.fadd_rn
    times = libdevice.dmul_rn if is_wide else libdevice.fmul_rn
    # Only -inf hides a key: the lowest finite bias plus a score, times log2(e), must stay finite.
    lowest, infinity = -1.2e308 if is_wide else -2.28e38, float("inf")

    @cuda.jit(device=True, forceinline=True)
    def cap(product, options):
        scale, softcap = options[:2]
        if capped:
            share = tanh(product * scale / softcap)
            return times(softcap, share), number(1.0) - share * share
        return times(product, scale), number(1.0)

    @cuda.jit(device=True, forceinline=True)
    def add_terms(score, options, b, head, query, key, diagonal, hide):
        ahead, alibi, bias = options[2:5]
        if with_alibi:
            score = plus(score, -number(alibi[b, head]) * number(abs(query + diagonal + ahead - key)))
        if with_bias:
            added = number(bias_load(bias[b, head, query, key]))
            hide = hide or added == -infinity
            score = plus(score, number(lowest) if added < number(lowest) else added)
        if not plain:
            score = times(score, number(LOG2E))
        return number(-infinity) if hide else score

    return cap, add_terms


@cuda.jit(device=True, forceinline=True)
def span(masked, query, diagonal, left, right, end):
    """Range of the keys that a query sees: first, and last + 1."""
    low, high = int32(0), int32(end)
    if masked:
        low = int32(query + diagonal - left)
        high = min(high, int32(query + diagonal + right + 1))
    return low, high


@cache
def queries_locator(rows: int):
    """Device function that locates the rows of a tile. A row is a query of one of ``group`` heads from ``head`` on.

    ``statistics`` (3, batch, nheads, seqlen_q): see :mod:`.backward_rows`; ``stats`` are those of the tile.
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
    """Device function that locates the keys and values of a tile; past the end, the last key and value."""

    @cuda.jit(device=True, forceinline=True)
    def locate(places, k, v, first, end, head, entry, start):
        at = int32(cuda.threadIdx.x)
        if at < keys:
            place = start + min(first + at, end - 1)
            places[at] = entry * k.strides[0] + place * k.strides[1] + head * k.strides[2]
            places[keys + at] = entry * v.strides[0] + place * v.strides[1] + head * v.strides[2]

    return locate


@cache
def looker(config: NumbaBackwardConfig):
    """Device function for the bits of a thread's pairs that a block mask makes visible."""
    queries_own, (my_queries, my_keys) = config.queries_own, config.pairs

    @cuda.jit(device=True, forceinline=True)
    def look(visible, b, query_of, head_of, first_key, end, block_q, block_k, r, c):
        seen = uint32(0)
        for i in range(my_queries):
            row = r + i * ROWS if queries_own else c + i * ROW_THREADS
            block, head = query_of[row] // block_q, head_of[row]
            for j in range(my_keys):
                key = min(first_key + (c + j * ROW_THREADS if queries_own else r + j * ROWS), end - 1)
                seen |= uint32(visible[b, head, block, key // block_k] != 0) << uint32(i * my_keys + j)
        return seen

    return look


@cache
def multiplier(config: NumbaBackwardConfig):
    """Device function for products of rows of two arrays, owned times others, in a tile of registers."""
    dtype, chunk, stride = config.problem.dtype, config.chunk, config.stride
    number = functions(dtype).compute
    (my_rows, my_columns), others = config.tile, config.block_m * config.stride
    stage_own = stager(dtype, THREADS, config.block_m, chunk, stride)
    stage_other = stager(dtype, THREADS, config.block_n, chunk, stride)
    multiply = scorer(number, config.block_m, config.block_n, chunk, stride)
    zero = 0.0

    @cuda.jit(device=True, forceinline=True)
    def products(tile, staged, owned, owned_places, owned_at, other, other_places, other_at, r, c):
        """Compute a tile of products. The rows' places begin at ``owned_at`` and ``other_at`` of the tables."""
        for i in range(my_rows):
            for j in range(my_columns):
                tile[i, j] = zero
        dim = owned.shape[3]
        for column in range(0, dim, chunk):
            cuda.syncthreads()  # no thread reads the staged data any more
            stage_own(staged, 0, owned, owned_places, owned_at, column, dim, owned.strides[3])
            stage_other(staged, others, other, other_places, other_at, column, dim, other.strides[3])
            cuda.syncthreads()
            multiply(tile, staged, r, c)

    return products


@cache
def differentiator(config: NumbaBackwardConfig, with_slope: bool = True):
    """Device function that replaces the products of a tile, S before scaling and dP, by P and dS.

    With dropout the statistics give P of the weights that are kept; P and dP of the others are 0.

    ``with_slope``: dS is the gradient of ``softmax_scale * q k^T``; without, that of the bias.
    """
    problem, block_rows = config.problem, config.rows
    number, (cap, add_terms) = functions(problem.dtype).compute, scorers(problem)
    masked, with_blocks = problem.masked, problem.scores.block_mask
    with_slope = problem.scores.softcap and with_slope
    with_dropout, keep = bool(problem.scores.dropout), keeper(problem.scores.dropout)
    queries_own, (my_queries, my_keys) = config.queries_own, config.pairs
    exp2 = libdevice.exp2 if number is float64 else libdevice.exp2f
    infinity, hidden, zero = float("inf"), -0.0, 0.0

    @cuda.jit(device=True, forceinline=True)
    def differentiate(
        s, dp, options, stats, query_of, head_of, b, first, n_rows, first_key, end, diagonal, left, right, seen, r, c
    ):  # fmt: skip
        # In several loops: a longer one would not be unrolled, and the tile would leave the registers.
        dropped = uint32(0)
        if with_dropout:
            seed, dropout_p, query0, key0 = options[5:]
            for i in range(my_queries):
                row = r + i * ROWS if queries_own else c + i * ROW_THREADS
                for j in range(my_keys):
                    key = key0 + first_key + (c + j * ROW_THREADS if queries_own else r + j * ROWS)
                    kept = keep(seed, dropout_p, b, head_of[row], query0 + query_of[row], key)
                    dropped |= uint32(not kept) << uint32(i * my_keys + j)
            for i in range(my_queries):
                for j in range(my_keys):
                    at = (i, j) if queries_own else (j, i)
                    if (dropped >> uint32(i * my_keys + j)) & uint32(1):
                        dp[at] = zero

        for i in range(my_queries):
            row = r + i * ROWS if queries_own else c + i * ROW_THREADS
            for j in range(my_keys):
                at = (i, j) if queries_own else (j, i)
                s[at], slope = cap(s[at], options)
                if with_slope:
                    dp[at] = (dp[at] - take(stats, 2 * block_rows + row)) * slope

        for i in range(my_queries):
            row = r + i * ROWS if queries_own else c + i * ROW_THREADS
            query, head = query_of[row], head_of[row]
            low, high = span(masked, query, diagonal, left, right, end)
            if int32(first + row) >= n_rows:
                high = low
            for j in range(my_keys):
                at = (i, j) if queries_own else (j, i)
                key = int32(first_key + (c + j * ROW_THREADS if queries_own else r + j * ROWS))
                hide = key < low or key >= high
                if with_blocks:
                    hide = hide or (seen >> uint32(i * my_keys + j)) & uint32(1) == 0
                key = min(key, end - 1)
                s[at] = add_terms(s[at], options, b, head, query, key, diagonal, hide)

        for i in range(my_queries):
            row = r + i * ROWS if queries_own else c + i * ROW_THREADS
            top, rest, delta = (
                take(stats, row),
                take(stats, block_rows + row),
                take(stats, 2 * block_rows + row),
            )
            for j in range(my_keys):
                at = (i, j) if queries_own else (j, i)
                hide, gradient = s[at] == -infinity, dp[at] if with_slope else dp[at] - delta
                weight = exp2((s[at] - top) - rest)
                drop = with_dropout and (dropped >> uint32(i * my_keys + j)) & uint32(1)
                s[at] = number(hidden) if hide else number(zero) if drop else weight
                dp[at] = number(hidden) if hide else weight * gradient + number(zero)  # -0 becomes 0

    return differentiate


@cache
def accumulator(config: NumbaBackwardConfig):
    """Device function for ``o += tile X``, with the ``slab`` columns of X from ``first_column`` on.

    The tile is (owned, others) in registers and passes through ``p`` in shared memory. X has a row for each of the
    others; their places begin at ``at`` of the table.
    """
    dtype, slab, chunk_v, others = config.problem.dtype, config.slab, config.chunk_v, config.block_n
    (my_rows, my_columns), stride_p = config.tile, config.stride_p
    stage = stager(dtype, THREADS, chunk_v, slab, slab)
    number = functions(dtype).compute
    accumulate, accumulate_seen = accumulators(number, my_rows, slab // ROW_THREADS, chunk_v, slab, stride_p)

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


def signature(problem: NumbaBackwardProblem, element: str, arrays: int, *more: str) -> str:
    """Signature of a kernel: ``arrays`` arrays of four axes, ``more``, statistics, sequences and the options."""
    rank4, computed, scores = "[:, :, :, :]", str(functions(problem.dtype).compute), problem.scores
    optional = {
        "float32[:, :]": scores.alibi,
        (functions(scores.bias).element if scores.bias else "") + rank4: scores.bias,
        "uint8" + rank4: scores.block_mask,
        SEED_TYPES[scores.dropout]: scores.dropout,
    }
    types = [element + rank4] * arrays + [*more, computed + "[:, :, :, ::1]", "int64[:, ::1]"]
    types += [array if present else "int32" for array, present in optional.items()]
    return f"void({', '.join([*types, *[computed] * 3, *['int32'] * 7])})"
