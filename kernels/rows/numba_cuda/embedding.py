"""Rows of a table by index for Numba, and the gradient of the table: the readable twin of embedding.cu.

forward    x[i] = scale weight[ids[i]], NaN where the index is outside the table
backward   dweight[v] = sum of scale dx[i] over ids[i] = v

The gradient sorts keys (index << 32 | i), of which no two are equal: blocks of RUN, then pairs of runs. It adds tiles
of TILE sorted rows, then the sums of tiles into which an index continues. A thread has one column.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, int64, uint64

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["carry", "forward", "merge", "sort", "total"]

RUN, TILE = 1024, 32
OUTSIDE = 0xFFFFFFFF  # index of rows that are not added: sorted to the end
NOT_A_NUMBER = math.nan


@cuda.jit(device=True)
def index_of(key):
    return int64(key >> uint64(32))


@cuda.jit(device=True)
def merged_place(keys, i, run, end):
    """Position of keys[i] after two neighbouring runs are merged, of which only keys before ``end`` exist."""
    pair = i // (2 * run) * (2 * run)
    middle = pair + run
    low, high, before = pair, middle, run
    if i < middle:
        low, high, before = min(middle, end), min(middle + run, end), 0
    start = low
    while low < high:
        half = (low + high) // 2
        if keys[half] < keys[i]:
            low = half + 1
        else:
            high = half
    return i + (low - start) - before


@cache
def forward(dtype: str, ids: str) -> NumbaKernel:
    load, store, number, element, _ = functions(dtype)

    def embedding_forward(ids, weight, x, scale):
        r = cuda.blockIdx.x
        v = ids[r]
        for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
            if 0 <= v < weight.shape[0]:
                x[r, c] = store(load(weight[v, c]) * number(scale))
            else:
                x[r, c] = store(number(NOT_A_NUMBER))

    signature = f"void({ids}[::1], {element}[:, :], {element}[:, :], float64)"
    return NumbaKernel(embedding_forward, signature, f"embedding_forward_{dtype}_{ids}")


@cache
def sort(ids: str) -> NumbaKernel:
    def embedding_sort(ids, keys, num_embeddings):
        buffer = cuda.shared.array((2, RUN), uint64)
        t = cuda.threadIdx.x
        i = int64(cuda.blockIdx.x) * RUN + t
        v = int64(OUTSIDE)
        if i < len(ids) and 0 <= ids[i] < num_embeddings:
            v = int64(ids[i])
        buffer[0, t] = uint64(v) << uint64(32) | uint64(i)
        now, run = 0, 1
        while run < RUN:
            cuda.syncthreads()
            buffer[1 - now, merged_place(buffer[now], int64(t), run, RUN)] = buffer[now, t]
            now, run = 1 - now, 2 * run
        cuda.syncthreads()
        if i < len(ids):
            keys[i] = buffer[now, t]

    return NumbaKernel(embedding_sort, f"void({ids}[::1], uint64[::1], int64)", f"embedding_sort_{ids}")


@cache
def merge() -> NumbaKernel:
    def embedding_merge(keys, merged, run):
        i = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if i < len(keys):
            merged[merged_place(keys, i, run, len(keys))] = keys[i]

    return NumbaKernel(embedding_merge, "void(uint64[::1], uint64[::1], int64)", "embedding_merge")


@cache
def total(dtype: str) -> NumbaKernel:
    load, _, number, element, statistics = functions(dtype)

    def embedding_sum(keys, dx, partial, dweight, scale, adds):
        tile, c = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
        if c >= dx.shape[1]:
            return
        first, end = tile * TILE, min((tile + 1) * TILE, len(keys))
        carried = first > 0 and index_of(keys[first - 1]) == index_of(keys[first])  # from the tile before
        sum = number(0.0)
        for at in range(first, end):
            v = index_of(keys[at])
            if v == OUTSIDE:
                return
            sum += load(dx[int64(keys[at] & uint64(OUTSIDE)), c])
            if at + 1 == end or index_of(keys[at + 1]) != v:
                if carried:
                    partial[tile, c] = sum
                else:
                    held = dweight[v, c] if adds else number(0.0)
                    dweight[v, c] = held + number(scale) * sum
                carried, sum = False, number(0.0)

    matrix = f"{statistics}[:, :]"
    signature = f"void(uint64[::1], {element}[:, :], {matrix}, {matrix}, float64, int32)"
    return NumbaKernel(embedding_sum, signature, f"embedding_sum_{dtype}")


@cache
def carry(dtype: str) -> NumbaKernel:
    _, _, number, _, statistics = functions(dtype)

    def embedding_carry(keys, partial, dweight, scale):
        """Add the carries of an index to the tile in which it starts, if it continues into further tiles."""
        tile, c = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
        first, at = tile * TILE, (tile + 1) * TILE
        v = index_of(keys[at - 1])
        started = first == 0 or index_of(keys[first - 1]) != v
        if c >= dweight.shape[1] or v == OUTSIDE or not started:
            return
        sum = number(0.0)
        while at < len(keys) and index_of(keys[at]) == v:
            sum += partial[at // TILE, c]
            at += TILE
        dweight[v, c] += number(scale) * sum

    matrix = f"{statistics}[:, :]"
    return NumbaKernel(
        embedding_carry, f"void(uint64[::1], {matrix}, {matrix}, float64)", f"embedding_carry_{dtype}"
    )
