"""NumPy references: packed weights: ternary formats."""
