"""Kernels for ``numba.cuda`` that the tests compile."""

from __future__ import annotations

from gpu_ops.kernels.compiler import jit

OFFSET = 0.5


def scale_kernel(factor):
    """Kernel ``y[i] = x[i, 0] * factor + OFFSET``, with the factor in a closure and a device function in between."""
    from numba import cuda

    @cuda.jit(device=True)
    def times(value):
        return value * factor + OFFSET

    def scale(x, y, n):
        i = cuda.grid(1)
        if i < n:
            y[i] = times(x[i, 0])

    return jit.NumbaKernel(scale, "void(float32[:, ::1], float32[::1], int64)", f"scale[{factor}]")


def difference_kernel():
    """Kernel ``y[i] = x[i] * factor - x[0] * factor``, which is 0 for i = 0 unless one product is not rounded."""
    from numba import cuda

    def difference(x, y, total, factor):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] * factor - x[0] * factor
            cuda.atomic.add(total, 0, x[i])

    signature = "void(float32[::1], float32[::1], float32[::1], float32)"
    return jit.NumbaKernel(difference, signature, "difference")
