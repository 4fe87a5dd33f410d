"""Merging for Numba: attention over two sets of keys (the twin of merge.cu), and over the parts of split-KV (of
combine.cu).

lse = ln(e^lse1 + e^lse2)      out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2

A row (one query of one head) belongs to 16 threads, half a warp; thread c of them owns columns c, c + 16, ... All
read the row's two lse before the first one writes, so that lse1 and out1 may receive the results.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64, int64
from numba.cuda import libdevice

from gpu_ops.kernels.attention.numba_cuda.config import LN2, LOG2E, THREADS
from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["combine_kernel", "merge_kernel"]

LANES = 16


@cache
def merge_kernel(dtype: str, lse1: str, lse2: str, lse: str) -> NumbaKernel:
    """Kernel that merges arrays (outer, middle, inner, cols) and lse (outer, middle, inner), in any strides."""
    load, store, number, element, _ = functions(dtype)
    lse_number = float64 if lse == "float64" else number
    exp, log1p = (libdevice.exp, libdevice.log1p) if number is float64 else (libdevice.expf, libdevice.log1pf)
    minus_infinity = -math.inf

    def attention_merge(out1, lse1, out2, lse2, out, lse):
        _, middle, inner, cols = out.shape
        thread = int64(cuda.grid(1))
        lane, row = thread % LANES, thread // LANES
        exists = row < out.shape[0] * middle * inner
        row = row if exists else int64(0)  # reads the first row, and writes nothing
        i, j, k = row // (middle * inner), row // inner % middle, row % inner
        a, b = lse_number(lse1[i, j, k]), lse_number(lse2[i, j, k])
        difference = b - a if a > b else a - b
        smaller = number(1.0) if a == b else exp(number(difference))  # of the two weights, the larger is 1
        inverse = number(1.0) / (number(1.0) + smaller)
        weight1 = inverse if a >= b else smaller * inverse
        weight2 = inverse if b >= a else smaller * inverse
        cuda.syncwarp()
        if exists and lane == 0:
            lse[i, j, k] = (a if a > b else b) + lse_number(log1p(smaller))
        if exists:
            for c in range(lane, cols, LANES):
                total = number(0.0)
                if a != minus_infinity:
                    total = weight1 * load(out1[i, j, k, c])
                if b != minus_infinity:
                    total += weight2 * load(out2[i, j, k, c])
                out[i, j, k, c] = store(total)

    part = f"{element}[:, :, :, :]"
    signature = f"void({part}, {lse1}[:, :, :], {part}, {lse2}[:, :, :], {part}, {lse}[:, :, :])"
    words = ",".join(dict.fromkeys((dtype, f"lse {lse1}", f"lse {lse2}")))
    return NumbaKernel(attention_merge, signature, f"attention_merge[{words}]")


# Split-KV for Numba: kernel that merges the partial results of attention over parts of the keys.
#
#     l = 2^(sink log2 e - m) + sum over parts of 2^(row_max_p - m) row_sum_p,    m the largest row_max_p,
#                                                                                 or the sink
#     lse = m ln 2 + ln l,    out = sum over parts of 2^(row_max_p - m) row_sum_p / l out_p
#
# A part's lse would not suffice: next to a bias of -1e9 it loses ln(row_sum), and with it the number of keys.
#
# Few queries give too few blocks for a GPU. Then each block gets a part of the keys (flash decoding), and this
# kernel follows. A block takes one query of one head; thread t has columns t, t + 128, ...


@cache
def combine_kernel(dtype: str, sinks: bool, lse: str) -> NumbaKernel:
    """Kernel that combines parts. ``dtype`` and ``lse``: dtypes of the results. ``sinks``: whether there are any.

    Takes ``part_out`` (parts * batch, seqlen_q, nheads, head_dim_v) and the softmax statistics of each row,
    ``row_max_sum`` (2 * parts * batch, nheads, seqlen_q): the largest scores, in base 2, then the sums of powers of 2
    relative to them.
    """
    f, number, with_sinks = functions(dtype), functions(dtype).compute, sinks

    def attention_combine(part_out, row_max_sum, out, lse, sinks):
        weights = cuda.shared.array(THREADS, float64)
        batch, seqlen_q, nheads, head_dim_v = out.shape
        n_parts = part_out.shape[0] // batch
        thread, x = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        head, x = x % nheads, x // nheads
        query, b = x % seqlen_q, x // seqlen_q

        top, sink = -math.inf, -math.inf
        if with_sinks:
            sink = float64(sinks[head]) * LOG2E
            top = sink
        for part in range(n_parts):
            if row_max_sum[(n_parts + part) * batch + b, head, query] != 0:
                top = max(top, row_max_sum[part * batch + b, head, query])
        if top == -math.inf:  # no part sees a key
            top = 0.0
        if thread < n_parts:
            weight = float64(row_max_sum[(n_parts + thread) * batch + b, head, query])
            if weight != 0:
                weight *= libdevice.exp2(row_max_sum[thread * batch + b, head, query] - top)
            weights[thread] = weight
        cuda.syncthreads()
        total = libdevice.exp2(sink - top)
        for part in range(n_parts):
            total += weights[part]

        if thread == 0:
            lse[b, head, query] = top * LN2 + math.log(total) if total != 0 else -math.inf
        for column in range(thread, head_dim_v, THREADS):
            value = number(0.0)
            for part in range(n_parts):
                x = part_out[part * batch + b, query, head, column]
                value += number(weights[part] / total) * x if abs(x) < math.inf else x  # 0 * inf would be NaN
            out[b, query, head, column] = f.store(value) if total != 0 else f.store(number(0.0))

    workspace = f"{f.compute}[:, :, :, ::1], {f.compute}[:, :, ::1]"
    sinks_type = "float32[:]" if sinks else "int32"
    signature = f"void({workspace}, {f.element}[:, :, :, :], {lse}[:, :, :], {sinks_type})"
    words = [dtype, *["sinks"] * sinks, *["wide_lse"] * (lse != f.statistics)]
    return NumbaKernel(attention_combine, signature, f"attention_combine[{','.join(words)}]")
