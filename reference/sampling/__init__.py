"""NumPy references: sampling of tokens."""
