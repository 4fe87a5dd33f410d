"""Readable twins of the CUDA C++ kernels, for Numba: see the room's lowering for formulas and shapes."""
