"""Exchange between the lanes of a warp: shfl, vote, match, redux, elect, activemask.

Arrays are ``[W, 32]``, one row per executing warp. ``active`` marks the lanes that execute; ``members`` is the mask
that each lane passed. Lanes with the same mask form a group, and a warp may hold several independent groups. The
result for a lane outside its own mask is undefined in PTX and unspecified here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from gpu_ops.emulator.instructions import unknown
from gpu_ops.emulator.syntax import DTYPE, Array

_LANE = np.arange(32, dtype=np.uint32)
_FULL = np.uint32(0xFFFFFFFF)

#: Value that shfl reads from a lane that does not take part. PTX leaves it undefined; here it is a float32 NaN, which
#: is visible.
UNDEFINED = np.uint32(0x7FFFFFFF)


def _bits(lanes: Array) -> Array:
    """Pack bool ``[W, 32]`` into masks ``[W, 1]``."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)


def _collapse(values: Array) -> Array:
    """Reduce to ``[1, 1]`` if every lane of every warp has the same value, as most masks and distances do."""
    corner = values[:1, :1]
    return corner if (values == corner).all() else values


def _all_lanes(members: Array) -> bool:
    return members.size == 1 and bool(members[0, 0] == _FULL)


def _contains(members: Array, lanes: Array) -> Array:
    return ((members >> lanes) & np.uint32(1)).astype(np.bool_)


def _groups(members: Array, active: Array) -> Iterator[Array]:
    """Lanes of each group, bool ``[W, 32]``; warps with fewer groups than others yield empty ones."""
    members = _collapse(members)
    inside = active if _all_lanes(members) else active & _contains(members, _LANE)
    if members.size == 1:
        yield inside
        return
    left = inside
    while True:
        first = left.argmax(axis=1)[:, None]
        group = left & (members == np.take_along_axis(members, first, axis=1))
        yield group
        left = left & ~group
        if not left.any():
            return


def _per_group(members: Array, active: Array, evaluate: Callable[[Array], Array]) -> Array:
    """Compute ``evaluate(group)`` of each lane's group; evaluate returns ``[W, 32]`` or ``[W, 1]``."""
    result = None
    for group in _groups(members, active):
        value = evaluate(group)
        result = np.where(group, value, value if result is None else result)
    assert result is not None  # there is always a first group, though it may be empty
    return result


