"""Compilers of GPU kernels, the cache of what they made, and launches."""
