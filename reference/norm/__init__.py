"""NumPy references: RMSNorm and LayerNorm."""
