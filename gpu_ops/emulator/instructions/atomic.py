"""Effect of atom and red on a value in memory, and the old value for each lane if several access one address.

Such lanes run in lane order (silicon promises no order). :func:`combine` is the operation on values;
:func:`in_order` evaluates all turns at once, and stays fast with thousands of lanes on one address.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.emulator.instructions import unknown
from gpu_ops.emulator.syntax import DTYPE, Array

_HALF: dict[str, Any] = dict.fromkeys(("f16", "f16x2"), np.float16)
_HALF |= dict.fromkeys(("bf16", "bf16x2"), ml_dtypes.bfloat16)
_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "f32", "f64", *_HALF),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    "cas": ("b16", "b32", "b64"),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}
_UFUNCS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


_OTHERS: dict[str, Callable[..., Any]] = {
    "exch": lambda old, operand: np.broadcast_to(operand, old.shape).copy(),
    "cas": lambda old, expected, desired: np.where(old == expected, desired, old),
    "inc": lambda old, limit: np.where(old >= limit, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - np.uint32(1)),
}


def _check(op: str, ptx_type: str, modifiers: tuple[str, ...]) -> None:
    """Check modifiers: half types need .noftz, others must not have it. Memory order and scope do not matter here."""
    if ptx_type not in _TYPES.get(op, ()) or ("noftz" in modifiers) != (ptx_type in _HALF):
        raise unknown("atom", tuple(dict.fromkeys((*modifiers, op, ptx_type))))


def _numbers(values: Array, ptx_type: str) -> Array:
    """Convert to values that NumPy can add; a packed pair becomes a last axis of two."""
    if ptx_type not in _HALF:
        return values
    return (values[:, None] if ptx_type.endswith("x2") else values).view(_HALF[ptx_type])


def _registers(numbers: Array, ptx_type: str) -> Array:
    """Inverse of :func:`_numbers`."""
    values = numbers.view(DTYPE[ptx_type])
    return values[:, 0] if ptx_type.endswith("x2") else values


@cache
def combine(op: str, ptx_type: str, modifiers: tuple[str, ...]) -> Callable[..., Array]:
    """Function ``new = f(old, operand)``, for cas ``f(old, expected, desired)``, on arrays of ``DTYPE[ptx_type]``."""
    _check(op, ptx_type, modifiers)
    if op in _OTHERS:
        return _OTHERS[op]
    ufunc = _UFUNCS[op]

    def run(old: Array, operand: Array) -> Array:
        return _registers(ufunc(_numbers(old, ptx_type), _numbers(operand, ptx_type)), ptx_type)

    return run


def _by_address(addresses: Array) -> tuple[Array, Array, Array] | None:
    """Lanes sorted by address, then lane; the start of each address among them; its number of lanes.

    None if no address occurs twice.
    """
    if (addresses[1:] > addresses[:-1]).all():
        return None
    order = addresses.argsort(kind="stable")
    ordered = addresses[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    if len(starts) == len(addresses):
        return None
    return order, starts, np.diff(starts, append=len(addresses))


# The functions below take lanes sorted by address: the first value at each address, `starts` and `counts` of its
# lanes, and the operands of the lanes. They return the old value for each lane and the last value at each address.
_Turns = Callable[..., tuple[Array, Array]]


def _rounds(function: Callable[..., Array]) -> _Turns:
    """One step per turn, for all addresses at once."""

    def run(begin: Array, starts: Array, counts: Array, *operands: Array) -> tuple[Array, Array]:
        old, value = np.empty_like(operands[0]), begin.copy()
        for round_number in range(counts.max()):
            busy = np.flatnonzero(counts > round_number)
            lanes = starts[busy] + round_number
            old[lanes] = value[busy]
            value[busy] = function(value[busy], *(operand[lanes] for operand in operands))
        return old, value

    return run


def _accumulated(ufunc: np.ufunc, function: Callable[..., Array], ptx_type: str) -> _Turns:
    """One step per address if there are fewer addresses than turns; at most sqrt(lanes) steps either way."""
    rounds = _rounds(function)

    def run(begin: Array, starts: Array, counts: Array, operand: Array) -> tuple[Array, Array]:
        if len(starts) >= counts.max():
            return rounds(begin, starts, counts, operand)
        old, left = np.empty_like(operand), np.empty_like(begin)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            values = np.concatenate([begin[i : i + 1], operand[start : start + count]])
            numbers = _numbers(values, ptx_type)
            values = _registers(ufunc.accumulate(numbers, axis=0, dtype=numbers.dtype), ptx_type)
            old[start : start + count], left[i] = values[:-1], values[-1]
        return old, left

    return run


def _exchanges(begin: Array, starts: Array, counts: Array, operand: Array) -> tuple[Array, Array]:
    old = np.roll(operand, 1)
    old[starts] = begin
    return old, operand[starts + counts - 1]


def _compares(begin: Array, starts: Array, counts: Array, *operands: Array) -> tuple[Array, Array]:
    """One step per successful swap, because in a loop around cas most lanes fail."""
    expected, desired = operands
    lanes, none = np.arange(len(expected)), len(expected)
    value, waiting = begin.copy(), np.ones(len(expected), np.bool_)
    old = np.repeat(value, counts)
    while True:
        hits = waiting & (old == expected)
        first = np.minimum.reduceat(np.where(hits, lanes, none), starts)  # first hit of each address
        swapped = first < none
        if not swapped.any():
            return old, value
        value = np.where(swapped, desired[np.minimum(first, none - 1)], value)
        waiting &= lanes > np.repeat(first, counts)
        old = np.where(waiting, np.repeat(value, counts), old)


@cache
def in_order(op: str, ptx_type: str, modifiers: tuple[str, ...]) -> Callable[..., tuple[Array, Array, Array]]:
    """Function for all turns at once: ``run(addresses, before, *operands) -> (old, last, new)``.

    ``before`` is the value in memory at each lane's address. Lane i reads ``old[i]``; then memory at
    ``addresses[last]`` becomes ``new``, where ``last`` are the lanes with the last turn at their address.
    """
    function = combine(op, ptx_type, modifiers)
    if op == "exch":
        turns: _Turns = _exchanges
    elif op == "cas":
        turns = _compares
    elif op in _UFUNCS:
        turns = _accumulated(_UFUNCS[op], function, ptx_type)
    else:
        turns = _rounds(function)

    def run(addresses: Array, before: Array, *operands: Array) -> tuple[Array, Array, Array]:
        groups = _by_address(addresses)
        if groups is None:
            return before, np.arange(len(addresses)), function(before, *operands)
        order, starts, counts = groups
        sorted_operands = (np.broadcast_to(operand, addresses.shape)[order] for operand in operands)
        sorted_old, left = turns(before[order[starts]], starts, counts, *sorted_operands)
        old = np.empty_like(sorted_old)
        old[order] = sorted_old
        return old, order[starts + counts - 1], left

    return run
