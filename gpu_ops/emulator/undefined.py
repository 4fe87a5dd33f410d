"""Uninitialised values in registers: from the load that read one, to the first use that matters.

Whether a value is initialised is a property of the value. A load that reads what nothing has written marks its
register, lane by lane. Moves, arithmetic and stores to shared and local memory carry the mark along; choices
(``selp``, ``and``, predicated moves) drop it where the result does not depend on it. A branch, an address, a store to
global memory and what else can be seen from outside report it.

``State.undefined`` holds the marks: for each register with one, an int64 per thread, which is 0 or tells the load. It
is empty until a load marks something, and nothing here runs while it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from gpu_ops.emulator import shadow
from gpu_ops.emulator.batch import WARP
from gpu_ops.emulator.flow import Flow, flow_at
from gpu_ops.emulator.instructions.warp_ops import shfl_sources
from gpu_ops.emulator.memory import NO, SOME, Place
from gpu_ops.emulator.sanitizer import Absent
from gpu_ops.emulator.state import Group, State
from gpu_ops.emulator.syntax import DTYPE, Array

_LOADS = 1000  # to remember before those without marks are dropped
_SHIFT = 32  # a mark is the number of the load above the position of its lane, plus 1


# -- marks ----------------------------------------------------------------------------------------


def _marks(m: State, registers: list[int]) -> Array | None:
    """The marks of several registers as one; None if there are none."""
    found = None
    for i in registers:
        if (marks := m.undefined.get(i)) is not None:
            found = marks if found is None else np.maximum(found, marks)
    return found


def _put(m: State, register: int, marks: Array | None, lanes: Array) -> None:
    """The lanes have written a register."""
    old = m.undefined.get(register)
    if old is None and marks is None:
        return
    new = np.zeros(m.threads, np.int64) if old is None else old.copy()
    new[lanes] = 0 if marks is None else marks[lanes]
    if new.any():
        m.undefined[register] = new
    else:
        m.undefined.pop(register, None)


def _report(m: State, pc: int, marks: Array, lanes: Array, use: str) -> None:
    """Report the marked lanes among these, and drop the marks where faults are collected."""
    s = m.sanitizer
    assert s is not None
    found = np.unique(marks[lanes & m.alive & (marks != 0)])
    for mark in found.tolist():
        load, position = s.loads[(mark - 1) >> _SHIFT], (mark - 1) & ((1 << _SHIFT) - 1)
        user = int(np.flatnonzero(lanes & m.alive & (marks == mark))[0])

        def what(load=load, position=position, user=user) -> str:  # type: ignore[no-untyped-def]
            text, store = load.text(s, position)
            text = f"{text}; {m.thread(user)} {use}\n    at {m.program.where(pc)}"
            return text if store < 0 else f"{text}\n  the value was stored there at {m.program.where(store)}"

        m.report("uninitialised read", load.access.pc, int(load.place.lanes[position]), what)
    if len(found):
        for register, other in list(m.undefined.items()):
            _put(m, register, np.where(np.isin(other, found), 0, other), m.full(None))


# -- instructions ---------------------------------------------------------------------------------


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
    if marks is not None and flow.op is not None:
        marks = _chosen(m, flow, marks)
    if doubt is not None:  # whether these lanes write at all
        doubt = np.where(lanes, doubt, 0)
        active = active | (doubt != 0)
        marks = doubt if marks is None else np.maximum(marks, doubt)
    for register in flow.targets:
        _put(m, register, marks, active)


def _chosen(m: State, flow: Flow, marks: Array) -> Array:
    """The marks of a bitwise instruction: those lanes whose result changes with the marked sources."""
    assert flow.op is not None
    values = [np.broadcast_to(read(), m.threads) for read in flow.readers]
    doubtful = [k for k, i in enumerate(flow.operands) if i in m.undefined]
    compared = [k for k in doubtful if k < 2] if len(values) == 3 and "pred" in flow.op.writes else []
    if compared:  # setp.lt.and p, a, b, c: a and b matter unless c decides
        a_b = _marks(m, [i for k in compared if (i := flow.operands[k]) is not None])
        assert a_b is not None
        decides = ~values[2] if "and" in m.program.code[flow.pc].modifiers else values[2]
        c = m.undefined.get(flow.operands[2] if flow.operands[2] is not None else -1)
        known = decides if c is None else decides & (c == 0)
        return np.where((a_b != 0) & known, 0, marks)
    results = []
    for bits in itertools.product((0, 0xFF), repeat=len(doubtful)):
        given = list(values)
        for k, byte in zip(doubtful, bits, strict=True):
            i, dtype = flow.operands[k], values[k].dtype
            assert i is not None
            other = np.frombuffer(
                bytes([byte and 1] if dtype == np.bool_ else [byte] * dtype.itemsize), dtype
            )
            given[k] = np.where(m.undefined[i] != 0, other, values[k])
        out = flow.op.run(*given)
        results.append(np.asarray(out[0] if isinstance(out, tuple) else out))
    as_bits = [np.broadcast_to(r.view(f"u{r.dtype.itemsize}"), m.threads) for r in results]
    differs = np.logical_or.reduce([r != as_bits[0] for r in as_bits])
    return np.where(differs, marks, 0)


def together(m: State, pc: int, here: Array) -> None:
    """Carry marks through an instruction of whole warps. ``here``: the lanes that execute it, ``[warps, 32]``."""
    flow, lanes = flow_at(m, pc), here.ravel()
    marks = _marks(m, flow.sources)
    if marks is not None:
        rows = marks.reshape(-1, WARP)
        if flow.readers:  # shfl: the value of another lane, and the own lane's idea of which
            distance, clamp = (np.broadcast_to(r(), m.threads).reshape(-1, WARP) for r in flow.readers)
            source, valid = shfl_sources(m.program.code[pc].modifiers[1], distance, clamp)
            lane = np.broadcast_to(np.arange(WARP), rows.shape)
            source = np.where(valid, np.broadcast_to(source, rows.shape), lane).astype(np.intp)
            value, *rest = ([i] if i is not None else [] for i in flow.operands)
            moved, own = _marks(m, value), _marks(m, [i for r in rest for i in r])
            rows = np.zeros(rows.shape, np.int64)
            if moved is not None:
                rows = np.take_along_axis(moved.reshape(-1, WARP), source, axis=1)
            if own is not None:
                rows = np.maximum(rows, own.reshape(-1, WARP))
        else:
            rows = np.broadcast_to(np.where(here, rows, 0).max(axis=1, keepdims=True), rows.shape)
        marks = np.ascontiguousarray(rows).ravel()
    wrong = _product(m, flow, here) if marks is not None and flow.tile else [True] * len(flow.targets)
    for k, register in enumerate(flow.targets):
        mine = None if marks is None or (flow.readers and k) else np.where(wrong[k], marks, 0)
        _put(m, register, mine, lanes)


def _product(m: State, flow: Flow, here: Array) -> list[Array]:
    """Which elements of a product of tiles depend on marked ones: a NaN spreads just as far."""
    warps, tiles = here.any(axis=1), []
    assert flow.tile is not None
    for registers, (_, ptx_type) in zip(flow.tiles, (flow.tile.a, flow.tile.b, flow.tile.c), strict=True):
        nan, nothing = np.array([-1], f"i{DTYPE[ptx_type].itemsize}"), np.zeros(m.threads, np.int64)
        marks = [m.undefined.get(-1 if i is None else i, nothing) for i in registers]
        bits = [np.where(of != 0, nan, 0).astype(nan.dtype).view(f"u{nan.itemsize}") for of in marks]
        tiles.append([np.ascontiguousarray(b.reshape(-1, WARP)[warps]) for b in bits])
    found = []
    for result in flow.tile.run(*tiles):
        wrong = np.zeros(here.shape, np.bool_)
        wrong[warps] = result.view(f"u{result.dtype.itemsize}") != 0
        found.append(wrong.ravel())
    return found


# -- memory ---------------------------------------------------------------------------------------


def _new_loads(m: State) -> Iterator[tuple[Absent, Array]]:
    """What the load that has just run read, and the marks of its lanes."""
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
    """Drop the loads of which no mark is left."""
    s = m.sanitizer
    assert s is not None
    left = {
        n for marks in m.undefined.values() for n in np.unique((marks[marks != 0] - 1) >> _SHIFT).tolist()
    }
    s.loads = {n: load for n, load in s.loads.items() if n in left}


def loaded(m: State, registers: list[list[int]], size: int) -> None:
    """Mark registers after a load: those that take the first ``size`` bytes, the next ones, and so on."""
    ones = np.uint64((1 << size) - 1)
    for load, marks in _new_loads(m):
        access, bits, lanes = load.access, load.bits, load.place.lanes
        if access.initialised == NO:
            continue
        if access.initialised == SOME:
            bits = np.where(bits == np.uint64((1 << access.size) - 1), bits, np.uint64(0))
        for k, several in enumerate(registers):
            mine = bits >> np.uint64(k * size) & ones
            # Of an element in local memory one byte is enough: compilers copy structs with their padding.
            wrong = np.where(load.place.owner == -2, mine == ones, mine != 0)
            for register in several if wrong.any() else ():
                _mark(m, register, lanes[wrong], marks[wrong])


def _mark(m: State, register: int, lanes: Array, marks: Array) -> None:
    new = np.zeros(m.threads, np.int64)
    new[lanes] = marks
    at = np.zeros(m.threads, np.bool_)
    at[lanes] = True
    _put(m, register, new, at)


def loaded_fragments(
    m: State,
    registers: list[int],
    place: Place,
    rows: int,
    load: Callable[[Array], list[Array]],
    warps: Array,
) -> None:
    """Mark the registers of ``ldmatrix``, to which ``load`` distributes rows of 16 bytes."""
    for found, marks in _new_loads(m):
        lanes, bits = found.place.lanes, found.bits
        data, of_warp = np.zeros((len(warps), rows, 16), np.uint8), np.zeros(m.threads // WARP, np.int64)
        at = np.searchsorted(place.lanes, lanes)
        data.reshape(-1, 16)[at] = bits[:, None] >> np.arange(16, dtype=np.uint64) & np.uint64(1)
        np.maximum.at(of_warp, lanes // WARP, marks)
        for register, fragment in zip(registers, load(data), strict=True):
            wrong = np.zeros((m.threads // WARP, WARP), np.bool_)
            wrong[warps] = fragment != 0
            where = wrong.ravel()
            if where.any():
                _mark(m, register, np.flatnonzero(where), np.repeat(of_warp, WARP)[where])


def stored(m: State, pc: int, place: Place, marks: list[Array | None], size: int) -> None:
    """After a store of elements of so many bytes with these marks: report, or mark memory."""
    bits, told = np.zeros(len(place.lanes), np.uint64), np.zeros(m.threads, np.int64)
    for k, of in enumerate(marks):
        if of is not None:
            mine = np.broadcast_to(of, m.threads)[place.lanes]
            bits |= np.where(mine != 0, np.uint64(((1 << size) - 1) << (k * size)), np.uint64(0))
            told[place.lanes] = np.maximum(told[place.lanes], mine)
    _stored(m, pc, place, bits, told)


def stored_fragments(
    m: State, pc: int, place: Place, registers: list[int], store: Callable[..., Array], warps: Array
) -> None:
    """The same for ``stmatrix``, where ``store`` makes rows of 16 bytes of the registers."""
    marks = [m.undefined.get(i, np.zeros(m.threads, np.int64)).reshape(-1, WARP) for i in registers]
    rows = store([np.where(of[warps] != 0, 0xFFFFFFFF, 0).astype(np.uint32) for of in marks])
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16) != 0
    bits = np.packbits(data, axis=1, bitorder="little").view(np.uint16).ravel().astype(np.uint64)
    told = np.maximum.reduce(marks).max(axis=1)
    _stored(m, pc, place, bits, np.repeat(told, WARP))


def _stored(m: State, pc: int, place: Place, bits: Array, told: Array) -> None:
    wrong = bits != 0
    if not wrong.any():
        return
    outside = np.zeros(m.threads, np.bool_)
    outside[place.lanes[wrong & (place.owner >= 0)]] = True
    _report(m, pc, told, outside, "stores the value in global memory")
    _void(m, place.of(wrong), bits[wrong])


def _void(m: State, place: Place, bits: Array) -> None:
    """Mark bytes of shared and local memory, a bit each, that were written with uninitialised values."""
    s = m.sanitizer
    assert s is not None
    shared, local = place.owner == -1, place.owner == -2
    if shared.any():
        tables = m.memory.windows, s.granule, s.state
        shadow.void_shared(place.host[shared], place.lanes[shared], bits[shared], *tables)
    base, stride = int(m.memory.windows[4]), int(m.memory.windows[6])
    for lane, host, mine in zip(place.lanes[local], place.host[local], bits[local].tolist(), strict=True):
        offset = int(host) - base - int(lane) * stride
        for b in range(64):
            if mine >> b & 1:
                s.written[lane, offset + b] = shadow.VOID
