"""The options of ``rope``, checked: axes, scaling, theta, rotary_dim and positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays, bounds_of
from gpu_ops.core.checks import Axes
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.ops.rope_tables import tables_of

__all__ = [
    "BY_LENGTH",
    "Positions",
    "axes_of",
    "inv_freq_of",
    "later_tables",
    "positions_of",
    "rotary_dim_of",
    "rows_and_bounds",
    "rows_of",
    "scaling_of",
    "theta_of",
]

Rows: TypeAlias = tuple[npt.NDArray[np.int64], int, int]  # all positions, the smallest and the largest

BY_LENGTH = ("dynamic", "longrope")  # scalings whose frequencies depend on the longest position
_EXACT = 2**53  # integers up to here are exact in float64
_PLAIN = RopeScaling("default")
_AXES = {
    "bshd": "batch seqlen {} head_dim",
    "bhsd": "batch {} seqlen head_dim",
    "packed": "total {} head_dim",
}


def axes_of(who: str, inputs: dict[str, Array], layout: Any) -> tuple[Axes, str]:
    """Checked axis lengths, and the layout: "bshd", "bhsd" or "packed"."""
    layout = checks.one_of(who, "layout", layout, ("bshd", "bhsd"))
    first, x = next(iter(inputs.items()))
    if x.ndim not in (3, 4):
        raise ShapeError(
            f"{who}: {first} has {x.ndim} axes, shape {x.shape}; expected (batch, seqlen, nheads, head_dim), or "
            f"packed (total, nheads, head_dim)"
        )
    if x.ndim == 3:
        if layout == "bhsd":
            raise OptionError(
                f"{who}: layout='bhsd' is for 4 axes; packed {first} is (total, nheads, head_dim)"
            )
        layout = "packed"
    axes = Axes(who)
    for (name, array), heads in zip(inputs.items(), ("nheads", "nheads_kv"), strict=False):
        axes.bind(name, array, _AXES[layout].format(heads))
    return axes, layout


def scaling_of(who: str, scaling: Any) -> RopeScaling:
    if scaling is None:
        return _PLAIN
    if not isinstance(scaling, RopeScaling):
        hint = (
            "RopeScaling.from_hf(config)"
            if isinstance(scaling, dict)
            else "for example RopeScaling.linear(4.0)"
        )
        raise OptionError(f"{who}: scaling must be a RopeScaling, got {type(scaling).__name__}; use {hint}")
    return scaling


def theta_of(who: str, theta: Any, scaling: RopeScaling) -> float:
    if theta is None:
        return 10000.0 if scaling.theta is None else scaling.theta
    return checks.number(who, "theta", theta, above=0.0)


def rotary_dim_of(who: str, rotary_dim: Any, head_dim: int, scaling: RopeScaling) -> int:
    origin = "rotary_dim"
    if rotary_dim is None:
        partial = scaling.partial_rotary_factor
        rotary_dim = head_dim if partial is None else int(head_dim * partial)
        origin = "head_dim" if partial is None else f"rotary_dim = int({head_dim} * partial_rotary_factor)"
    size = checks.integer(who, "rotary_dim", rotary_dim)
    if not 2 <= size <= head_dim or size % 2:
        raise OptionError(
            f"{who}: {origin} is {size}; components rotate in pairs: pass rotary_dim=, an even number from 2 "
            f"to head_dim={head_dim}"
        )
    return size


def inv_freq_of(
    who: str, scaling: RopeScaling, rotary_dim: int, theta: float, longest: int
) -> npt.NDArray[np.float64]:
    """Radians per position of each pair."""
    with np.errstate(over="ignore"):
        inv_freq = scaling.inv_freq(rotary_dim, theta, longest)
    if not np.isfinite(inv_freq).all():
        raise OptionError(f"{who}: theta={theta:g} makes frequencies infinite")
    return inv_freq


@dataclass(frozen=True)
class Positions:
    """``array``, integers (batch or 1, tokens of a sequence); or None: ``first``, ``first + 1``, ..."""

    array: Array | None
    first: int
    seqlen: int
    tokens: int  # of all sequences

    @classmethod
    def of(cls, array: Array, tokens: int = 0) -> Positions:
        return cls(array if array.ndim == 2 else array[None], 0, array.shape[-1], tokens)

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest; of an array on a device after waiting for it."""
        if self.array is None:
            return self.first, self.first + self.seqlen - 1
        return bounds_of(self.array) if self.array.size else (0, -1)

    def check_bounds(self, who: str) -> None:
        _check_bounds(who, *self.bounds)

    def on_host(self) -> npt.NDArray[np.int64]:
        """All of them, for the CPU."""
        if self.array is None:
            return self.first + np.arange(self.seqlen)[None]
        return self.array.astype(np.int64, copy=False)

    def on_device(self) -> Array | None:
        """The array, if there is one, in a dtype that the kernels read."""
        if self.array is None or self.array.dtype in (np.int32, np.int64):
            return self.array
        return self.array.astype(np.int64)


