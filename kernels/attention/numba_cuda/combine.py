"""Split-KV for Numba: kernel that merges the partial results of attention over parts of the keys.

    l = 2^(sink log2 e - m) + sum over parts of 2^(row_max_p - m) row_sum_p,    m the largest row_max_p, or the sink
    lse = m ln 2 + ln l,    out = sum over parts of 2^(row_max_p - m) row_sum_p / l out_p

A part's lse would not suffice: next to a bias of -1e9 it loses ln(row_sum), and with it the number of keys.

Few queries give too few blocks for a GPU. Then each block gets a part of the keys (flash decoding), and this kernel
follows. A block takes one query of one head; thread t has columns t, t + 128, ...
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64, int64
from numba.cuda import libdevice

from gpu_ops.kernels.attention.numba_cuda.config import LN2, LOG2E, THREADS
from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["combine_kernel"]


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
