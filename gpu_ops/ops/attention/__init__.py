"""Public functions: attention."""
