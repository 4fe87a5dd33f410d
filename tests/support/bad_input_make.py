"""Arguments of mistakes: arrays, and changes of a valid call's arrays."""

from __future__ import annotations

import numpy as np

F32, F64, I32 = np.float32, np.float64, np.int32


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, I32)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def misaligned(x):
    return np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)


class On:
    """Change computed from the array it replaces."""

    def __init__(self, change):
        self.change = change


class Of:
    """A view of another argument."""

    def __init__(self, name, view):
        self.name, self.view = name, view


cast = {name: On(lambda x, name=name: x.astype(name)) for name in ("float64", "float16", "int32", "int64")}
