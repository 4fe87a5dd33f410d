"""Device code and its launch configurations: raw arrays in, raw arrays out.

Nothing here validates or chooses; ``gpu_ops`` does, then calls in. Import as ``gpu_ops.kernels``.
"""

if not __name__.startswith("gpu_ops."):
    # Empty, and of no version: from a checkout's root transformers finds this folder where it looks for a package.
    __version__, __path__ = "0", []

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            "this directory is the package gpu_ops.kernels: write `from gpu_ops import kernels` "
            "(importing it as top-level `kernels` would load every module twice)"
        )
