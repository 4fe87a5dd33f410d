"""Public functions: rotary position embedding."""