def shfl_sources(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Lane that each lane reads, and whether that is in range; if not, a lane reads itself.

    ``b`` and ``c`` may be ``[1, 1]``; the results are then ``[1, 32]``.
    """
    distance = b & np.uint32(31)
    segment = (c >> np.uint32(8)) & np.uint32(31)
    last = (_LANE & segment) | (c & np.uint32(31) & ~segment)  # the first, for mode up
    if mode == "up":
        source = _LANE - distance  # below lane 0 it wraps to a lane that is never in range
        valid = source.view(np.int32) >= last.view(np.int32)
    elif mode == "down":
        source = _LANE + distance
        valid = source <= last
    elif mode == "bfly":
        source = _LANE ^ distance
        valid = source <= last
    elif mode == "idx":
        source = (_LANE & segment) | (distance & ~segment)
        valid = source <= last
    else:
        raise unknown("shfl", ("sync", mode))
    return np.where(valid, source, _LANE), valid


@lru_cache(maxsize=256)
def _pattern(mode: str, b: int, c: int) -> tuple[Array, Array]:
    """Result of :func:`shfl_sources` for one warp whose lanes all pass the same b and c."""
    source, valid = shfl_sources(mode, np.full((1, 1), b, np.uint32), np.full((1, 1), c, np.uint32))
    return source[0], valid[0]


def shfl(mode: str, a: Array, b: Array, c: Array, members: Array, active: Array) -> tuple[Array, Array]:
    """Compute ``d|p``: the value of ``a`` in the source lane, and whether that lane is in range."""
    b, c, members = _collapse(b), _collapse(c), _collapse(members)
    if b.size == c.size == 1:
        source, valid = _pattern(mode, int(b[0, 0]), int(c[0, 0]))
        value, present = a.take(source, axis=1), active.take(source, axis=1)
    else:
        source, valid = shfl_sources(mode, b, c)
        value, present = np.take_along_axis(a, source, axis=1), np.take_along_axis(active, source, axis=1)
    if not _all_lanes(members):
        present &= _contains(members, source)
    if not present.all():
        value = np.where(present, value, UNDEFINED)
    return value, np.broadcast_to(valid, a.shape).copy()


#: Functions of two masks: the lanes of a group with a true and with a false predicate.
_VOTES: dict[str, Callable[[Array, Array], Array]] = {
    "ballot": lambda true, false: true,
    "any": lambda true, false: true != 0,
    "all": lambda true, false: false == 0,
    "uni": lambda true, false: (true == 0) | (false == 0),
}


def vote(mode: str, predicate: Array, members: Array, active: Array) -> Array:
    """Vote of each group: ballot returns the lanes whose predicate holds as uint32; any, all and uni return bool."""
    if mode not in _VOTES:
        raise unknown("vote", ("sync", mode))
    result = _VOTES[mode]
    return _per_group(
        members, active, lambda group: result(_bits(group & predicate), _bits(group & ~predicate))
    )


def match(mode: str, value: Array, members: Array, active: Array) -> tuple[Array, Array]:
    """Mask of lanes: ``any``: those of the group with the same value. ``all``: the group if it has one value, else 0.

    The second result is whether the group has only one value.
    """
    if mode not in ("any", "all"):
        raise unknown("match", (mode, "sync"))
    group = _per_group(members, active, lambda lanes: _bits(lanes))
    equal = np.packbits(value[:, :, None] == value[:, None, :], axis=2, bitorder="little").view(np.uint32)
    same = equal[:, :, 0] & group
    uniform = same == group
    return (same if mode == "any" else np.where(uniform, group, np.uint32(0))), uniform


_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def redux(
    op: str, ptx_type: str, value: Array, members: Array, active: Array, modifiers: tuple[str, ...] = ()
) -> Array:
    """Sum (wrapping), minimum, ... of ``value`` over each group, in the dtype of ``ptx_type``.

    f32 has min and max, with ``abs`` and ``NaN``: NaN is ignored, or the result if any lane has it.
    """
    check_redux(op, ptx_type, modifiers)
    ufunc, floats = _REDUCTIONS[op], ptx_type == "f32"
    value = value.view(DTYPE[ptx_type])
    nan = np.isnan(value)
    value = _order(value, "abs" in modifiers) if floats else value
    dtype, limits = value.dtype, np.iinfo(value.dtype)
    identity = dtype.type({"min": limits.max, "max": limits.min, "and": limits.max}.get(op, 0))

    def evaluate(group: Array) -> Array:
        known = group & ~nan
        shared: Array = ufunc.reduce(np.where(known, value, identity), axis=1, keepdims=True, dtype=dtype)
        if not floats:
            return shared
        none = (
            (group & nan).any(axis=1, keepdims=True)
            if "NaN" in modifiers
            else ~known.any(axis=1, keepdims=True)
        )
        return np.where(none, np.int32(0x7FFFFFFF), _order(shared.view(np.float32), False)).view(np.float32)

    return _per_group(members, active, evaluate)


def check_redux(op: str, ptx_type: str, modifiers: tuple[str, ...]) -> None:
    """Raise for a form that does not exist."""
    types = ("u32", "s32", "f32") if op in ("min", "max") else ("u32", "s32") if op == "add" else ("b32",)
    allowed = ((), ("abs",), ("NaN",), ("abs", "NaN")) if ptx_type == "f32" else ((),)
    if op not in _REDUCTIONS or ptx_type not in types or modifiers not in allowed:
        raise unknown("redux", ("sync", op, *modifiers, ptx_type))


def _order(value: Array, absolute: bool) -> Array:
    """Map the bits of floats to int32 in the order of their values, -0 right before 0; the map is its own inverse."""
    bits = value.view(np.int32)
    if absolute:
        return bits & np.int32(0x7FFFFFFF)
    return np.where(bits < 0, np.int32(-(1 << 31)) - bits - np.int32(1), bits)


def elect(members: Array, active: Array) -> tuple[Array, Array]:
    """Leader of each group, its lowest lane, and whether a lane is the leader."""
    leader = _per_group(members, active, lambda group: group.argmax(axis=1)[:, None].astype(np.uint32))
    return leader, leader == _LANE


def activemask(active: Array) -> Array:
    """Mask of the lanes that execute together."""
    return np.broadcast_to(_bits(active), active.shape).copy()
