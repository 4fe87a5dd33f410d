"""Modules that the CPU kernels of all rooms share, among them:

=============  ======================================================================================
``jit``        compiles a kernel once per variant and keeps it on disk
``parallel``   runs a compiled kernel on all cores
``dtype``      loads and stores of float16 / bfloat16 as bits; rows of strided arrays
``fastmath``   exp, exp2 and tanh as polynomials that LLVM turns into vector code
=============  ======================================================================================
"""

from gpu_ops.kernels.compiler.numba_import import import_numba

import_numba()  # before any module here does
