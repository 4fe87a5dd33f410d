"""Special registers: what a thread can ask about itself and its grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpu_ops.emulator.types import Array

if TYPE_CHECKING:
    from gpu_ops.emulator.machine import Machine

__all__ = ["SPECIAL"]


class _Special(NamedTuple):
    dtype: np.dtype[Any]
    value: Callable[[Machine], Array]


def _thread(m: Machine) -> Array:
    return (m.lanes % m.padded).astype(np.uint32)


def _tid(axis: int) -> Callable[[Machine], Array]:
    def value(m: Machine) -> Array:
        x, y, _ = m.block
        if m.block[axis] == 1:
            return _u32(0)
        t = _thread(m)
        return (t % x, t // x % y, t // (x * y))[axis].astype(np.uint32)

    return value


def _ctaid(axis: int) -> Callable[[Machine], Array]:
    def value(m: Machine) -> Array:
        x, y, _ = m.grid
        b = m.blocks
        if len(b) > 1:
            b = np.repeat(b, m.padded)
        return (b % x, b // x % y, b // (x * y))[axis].astype(np.uint32)

    return value


def _u32(value: int) -> Array:
    return np.array([value], np.uint32)


def _lane(m: Machine) -> Array:
    return (m.lanes % 32).astype(np.uint32)


def _bits(below: bool, itself: bool, above: bool) -> Callable[[Machine], Array]:
    def value(m: Machine) -> Array:
        bit = np.uint32(1) << _lane(m)
        low = bit - np.uint32(1)
        mask = np.zeros(m.threads, np.uint32)
        mask |= low if below else np.uint32(0)
        mask |= bit if itself else np.uint32(0)
        return mask | (~(low | bit) if above else np.uint32(0))

    return value


_U32 = np.dtype(np.uint32)

#: Name -> dtype and value over the threads (one element when it is the same for all). Clocks are read step by step.
SPECIAL: dict[str, _Special] = {
    **{f"%tid.{a}": _Special(_U32, _tid(i)) for i, a in enumerate("xyz")},
    **{f"%ctaid.{a}": _Special(_U32, _ctaid(i)) for i, a in enumerate("xyz")},
    **{f"%ntid.{a}": _Special(_U32, lambda m, i=i: _u32(m.block[i])) for i, a in enumerate("xyz")},  # type: ignore[misc]
    **{f"%nctaid.{a}": _Special(_U32, lambda m, i=i: _u32(m.grid[i])) for i, a in enumerate("xyz")},  # type: ignore[misc]
    "%laneid": _Special(_U32, _lane),
    "%warpid": _Special(_U32, lambda m: _thread(m) // np.uint32(32)),
    "%nwarpid": _Special(_U32, lambda m: _u32(m.padded // 32)),
    "%smid": _Special(_U32, lambda m: _u32(0)),
    "%nsmid": _Special(_U32, lambda m: _u32(1)),
    "%gridid": _Special(np.dtype(np.uint64), lambda m: np.array([1], np.uint64)),
    "%lanemask_eq": _Special(_U32, _bits(False, True, False)),
    "%lanemask_lt": _Special(_U32, _bits(True, False, False)),
    "%lanemask_le": _Special(_U32, _bits(True, True, False)),
    "%lanemask_gt": _Special(_U32, _bits(False, False, True)),
    "%lanemask_ge": _Special(_U32, _bits(False, True, True)),
    "%dynamic_smem_size": _Special(_U32, lambda m: _u32(m.dynamic_shared)),
    "%total_smem_size": _Special(_U32, lambda m: _u32(m.dynamic_shared + m.program.shared_bytes)),
    "WARP_SZ": _Special(_U32, lambda m: _u32(32)),
}
