"""Readable twins of the CUDA C++ kernels, written in Python for Numba: same formulas, one thing at a time.

They hold to 48 KB of shared memory, use no tensor cores and no asynchronous copies, and so are slower. Only
:mod:`gpu_ops.kernels.compiler.jit` compiles them. bfloat16 arrays come as uint16, float16 as float16.
"""