def rows_and_bounds(who: str, array: Array) -> Rows:
    """``on_host`` and ``bounds`` of positions whose shape has been checked, for the CPU, after a look at all."""
    first, last = bounds_of(array) if array.size else (0, -1)
    _check_bounds(who, first, last)
    return (array if array.ndim == 2 else array[None]).astype(np.int64, copy=False), first, last


def rows_of(who: str, where: Positions, given: Any) -> Callable[[Any], Rows]:
    """:func:`rows_and_bounds` of the positions of later calls, which are given as these were: as an array, a number
    or not at all."""
    if where.array is not None:
        return functools.partial(rows_and_bounds, who)
    if given is None:
        fixed = (where.on_host(), *where.bounds)
        return lambda _: fixed
    steps, more = np.arange(where.seqlen)[None], where.seqlen - 1

    def count_up(first: Any) -> Rows:
        first = int(first)
        _check_bounds(who, first, first + more)
        return first + steps, first, first + more

    return count_up


def later_tables(
    who: str,
    scaling: RopeScaling,
    rotary_dim: int,
    theta: float,
    longest: int,
    dtype: npt.DTypeLike,
    *,
    lasting: bool,
) -> Callable[[Any, int, int], tuple[Array, Array, Any]]:
    """:func:`tables_of` the frequencies for sequences of length ``longest``; where they go by the length, and it is
    not ``lasting``, for that which the positions of each call reach."""

    @functools.lru_cache(maxsize=1)  # the layers of a model have the length in common
    def tables_at(longest: int) -> Callable[[Any, int, int], tuple[Array, Array, Any]]:
        inv_freq = inv_freq_of(who, scaling, rotary_dim, theta, longest)
        return tables_of(inv_freq, scaling.attention_factor_at(longest), dtype)

    if lasting or scaling.kind not in BY_LENGTH:
        return tables_at(longest)
    return lambda positions, first, last: tables_at(max(last + 1, 0))(positions, first, last)


def _check_bounds(who: str, first: int, last: int) -> None:
    if first < -_EXACT or last > _EXACT:
        raise OptionError(f"{who}: positions reach beyond 2**53, where angles in float64 mean nothing")


def positions_of(who: str, arrays: Arrays, positions: Any, axes: Axes, layout: str) -> Positions:
    seqlen = axes["total" if layout == "packed" else "seqlen"]
    tokens = seqlen * (1 if layout == "packed" else axes["batch"])
    if positions is None:
        return Positions(None, 0, seqlen, tokens)
    if isinstance(positions, (int, np.integer)):
        return Positions(None, checks.integer(who, "positions", positions), seqlen, tokens)
    if isinstance(positions, (float, np.floating)):
        raise DTypeError(
            f"{who}: positions is the number {positions}; pass an integer, the position of the first token, or an "
            "array of integers"
        )
    given = arrays.read("positions", positions)
    if given.dtype.kind not in "iu":
        raise DTypeError(f"{who}: positions is {given.dtype}; allowed: integers, for example np.int64")
    allowed = [(seqlen,)] if layout == "packed" else [(seqlen,), (axes["batch"], seqlen), (1, seqlen)]
    if given.shape not in allowed:
        names = "(total,)" if layout == "packed" else "(seqlen,), (batch, seqlen) or (1, seqlen)"
        raise ShapeError(
            f"{who}: positions has shape {given.shape}; expected {names}: "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))}"
        )
    return Positions.of(given, tokens)
