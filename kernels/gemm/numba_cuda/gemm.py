"""GEMM for Numba, with the epilogues of a gated MLP: the readable twin of gemm_sm80.cu and gemv.cu.

kStore     c = a b^T                 kGate           c = act(a b^T) * (a b1^T)
kAdd       c = total + a b^T         kGateKeep       the same; c1 = a b^T, h = a b1^T
kLinear    c = a b^T + c1 + h[0]     kGateBackward   dh = a b^T; c = dgate, c1 = dup, h = act(gate) * up

With kLinear c1 is the residual and h the bias, a row; without rows there is none. With kGateBackward a1 is gate and
b1 is up; c and c1 may be the same arrays.

A block computes 64 x 64 of C and walks over K in steps of 16: 256 threads stage tiles of A and B in shared memory,
where each element serves 64 rows. Thread (r, q) of 16 x 16 has rows r, r + 16, ... and columns q, q + 16, ...: it
reads 4 + 4 elements for 16 multiply-adds. Sums are float32 (float64 for float64), first within tiles and then over
tiles: short sums round less.
"""

from __future__ import annotations

from functools import cache

from numba import cuda

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel
from gpu_ops.kernels.gemm.numba_cuda.swiglu import activated

__all__ = ["BLOCK", "THREADS", "kernel"]

BLOCK, BLOCK_K = 64, 16
SIDE = 16  # side of the thread grid
THREADS = SIDE * SIDE
MINE = BLOCK // SIDE  # rows and columns per thread
PADDED = BLOCK + 2  # a warp stores 16 columns of 2 rows, all in different banks


@cache
def kernel(
    dtype: str, out: str, a_across: bool, b_across: bool, summed: bool, epilogue: str, activation: str
) -> NumbaKernel:
    """Kernel. ``*_across``: the operand is (k, rows) in memory. ``summed``: adds ``a1 b1^T``. ``out``: dtype of c."""
    number, element, c = functions(dtype).compute, functions(dtype).element, functions(out).element
    total = functions(dtype).statistics if epilogue == "kAdd" else c
    arrays = [element] * 4 + [c] * 3 + [total]
    signature = f"void({', '.join(f'{of}[:, :]' for of in arrays)})"
    name = "_".join(
        ["gemm", dtype, out, "across" if a_across else "along", "across" if b_across else "along"]
        + ["sum"] * summed
        + [epilogue]
        + [activation] * epilogue.startswith("kGate")
    )
    add_tile = adder(number)
    stage_a, stage_b = stager(dtype, a_across), stager(dtype, b_across)
    finish = finisher(epilogue, activation, dtype, out)
    gated, pairs = epilogue in ("kGate", "kGateKeep"), 2 if summed else 1

    def gemm(a, b, a1, b1, c, c1, h, total):
        rows, cols = c.shape
        tiles = (cols + BLOCK - 1) // BLOCK
        row0, col0 = cuda.blockIdx.x // tiles * BLOCK, cuda.blockIdx.x % tiles * BLOCK
        r, q = cuda.threadIdx.x // SIDE, cuda.threadIdx.x % SIDE
        staged_a = cuda.shared.array((BLOCK_K, PADDED), number)
        staged_b = cuda.shared.array((BLOCK_K, PADDED), number)
        staged_up = cuda.shared.array((BLOCK_K if gated else 1, PADDED), number)
        sums = cuda.local.array((MINE, MINE), number)
        ups = cuda.local.array((MINE, MINE), number)
        clear(sums)
        clear(ups)
        for pair in range(pairs):
            left, right = (a1, b1) if pair else (a, b)
            depth = left.shape[0] if a_across else left.shape[1]
            for k0 in range(0, depth, BLOCK_K):
                stage_a(staged_a, left, row0, rows, k0, depth)
                stage_b(staged_b, right, col0, cols, k0, depth)
                if gated:
                    stage_b(staged_up, b1, col0, cols, k0, depth)
                cuda.syncthreads()
                add_tile(sums, staged_a, staged_b, r, q)
                if gated:
                    add_tile(ups, staged_a, staged_up, r, q)
                cuda.syncthreads()  # the tiles may be overwritten
        for i in range(MINE):
            for j in range(MINE):
                row, col = row0 + r + i * SIDE, col0 + q + j * SIDE
                if row < rows and col < cols:
                    finish(sums[i, j], ups[i, j], a1, b1, c, c1, h, total, row, col)

    return NumbaKernel(gemm, signature, name)


