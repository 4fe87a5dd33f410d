"""Rows of the table of calls (calls.py): AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.call_maker import Maker


def step(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    """AdamW step; 16-bit parameters have a master copy."""
    state_dtype = np.float64 if new.dtype == np.float64 else np.float32
    arrays = {**new.normal(params="cols", grads="cols"), **new.normal(state_dtype, m="cols", v="cols")}
    arrays["v"] *= arrays["v"]
    options = {"step": 3, "lr": 0.01, "weight_decay": 0.1}
    if new.dtype.itemsize == 2:
        options["master"] = arrays["params"].astype(np.float32)
        new.axes["master"] = ("cols",)
    return arrays, options


def numbers_in_arrays(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    """AdamW step with numbers in arrays and a mask; bfloat16 parameters are rounded stochastically."""
    arrays, options = step(new)
    numbers = {"lr": np.array(0.01), "grad_scale": np.array(0.5), "skip": np.zeros((), np.float32)}
    new.axes |= dict.fromkeys(numbers, ())
    options |= {**numbers, **new.integers(0, 2, np.uint8, decay_mask="cols")}
    if new.dtype.name == "bfloat16":
        options |= {"rounding": "stochastic", "seed": 5, "master": None}
    return arrays, options


VARIANTS: dict[str, Any] = {"adamw_step": step, "adamw_step arrays": numbers_in_arrays}
