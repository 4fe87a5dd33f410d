"""Split-KV for Numba: the results of parts of the keys become one.

    lse = log(exp(sink) + sum over parts of exp(lse_p)),    out = sum over parts of exp(lse_p - lse) out_p

With few queries there are too few blocks for a GPU: then each gets a part of the keys (flash decoding), and this
kernel follows. A block takes one query of one head, thread t its columns t, t + 128, ...
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64, int64

from gpu_ops.kernels.jit import NumbaKernel
from gpu_ops.kernels.numba_cuda.attention_config import THREADS
from gpu_ops.kernels.numba_cuda.dtype import functions

__all__ = ["combine_kernel"]


@cache
def combine_kernel(dtype: str, sinks: bool) -> NumbaKernel:
    """``part_out`` (parts * batch, seqlen_q, nheads, head_dim_v), ``part_lse`` (parts * batch, nheads, seqlen_q)."""
    f, number, with_sinks = functions(dtype), functions(dtype).compute, sinks

    def attention_combine(part_out, part_lse, out, lse, sinks):
        weights = cuda.shared.array(THREADS, float64)
        batch, seqlen_q, nheads, head_dim_v = out.shape
        n_parts = part_out.shape[0] // batch
        thread, x = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        head, x = x % nheads, x // nheads
        query, b = x % seqlen_q, x // seqlen_q

        top = -math.inf
        if with_sinks:
            top = float64(sinks[head])
        for part in range(n_parts):
            top = max(top, part_lse[part * batch + b, head, query])
        if top == -math.inf:  # no part sees a key
            top = 0.0
        if thread < n_parts:
            weights[thread] = math.exp(part_lse[thread * batch + b, head, query] - top)
        cuda.syncthreads()
        total = 0.0
        if with_sinks:
            total = math.exp(float64(sinks[head]) - top)
        for part in range(n_parts):
            total += weights[part]

        if thread == 0:
            lse[b, head, query] = top + math.log(total) if total != 0 else -math.inf
        for column in range(thread, head_dim_v, THREADS):
            value = number(0.0)
            for part in range(n_parts):
                value += number(weights[part] / total) * part_out[part * batch + b, query, head, column]
            out[b, query, head, column] = f.store(value) if total != 0 else f.store(number(0.0))

    workspace = f"{f.compute}[:, :, :, ::1], float64[:, :, ::1]"
    given = "float32[:]" if sinks else "int32"
    signature = f"void({workspace}, {f.element}[:, :, :, :], {f.statistics}[:, :, :], {given})"
    return NumbaKernel(attention_combine, signature, f"attention_combine[{dtype}{',sinks' if sinks else ''}]")
