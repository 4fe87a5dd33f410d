"""Results of backward ops: the gradient of an input, and sums over tokens, optionally added to arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call, Finish
from gpu_ops.errors import OptionError

__all__ = ["named_results", "write_gradients"]


def write_gradients(
    call: Call,
    x: Array,
    sums: Mapping[str, tuple[tuple[int, ...], Any]],
    dtype: np.dtype[Any],
    out: Any,
    *,
    dx: bool = True,
) -> Finish | None:
    """Declare ``dx``, like x, if requested, and ``sums`` of ``dtype``.

    ``sums``: by name, the shape and the caller's array to which the sum is added, or None. ``out``: a tuple of arrays
    for the other results, or a single array for a single one. The option ``added`` names the added sums. Returns the
    ``finish`` of :meth:`Call.bind` that puts all results in order.
    """
    added = {name: array for name, (_, array) in sums.items() if array is not None}
    fresh = {"dx": (x.shape, x.dtype)} if dx else {}
    fresh |= {name: (shape, dtype) for name, (shape, array) in sums.items() if array is None}
    if len(fresh) > 1:
        call.write_each(fresh, out, rows=True)
    elif out is not None and not fresh:
        raise OptionError(f"{call.op}: out= has nothing to receive: {', '.join(added)} are given by name")
    for name, (shape, result_dtype) in fresh.items() if len(fresh) == 1 else ():
        call.write(name, shape, result_dtype, out, rows=True)
    for name, array in added.items():
        call.write(name, sums[name][0], dtype, array, argument=name, rows=True, added=True)
    call.option(added=tuple(added))
    return named_results(*["dx"] * dx, *sums) if added else None


def named_results(*names: str) -> Finish:
    """Return the ``finish`` that puts results in this order: added results were declared after the others."""
    if len(names) == 1:
        return lambda views, device, give: give(names[0])
    return lambda views, device, give: tuple(map(give, names))
