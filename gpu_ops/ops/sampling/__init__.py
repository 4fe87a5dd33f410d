"""Public functions: sampling of tokens."""
