"""Integer arrays of row or class indices; values are checked in every call, unless that would wait for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call, CheckValues
from gpu_ops.errors import DTypeError, OptionError

__all__ = ["check_indices", "read_indices"]


def read_indices(call: Call, name: str, x: Any, shape: tuple[int, ...] | None = None) -> Array:
    """Read an int32 or int64 array of this shape; kernels require it contiguous."""
    view = call.read(name, x, contiguous=True)
    if view.dtype not in (np.int32, np.int64):
        raise DTypeError(
            f"{call.op}: {name} is {view.dtype}; allowed: int32, int64. Cast it: {name}.astype('int64')"
        )
    if shape is not None:
        checks.exactly(call.op, name, view, shape)
    return view


def check_indices(op: str, name: str, end: int, ignored: int | None = None) -> CheckValues:
    """Hook that checks an array in host memory: each index is in [0, end), or ``ignored``."""

    def check_values(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        x = views[name]
        wrong = x.view(f"u{x.itemsize}") >= end if end else np.ones(x.shape, bool)  # negative ones are large
        if ignored is not None:
            wrong &= x != ignored
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            position = f"[{', '.join(map(str, index))}]" if index else ""
            exception = "" if ignored is None else f", nor ignore_index, {ignored}"
            raise OptionError(f"{op}: {name}{position} is {int(x[index])}, not in [0, {end}){exception}")
        return {}, {}

    return check_values
