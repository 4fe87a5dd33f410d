"""NumPy references: cross-entropy, alone and fused with the output layer."""
