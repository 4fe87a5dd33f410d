"""Attention forward for Numba: tiled, with online softmax. The readable twin of the CUDA C++ kernel.

    out = softmax(s) v,    s = softcap(softmax_scale * q k^T) + alibi + bias, masked,    lse = log(sum(exp(s)))

A block of 128 threads owns ``block_m`` *rows*. A row is a query of one of the query heads that share a key head
(row = query * group + head in the group), so keys and values are read once for the whole group. The block walks over
the keys that its rows see, ``block_n`` at a time. For each row it keeps the largest score so far m, the sum l of
exp2(score - m), and the accumulator O, the values weighted by the same exponentials:

    S = Q K^T                      (block_m, block_n) in registers; Q and K pass through shared memory in chunks
    m_new = max(m, max(S))
    P = exp2(S - m_new)            (block_m, block_n) in shared memory
    O = O exp2(m - m_new) + P V    (block_m, slab)    in registers; V passes through shared memory in chunks
    l = l exp2(m - m_new) + sum(P)

At the end out = O / l. :mod:`.tile` implements these steps. Nothing of size seqlen_q x seqlen_k is ever
stored. 4 flops per query, key and column.

The threads form a grid of 8 x 16. Thread (r, c) owns rows r, r + 8, ... and, in each of them, keys (of S) and columns
(of O) c, c + 16, ... So a number read from shared memory serves several products. The 16 threads of a row are half a
warp, which reduces maxima and sums by shuffles:

              c = 0   1  ...  15 | 0   1  ...  15 | ...           S[8 i + r, 16 j + c] is s[i, j] of thread (r, c)
    row r     t0     t1      t15   t0    t1   t15
    row r+1   t16    t17     t31   t16 ...                        threads t0 .. t31: one warp

:mod:`.config` chooses the tile sizes and gives the reasons.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float64, int32, int64, uint32
from numba.cuda import libdevice

from gpu_ops.kernels.attention.numba_cuda.config import (
    LN2,
    LOG2E,
    ROW_THREADS,
    ROWS,
    THREADS,
    NumbaForwardConfig,
)
from gpu_ops.kernels.attention.numba_cuda.tile import WARP, accumulators, keeper, scorer, weigher
from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.memory import stager, store_at
from gpu_ops.kernels.common.numba_cuda.philox import SEED_TYPES
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["forward_kernel"]


@cache
def forward_kernel(config: NumbaForwardConfig) -> NumbaKernel:
    """Kernel of a configuration, built once. Pass 0 for an array that it does not use.

    ==========  ======================================================================  ==================
    q           (batch, seqlen_q, nheads, head_dim)                                     any strides, as all
    k, v        (batch, seqlen_k, nheads_kv, head_dim or head_dim_v), or pages
    out         (batch, seqlen_q, nheads, head_dim_v)
    lse         (batch, nheads, seqlen_q)
    sequences   (batch, 4): q start, q length, k start, k length                        int64, contiguous
    k_scale     (num_pages, page_size, nheads_kv), as v_scale: of quantized pages       float32
    table       (batch, max_pages)                                                      int32
    alibi       (batch, nheads)                                                         float32
    sinks       (nheads,)                                                               float32
    bias        (batch, nheads, seqlen_q, seqlen_k)                                     broadcast
    visible     (batch, nheads, query blocks, key blocks)                               uint8
    seed        (1,), or a number                                                       uint64
    ==========  ======================================================================  ==================

    Sequences may also be packed end to end in arrays with one batch entry. With ``config.split``, out and lse hold
    partial results in the compute type, part after part along the first axis; lse holds the maxima of the scores in
    base 2, followed by as many sums.
    """
    number = functions(config.dtype).compute
    scores = config.scores
    bias_load = functions(scores.bias or config.dtype).load
    block_m, block_n, chunk, chunk_v, slab = _tiles(config)
    stride, stride_p = config.stride, config.stride_p
    n_staged, n_p = config.staged, block_m * stride_p
    staged_k = block_m * stride  # K follows Q
    my_rows, my_keys, my_columns = block_m // ROWS, block_n // ROW_THREADS, slab // ROW_THREADS

    capped, with_sinks, with_alibi = scores.softcap, scores.sinks, scores.alibi
    with_bias, with_blocks = bool(scores.bias), scores.block_mask
    with_dropout, keep = bool(scores.dropout), keeper(scores.dropout)
    masked, paged, split = config.masked, config.paged, config.split
    quantized, n_scales = bool(config.codes), block_n if config.codes else 1
    in_powers_of_e = config.in_powers_of_e
    exp2, tanh = (libdevice.exp2, libdevice.tanh) if number is float64 else (libdevice.exp2f, libdevice.tanhf)
    # The lowest finite bias times log2(e) must stay finite, since only -inf hides a key.
    lowest = -1.2e308 if number is float64 else -2.28e38
    store = _same if split else functions(config.out).store
    lse_number = float64 if config.wide_lse else number
    log2 = libdevice.log2 if lse_number is float64 else libdevice.log2f
    infinity, zero = float("inf"), 0.0

    stage_q = stager(config.dtype, THREADS, block_m, chunk, stride)
    stage_k = stager(config.codes or config.dtype, THREADS, block_n, chunk, stride)
    stage_v = stager(config.codes or config.dtype, THREADS, chunk_v, slab, slab)
    multiply = scorer(number, block_m, block_n, chunk, stride)
    weigh = weigher(number, my_rows, my_keys, my_columns, stride_p)
    accumulate, accumulate_seen = accumulators(number, my_rows, my_columns, chunk_v, slab, stride_p)

    def attention_forward(
        q, k, v, out, lse, sequences, k_scale, v_scale, table, alibi, sinks, bias, visible, seed,
        scale, softcap, dropout_p, ahead, query0, key0, left, right, block_q, block_k, n_parts,
    ):  # fmt: skip
        staged = cuda.shared.array(n_staged, number, alignment=16)  # Q and K, later V
        p = cuda.shared.array(n_p, number, alignment=16)
        q_offset = cuda.shared.array(block_m, int64)  # byte offset of a row in its array
        k_offset = cuda.shared.array(block_n, int64)
        v_offset = cuda.shared.array(block_n, int64)
        k_scales = cuda.shared.array(n_scales, number)  # of quantized keys; else not read
        v_scales = cuda.shared.array(n_scales, number)
        query_of = cuda.shared.array(block_m, int32)
        head_of = cuda.shared.array(block_m, int32)
        s = cuda.local.array((my_rows, my_keys), number)
        o = cuda.local.array((my_rows, my_columns), number)
        row_max = cuda.local.array(my_rows, number)
        row_sum = cuda.local.array(
            my_rows, number
        )  # over this thread's keys; 16 threads add theirs at the end
        thread = uint32(cuda.threadIdx.x)
        r, c = thread // uint32(ROW_THREADS), thread % uint32(ROW_THREADS)

        # The rows, keys and columns of this block.
        batch, nheads_kv, head_dim, head_dim_v = sequences.shape[0], k.shape[2], q.shape[3], v.shape[3]
        n_slabs = (head_dim_v + slab - 1) // slab
        group = int32(q.shape[2] // nheads_kv)
        x = int64(cuda.blockIdx.x)
        first_column, x = x % n_slabs * slab, x // n_slabs
        head_kv, x = x % nheads_kv, x // nheads_kv
        b, x = x % batch, x // batch
        part, x = x % n_parts, x // n_parts
        n_blocks = cuda.gridDim.x // (n_slabs * nheads_kv * batch * n_parts)
        # The last rows first: in a causal problem they see the most keys.
        first_row = int32(n_blocks - 1 - x) * int32(block_m)
        q_start, q_len, k_start, k_len = sequences[b, 0], sequences[b, 1], sequences[b, 2], sequences[b, 3]
        n_rows = int32(q_len) * group
        if first_row >= n_rows:  # a shorter sequence of the batch
            return
        q_batch = b if q.shape[0] > 1 else int64(0)  # one entry: the only sequence, or all end to end
        k_batch = b if k.shape[0] > 1 else int64(0)
        if thread < block_m:
            row = min(
                first_row + int32(thread), n_rows - 1
            )  # past the end: repeat the last row, do not store it
            query, head = row // group, int32(head_kv) * group + row % group
            query_of[thread], head_of[thread] = query, head
            q_offset[thread] = q_batch * q.strides[0] + (q_start + query) * q.strides[1] + head * q.strides[2]

        # The keys that any of its rows sees. The last query is aligned with the last key.
        diagonal = int32(k_len - q_len)
        begin, end = int32(0), int32(k_len)
        if masked:
            begin = int32(max(begin, first_row // group + diagonal - left))
            end = int32(min(end, (min(first_row + block_m, n_rows) - 1) // group + diagonal + right + 1))
        if split:
            tiles = (max(end - begin, 0) + block_n - 1) // block_n
            each = (tiles + n_parts - 1) // n_parts * block_n
            begin = int32(begin + part * each)
            end = int32(min(end, begin + each))

        for i in range(my_rows):
            row_max[i], row_sum[i] = -infinity, zero
            for t in range(my_columns):
                o[i, t] = zero
        special = False  # V was not finite somewhere
        cuda.syncthreads()

        for first in range(begin, end, block_n):
            # 1. Locate the tile's keys. Past the end, repeat the last one; it is masked below.
            if with_blocks:
                seen = uint32(0)
                for i in range(my_rows):
                    for j in range(my_keys):
                        query, key = query_of[r + i * ROWS], min(first + c + j * ROW_THREADS, end - 1)
                        see = visible[b, head_of[r + i * ROWS], query // block_q, key // block_k] != 0
                        seen |= uint32(see) << uint32(i * my_keys + j)
                if cuda.syncthreads_or(int32(seen)) == 0:
                    continue
            if thread < block_n:
                key = min(first + int32(thread), end - 1)
                place, entry = k_start + key, k_batch
                if paged:
                    place, entry = int64(key % k.shape[1]), int64(table[b, key // k.shape[1]])
                k_offset[thread] = entry * k.strides[0] + place * k.strides[1] + head_kv * k.strides[2]
                v_offset[thread] = entry * v.strides[0] + place * v.strides[1] + head_kv * v.strides[2]
                if quantized:
                    k_scales[thread] = k_scale[entry, place, head_kv]
                    v_scales[thread] = v_scale[entry, place, head_kv]

            # 2. S = Q K^T.
            for i in range(my_rows):
                for j in range(my_keys):
                    s[i, j] = zero
            for column in range(0, head_dim, chunk):
                cuda.syncthreads()  # no thread reads the staged data any more
                stage_q(staged, 0, q, q_offset, 0, column, head_dim, q.strides[3])
                stage_k(staged, staged_k, k, k_offset, 0, column, head_dim, k.strides[3], k_scales)
                cuda.syncthreads()
                multiply(s, staged, r, c)

            # 3. Scores: scale, softcap, ALiBi, bias, masks.
            for i in range(my_rows):
                query, head = query_of[r + i * ROWS], head_of[r + i * ROWS]
                low, high = begin, end
                if masked:
                    low = int32(query + diagonal - left)
                    high = min(end, int32(query + diagonal + right + 1))
                for j in range(my_keys):
                    key = int32(first + c + j * ROW_THREADS)
                    score = s[i, j] * scale
                    hide = key < low or key >= high
                    if capped:
                        score = softcap * tanh(score / softcap)
                    if with_alibi:
                        score -= number(alibi[b, head]) * number(abs(query + diagonal + ahead - key))
                    if with_bias:
                        added = number(bias_load(bias[b, head, query, min(key, end - 1)]))
                        hide = hide or added == -infinity
                        score += number(lowest) if added < number(lowest) else added
                    if in_powers_of_e:
                        score *= number(LOG2E)
                    if with_blocks:
                        hide = hide or (seen >> uint32(i * my_keys + j)) & uint32(1) == 0
                    s[i, j] = -infinity if hide else score

            # 4. P and l from S; O and l follow the new maximum.
            weigh(s, p, o, row_max, row_sum, special, r, c)
            if with_dropout:
                for i in range(my_rows):
                    row = r + i * ROWS
                    query = query0 + query_of[row]
                    for j in range(my_keys):
                        key, at = key0 + first + c + j * ROW_THREADS, row * stride_p + c + j * ROW_THREADS
                        if p[at] != 0 and not keep(seed, dropout_p, b, head_of[row], query, key):
                            p[at] = zero

            # 5. O += P V. A weight of -0 marks a hidden key, whose value must not count, not even if it is NaN.
            for first_v in range(0, block_n, chunk_v):
                cuda.syncthreads()
                finite = stage_v(
                    staged, 0, v, v_offset, first_v, first_column, head_dim_v, v.strides[3], v_scales
                )
                if cuda.syncthreads_and(int32(finite)):
                    accumulate(o, p, staged, first_v, r, c)
                else:
                    accumulate_seen(o, p, staged, first_v, r, c)
                    special = True
            cuda.syncthreads()  # no thread reads the tables or P any more

        # lse, and the factor for O. A sink is one more score, of a key without a value.
        entry = part * q.shape[0] + q_batch if split else q_batch
        for i in range(my_rows):
            for distance in (8, 4, 2, 1):
                row_sum[i] += cuda.shfl_xor_sync(WARP, row_sum[i], distance)
            top, total, factor = row_max[i], row_sum[i], number(1.0)
            head, at = head_of[r + i * ROWS], q_start + query_of[r + i * ROWS]
            if with_sinks:
                sink = number(sinks[head]) * number(LOG2E)
                top = max(row_max[i], sink)
                base = top if top > -infinity else number(zero)
                factor = exp2(row_max[i] - base)
                total = total * factor + exp2(sink - base)
            blind = total == zero
            row_sum[i] = number(zero) if blind else factor / total
            if with_dropout:
                row_sum[i] /= number(1.0) - dropout_p
            if c == 0 and first_column == 0 and first_row + r + i * ROWS < n_rows:
                if split:
                    lse[entry, head, at], lse[n_parts * q.shape[0] + entry, head, at] = top, total
                else:
                    lse[entry, head, at] = (
                        -infinity if blind else (lse_number(top) + log2(lse_number(total))) * lse_number(LN2)
                    )

        across = ROW_THREADS * out.strides[3]
        # out = O / l, in a separate loop: a longer one would not be unrolled, and O would leave the registers.
        for i in range(my_rows):
            row = r + i * ROWS
            if first_row + row < n_rows:
                begins = entry * out.strides[0] + head_of[row] * out.strides[2]
                begins += (q_start + query_of[row]) * out.strides[1] + (first_column + c) * out.strides[3]
                for t in range(my_columns):
                    if first_column + c + t * ROW_THREADS < head_dim_v:
                        x = o[i, t] * row_sum[i] if abs(o[i, t]) < infinity else o[i, t]
                        store_at(out, begins + t * across, store(x))

    return NumbaKernel(attention_forward, _signature(config), config.label)


@cuda.jit(device=True)
def _same(value):
    return value


def _tiles(config):
    return config.block_m, config.block_n, config.chunk, config.chunk_v, config.slab


def _signature(config: NumbaForwardConfig) -> str:
    f = functions(config.dtype)
    computed, scores = str(f.compute), config.scores
    result, statistics = functions(config.out).element, f.statistics
    if config.split:
        result = statistics = computed
    elif config.wide_lse:
        statistics = "float64"
    rank4 = "[:, :, :, :]"
    optional = {
        "int32[:, :]": config.paged,
        "float32[:, :]": scores.alibi,
        "float32[:]": scores.sinks,
        (functions(scores.bias).element if scores.bias else "") + rank4: scores.bias,
        "uint8" + rank4: scores.block_mask,
        SEED_TYPES[scores.dropout]: scores.dropout,
    }
    pages = functions(config.codes or config.dtype).element + rank4
    scales = ["float32[:, :, :]" if config.codes else "int32"] * 2
    arrays = [
        f.element + rank4,
        pages,
        pages,
        result + rank4,
        statistics + "[:, :, :]",
        "int64[:, ::1]",
        *scales,
    ]
    arrays += [array if present else "int32" for array, present in optional.items()]
    return f"void({', '.join([*arrays, *[computed] * 3, *['int32'] * 8])})"
