"""Kernels and lowering: matrix products: linear, SwiGLU and the gated MLP."""
