"""Helpers of the Numba twins in every room.

Twins are the CUDA C++ kernels in Python for Numba: the same formulas, one step at a time. They use 48 KB of static
shared memory, no tensor cores and no asynchronous copies, so they are slower. Only
:mod:`gpu_ops.kernels.compiler.jit` compiles them. bfloat16 arrays come as uint16, float16 arrays as float16.
"""
