"""CPU kernels for text: byte-pair encoding."""
