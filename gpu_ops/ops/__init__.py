"""The public functions, one module per op."""
