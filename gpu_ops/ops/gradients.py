"""Results of backward ops: the gradient of an input, and sums over tokens that may be added to what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.bound import Finish
from gpu_ops.core.call import Call
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
    """``dx`` like x, unless it is not wanted, and ``sums`` of ``dtype``.

    ``sums``: by name, the shape and the caller's array to which the sum is added, or None. ``out``: the tuple of the
    others, or the array if it is one. The option ``added`` names those that are added. What is returned puts all in
    order, for :meth:`Call.bind`.
    """
    added = {name: given for name, (_, given) in sums.items() if given is not None}
    fresh = {"dx": (x.shape, x.dtype)} if dx else {}
    fresh |= {name: (shape, dtype) for name, (shape, given) in sums.items() if given is None}
    if len(fresh) > 1:
        call.write_each(fresh, out, rows=True)
    elif out is not None and not fresh:
        raise OptionError(f"{call.op}: out= has nothing to receive: {', '.join(added)} are given by name")
    for name, (shape, kind) in fresh.items() if len(fresh) == 1 else ():
        call.write(name, shape, kind, out, rows=True)
    for name, given in added.items():
        call.write(name, sums[name][0], dtype, given, argument=name, rows=True, added=True)
    call.option(added=tuple(added))
    return named_results(*["dx"] * dx, *sums) if added else None


def named_results(*names: str) -> Finish:
    """What a call returns, in this order: those that are added to were described after the others."""
    if len(names) == 1:
        return lambda views, device, give: give(names[0])
    return lambda views, device, give: tuple(map(give, names))
