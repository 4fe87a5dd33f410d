"""PTX of a Numba kernel, for ``launch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_ops.kernels.compiler.jit import NumbaKernel, compile_kernel


def ptx_of(function: Callable[..., Any], signature: str, arch: str = "sm_80") -> str:
    """PTX of a Numba kernel with its device functions, compiled without a driver or a GPU.

    ``signature`` is as for ``cuda.compile``, such as ``"void(float32[::1], int32)"``.

        >>> import numpy as np
        >>> from numba import cuda
        >>> from gpu_ops import emulator
        >>> @cuda.jit(device=True)
        ... def twice(v):
        ...     return 2 * v
        >>> def kernel(x):
        ...     i = cuda.grid(1)
        ...     x[i] = twice(x[i])
        >>> x = np.arange(32, dtype=np.float32)
        >>> emulator.launch(emulator.ptx_of(kernel, "void(float32[::1])"), "kernel", 1, 32, (x,))
        >>> float(x[31])
        62.0

    Raises ``KernelCompileError`` if numba-cuda is missing or cannot compile the kernel.
    """
    kernel = getattr(function, "py_func", function)  # a kernel of cuda.jit has it
    return compile_kernel(NumbaKernel(kernel, signature, kernel.__name__), arch).ptx
