"""Kernels and lowering: cross-entropy, alone and fused with the output layer."""
