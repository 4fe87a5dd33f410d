"""Attention forward for Numba: tiled, with online softmax. The readable twin of the CUDA C++ kernel.

    out = softmax(s) v,  s = softcap(softmax_scale * q k^T) + alibi + bias, masked;  lse = log(sum(exp(s)))

A block of 128 threads owns ``block_m`` *rows*: a row is a query of one of the heads that share a key head
(row = query * group + head, so that keys are read once for the whole group). It walks over the keys in tiles of
``block_n`` and keeps, for each row, the maximum of the scores so far, their sum, and O, the weighted sum of values:

    S  = Q K^T                       (block_m, block_n)   registers; Q and K pass through shared memory in chunks
    m' = max(m, max over keys of S)
    P  = exp2(S - m')                (block_m, block_n)   shared memory
    O  = O exp2(m - m') + P V        (block_m, head_dim_v) registers; V passes through shared memory in chunks

Nothing as large as seqlen_q x seqlen_k exists anywhere. 4 flops per query, key and element of head_dim.

The threads of a block form a grid of 8 x 16. Thread (r, c) owns rows r, r + 8, ... and of each row the keys (of S) and
columns (of O) c, c + 16, ...: what it loads from shared memory serves several multiplications, and the 16 threads of a row
are half a warp, so that maxima and sums over a row are shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, int64
from numba.cuda import libdevice

from gpu_ops.kernels.jit import NumbaKernel
from gpu_ops.kernels.numba_cuda.dtype import functions
from gpu_ops.kernels.numba_cuda.memory import load_at, load_vector

__all__ = ["Config", "forward", "make_forward", "select_config"]

Array = Any  # of the device

THREADS = 128
ROW_THREADS = 16  # threads that share a row
ROWS = THREADS // ROW_THREADS
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
UNLIMITED = 2**30  # a window no sequence fills


@dataclass(frozen=True)
class Config:
    """A kernel: its tiles, and the features that it has. What is False costs nothing."""

    dtype: str
    bias_dtype: str
    block_m: int  # rows of a block
    block_n: int  # keys of a tile
    chunk: int  # columns of Q and K in shared memory at a time
    slab: int  # columns of V and O of a block
    chunk_v: int  # rows of V in shared memory at a time
    masked: bool = False  # causal or a window
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    bias: bool = False
    block_mask: bool = False
    paged: bool = False
    split: bool = False

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block."""
        return self.staged * self.itemsize + self.block_m * (self.block_n + 16) * self.itemsize + self.tables

    @property
    def itemsize(self) -> int:
        return 8 if self.dtype == "float64" else 4

    @property
    def staged(self) -> int:
        """Elements of the shared memory through which Q, K and V pass."""
        return max((self.block_m + self.block_n) * self.stride, self.chunk_v * self.slab)

    @property
    def stride(self) -> int:
        """Length of a row of Q and K in shared memory: 16 bytes of padding put rows into different banks."""
        return self.chunk + 16 // self.itemsize

    @property
    def tables(self) -> int:
        return 8 * (self.block_m + 2 * self.block_n) + 8 * self.block_m


