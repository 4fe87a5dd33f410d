"""Kernels and lowering: packed weights: ternary formats."""
