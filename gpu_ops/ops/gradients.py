"""Results of backward ops: the gradient of an input, and sums over tokens that may be added to what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.bound import Finish
from gpu_ops.core.call import Call

__all__ = ["named_results", "write_gradients"]


def write_gradients(
    call: Call,
    x: Array,
    sums: Mapping[str, tuple[tuple[int, ...], Any]],
    dtype: np.dtype[Any],
    out: Any,
) -> Finish | None:
    """``dx`` like x, and ``sums`` of ``dtype``.

    ``sums``: by name, the shape and the caller's array to which the sum is added, or None. ``out``: the tuple of the
    others, or dx if it is alone. The option ``added`` names those that are added. What is returned puts all in order,
    for :meth:`Call.bind`.
    """
    added = {name: given for name, (_, given) in sums.items() if given is not None}
    fresh = {name: (shape, dtype) for name, (shape, given) in sums.items() if given is None}
    if fresh:
        call.write_each({"dx": (x.shape, x.dtype), **fresh}, out, rows=True)
    else:
        call.write("dx", x.shape, x.dtype, out, rows=True)
    for name, given in added.items():
        call.write(name, sums[name][0], dtype, given, argument=name, rows=True, added=True)
    call.option(added=tuple(added))
    return named_results("dx", *sums) if added else None


def named_results(*names: str) -> Finish:
    """What a call returns, in this order: those that are added to were described after the others."""
    return lambda views, device, give: tuple(map(give, names))
