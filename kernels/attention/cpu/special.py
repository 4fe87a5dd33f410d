"""Elements of V that are not finite. They count wherever a query sees them, however small the weight.

O excludes them, since every rescaling by 0 would turn an infinity into NaN. They are noted in two bits per query
and column, and added to the result at the end.
"""

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import like
from gpu_ops.kernels.common.cpu.jit import device_function

PLUS, MINUS = 1, 2  # both are NaN


@device_function
def noted(bits, x):
    """``bits`` of the values seen so far, updated by x."""
    if x - x == 0:
        return bits
    return np.uint8(bits | (PLUS if x == np.inf else MINUS if x == -np.inf else PLUS | MINUS))


@device_function
def with_special(x, bits):
    """Result x, which is NaN or finite, combined with the values noted in ``bits``."""
    if bits & PLUS:
        x += like(x, np.inf)
    if bits & MINUS:
        x -= like(x, np.inf)
    return x


@device_function
def finite_or_zero(x):
    return x if x - x == 0 else like(x, 0.0)
