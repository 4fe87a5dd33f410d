"""Gradients of attention for Numba, in tiles. The readable twin of the CUDA C++ kernels.

    P  = exp(s - lse)                       s: the scores, rounded as in forward.py
    dP = dO V^T,   dS = P (dP - delta)      delta = rowsum(dO O)
    dV = P^T dO
    dZ = dS (1 - tanh(z / cap)^2)       without a cap dS itself
    dQ = softmax_scale dZ K,   dK = softmax_scale dZ^T Q

Nothing of size seqlen_q x seqlen_k is stored: P is computed again from q, k and lse. There are two kernels. In the
first, a block owns queries, walks over keys and sums dQ. In the second it owns keys, walks over queries and sums dK
and dV. A sum belongs to one block, which adds it up in registers in a fixed order: no atomics, the same bits each
time. The price is that S and dP are computed twice, seven matrix products instead of five: 14 flops per query, key
and column.

As in forward.py, a row is a query of one of the heads that share a key head. A block that owns keys sums over the
whole group, so dK and dV need no further reduction. :mod:`.backward_rows` computes delta ahead,
:mod:`.backward_tile` has the steps, :mod:`.backward_bias` computes the gradient of the bias.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int32, int64, uint32

from gpu_ops.kernels.attention.numba_cuda.backward_config import NumbaBackwardConfig
from gpu_ops.kernels.attention.numba_cuda.backward_tile import (
    accumulator,
    differentiator,
    keys_locator,
    looker,
    multiplier,
    queries_locator,
    signature,
)
from gpu_ops.kernels.attention.numba_cuda.config import LOG2E, ROW_THREADS, ROWS
from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.memory import load_at, store_at
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["keys_kernel", "queries_kernel"]


@cache
def writer(dtype: str, add: bool):
    """Device function that writes a number in the dtype of gradients, or adds it to the stored value."""
    f = functions(dtype)

    @cuda.jit(device=True, forceinline=True)
    def write(x, at, value):
        store_at(x, at, f.store(f.load(load_at(x, at)) + value if add else value))

    return write


@cache
def queries_kernel(config: NumbaBackwardConfig, grads: str, added: bool = False) -> NumbaKernel:
    """Kernel for dQ. Arrays are those of ``forward_kernel``, and ``statistics`` (3, batch, nheads, seqlen_q) by
    :mod:`.backward_rows`. Pass 0 for an array that the kernel does not use. ``grads``: the dtype of dQ;
    ``added``: add to its contents.
    """
    block_m, block_n, slab = config.block_m, config.block_n, config.slab
    (my_rows, my_keys), my_columns = config.tile, slab // ROW_THREADS
    n_staged, n_p = config.staged, block_m * config.stride_p
    f, number = functions(config.problem.dtype), functions(config.problem.dtype).compute
    unit = 1 / LOG2E if config.problem.scores.plain else 1.0
    n_stats, n_queries, n_keys = 3 * block_m, 2 * block_m, 2 * block_n
    masked, with_blocks, zero = config.problem.masked, config.problem.scores.block_mask, 0.0
    locate_rows, locate_keys = queries_locator(block_m), keys_locator(block_n)
    look, products, add = looker(config), multiplier(config), accumulator(config)
    differentiate, write = differentiator(config), writer(grads, added)

    def attention_backward_queries(
        dout, q, k, v, dq, statistics, sequences, alibi, bias, visible, seed,
        scale, cap, dropout_p, ahead, query0, key0, left, right, block_q, block_k,
    ):  # fmt: skip
        staged = cuda.shared.array(n_staged, number, alignment=16)
        p = cuda.shared.array(n_p, number, alignment=16)
        stats = cuda.shared.array(n_stats, number)
        query_places = cuda.shared.array(n_queries, int64)  # bytes: rows of q, then of dout
        key_places = cuda.shared.array(n_keys, int64)  # of k, then of v
        query_of = cuda.shared.array(block_m, int32)
        head_of = cuda.shared.array(block_m, int32)
        s = cuda.local.array((my_rows, my_keys), number)
        dp = cuda.local.array((my_rows, my_keys), number)
        o = cuda.local.array((my_rows, my_columns), number)
        thread = uint32(cuda.threadIdx.x)
        r, c = thread // uint32(ROW_THREADS), thread % uint32(ROW_THREADS)
        factor = scale * number(unit)  # the product's own
        options = (scale, cap, ahead, alibi, bias, seed, dropout_p, query0, key0)

        # The rows and columns of this block.
        batch, nheads_kv, head_dim = sequences.shape[0], k.shape[2], q.shape[3]
        n_slabs = (head_dim + slab - 1) // slab
        group = int32(q.shape[2] // nheads_kv)
        x = int64(cuda.blockIdx.x)
        first_column, x = x % n_slabs * slab, x // n_slabs
        head_kv, x = x % nheads_kv, x // nheads_kv
        b, x = x % batch, x // batch
        n_blocks = cuda.gridDim.x // (n_slabs * nheads_kv * batch)
        # The last rows first: in a causal problem they see the most keys.
        first = int32(n_blocks - 1 - x) * int32(block_m)
        q_start, q_len, k_start, k_len = sequences[b, 0], sequences[b, 1], sequences[b, 2], sequences[b, 3]
        n_rows = int32(q_len) * group
        if first >= n_rows:  # a shorter sequence of the batch
            return
        q_batch = b if q.shape[0] > 1 else int64(0)  # one entry: the only sequence, or all end to end
        k_batch = b if k.shape[0] > 1 else int64(0)
        diagonal = int32(k_len - q_len)
        head = head_kv * group
        locate_rows(
            query_places, query_of, head_of, stats, q, dout, statistics, first, n_rows, group, head, q_batch, q_start
        )  # fmt: skip

        # The keys that any of its rows sees.
        begin, end = int32(0), int32(k_len)
        if masked:
            begin = int32(max(begin, first // group + diagonal - left))
            end = int32(min(end, (min(first + block_m, n_rows) - 1) // group + diagonal + right + 1))
        for i in range(my_rows):
            for t in range(my_columns):
                o[i, t] = zero
        cuda.syncthreads()

        for first_key in range(begin, end, block_n):
            seen = uint32(0)
            if with_blocks:
                seen = look(visible, b, query_of, head_of, first_key, end, block_q, block_k, r, c)
                if cuda.syncthreads_or(int32(seen)) == 0:
                    continue
            cuda.syncthreads()  # no thread reads the last tile's places any more
            locate_keys(key_places, k, v, first_key, end, head_kv, k_batch, k_start)
            products(s, staged, q, query_places, 0, k, key_places, 0, r, c)
            products(dp, staged, dout, query_places, block_m, v, key_places, block_n, r, c)
            differentiate(
                s, dp, options, stats, query_of, head_of, b, first, n_rows, first_key, end, diagonal, left, right,
                seen, r, c,
            )  # fmt: skip
            add(o, dp, p, staged, k, key_places, 0, first_column, r, c)

        across = ROW_THREADS * dq.strides[3]
        for i in range(my_rows):
            row = r + i * ROWS
            if first + row < n_rows:
                begins = q_batch * dq.strides[0] + head_of[row] * dq.strides[2]
                begins += (q_start + query_of[row]) * dq.strides[1] + (first_column + c) * dq.strides[3]
                for t in range(my_columns):
                    if first_column + c + t * ROW_THREADS < head_dim:
                        write(dq, begins + t * across, o[i, t] * factor)

    name = f"attention_backward_queries[{_label(config, grads, added)}]"
    types = signature(config.problem, f.element, 4, functions(grads).element + "[:, :, :, :]")
    return NumbaKernel(attention_backward_queries, types, name)


def _label(config: NumbaBackwardConfig, grads: str, added: bool) -> str:
    of_their_own = [f"gradients {grads}"] if grads != config.problem.dtype else []
    return ",".join([config.label, *of_their_own, *["added"] * added])


@cache
def keys_kernel(config: NumbaBackwardConfig, grads: str, added: bool = False) -> NumbaKernel:
    """Kernel for dK and dV; the arguments are those of :func:`queries_kernel`."""
    block_m, block_n, slab = config.block_m, config.block_n, config.slab
    (my_keys, my_rows), my_columns = config.tile, slab // ROW_THREADS
    n_staged, n_p = config.staged, block_m * config.stride_p
    f, number = functions(config.problem.dtype), functions(config.problem.dtype).compute
    unit = 1 / LOG2E if config.problem.scores.plain else 1.0
    n_stats, n_queries, n_keys = 3 * block_n, 2 * block_n, 2 * block_m
    masked, with_blocks, zero = config.problem.masked, config.problem.scores.block_mask, 0.0
    locate_rows, locate_keys = queries_locator(block_n), keys_locator(block_m)
    look, products, add = looker(config), multiplier(config), accumulator(config)
    differentiate, write = differentiator(config), writer(grads, added)

    @cuda.jit(device=True, forceinline=True)
    def store(x, sums, factor, first, n, begins, first_column, r, c):
        across = ROW_THREADS * x.strides[3]
        for i in range(my_keys):
            if first + r + i * ROWS < n:
                row = begins + (r + i * ROWS) * x.strides[1] + (first_column + c) * x.strides[3]
                for t in range(my_columns):
                    if first_column + c + t * ROW_THREADS < x.shape[3]:
                        write(x, row + t * across, sums[i, t] * factor)

    def attention_backward_keys(
        dout, q, k, v, dk, dv, statistics, sequences, alibi, bias, visible, seed,
        scale, cap, dropout_p, ahead, query0, key0, left, right, block_q, block_k,
    ):  # fmt: skip
        staged = cuda.shared.array(n_staged, number, alignment=16)
        p = cuda.shared.array(n_p, number, alignment=16)
        stats = cuda.shared.array(n_stats, number)
        query_places = cuda.shared.array(n_queries, int64)  # bytes: rows of q, then of dout
        key_places = cuda.shared.array(n_keys, int64)  # of k, then of v
        query_of = cuda.shared.array(block_n, int32)
        head_of = cuda.shared.array(block_n, int32)
        s = cuda.local.array((my_keys, my_rows), number)  # S^T, dP^T
        dp = cuda.local.array((my_keys, my_rows), number)
        sum_k = cuda.local.array((my_keys, my_columns), number)
        sum_v = cuda.local.array((my_keys, my_columns), number)
        thread = uint32(cuda.threadIdx.x)
        r, c = thread // uint32(ROW_THREADS), thread % uint32(ROW_THREADS)
        factor = scale * number(unit)  # the product's own
        options = (scale, cap, ahead, alibi, bias, seed, dropout_p, query0, key0)

        # The keys and columns of this block. The first keys first: in a causal problem the most rows see them.
        batch, nheads_kv = sequences.shape[0], k.shape[2]
        n_slabs = (max(q.shape[3], v.shape[3]) + slab - 1) // slab
        group = int32(q.shape[2] // nheads_kv)
        x = int64(cuda.blockIdx.x)
        first_column, x = x % n_slabs * slab, x // n_slabs
        head_kv, x = x % nheads_kv, x // nheads_kv
        b, x = x % batch, x // batch
        first_key = int32(x) * int32(block_m)
        q_start, q_len, k_start, k_len = sequences[b, 0], sequences[b, 1], sequences[b, 2], sequences[b, 3]
        end = int32(k_len)
        if first_key >= end:  # a shorter sequence of the batch
            return
        q_batch = b if q.shape[0] > 1 else int64(0)  # one entry: the only sequence, or all end to end
        k_batch = b if k.shape[0] > 1 else int64(0)
        diagonal = int32(k_len - q_len)
        head = head_kv * group
        locate_keys(key_places, k, v, first_key, end, head_kv, k_batch, k_start)

        # The rows that see any of its keys.
        first_query, last_query = int32(0), int32(q_len)
        if masked:
            last_key = min(first_key + block_m, end) - 1
            first_query = int32(min(max(first_query, first_key - diagonal - right), q_len))
            last_query = int32(min(q_len, last_key - diagonal + left + 1))
        n_rows = int32(q_len) * group
        for i in range(my_keys):
            for t in range(my_columns):
                sum_k[i, t] = sum_v[i, t] = zero

        for first in range(first_query * group, last_query * group, block_n):
            cuda.syncthreads()  # no thread reads the last tile's tables any more
            locate_rows(
                query_places, query_of, head_of, stats, q, dout, statistics, first, n_rows, group, head,
                q_batch, q_start,
            )  # fmt: skip
            seen = uint32(0)
            if with_blocks:
                cuda.syncthreads()
                seen = look(visible, b, query_of, head_of, first_key, end, block_q, block_k, r, c)
                if cuda.syncthreads_or(int32(seen)) == 0:
                    continue
            products(s, staged, k, key_places, 0, q, query_places, 0, r, c)
            products(dp, staged, v, key_places, block_m, dout, query_places, block_n, r, c)
            differentiate(
                s, dp, options, stats, query_of, head_of, b, first, n_rows, first_key, end, diagonal, left, right,
                seen, r, c,
            )  # fmt: skip
            if first_column < v.shape[3]:
                add(sum_v, s, p, staged, dout, query_places, block_n, first_column, r, c)
            if first_column < q.shape[3]:
                add(sum_k, dp, p, staged, q, query_places, 0, first_column, r, c)

        begins = k_batch * dk.strides[0] + (k_start + first_key) * dk.strides[1] + head_kv * dk.strides[2]
        store(dk, sum_k, factor, first_key, end, begins, first_column, r, c)
        begins = k_batch * dv.strides[0] + (k_start + first_key) * dv.strides[1] + head_kv * dv.strides[2]
        store(dv, sum_v, number(1.0), first_key, end, begins, first_column, r, c)

    name = f"attention_backward_keys[{_label(config, grads, added)}]"
    types = signature(config.problem, f.element, 4, *[functions(grads).element + "[:, :, :, :]"] * 2)
    return NumbaKernel(attention_backward_keys, types, name)
