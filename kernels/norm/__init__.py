"""Kernels and lowering: RMSNorm and LayerNorm."""
