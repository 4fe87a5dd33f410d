"""Gradient of attention's bias for Numba: dS, summed over the axes along which the bias was broadcast.

    dbias = sum over batch, heads, queries or keys of P (dP - delta)

A block owns a tile of dbias: 64 queries by 64 keys of one head and batch entry, or, of an axis of length 1, that one
element. It computes P and dS as the kernels of backward.py do, for one *unit* after the other: every tile
of heads, batch entries, queries and keys whose gradients add to what it owns. Each thread sums its pairs in
registers; at the end the block sums over the rows or keys of the tile. 4 flops per query, key and column.

Where blocks are few, as for a bias of (1, 1, 1, seqlen_k), the units are divided into parts with a block each, and a
second kernel adds the parts. All sums have a fixed order.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int32, int64, uint32

from gpu_ops.kernels.attention.numba_cuda.backward_config import NumbaBackwardConfig
from gpu_ops.kernels.attention.numba_cuda.backward_tile import (
    differentiator,
    keys_locator,
    looker,
    multiplier,
    queries_locator,
    signature,
)
from gpu_ops.kernels.attention.numba_cuda.config import ROW_THREADS, ROWS, THREADS
from gpu_ops.kernels.attention.numba_cuda.tile import WARP
from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["bias_kernel", "bias_sum_kernel"]


@cache
def bias_kernel(config: NumbaBackwardConfig, sum_queries: bool, sum_keys: bool) -> NumbaKernel:
    """Kernel for parts of dbias (parts, batch or 1, nheads or 1, seqlen_q or 1, seqlen_k or 1).

    ``batch_axis``, ``nheads_axis``: the lengths of these axes of dbias. The other arguments are those of
    ``queries_kernel``. Sequences have one length each for queries and keys.
    """
    block_m, block_n = config.block_m, config.block_n
    (my_rows, my_keys), stride_p = config.tile, config.stride_p
    n_staged, n_p = config.staged, block_m * stride_p
    f, number = functions(config.problem.dtype), functions(config.problem.dtype).compute
    n_stats, n_queries, n_keys = 3 * block_m, 2 * block_m, 2 * block_n
    masked, with_blocks, zero = config.problem.masked, config.problem.scores.block_mask, 0.0
    locate_rows, locate_keys = queries_locator(block_m), keys_locator(block_n)
    look, products = looker(config), multiplier(config)
    differentiate = differentiator(config, with_slope=False)
    stored_rows, stored_keys = 1 if sum_queries else my_rows, 1 if sum_keys else my_keys

    @cuda.jit(device=True, forceinline=True)
    def add_up(sums, p, r, c):
        """Sums over the keys and rows of the tile, where dbias has one, in column or row 0 of ``sums``."""
        if sum_keys:
            for i in range(my_rows):
                for j in range(1, my_keys):
                    sums[i, 0] += sums[i, j]
                for distance in (8, 4, 2, 1):
                    sums[i, 0] += cuda.shfl_xor_sync(WARP, sums[i, 0], distance)
        if sum_queries:
            for j in range(stored_keys):
                for i in range(1, my_rows):
                    sums[0, j] += sums[i, j]
                p[r * stride_p + c + j * ROW_THREADS] = sums[0, j]
            cuda.syncthreads()
            for j in range(stored_keys):
                sums[0, j] = zero
                for other in range(ROWS):
                    sums[0, j] += p[other * stride_p + c + j * ROW_THREADS]

    def attention_backward_bias(
        dout, q, k, v, parts, batch_axis, nheads_axis, statistics, sequences, alibi, bias, visible, seed,
        scale, cap, dropout_p, ahead, query0, key0, left, right, block_q, block_k,
    ):  # fmt: skip
        staged = cuda.shared.array(n_staged, number, alignment=16)
        p = cuda.shared.array(n_p, number, alignment=16)
        stats = cuda.shared.array(n_stats, number)
        query_places = cuda.shared.array(n_queries, int64)
        key_places = cuda.shared.array(n_keys, int64)
        query_of = cuda.shared.array(block_m, int32)
        head_of = cuda.shared.array(block_m, int32)
        s = cuda.local.array((my_rows, my_keys), number)
        dp = cuda.local.array((my_rows, my_keys), number)
        sums = cuda.local.array((my_rows, my_keys), number)
        thread = uint32(cuda.threadIdx.x)
        r, c = thread // uint32(ROW_THREADS), thread % uint32(ROW_THREADS)
        options = (scale, cap, ahead, alibi, bias, seed, dropout_p, query0, key0)

        batch, seqlen_q, nheads, seqlen_k = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
        group = int32(nheads // k.shape[2])
        tiles_q, tiles_k = (seqlen_q + block_m - 1) // block_m, (seqlen_k + block_n - 1) // block_n
        diagonal, n_rows, end = int32(seqlen_k - seqlen_q), int32(seqlen_q), int32(seqlen_k)

        # The tile of dbias that this block has, and its part of the units.
        x = int64(cuda.blockIdx.x)
        owned_k, owned_q = int64(1) if sum_keys else tiles_k, int64(1) if sum_queries else tiles_q
        tile_k, x = x % owned_k, x // owned_k
        tile_q, x = x % owned_q, x // owned_q
        head_axis, x = x % nheads_axis, x // nheads_axis
        b_axis, part = x % batch_axis, x // batch_axis
        each_k, each_q = tiles_k if sum_keys else int64(1), tiles_q if sum_queries else int64(1)
        each_head, each_b = nheads // nheads_axis, batch // batch_axis
        units = each_k * each_q * each_head * each_b
        n_parts = parts.shape[0] // batch_axis
        first_unit, last_unit = part * units // n_parts, (part + 1) * units // n_parts

        for i in range(my_rows):
            for j in range(my_keys):
                sums[i, j] = zero
        for unit in range(first_unit, last_unit):
            unit_k, y = unit % each_k, unit // each_k
            unit_q, y = y % each_q, y // each_q
            h, b = head_axis + y % each_head, b_axis + y // each_head  # all units, for an axis of length 1
            first = int32(tile_q + unit_q) * int32(block_m)
            first_key = int32(tile_k + unit_k) * int32(block_n)
            if masked:
                last_key = int32(min(first + block_m, n_rows) - 1 + diagonal + right)
                if first_key > last_key or first_key + block_n <= first + diagonal - left:
                    continue
            cuda.syncthreads()  # no thread reads the last tile's tables any more
            locate_rows(
                query_places, query_of, head_of, stats, q, dout, statistics, first, n_rows, int32(1), h, b, int64(0)
            )  # fmt: skip
            seen = uint32(0)
            if with_blocks:
                cuda.syncthreads()
                seen = look(visible, b, query_of, head_of, first_key, end, block_q, block_k, r, c)
                if cuda.syncthreads_or(int32(seen)) == 0:
                    continue
            locate_keys(key_places, k, v, first_key, end, h // group, b, int64(0))
            products(s, staged, q, query_places, 0, k, key_places, 0, r, c)
            products(dp, staged, dout, query_places, block_m, v, key_places, block_n, r, c)
            differentiate(
                s, dp, options, stats, query_of, head_of, b, first, n_rows, first_key, end, diagonal, left, right,
                seen, r, c,
            )  # fmt: skip
            for i in range(my_rows):
                for j in range(my_keys):
                    sums[i, j] += dp[i, j]

        add_up(sums, p, r, c)
        entry = part * batch_axis + b_axis
        for i in range(stored_rows):
            for j in range(stored_keys):
                query = int64(0) if sum_queries else tile_q * block_m + r + i * ROWS
                key = int64(0) if sum_keys else tile_k * block_n + c + j * ROW_THREADS
                mine = (not sum_queries or r == 0) and (not sum_keys or c == 0)
                if mine and query < parts.shape[2] and key < parts.shape[3]:
                    parts[entry, head_axis, query, key] = sums[i, j]

    words = [config.problem.label, *["sum queries"] * sum_queries, *["sum keys"] * sum_keys]
    types = signature(config.problem, f.element, 4, f"{number}[:, :, :, ::1]", "int32", "int32")
    return NumbaKernel(attention_backward_bias, types, f"attention_backward_bias[{','.join(words)}]")


@cache
def bias_sum_kernel(dtype: str, bias: str) -> NumbaKernel:
    """dbias (batch, nheads, seqlen_q, seqlen_k) in the bias' dtype, from its parts. A thread has an element."""
    number, store = functions(dtype).compute, functions(bias).store

    def attention_backward_bias_sum(parts, dbias):
        batch, nheads, seqlen_q, seqlen_k = dbias.shape
        x = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if x >= batch * nheads * seqlen_q * seqlen_k:
            return
        key, x = x % seqlen_k, x // seqlen_k
        query, x = x % seqlen_q, x // seqlen_q
        head, b = x % nheads, x // nheads
        total = number(0.0)
        for part in range(parts.shape[0] // batch):
            total += parts[part * batch + b, head, query, key]
        dbias[b, head, query, key] = store(total)

    types = f"void({number}[:, :, :, ::1], {functions(bias).element}[:, :, :, :])"
    return NumbaKernel(attention_backward_bias_sum, types, f"attention_backward_bias_sum[{dtype},{bias}]")
