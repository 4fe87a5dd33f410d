"""Arrays of a step of AdamW, in every combination of parameters, gradients and masters."""

from __future__ import annotations

import ml_dtypes
import numpy as np

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
