"""Shared parts of perf's tests: a case without any op of gpu_ops, limits, and an effort that takes no time."""

from __future__ import annotations

import numpy as np

from perf import build, case, harness
from perf.case import Case
from perf.stats import Limits

FAST = harness.Effort(rounds=2, slice_seconds=0.0, slow_seconds=0.0, pause=0.0)
LIMITS = Limits(copy=20e9, read=30e9, matmul=100e9, matmul_half=800e9)


def square_case(dtype: str = "float32", **changes) -> Case:
    """Case y = x * x: complete, without any op of gpu_ops."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": build.normal(rng, (64, 32), case.DTYPES[dtype])}

    def reference(x: dict[str, np.ndarray], precision: str) -> np.ndarray:
        square = x["x"].astype(np.float64) ** 2
        return square if precision == "float64" else square.astype(x["x"].dtype)

    fields = {
        "op": "square",
        "name": "forward",
        "shape": "64 x 32",
        "dtype": dtype,
        "flops": 64 * 32,
        "bytes": 2 * 64 * 32 * case.DTYPES[dtype].itemsize,
        "make": make,
        "make_small": make,
        "ours": lambda x: lambda: x["x"] * x["x"],
        "naive": lambda x: lambda: x["x"] ** 2,
        "reference": reference,
    }
    return Case(**{**fields, **changes})
