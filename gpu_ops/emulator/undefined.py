"""Uninitialised values in registers, from the load that read one to the first use that matters.

Whether a value is initialised is a property of the value. A load that reads unwritten memory marks its register,
lane by lane. Moves, arithmetic and stores to shared and local memory propagate the mark; choices (``selp``, ``and``,
predicated moves) drop it where the result does not depend on it. A branch, an address, a store to global memory and
any other visible effect report it.

``State.undefined`` holds the marks of each marked register as int64 ``[2, threads]``: 0 or a number that identifies
the load, and the uninitialised bits. Bitwise instructions, comparisons, moves and votes keep these exact
(:mod:`.bits`); after others all bits of the result are uninitialised. The dictionary is empty until a load marks a
register; until then no code of this module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gpu_ops.emulator import bits, shadow
from gpu_ops.emulator.batch import WARP
from gpu_ops.emulator.flow import Flow, flow_at
from gpu_ops.emulator.instructions.warp_ops import shfl_sources
from gpu_ops.emulator.memory import NO, SOME, LaneAddresses
from gpu_ops.emulator.sanitizer import Absent
from gpu_ops.emulator.state import Group, State
from gpu_ops.emulator.syntax import BITS, DTYPE, Array

_LOADS = 1000  # number of loads to keep before those without marks are dropped
_SHIFT = 32  # a mark is the load's number in the bits above the position of its lane, plus 1


# ---- marks -------------------------------------------------------------------------------------------------


def _marks(m: State, registers: list[int]) -> Array | None:
    """Marks of several registers as one, for all bits; None if there are none."""
    loads = [marks[0] for i in registers if (marks := m.undefined.get(i)) is not None]
    return _marked(np.maximum.reduce(loads)) if loads else None


def _marked(loads: Array, unknown: Array | np.uint64 = bits.ALL) -> Array:
    """Marks of these loads, for the unknown bits (uint64)."""
    marked = (loads != 0) & (unknown != 0)
    return np.stack((np.where(marked, loads, 0), np.where(marked, unknown, np.uint64(0)).view(np.int64)))


def _unknown(m: State, registers: list[int | None], width: int) -> Array:
    """Uninitialised bits of a source of ``width`` bits, as uint64."""
    unknown, width = np.zeros(m.threads, np.uint64), width // len(registers)
    for k, register in enumerate(registers):
        if register is not None and (marks := m.undefined.get(register)) is not None:
            unknown |= (marks[1].view(np.uint64) & np.uint64((1 << width) - 1)) << np.uint64(k * width)
    return unknown


def _loads(m: State, register: int) -> Array:
    """Numbers of the loads of a register's marks; 0 where there are none."""
    marks = m.undefined.get(register)
    return np.zeros(m.threads, np.int64) if marks is None else marks[0]


def _put(m: State, register: int, marks: Array | None, lanes: Array) -> None:
    """Set a register's marks in the lanes that have written it."""
    old = m.undefined.get(register)
    if old is None and marks is None:
        return
    new = np.zeros((2, m.threads), np.int64) if old is None else old.copy()
    new[:, lanes] = 0 if marks is None else marks[:, lanes]
    if new[0].any():
        m.undefined[register] = new
    else:
        m.undefined.pop(register, None)


def _report(m: State, pc: int, marks: Array, lanes: Array, use: str) -> None:
    """Report the marked lanes among these, and drop the marks if faults are collected."""
    s, marks = m.sanitizer, marks[0]
    assert s is not None
    numbers = np.unique(marks[lanes & m.alive & (marks != 0)])
    for mark in numbers.tolist():
        load, position = s.loads[(mark - 1) >> _SHIFT], (mark - 1) & ((1 << _SHIFT) - 1)
        user = int(np.flatnonzero(lanes & m.alive & (marks == mark))[0])

        def what(load=load, position=position, user=user) -> str:  # type: ignore[no-untyped-def]
            text, store = load.text(s, position)
            text = f"{text}; {m.thread(user)} {use}\n    at {m.program.where(pc)}"
            return text if store < 0 else f"{text}\n  the value was stored there at {m.program.where(store)}"

        m.report("uninitialised read", load.access.pc, int(load.place.lanes[position]), what)
    if len(numbers):
        for register, other in list(m.undefined.items()):
            _put(m, register, np.where(np.isin(other[0], numbers), 0, other), m.full(None))


