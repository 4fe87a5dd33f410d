"""Public functions: packed weights: ternary formats."""
