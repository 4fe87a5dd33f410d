"""Public functions: matrix products: linear, SwiGLU and the gated MLP."""
