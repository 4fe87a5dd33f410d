"""Helpers of the tests of row-wise ops (RMSNorm, SwiGLU): odd strides, and comparison with the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gpu_ops.reference.tolerance import FORWARD
from tests.support.compare import assert_close


def emulator_dtypes(raw):
    """Dtypes that run on the emulator by default: each kernel of another dtype compiles for a second or more."""
    return [np.dtype(ml_dtypes.bfloat16 if raw else np.float64), np.dtype(np.float32)]


def close(got, want, naive, dtype, factor=FORWARD, what=""):
    if dtype == np.float64:  # the textbook code is the reference itself here, so it cannot be the yardstick
        scale = float(np.max(np.abs(want), initial=1.0))
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14 * scale, err_msg=what)
    else:
        assert_close(got, want, naive, dtype, factor, what)


def views(x):
    """Views of the same values with other strides, with their names."""
    padded = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 3), x.dtype)
    padded[..., : x.shape[-1]] = x
    yield "rows apart", padded[..., : x.shape[-1]]
    padded[..., : 2 * x.shape[-1] : 2] = x
    yield "every other column", padded[..., : 2 * x.shape[-1] : 2]
    yield "reversed columns", x[..., ::-1].copy()[..., ::-1]
    yield "reversed rows", x[::-1].copy()[::-1]
    yield "transposed", x.swapaxes(0, 1).copy().swapaxes(0, 1)
    yield "column-major", np.asfortranarray(x)
    frozen = x.copy()
    frozen.flags.writeable = False
    yield "read-only", frozen