def select_config(dtype: str, head_dim: int, head_dim_v: int, rows: int, **features: Any) -> Config:
    slab = min(-(-head_dim_v // 16) * 16, 128)
    double = dtype == "float64"
    block_m, block_n = (32, 32) if double else (64, 64)
    chunk = 16 if double else 32
    features.setdefault("bias_dtype", dtype)
    return Config(
        dtype=dtype,
        block_m=block_m,
        block_n=block_n,
        chunk=chunk,
        slab=slab,
        chunk_v=32 if not double else 16,
        **features,
    )


@cache
def make_forward(config: Config) -> NumbaKernel:
    """The kernel of a configuration, made once."""
    f = functions(config.dtype)
    load, store, compute = f.load, f.store, f.compute
    load_bias = functions(config.bias_dtype).load
    double = config.dtype == "float64"
    exp2 = libdevice.exp2 if double else libdevice.exp2f
    log2 = libdevice.log2 if double else libdevice.log2f
    tanh = libdevice.tanh if double else libdevice.tanhf

    block_m, block_n, chunk, chunk_v, slab = (
        config.block_m, config.block_n, config.chunk, config.chunk_v, config.slab,
    )  # fmt: skip
    stride, p_stride, staged = config.stride, block_n + 16, config.staged
    my_rows, my_keys, my_columns = block_m // ROWS, block_n // ROW_THREADS, slab // ROW_THREADS
    masked, softcapped, has_sinks, has_alibi = config.masked, config.softcap, config.sinks, config.alibi
    has_bias, has_block_mask, paged, split_keys = config.bias, config.block_mask, config.paged, config.split
    plain = not (softcapped or has_alibi or has_bias)
    infinity = compute(np.inf)
    hidden = compute(-0.0)

    def stager(rows, columns, stride):
        """A device function that copies a tile of an array to shared memory."""
        per_thread = rows * columns // THREADS

        @cuda.jit(device=True)
        def stage(target, source, offsets, column, end, column_stride):
            """target[r, c] = element ``column + c`` of row r, which begins at byte offsets[r]; 0 from ``end`` on.

            All loads come before all stores, so that they wait for memory together. Returns whether all is finite.
            """
            values = cuda.local.array(per_thread, compute)
            finite = True
            for i in range(per_thread):
                at = cuda.threadIdx.x + i * THREADS
                x = column + at % columns
                value = load(load_at(source, offsets[at // columns] + min(x, end - 1) * column_stride))
                values[i] = value if x < end else compute(0)
                finite = finite and abs(value) < infinity
            for i in range(per_thread):
                at = cuda.threadIdx.x + i * THREADS
                target[at // columns * stride + at % columns] = values[i]
            return finite

        return stage

    stage_q, stage_k = stager(block_m, chunk, stride), stager(block_n, chunk, stride)
    stage_v = stager(chunk_v, slab, slab)

    def attention_forward(
        q, k, v, out, lse, sequences, table, alibi, sinks, bias, visible, scale, softcap, left, right, block_q, block_k,
        n_splits,
    ):  # fmt: skip
        q_rows = cuda.shared.array(block_m, int64)  # where rows begin, in bytes
        k_rows = cuda.shared.array(block_n, int64)
        v_rows = cuda.shared.array(block_n, int64)
        query_of = cuda.shared.array(block_m, int32)
        head_of = cuda.shared.array(block_m, int32)
        buffer = cuda.shared.array(staged, compute, alignment=16)
        sq, sk = buffer[: block_m * stride], buffer[block_m * stride :]
        sp = cuda.shared.array((block_m, p_stride), compute, alignment=16)

        s = cuda.local.array((my_rows, my_keys), compute)
        o = cuda.local.array((my_rows, my_columns), compute)
        row_max = cuda.local.array(my_rows, compute)
        row_sum = cuda.local.array(
            my_rows, compute
        )  # of this thread's keys; the 16 threads add up at the end
        thread = int32(cuda.threadIdx.x)
        r, c = thread // ROW_THREADS, thread % ROW_THREADS

        # Which rows, keys and columns are this block's.
        heads_kv, head_dim, head_dim_v = k.shape[2], q.shape[3], v.shape[3]
        group = int32(q.shape[2] // heads_kv)
        batch, n_slabs = sequences.shape[0], (head_dim_v + slab - 1) // slab
        x = int64(cuda.blockIdx.x)
        first_column, x = x % n_slabs * slab, x // n_slabs
        head_kv, x = x % heads_kv, x // heads_kv
        b, x = x % batch, x // batch
        part, x = x % n_splits, x // n_splits
        blocks = cuda.gridDim.x // (n_slabs * heads_kv * batch * n_splits)
        first_row = int32((blocks - 1 - x) * block_m)  # causal: the longest first
        q_start, q_len = sequences[b, 0], int32(sequences[b, 1])
        k_start, k_len = sequences[b, 2], int32(sequences[b, 3])
        n_rows = q_len * group
        if first_row >= n_rows:  # a shorter sequence of the batch
            return
        qb = b if q.shape[0] > 1 else 0
        kb = b if k.shape[0] > 1 else 0

        if thread < block_m:
            row = min(first_row + thread, n_rows - 1)
            query, head = row // group, int32(head_kv) * group + row % group
            query_of[thread], head_of[thread] = query, head
            q_rows[thread] = qb * q.strides[0] + (q_start + query) * q.strides[1] + head * q.strides[2]
        first_query, last_query = first_row // group, (min(first_row + block_m, n_rows) - 1) // group
        diagonal = k_len - q_len
        begin, end = int32(0), k_len
        if masked:
            begin = max(begin, first_query + diagonal - left)
            end = min(end, last_query + diagonal + right + 1)
        if split_keys:
            tiles = (max(end - begin, 0) + block_n - 1) // block_n
            per_part = (tiles + n_splits - 1) // n_splits * block_n
            begin += part * per_part
            end = min(end, begin + per_part)

        for i in range(my_rows):
            row_max[i] = -infinity
            row_sum[i] = 0
            for t in range(my_columns):
                o[i, t] = 0

        for first in range(begin, end, block_n):
            cuda.syncthreads()  # the last tile's use of the tables is over
            if thread < block_n:
                key = min(first + thread, end - 1)
                if paged:
                    page, key_ = int64(table[b, key // k.shape[1]]), int64(key % k.shape[1])
                else:
                    page, key_ = kb, k_start + key
                k_rows[thread] = page * k.strides[0] + key_ * k.strides[1] + head_kv * k.strides[2]
                v_rows[thread] = page * v.strides[0] + key_ * v.strides[1] + head_kv * v.strides[2]
            for i in range(my_rows):
                for j in range(my_keys):
                    s[i, j] = 0
            for column in range(0, head_dim, chunk):
                cuda.syncthreads()
                stage_q(sq, q, q_rows, column, head_dim, q.strides[3])
                stage_k(sk, k, k_rows, column, head_dim, k.strides[3])
                cuda.syncthreads()
                for d in range(chunk):
                    for i in range(my_rows):
                        for j in range(my_keys):
                            s[i, j] += (
                                sq[(r + i * ROWS) * stride + d] * sk[(c + j * ROW_THREADS) * stride + d]
                            )

            for i in range(my_rows):
                row = r + i * ROWS
                for j in range(my_keys):
                    key = first + c + j * ROW_THREADS
                    value = s[i, j] * scale
                    hide = key >= end
                    if masked:
                        position = query_of[row] + diagonal
                        hide = hide or key < position - left or key > position + right
                    s[i, j] = -infinity if hide else value

            for i in range(my_rows):
                top = row_max[i]
                for j in range(my_keys):
                    top = max(top, s[i, j])
                for shift in (8, 4, 2, 1):
                    top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, shift))
                base = top if top > -infinity else compute(0)  # nothing seen yet: keep -inf - -inf away
                shrink = exp2(row_max[i] - base)
                total = compute(0)
                for j in range(my_keys):
                    p = exp2(s[i, j] - base) if s[i, j] != -infinity else hidden
                    total += p
                    sp[r + i * ROWS, c + j * ROW_THREADS] = p
                row_max[i] = top
                row_sum[i] = row_sum[i] * shrink + total
                for t in range(my_columns):
                    o[i, t] *= shrink

            for first_v in range(0, block_n, chunk_v):
                cuda.syncthreads()
                finite = stage_v(buffer, v, v_rows[first_v:], first_column, head_dim_v, v.strides[3])
                if cuda.syncthreads_and(int32(finite)):
                    for j in range(chunk_v):
                        for i in range(my_rows):
                            for t in range(my_columns):
                                o[i, t] += (
                                    sp[r + i * ROWS, first_v + j] * buffer[j * slab + c + t * ROW_THREADS]
                                )
                else:  # a key that is not seen, weight -0, has no part even if its value is NaN
                    for j in range(chunk_v):
                        for i in range(my_rows):
                            p = sp[r + i * ROWS, first_v + j]
                            if p != 0:
                                for t in range(my_columns):
                                    o[i, t] += p * buffer[j * slab + c + t * ROW_THREADS]

        for i in range(my_rows):
            for shift in (8, 4, 2, 1):
                row_sum[i] += cuda.shfl_xor_sync(0xFFFFFFFF, row_sum[i], shift)
            row = r + i * ROWS
            if first_row + row < n_rows:
                total = row_sum[i]
                inverse = compute(1) / total if total != 0 else compute(0)
                at, head = q_start + query_of[row], head_of[row]
                ob = part * batch + b if out.shape[0] > 1 else 0
                if c == 0 and first_column == 0:
                    lse[ob, head, at] = (row_max[i] + log2(total)) * compute(LN2) if total != 0 else -infinity
                for t in range(my_columns):
                    column = first_column + c + t * ROW_THREADS
                    if column < head_dim_v:
                        out[ob, at, head, column] = store(o[i, t] * inverse)

    e, w = f.element, f.statistics
    e_bias = functions(config.bias_dtype).element
    arrays = f"{e}[:,:,:,:],{e}[:,:,:,:],{e}[:,:,:,:],{e}[:,:,:,:],{w}[:,:,:],int64[:,::1]"
    optional = f"int32[:,:],{w}[:,:],{w}[:],{e_bias}[:,:,:,:],uint8[:,:,:,:]"
    scalars = f"{w},{w},int32,int32,int32,int32,int32"
    return NumbaKernel(
        attention_forward, f"void({arrays},{optional},{scalars})", f"attention_forward{config}"
    )


def forward(
    device, q, k, v, out, lse, sequences, *, max_seqlen_q, softmax_scale, left=UNLIMITED, right=UNLIMITED
):
    masked = left < UNLIMITED or right < UNLIMITED
    config = select_config(q.dtype.name, q.shape[3], v.shape[3], 1, masked=masked)
    kernel = make_forward(config)
    batch, heads_kv = sequences.shape[0], k.shape[2]
    group = q.shape[2] // heads_kv
    blocks = -(-max_seqlen_q * group // config.block_m)
    grid = blocks * batch * heads_kv * -(-v.shape[3] // config.slab)
    stand_ins = (sequences.view(np.int32), lse[0], lse[0, 0], q, q.view(np.uint8))
    args = (q, k, v, out, lse, sequences, *stand_ins, softmax_scale * LOG2E, 0.0, left, right, 0, 0, 1)
    device.launch(kernel, (grid,), (THREADS,), args)
