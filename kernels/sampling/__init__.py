"""Kernels and lowering: sampling of tokens."""
