"""Philox 4x32-10 in compiled code: see ``reference/philox.py``."""

from __future__ import annotations

from gpu_ops.kernels.common.cpu.codegen.philox import philox_rounds
from gpu_ops.kernels.common.cpu.jit import noinline_function


@noinline_function
def philox4x32(c0, c1, c2, c3, n, k0, k1):
    """Replace ``n`` counters, whose words are in four arrays of uint32, by their random words; the key is uint32."""
    philox_rounds(c0, c1, c2, c3, n, k0, k1)
