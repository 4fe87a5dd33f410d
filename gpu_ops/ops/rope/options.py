"""Checks of the axes and positions of ``rope``, and the hook that reads positions in every call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, bounds_of
from gpu_ops.core.call import Call, CheckValues
from gpu_ops.errors import DeviceError, DTypeError, OptionError, ShapeError
from gpu_ops.kernels.recording import as_int64
from gpu_ops.ops.rope.frequencies import Frequencies

__all__ = [
    "PositionsCheck",
    "Rows",
    "bind_axes",
    "last_on_device",
    "read_positions",
    "rows_and_bounds",
    "widened",
    "widens",
]

Rows: TypeAlias = tuple[npt.NDArray[np.int64], int, int]
"""Positions (batch or 1, seqlen), their minimum and their maximum."""

_EXACT = 2**53  # integers up to here are exact in float64
_AXES = {
    "bshd": "batch seqlen {} head_dim",
    "bhsd": "batch {} seqlen head_dim",
    "packed": "total {} head_dim",
}
_READ_BY_KERNELS = (np.dtype(np.int32), np.dtype(np.int64))


def bind_axes(call: Call, inputs: Mapping[str, Array], layout: Any) -> str:
    """Check axis lengths; return the layout: "bshd", "bhsd" or "packed"."""
    checked = checks.one_of(call.op, "layout", layout, ("bshd", "bhsd"))
    first, x = next(iter(inputs.items()))
    if x.ndim not in (3, 4):
        raise ShapeError(
            f"{call.op}: {first} has {x.ndim} axes, shape {x.shape}; expected (batch, seqlen, nheads, head_dim), or "
            f"packed (total, nheads, head_dim)"
        )
    if x.ndim == 3:
        if checked == "bhsd":
            raise OptionError(
                f"{call.op}: layout='bhsd' is for 4 axes; packed {first} is (total, nheads, head_dim)"
            )
        checked = "packed"
    for (name, array), heads in zip(inputs.items(), ("nheads", "nheads_kv"), strict=False):
        call.axes.bind(name, array, _AXES[checked].format(heads))
    return checked


def read_positions(call: Call, positions: Any, layout: str) -> Array | None:
    """Read the array of positions; None for None and for a number, which becomes ``first`` of the call."""
    op, seqlen = call.op, call.axes["total" if layout == "packed" else "seqlen"]
    if positions is None:
        return None
    if isinstance(positions, (int, np.integer)):
        checks.integer(op, "positions", positions)
        call.number("first", "positions")
        return None
    if isinstance(positions, (float, np.floating)):
        raise DTypeError(
            f"{op}: positions is the number {positions}; pass an integer, the position of the first token, or an "
            "array of integers"
        )
    array = call.read("positions", positions)
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{op}: positions is {array.dtype}; allowed: integers, for example np.int64")
    allowed = [(seqlen,)] if layout == "packed" else [(seqlen,), (call.axes["batch"], seqlen), (1, seqlen)]
    if array.shape not in allowed:
        names = "(total,)" if layout == "packed" else "(seqlen,), (batch, seqlen) or (1, seqlen)"
        raise ShapeError(
            f"{op}: positions has shape {array.shape}; expected {names}: "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))}"
        )
    return array


@dataclass(frozen=True)
class PositionsCheck:
    """Hook of ``rope``: checks positions, and looks up the frequencies and tables that they need."""

    op: str
    seqlen: int
    frequencies: Frequencies

    def for_call(self, call: Call, positions: Array | None, *, counts_up: bool) -> CheckValues | None:
        """The hook of a call; None if kernels need nothing from the host. ``counts_up``: positions is a number."""
        if not call.on_cuda:
            return self.on_host
        return self.on_device if counts_up or self.frequencies.by_length or widens(positions) else None

    def on_host(self, views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        array = views.get("positions")
        if array is None:
            first, last = self._bounds(views)
            positions = self._steps + first if first else self._steps
        else:
            positions, first, last = rows_and_bounds(self.op, array)
        options, tables = self.frequencies.lookup(backend, positions, first, last)
        return options, tables or widened(array)

    def on_device(self, views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The hook for CUDA arrays. It waits for positions only if the frequencies depend on them."""
        array = views.get("positions")
        if array is None:
            _, last = self._bounds(views)
        else:
            last = last_on_device(self.op, array) if self.frequencies.by_length else 0
        return self.frequencies.at(last).options if self.frequencies.by_length else {}, widened(array)

    def _bounds(self, views: dict[str, Any]) -> tuple[int, int]:
        """Minimum and maximum of positions that count up."""
        first = int(views.get("first", 0))  # a Python integer: NumPy's overflow
        last = first + self.seqlen - 1
        if first < -_EXACT or last > _EXACT:
            raise _beyond(self.op)
        return first, last

    @functools.cached_property
    def _steps(self) -> npt.NDArray[np.int64]:
        return np.arange(self.seqlen)[None]


def rows_and_bounds(op: str, positions: Array) -> Rows:
    """Check positions in host memory; return them with their minimum and maximum."""
    first, last = bounds_of(positions) if positions.size else (0, -1)
    if first < -_EXACT or last > _EXACT:
        raise _beyond(op)
    return as_int64(positions if positions.ndim == 2 else positions[None]), first, last


def last_on_device(op: str, positions: Array) -> int:
    """Largest position on a device; waits for it."""
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        raise DeviceError(
            f"{op}: frequencies of this scaling depend on the largest position, and a captured stream cannot be "
            "asked for it; pass seqlen="
        )
    return int(positions.max()) if positions.size else -1


def widens(positions: Array | None) -> bool:
    """Whether positions are neither int32 nor int64, the dtypes that kernels read."""
    return positions is not None and positions.dtype not in _READ_BY_KERNELS


def widened(positions: Array | None) -> dict[str, Array]:
    """Positions as int64, if kernels do not read their dtype."""
    if positions is None or not widens(positions):
        return {}
    return {"positions": positions.astype(np.int64, order="C")}


def _beyond(op: str) -> OptionError:
    return OptionError(f"{op}: positions reach beyond 2**53, where angles in float64 mean nothing")
