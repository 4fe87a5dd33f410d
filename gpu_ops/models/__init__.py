"""Models as plain functions on arrays: a transformer block, a Llama, forward and backward."""
