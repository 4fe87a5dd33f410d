"""GPU compilers, the cache of their output, and kernel launches."""
