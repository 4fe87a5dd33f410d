"""Public functions: cross-entropy, alone and fused with the output layer."""
