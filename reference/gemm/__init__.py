"""NumPy references: matrix products: linear, SwiGLU and the gated MLP."""