# ---- instructions ------------------------------------------------------------------------------------------


def before(m: State, group: Group) -> None:
    """Carry marks through the instruction that a group is about to execute, or report them."""
    flow = flow_at(m, group.pc)
    lanes = m.full(group.mask)
    doubt = m.undefined.get(flow.guard)
    if doubt is not None and flow.visible:
        _report(m, flow.pc, doubt, lanes, flow.visible)
        doubt = None
    if flow.guard >= 0:
        p = m.registers[flow.guard]
        active = lanes & (~p if m.steps[flow.pc].negated else p)
    else:
        active = lanes
    for registers, use in ((flow.addresses, "uses the value as an address"), (flow.uses, flow.use)):
        marks = _marks(m, registers)
        if marks is not None:
            _report(m, flow.pc, marks, active, use)
    if flow.warp or not flow.targets:
        return
    marks = _marks(m, flow.sources)
    mine = [marks] * len(flow.targets) if marks is None or flow.op is None else _chosen(m, flow, marks[0])
    if doubt is not None:  # uncertain whether these lanes write at all
        doubt = _marked(np.where(lanes, doubt[0], 0))
        active = active | (doubt[0] != 0)
        mine = [doubt if of is None else np.where(doubt[0] != 0, doubt, of) for of in mine]
    for register, of in zip(flow.targets, mine, strict=True):
        _put(m, register, of, active)


def _chosen(m: State, flow: Flow, loads: Array) -> list[Array | None]:
    """Marks of each target, for the bits that change with the uninitialised bits of the sources."""
    assert flow.op is not None
    values = [np.broadcast_to(read(), m.threads) for read in flow.readers]
    sources = zip(flow.operands, flow.op.reads, strict=True)
    unknown = [_unknown(m, registers, BITS[ptx_type]) for registers, ptx_type in sources]
    changed = bits.changing(flow, values, unknown)
    return [_marked(loads, changed[number] >> np.uint64(first)) for number, first in flow.results]


def together(m: State, pc: int, here: Array, named: Array) -> None:
    """Carry marks through an instruction of whole warps.

    ``here``: the lanes that execute it, ``[warps, 32]``; ``named``: the lanes that each of them names.
    """
    flow, lanes = flow_at(m, pc), here.ravel()
    marks = _marks(m, flow.sources)
    mine: list[Array | None] = [None] * len(flow.targets)
    if marks is not None:
        rows = marks[0].reshape(-1, WARP)
        rows = np.broadcast_to(np.where(here, rows, 0).max(axis=1, keepdims=True), rows.shape)
        loads = np.ascontiguousarray(rows).ravel()
        if flow.exchange is not None:
            mine = [_marked(loads, _exchanged(m, flow, here, named))]
        elif flow.readers:
            mine = _shuffled(m, flow)
        elif flow.tile:
            mine = [_marked(np.where(wrong, loads, 0)) for wrong in _product(m, flow, here)]
        else:
            mine = [_marked(loads)] * len(flow.targets)
    for register, of in zip(flow.targets, mine, strict=False):
        _put(m, register, of, lanes)


def _exchanged(m: State, flow: Flow, here: Array, named: Array) -> Array:
    """Bits of a vote or reduction that the values of marked lanes can change."""
    assert flow.exchange is not None
    values, (registers,) = np.broadcast_to(flow.readers[0](), m.threads), flow.operands
    unknown = _unknown(m, registers, 8 * values.itemsize)
    results = []
    for ones in (False, True):
        trial = bits.filled(values, unknown, ones).reshape(-1, WARP)
        result = np.asarray(flow.exchange(trial, named, here))
        results.append(result.view(f"u{result.itemsize}").astype(np.uint64))
    return np.ascontiguousarray(np.broadcast_to(results[0] ^ results[1], here.shape)).ravel()


