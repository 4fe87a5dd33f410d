"""Integer arrays that name rows or classes: read, and looked at in every call where that does not wait for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.bound import Look
from gpu_ops.core.call import Call
from gpu_ops.errors import DTypeError, OptionError

__all__ = ["look_at", "read_indices"]


def read_indices(call: Call, name: str, x: Any, shape: tuple[int, ...] | None = None) -> Array:
    """An int32 or int64 array of this shape; kernels take its elements in order, without gaps."""
    view = call.read(name, x, contiguous=True)
    if view.dtype not in (np.int32, np.int64):
        raise DTypeError(
            f"{call.op}: {name} is {view.dtype}; allowed: int32, int64. Cast it: {name}.astype('int64')"
        )
    if shape is not None:
        checks.exactly(call.op, name, view, shape)
    return view


def look_at(op: str, name: str, end: int, ignored: int | None = None) -> Look:
    """A hook for arrays in host memory: each index lies in [0, end), or is ``ignored``."""

    def look(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        x = views[name]
        wrong = x.view(f"u{x.itemsize}") >= end if end else np.ones(x.shape, bool)  # a negative one is large
        if ignored is not None:
            wrong &= x != ignored
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            where = f"[{', '.join(map(str, at))}]" if at else ""
            but = "" if ignored is None else f", nor ignore_index, {ignored}"
            raise OptionError(f"{op}: {name}{where} is {int(x[at])}, not in [0, {end}){but}")
        return {}, {}

    return look
