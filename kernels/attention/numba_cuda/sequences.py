"""Table of sequences that attention reads, int64 (batch, 4): q start, q length, k start, k length.

For lengths that are on the device: a thread writes the row of a sequence.
"""

from __future__ import annotations

from functools import cache

from numba import cuda

from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["THREADS", "packed_kernel", "used_kernel"]

THREADS = 128


@cache
def packed_kernel(*, paged: bool, used: bool) -> NumbaKernel:
    """Kernel for packed sequences: from the starts of q's and k's sequences, (batch + 1,).

    ``paged``: k has no starts. ``used``: from the number of keys in use of each, (batch,). Pass 0 for an array that
    it does not use.
    """

    def attention_sequences(starts_q, starts_k, used_k, sequences):
        b = cuda.grid(1)
        if b < sequences.shape[0]:
            sequences[b, 0], sequences[b, 1] = starts_q[b], starts_q[b + 1] - starts_q[b]
            sequences[b, 2] = 0 if paged else starts_k[b]
            sequences[b, 3] = used_k[b] if used else starts_k[b + 1] - starts_k[b]

    starts_types = ["int32[:]" if present else "int32" for present in (True, not paged, used)]
    words = ["packed", *(["paged"] if paged else []), *(["used"] if used else [])]
    signature = f"void({', '.join(starts_types)}, int64[:, ::1])"
    return NumbaKernel(attention_sequences, signature, f"attention_sequences[{','.join(words)}]")


@cache
def used_kernel() -> NumbaKernel:
    """Kernel for caches: from the number of keys in use of each, (batch,), and the queries of every sequence."""

    def attention_sequences(used, seqlen_q, sequences):
        b = cuda.grid(1)
        if b < sequences.shape[0]:
            sequences[b, 0], sequences[b, 1] = 0, seqlen_q
            sequences[b, 2], sequences[b, 3] = 0, used[b]

    signature = "void(int32[:], int64, int64[:, ::1])"
    return NumbaKernel(attention_sequences, signature, "attention_sequences[used]")