def _shuffled(m: State, flow: Flow) -> list[Array | None]:
    """Marks of the results of ``shfl``: those of the other lane's value, and of this lane's choice of a lane."""
    shape = m.threads // WARP, WARP
    distance, clamp = (np.broadcast_to(r(), m.threads).reshape(shape) for r in flow.readers)
    source, valid = shfl_sources(m.program.code[flow.pc].modifiers[1], distance, clamp)
    lane = np.broadcast_to(np.arange(WARP), shape)
    source = np.where(valid, np.broadcast_to(source, shape), lane).astype(np.intp)
    value, *rest = ([i for i in registers if i is not None] for registers in flow.operands)
    which = _marks(m, [i for registers in rest for i in registers])
    moved = None
    if value and (marks := m.undefined.get(value[0])) is not None:
        rows = np.take_along_axis(marks.reshape(2, *shape), source[np.newaxis], axis=2)
        moved = rows.reshape(2, -1)
    if which is not None:
        moved = which if moved is None else np.where(which[0] != 0, which, moved)
    return [moved, which]


def _product(m: State, flow: Flow, here: Array) -> list[Array]:
    """Marks of a product of tiles: of the elements that depend on marked ones, found by the spread of a NaN."""
    assert flow.tile is not None
    warps, tiles = here.any(axis=1), []
    for registers, (_, ptx_type) in zip(flow.tiles, (flow.tile.a, flow.tile.b, flow.tile.c), strict=True):
        nan = np.array([-1], f"i{DTYPE[ptx_type].itemsize}")
        loads = [_loads(m, -1 if i is None else i) for i in registers]
        values = [np.where(of != 0, nan, 0).astype(nan.dtype).view(f"u{nan.itemsize}") for of in loads]
        tiles.append([np.ascontiguousarray(v.reshape(-1, WARP)[warps]) for v in values])
    faults = []
    for result in flow.tile.run(*tiles):
        wrong = np.zeros(here.shape, np.bool_)
        wrong[warps] = result.view(f"u{result.dtype.itemsize}") != 0
        faults.append(wrong.ravel())
    return faults


# ---- memory ------------------------------------------------------------------------------------------------


def _new_loads(m: State) -> Iterator[tuple[Absent, Array]]:
    """Yield the absent bytes that the latest load read, and the marks of its lanes."""
    s = m.sanitizer
    assert s is not None
    if not m.undefined or len(s.loads) >= _LOADS:
        _prune(m)
    absent, s.absent = s.absent, []
    for load in absent:
        number = next(reversed(s.loads), -1) + 1
        s.loads[number] = load
        yield load, (np.int64(number) << _SHIFT) + np.arange(1, len(load.bits) + 1)


def _prune(m: State) -> None:
    """Drop the loads that no mark refers to."""
    s = m.sanitizer
    assert s is not None
    left = {
        n for loads, _ in m.undefined.values() for n in np.unique((loads[loads != 0] - 1) >> _SHIFT).tolist()
    }
    s.loads = {n: load for n, load in s.loads.items() if n in left}


def loaded(m: State, registers: list[list[int]], size: int, signed: bool = True) -> None:
    """Mark registers after a load: those that take the first ``size`` bytes, the next ones, and so on.

    Above these bytes a register has zeros or, if it is signed, bits that depend on them.
    """
    unknown = bits.ALL if signed else np.uint64((1 << 8 * size) - 1)
    ones = np.uint64((1 << size) - 1)
    for load, marks in _new_loads(m):
        access, missing, lanes = load.access, load.bits, load.place.lanes
        if access.initialised == NO:
            continue
        if access.initialised == SOME:
            missing = np.where(missing == np.uint64((1 << access.size) - 1), missing, np.uint64(0))
        for k, several in enumerate(registers):
            mine = missing >> np.uint64(k * size) & ones
            # One written byte of an element in local memory is enough: compilers copy structs with their padding.
            wrong = np.where(load.place.owner == -2, mine == ones, mine != 0)
            for register in several if wrong.any() else ():
                _mark(m, register, lanes[wrong], marks[wrong], unknown)


