"""NumPy references: rotary position embedding."""
