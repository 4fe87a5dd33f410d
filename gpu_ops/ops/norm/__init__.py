"""Public functions: RMSNorm and LayerNorm."""