@cuda.jit(device=True, forceinline=True)
def clear(sums):
    for i in range(MINE):
        for j in range(MINE):
            sums[i, j] = 0.0


@cache
def adder(number):
    """Device function that adds the products of two tiles for a thread's rows r and columns q."""

    @cuda.jit(device=True, forceinline=True)
    def add_tile(sums, staged_a, staged_b, r, q):
        part = cuda.local.array((MINE, MINE), number)
        clear(part)
        for k in range(BLOCK_K):
            for i in range(MINE):
                for j in range(MINE):
                    part[i, j] = cuda.fma(staged_a[k, r + i * SIDE], staged_b[k, q + j * SIDE], part[i, j])
        for i in range(MINE):
            for j in range(MINE):
                sums[i, j] += part[i, j]

    return add_tile


@cache
def stager(dtype: str, across: bool):
    """Device function that copies 64 rows by 16 columns of an operand to shared memory, zero past the edges."""
    load, number = functions(dtype).load, functions(dtype).compute

    @cuda.jit(device=True)
    def stage(target, source, row0, rows, k0, depth):
        for i in range(cuda.threadIdx.x, BLOCK * BLOCK_K, THREADS):
            # adjacent threads read adjacent memory
            row, k = (i % BLOCK, i // BLOCK) if across else (i // BLOCK_K, i % BLOCK_K)
            value = number(0.0)
            if row0 + row < rows and k0 + k < depth:
                value = load(source[k0 + k, row0 + row] if across else source[row0 + row, k0 + k])
            target[k, row] = value

    return stage


@cache
def finisher(epilogue: str, activation: str, dtype: str, out: str):
    """Device function for the epilogue of one element."""
    load, store, number = functions(dtype).load, functions(out).store, functions(dtype).compute
    load_out = functions(out).load
    of = activated(activation, dtype)

    @cuda.jit(device=True)
    def kStore(x, _, a1, b1, c, c1, h, total, row, col):
        c[row, col] = store(x)

    @cuda.jit(device=True)
    def kAdd(x, _, a1, b1, c, c1, h, total, row, col):
        c[row, col] = store(total[row, col] + x)

    @cuda.jit(device=True)
    def kLinear(x, _, a1, b1, c, c1, h, total, row, col):
        if c1.shape[0] > 0:
            x += load_out(c1[row, col])
        if h.shape[0] > 0:
            x += load_out(h[0, col])
        c[row, col] = store(x)

    @cuda.jit(device=True)
    def kGate(gate, up, a1, b1, c, c1, h, total, row, col):
        act, _ = of(gate)
        c[row, col] = store(act * up)

    @cuda.jit(device=True)
    def kGateKeep(gate, up, a1, b1, c, c1, h, total, row, col):
        act, _ = of(gate)
        c[row, col] = store(act * up)
        c1[row, col], h[row, col] = store(gate), store(up)

    @cuda.jit(device=True)
    def kGateBackward(dh, _, a1, b1, c, c1, h, total, row, col):
        gate, up = load(a1[row, col]), load(b1[row, col])
        act, slope = of(gate)
        c[row, col] = store(number(dh * up * slope))
        c1[row, col] = store(number(dh * act))
        h[row, col] = store(number(act * up))

    finishers = {"kStore": kStore, "kAdd": kAdd, "kLinear": kLinear, "kGate": kGate}
    return {**finishers, "kGateKeep": kGateKeep, "kGateBackward": kGateBackward}[epilogue]
