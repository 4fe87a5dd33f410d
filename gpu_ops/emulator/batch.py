"""Batch of blocks that run together: the position of every thread, and its special registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.emulator.errors import Faults, SanitizerError
from gpu_ops.emulator.memory import Memory
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.syntax import Array

WARP = 32

#: Threads that an instruction runs for: a bool per thread, or None for all of them.
Mask = Array | None

#: Description of a fault, or a function that returns it when it is needed.
Text = str | Callable[[], str]

#: Mask without any thread; compared by identity.
NONE: Array = np.zeros(1, np.bool_)


class Batch:
    """Some blocks of a launch, each padded to whole warps. Lane numbers run through the whole batch."""

    memory: Memory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    faults: Faults | None

    def __init__(self, program: PtxProgram) -> None:
        self.program = program

    def begin(self, blocks: Array) -> None:
        """Start the blocks with these linear ids."""
        size = self.block[0] * self.block[1] * self.block[2]
        self.padded = -(-size // WARP) * WARP  # threads of a block; those beyond its size are never alive
        self.blocks = blocks
        self.threads = len(blocks) * self.padded
        self.lanes = np.arange(self.threads, dtype=np.int32)
        self.alive = self.lanes % self.padded < size
        self.all_alive = size == self.padded
        self.memory.begin(len(blocks), self.padded, self.dynamic_shared)

    def thread(self, lane: int) -> str:
        """Name of a lane's thread, such as ``block (3,0,0) thread (17,0,0)``."""
        b, t = int(self.blocks[lane // self.padded]), lane % self.padded
        gx, gy, _ = self.grid
        x, y, _ = self.block
        block = f"block ({b % gx},{b // gx % gy},{b // (gx * gy)})"
        return f"{block} thread ({t % x},{t // x % y},{t // (x * y)})"

    def report(self, kind: str, pc: int, lane: int, what: Text, rival: int = -1) -> None:
        """Raise a fault, or keep it if the launch collects them.

        ``rival`` is the pc of the other access, if any: two instructions make one fault,
        however many threads run them.
        """
        if self.faults is None:
            raise self.fault(kind, pc, lane, what)
        key = kind, pc, rival
        if not self.faults.repeated(key):
            self.faults.found[key] = self.fault(kind, pc, lane, what)

    def note(self, pc: int, lane: int, what: Text) -> None:
        """Keep a note if the launch collects faults, once for each instruction."""
        if self.faults is not None and pc not in self.faults.notes:
            self.faults.notes[pc] = str(self.fault("note", pc, lane, what))

    def fault(self, kind: str, pc: int, lane: int, what: Text) -> SanitizerError:
        what = what if isinstance(what, str) else what()
        where = f"kernel {self.program.title}, {self.thread(lane)}\n  at {self.program.where(pc)}"
        return SanitizerError(kind, f"{what}\n  {where}")


class SpecialRegister(NamedTuple):
    """Special register; ``value`` returns one element per thread, or one for all of them."""

    dtype: np.dtype[Any]
    value: Callable[[Batch], Array]


def _u32(value: int) -> Array:
    return np.array([value], np.uint32)


def _thread(b: Batch) -> Array:
    return (b.lanes % b.padded).astype(np.uint32)


def _lane(b: Batch) -> Array:
    return (b.lanes % WARP).astype(np.uint32)


def _tid(axis: int) -> Callable[[Batch], Array]:
    def value(b: Batch) -> Array:
        x, y, _ = b.block
        if b.block[axis] == 1:
            return _u32(0)
        t = _thread(b)
        return (t % x, t // x % y, t // (x * y))[axis].astype(np.uint32)

    return value


def _ctaid(axis: int) -> Callable[[Batch], Array]:
    def value(b: Batch) -> Array:
        x, y, _ = b.grid
        block = np.repeat(b.blocks, b.padded) if len(b.blocks) > 1 else b.blocks
        return (block % x, block // x % y, block // (x * y))[axis].astype(np.uint32)

    return value


def _lanemask(below: bool, own: bool, above: bool) -> Callable[[Batch], Array]:
    def value(b: Batch) -> Array:
        bit = np.uint32(1) << _lane(b)
        low = bit - np.uint32(1)
        mask = np.zeros(b.threads, np.uint32)
        mask |= low if below else np.uint32(0)
        mask |= bit if own else np.uint32(0)
        return mask | (~(low | bit) if above else np.uint32(0))

    return value


def _size(of: Callable[[Batch], tuple[int, int, int]], axis: int) -> Callable[[Batch], Array]:
    return lambda b: _u32(of(b)[axis])


_VALUES_U32: dict[str, Callable[[Batch], Array]] = {
    **{f"%tid.{a}": _tid(i) for i, a in enumerate("xyz")},
    **{f"%ctaid.{a}": _ctaid(i) for i, a in enumerate("xyz")},
    **{f"%ntid.{a}": _size(lambda b: b.block, i) for i, a in enumerate("xyz")},
    **{f"%nctaid.{a}": _size(lambda b: b.grid, i) for i, a in enumerate("xyz")},
    "%laneid": _lane,
    "%warpid": lambda b: _thread(b) // np.uint32(WARP),
    "%nwarpid": lambda b: _u32(b.padded // WARP),
    "%smid": lambda b: _u32(0),
    "%nsmid": lambda b: _u32(1),
    "%lanemask_eq": _lanemask(False, True, False),
    "%lanemask_lt": _lanemask(True, False, False),
    "%lanemask_le": _lanemask(True, True, False),
    "%lanemask_gt": _lanemask(False, False, True),
    "%lanemask_ge": _lanemask(False, True, True),
    "%dynamic_smem_size": lambda b: _u32(b.dynamic_shared),
    "%total_smem_size": lambda b: _u32(b.dynamic_shared + b.program.shared_bytes),
    "%envreg1": lambda b: _u32(b.memory.grid_barrier >> 32),
    "%envreg2": lambda b: _u32(b.memory.grid_barrier & 0xFFFFFFFF),
    "WARP_SZ": lambda b: _u32(WARP),
}

#: Special registers by name, except the clocks: an instruction reads those when it runs.
SPECIAL_REGISTERS = {
    name: SpecialRegister(np.dtype(np.uint32), value) for name, value in _VALUES_U32.items()
} | {"%gridid": SpecialRegister(np.dtype(np.uint64), lambda b: np.array([1], np.uint64))}
