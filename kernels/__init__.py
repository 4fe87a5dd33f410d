"""Device code and its launch configurations: raw arrays in, raw arrays out.

Nothing here validates or chooses; ``gpu_ops`` does, then calls in. Import as ``gpu_ops.kernels``.
"""

if not __name__.startswith("gpu_ops."):
    raise ImportError(
        "this directory is the package gpu_ops.kernels: write `from gpu_ops import kernels` "
        "(importing it as top-level `kernels` would load every module twice)"
    )
