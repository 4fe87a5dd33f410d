"""Kernels and lowering: attention."""
