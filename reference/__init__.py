"""NumPy reference implementations: the definition of correct for every op.

One module per op, one function per public function, NumPy only. Import as ``gpu_ops.reference``.
"""

if not __name__.startswith("gpu_ops."):
    raise ImportError(
        "this directory is the package gpu_ops.reference: write `from gpu_ops import reference` "
        "(importing it as top-level `reference` would load every module twice)"
    )