def _mark(m: State, register: int, lanes: Array, marks: Array, unknown: np.uint64 = bits.ALL) -> None:
    new = np.zeros(m.threads, np.int64)
    new[lanes] = marks
    at = np.zeros(m.threads, np.bool_)
    at[lanes] = True
    _put(m, register, _marked(new, unknown), at)


def loaded_fragments(
    m: State,
    registers: list[int],
    place: LaneAddresses,
    rows: int,
    load: Callable[[Array], list[Array]],
    warps: Array,
) -> None:
    """Mark the registers of ``ldmatrix``; ``load`` distributes rows of 16 bytes to them."""
    for unwritten, marks in _new_loads(m):
        lanes, missing = unwritten.place.lanes, unwritten.bits
        data, of_warp = np.zeros((len(warps), rows, 16), np.uint8), np.zeros(m.threads // WARP, np.int64)
        at = np.searchsorted(place.lanes, lanes)
        data.reshape(-1, 16)[at] = missing[:, None] >> np.arange(16, dtype=np.uint64) & np.uint64(1)
        np.maximum.at(of_warp, lanes // WARP, marks)
        for register, fragment in zip(registers, load(data), strict=True):
            wrong = np.zeros((m.threads // WARP, WARP), np.bool_)
            wrong[warps] = fragment != 0
            where = wrong.ravel()
            if where.any():
                _mark(m, register, np.flatnonzero(where), np.repeat(of_warp, WARP)[where])


def stored(m: State, pc: int, place: LaneAddresses, registers: list[int], size: int, first: int = 0) -> None:
    """Report or mark memory after a store of ``size`` bytes of each register, from bit ``first`` on."""
    missing, told = np.zeros(len(place.lanes), np.uint64), np.zeros(m.threads, np.int64)
    for k, register in enumerate(registers):
        if (marks := m.undefined.get(register)) is not None:
            loads, unknown = marks[:, place.lanes]
            matters = (unknown >> first & ((1 << 8 * size) - 1 if size < 8 else -1)) != 0
            missing |= np.where(matters, np.uint64(((1 << size) - 1) << (k * size)), np.uint64(0))
            told[place.lanes] = np.maximum(told[place.lanes], np.where(matters, loads, 0))
    _stored(m, pc, place, missing, told)


def stored_fragments(
    m: State, pc: int, place: LaneAddresses, registers: list[int], store: Callable[..., Array], warps: Array
) -> None:
    """Mark memory after ``stmatrix``; ``store`` makes rows of 16 bytes from the registers."""
    loads = [_loads(m, i).reshape(-1, WARP) for i in registers]
    rows = store([np.where(of[warps] != 0, 0xFFFFFFFF, 0).astype(np.uint32) for of in loads])
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16) != 0
    missing = np.packbits(data, axis=1, bitorder="little").view(np.uint16).ravel().astype(np.uint64)
    told = np.maximum.reduce(loads).max(axis=1)
    _stored(m, pc, place, missing, np.repeat(told, WARP))


def _stored(m: State, pc: int, place: LaneAddresses, missing: Array, told: Array) -> None:
    wrong = missing != 0
    if not wrong.any():
        return
    outside = np.zeros(m.threads, np.bool_)
    outside[place.lanes[wrong & (place.owner >= 0)]] = True
    _report(m, pc, _marked(told), outside, "stores the value in global memory")
    _void(m, place.of(wrong), missing[wrong])


def _void(m: State, place: LaneAddresses, missing: Array) -> None:
    """Mark bytes of shared and local memory, a bit each, that got uninitialised values."""
    s = m.sanitizer
    assert s is not None
    shared, local = place.owner == -1, place.owner == -2
    if shared.any():
        tables = m.memory.windows, s.granule, s.state
        shadow.void_shared(place.host[shared], place.lanes[shared], missing[shared], *tables)
    base, stride = int(m.memory.windows[4]), int(m.memory.windows[6])
    for lane, host, mine in zip(place.lanes[local], place.host[local], missing[local].tolist(), strict=True):
        offset = int(host) - base - int(lane) * stride
        for b in range(64):
            if mine >> b & 1:
                s.written[lane, offset + b] = shadow.VOID
