"""NumPy references: attention."""
