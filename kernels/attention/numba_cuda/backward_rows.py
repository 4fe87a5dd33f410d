"""Row statistics for the gradients of attention (a row is a query of a head), and gradients of sinks. For Numba.

    top, rest:   P = exp2(s - top - rest), s in units of log2
    delta:       rowsum(dO O)

top is lse in the computing dtype, and rest is its rounding error, unless lse is too coarse. If all 100 keys
of a row have a bias of -1e9, lse is -1e9 + log(100), which float32 rounds to -1e9, and each key would weigh 1 instead
of 1/100. For such a row the kernel walks over the keys: top is the largest score, and rest the log2 of the sum of all
weights relative to it.

A float32 dout with 16-bit inputs is first rounded to their dtype: delta then comes from the dout that dP uses.
Delta is summed over columns in order, by multiply-adds, as dP is. So the two cancel exactly where a row sees one key.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64, int32, int64
from numba.cuda import libdevice

from gpu_ops.kernels.attention.numba_cuda.backward_config import RESOLUTION, NumbaBackwardProblem
from gpu_ops.kernels.attention.numba_cuda.backward_tile import scorers, signature, span
from gpu_ops.kernels.attention.numba_cuda.config import LOG2E, THREADS
from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.memory import stager, take
from gpu_ops.kernels.common.numba_cuda.reduce import WARPS, over_block, plus
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["SINK_THREADS", "rounding_kernel", "rows_kernel", "sinks_kernel"]

SINK_THREADS = 32 * WARPS
CHUNK = {
    4: 32,
    8: 16,
}  # columns of dO and O in shared memory at a time, by itemsize: 128 rows of each take 34 KB


@cache
def rows_kernel(
    problem: NumbaBackwardProblem, with_sinks: bool, lse_dtype: str, out_dtype: str, delta_given: bool = False
) -> NumbaKernel:
    """Kernel for statistics (3, batch, nheads, seqlen_q): top, rest, delta. A block has 128 queries of a head.

    ``delta``: 0 if it is not given; if it is, ``out`` is not read.
    """
    f, number = functions(problem.dtype), functions(problem.dtype).compute
    lse_number = functions(lse_dtype).compute
    load, masked, with_blocks = f.load, problem.masked, problem.scores.block_mask
    with_dropout = bool(problem.scores.dropout)
    cap_product, add_terms = scorers(problem)
    exp2, log2, fma = libdevice.exp2f, libdevice.log2f, libdevice.fmaf
    if number is float64:
        exp2, log2, fma = libdevice.exp2, libdevice.log2, libdevice.fma
    infinity, chunk = float("inf"), CHUNK[problem.itemsize]
    stride = chunk + 1  # threads read a column: 32 banks
    n_numbers, n_places = THREADS * stride, 2 * THREADS
    stage = stager(problem.dtype, THREADS, THREADS, chunk, stride)
    stage_out = stager(out_dtype, THREADS, THREADS, chunk, stride)

    @cuda.jit(device=True)
    def walk(
        q, k, sink, sequences, options, visible, b, entry, k_batch, head, query, left, right, block_q, block_k
    ):
        """The largest score of a row, sink included, and the log2 of the sum of weights relative to it."""
        q_start, q_len, k_start, k_len = sequences[b, 0], sequences[b, 1], sequences[b, 2], sequences[b, 3]
        head_kv, diagonal = head // (q.shape[2] // k.shape[2]), int32(k_len - q_len)
        low, high = span(masked, query, diagonal, left, right, k_len)
        top, total = sink * number(LOG2E), number(1.0) if sink > -infinity else number(0.0)
        for key in range(max(low, 0), high):
            hide = False
            if with_blocks:
                hide = visible[b, head, query // block_q, key // block_k] == 0
            if not hide:
                product = number(0.0)
                for d in range(q.shape[3]):
                    x = load(q[entry, q_start + query, head, d])
                    product = fma(x, load(k[k_batch, k_start + key, head_kv, d]), product)
                score, _ = cap_product(product, options)
                score = add_terms(score, options, b, head, query, int32(key), diagonal, hide)
                if score != -infinity:
                    if score > top:
                        total *= exp2(top - score)
                        top = score
                    total += exp2(score - top)
        return top, log2(total) if total > 0 else number(0.0)

    def attention_backward_rows(
        dout, q, k, out, lse, delta_, sinks, statistics, sequences, alibi, bias, visible, seed,
        scale, cap, dropout_p, ahead, query0, key0, left, right, block_q, block_k,
    ):  # fmt: skip
        gradients = cuda.shared.array(n_numbers, number, alignment=16)
        results = cuda.shared.array(n_numbers, number, alignment=16)
        places = cuda.shared.array(n_places, int64)  # bytes: rows of dout, then of out
        thread, x = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        batch, nheads = sequences.shape[0], q.shape[2]
        head, x = x % nheads, x // nheads
        b, x = x % batch, x // batch
        first = int32(x) * int32(THREADS)
        q_start, q_len = sequences[b, 0], sequences[b, 1]
        if first >= q_len:
            return
        entry = b if q.shape[0] > 1 else int64(0)
        query = min(first + int32(thread), int32(q_len) - 1)
        at = q_start + query
        places[thread] = entry * dout.strides[0] + at * dout.strides[1] + head * dout.strides[2]
        places[THREADS + thread] = entry * out.strides[0] + at * out.strides[1] + head * out.strides[2]

        delta, dim = number(0.0), out.shape[3]
        if delta_given:
            delta = delta_[entry, head, at]
        for column in range(0, 0 if delta_given else dim, chunk):
            cuda.syncthreads()
            stage(gradients, 0, dout, places, 0, column, dim, dout.strides[3])
            stage_out(results, 0, out, places, THREADS, column, dim, out.strides[3])
            cuda.syncthreads()
            for d in range(chunk):
                delta = fma(take(gradients, thread * stride + d), take(results, thread * stride + d), delta)

        if first + int32(thread) < q_len:
            natural = lse[entry, head, at]
            exact, base2 = float64(natural) * LOG2E, natural * lse_number(LOG2E)
            top, rest = number(exact), number(0.0)
            if abs(top) < infinity:
                rest = number(exact - float64(top))
            if base2 + lse_number(RESOLUTION) == base2 and abs(base2) < infinity:
                k_batch = b if k.shape[0] > 1 else int64(0)
                sink = number(sinks[head]) if with_sinks else number(-infinity)
                options = (scale, cap, ahead, alibi, bias, seed, dropout_p, query0, key0)
                top, rest = walk(
                    q, k, sink, sequences, options, visible, b, entry, k_batch, int32(head), query, left, right,
                    block_q, block_k,
                )  # fmt: skip
            if with_dropout:  # P includes 1 / (1 - dropout_p), and delta its inverse: see differentiator
                kept = number(1.0) - dropout_p
                rest, delta = rest + log2(kept), delta * kept
            statistics[0, entry, head, at] = top
            statistics[1, entry, head, at] = rest
            statistics[2, entry, head, at] = delta

    rank3 = "[:, :, :]"
    more = (
        functions(out_dtype).element + "[:, :, :, :]",
        str(lse_number) + rank3,
        str(number) + rank3 if delta_given else "int32",
        "float32[:]" if with_sinks else "int32",
    )
    words = [*["sinks"] * with_sinks, *["delta"] * delta_given, f"lse {lse_dtype}", f"out {out_dtype}"]
    name = f"attention_backward_rows[{','.join([problem.label, *words])}]"
    return NumbaKernel(attention_backward_rows, signature(problem, f.element, 3, *more), name)


@cache
def rounding_kernel(dtype: str) -> NumbaKernel:
    """Kernel that rounds a float32 dout (batch, seqlen_q, nheads, head_dim_v) to ``dtype``, an element per thread."""
    store = functions(dtype).store

    def attention_backward_round(dout, rounded):
        batch, seqlen_q, nheads, dim = dout.shape
        x = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if x >= batch * seqlen_q * nheads * dim:
            return
        column, x = x % dim, x // dim
        head, x = x % nheads, x // nheads
        query, b = x % seqlen_q, x // seqlen_q
        rounded[b, query, head, column] = store(dout[b, query, head, column])

    types = f"void(float32[:, :, :, :], {functions(dtype).element}[:, :, :, ::1])"
    return NumbaKernel(attention_backward_round, types, f"attention_backward_round[{dtype}]")


@cache
def sinks_kernel(dtype: str) -> NumbaKernel:
    """Kernel for dsinks (nheads,) = -sum of exp(sink - lse) delta over the rows of a head. A block has a head.

    d lse / d sink is the sink's probability; the sink has no value, so only -delta remains. The order is fixed.
    """
    number = functions(dtype).compute
    add_up, log2e = over_block(plus), LOG2E

    def attention_backward_sinks(sinks, statistics, dsinks):
        scratch = cuda.shared.array(WARPS, float64)
        head, batch, seqlen = cuda.blockIdx.x, statistics.shape[1], statistics.shape[3]
        sink, total = float64(sinks[head]), 0.0
        for i in range(cuda.threadIdx.x, batch * seqlen, SINK_THREADS):
            b, at = i // seqlen, i % seqlen
            top = float64(statistics[0, b, head, at])
            if top != -math.inf:  # otherwise the sink is -inf as well
                share = libdevice.exp2(sink * log2e - top - statistics[1, b, head, at])
                total += share * statistics[2, b, head, at]
        total = add_up(total, scratch)
        if cuda.threadIdx.x == 0:
            dsinks[head] = number(-total)

    types = f"void(float32[:], {number}[:, :, :, ::1], {functions(dtype).statistics}[:])"
    return NumbaKernel(attention_backward_sinks, types, f"attention_backward_sinks[{dtype}]")
