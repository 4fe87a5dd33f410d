"""Helpers of the tests of many ops (AdamW, softmax, linear, ...): odd strides, and comparison with the reference."""

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


BF16, F16, F32, F64 = map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
# params, grads, master, rounding
FORMS = {
    "float32": (F32, F32, False, "nearest"),
    "float32, bfloat16 gradients": (F32, BF16, False, "nearest"),
    "float32, float16 gradients": (F32, F16, False, "nearest"),
    "float64": (F64, F64, False, "nearest"),
    "bfloat16 of master": (BF16, BF16, True, "nearest"),
    "float16 of master": (F16, F32, True, "nearest"),
    "bfloat16 of master, stochastic": (BF16, F32, True, "stochastic"),
    "bfloat16 alone": (BF16, BF16, False, "stochastic"),
}


def made(rng, form, size):
    """Arrays by name; some gradients and moments are 0."""
    params, grads, has_master, rounding = FORMS[form]
    moment_dtype = F64 if params == F64 else F32
    start, m = rng.standard_normal(size), 0.1 * rng.standard_normal(size)
    arrays = {
        "params": start.astype(params),
        "grads": (0.1 * rng.standard_normal(size)).astype(grads),
        "m": m.astype(moment_dtype),
        "v": (m * m + 1e-4).astype(moment_dtype),
    }
    for name in ("grads", "m", "v"):
        arrays[name][3:5] = 0
    if has_master:
        arrays["master"] = start.astype(moment_dtype)
    return arrays, {"rounding": rounding}


def same_bits(actual, expected):
    for i, (f, w) in enumerate(zip(actual, expected, strict=True)):
        assert f.dtype == w.dtype
        assert f.tobytes() == w.tobytes(), f"result {i}: {np.flatnonzero(f != w)[:5]}"
