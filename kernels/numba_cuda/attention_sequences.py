"""The table of sequences that attention reads, int64 (batch, 4): q start, q length, k start, k length.

For lengths that lie on the device: a thread writes the row of a sequence.
"""

from __future__ import annotations

from functools import cache

from numba import cuda

from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["THREADS", "packed_kernel", "used_kernel"]

THREADS = 128


@cache
def packed_kernel() -> NumbaKernel:
    """Of sequences that lie end to end: from the starts of those of q and of k, (batch + 1,)."""

    def attention_sequences(starts_q, starts_k, sequences):
        b = cuda.grid(1)
        if b < sequences.shape[0]:
            sequences[b, 0], sequences[b, 1] = starts_q[b], starts_q[b + 1] - starts_q[b]
            sequences[b, 2], sequences[b, 3] = starts_k[b], starts_k[b + 1] - starts_k[b]

    signature = "void(int32[:], int32[:], int64[:, ::1])"
    return NumbaKernel(attention_sequences, signature, "attention_sequences[packed]")


@cache
def used_kernel() -> NumbaKernel:
    """Of caches: from how many keys of each are in use, (batch,), and the queries of every sequence."""

    def attention_sequences(used, seqlen_q, sequences):
        b = cuda.grid(1)
        if b < sequences.shape[0]:
            sequences[b, 0], sequences[b, 1] = 0, seqlen_q
            sequences[b, 2], sequences[b, 3] = 0, used[b]

    signature = "void(int32[:], int64, int64[:, ::1])"
    return NumbaKernel(attention_sequences, signature, "attention_sequences[used]")
