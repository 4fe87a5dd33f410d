"""Rows of the table of calls (calls.py): ternary weights."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpu_ops
from gpu_ops import TernaryMatrix
from tests.support.call_maker import Maker


def matrix(new: Maker, group_size: int | None = None, rows: str = "N") -> TernaryMatrix:
    w = new.rng.standard_normal((new.sizes[rows], new.sizes["K"]), dtype=np.float32)
    return gpu_ops.ternary_quantize(w, group_size=group_size, backend="reference")


def trits(new: Maker) -> Any:
    new.axes["trits"] = ("N", "K")
    return new.rng.integers(-1, 2, (new.sizes["N"], new.sizes["K"])).astype(np.int8)


def unpack(new: Maker) -> dict[str, Any]:
    packed = gpu_ops.ternary_pack(trits(new), "base3", backend="reference")
    new.axes["packed"] = ("N", "bytes")
    return {"packed": packed, "shape": (new.sizes["N"], new.sizes["K"]), "format": "base3"}


VARIANTS: dict[str, Any] = {
    "ternary_quantize": lambda new: (new.normal(w="N K"), {}),
    "ternary_quantize twn": lambda new: (new.normal(w="N K"), {"method": "twn", "group_size": 64}),
    "ternary_pack": lambda new: ({"trits": trits(new), "format": "base3"}, {}),
    "ternary_unpack": lambda new: (unpack(new), {}),
    "ternary_matmul": lambda new: ({**new.normal(x="rows K"), "w": matrix(new)}, {}),
    "ternary_matmul base3": lambda new: (
        {**new.normal(x="batch rows K"), "w": matrix(new, 64).to("base3")},
        {"activations": "native"},
    ),
    "ternary_matmul given": lambda new: (
        {**new.integers(-128, 128, np.int8, x="batch rows K"), "w": matrix(new, 64)},
        {**new.normal(new.wide, x_scale="batch rows"), "out_dtype": new.dtype},
    ),
    "ternary_matmul both": lambda new: ({"x": matrix(new, rows="rows"), "w": matrix(new).to("base3")}, {}),
    "ternary_matmul_backward": lambda new: (
        {**new.normal(dy="rows N", x="rows K"), "w": matrix(new)},
        {},
    ),
    "ternary_matmul_backward dx": lambda new: (
        {**new.normal(dy="rows N", x="rows K"), "w": matrix(new, 64)},
        {"only": "dx"},
    ),
    "ternary_matmul_backward native": lambda new: (
        {**new.normal(dy="batch rows N", x="batch rows K"), "w": matrix(new, 64).to("base3")},
        {"activations": "native"},
    ),
}
