"""Seeds of dropout: an array that kernels read, or an integer that may differ in every call of one program."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.call import Call
from gpu_ops.errors import DTypeError, ShapeError

__all__ = ["number", "read_seed"]

_LARGEST = (1 << 64) - 1


def read_seed(call: Call, seed: Any) -> None:
    """Read ``seed``: an array of one uint64 or int64, or an integer."""
    op = call.op
    if hasattr(seed, "shape") and not isinstance(seed, np.generic):
        seed_ = call.read("seed", seed)
        if seed_.dtype not in (np.int64, np.uint64):
            raise DTypeError(
                f"{op}: seed is {seed_.dtype}, expected an integer, or an array of uint64 or int64"
            )
        if seed_.shape not in ((), (1,)):
            raise ShapeError(f"{op}: seed has shape {seed_.shape}, expected one number: () or (1,)")
    else:
        number(op, seed)
        call.provide("seed", None, "seed", functools.partial(number, op))


def number(op: str, seed: Any, device: Any = None) -> int:
    """Check an integer seed. A later call may pass another one."""
    return checks.integer(op, "seed", seed, low=0, high=_LARGEST)
