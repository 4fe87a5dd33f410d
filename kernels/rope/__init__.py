"""Kernels and lowering: rotary position embedding."""
