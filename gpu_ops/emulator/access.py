"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gpu_ops.emulator import aot, undefined
from gpu_ops.emulator.batch import Mask
from gpu_ops.emulator.instructions import Unknown
from gpu_ops.emulator.instructions.atomic import in_order
from gpu_ops.emulator.memory import (
    EACH,
    GENERIC,
    GLOBAL,
    LOCAL,
    NO,
    SHARED,
    SOME,
    SPACES,
    Access,
    LaneAddresses,
)
from gpu_ops.emulator.registers import Builder, address, parts, reader, without_policy, writer
from gpu_ops.emulator.state import Group, ReadyStep, State
from gpu_ops.emulator.syntax import BITS, DTYPE, Address, Array, Instruction, Name, Operand

_VECTOR = {"v2": 2, "v4": 4, "v8": 8}
_POLLS = {"volatile", "relaxed", "acquire", "mmio", "cv"}
# Modifiers that change no value: cache hints, and memory orders that lock-step execution always satisfies.
_HINTS = {"nc", "ca", "cg", "cs", "lu", "wb", "wt"}
_IGNORED = {"weak", "release", "cta", "gpu", "sys", "cluster"} | _HINTS | _POLLS


def locate(
    m: State,
    access: Access,
    mask: Mask,
    where: Array,
    values: Array | None = None,
    judged: tuple[Access, int] | None = None,
) -> LaneAddresses:
    """Resolve the addresses of the active lanes; an invalid one raises an error.

    ``values``: the values that a store writes, by lane. ``judged``: the part that the sanitizer judges, and its
    offset.
    """
    lanes = m.active_lanes(mask)
    if len(where) > 1 and len(lanes) < len(where):
        where = where[lanes]
    place, fault, position = m.memory.resolve(access, lanes, where)
    if fault:
        _report(m, access, place, fault, position)
    if m.sanitizer is not None:
        part, offset = judged or (access, 0)
        m.sanitizer.access(part, place.moved(offset), values)
    if m.profiler is not None:
        m.profiler.access(access, place)
    return place


def _report(m: State, access: Access, place: LaneAddresses, kind: int, position: int) -> None:
    """Raise for an invalid address. If the launch collects faults, the lane accesses scratch memory instead."""
    while kind:
        at = int(place.address[0 if len(place.address) == 1 else position])
        what = "misaligned" if kind == aot.MISALIGNED else "out of bounds"
        if what == "out of bounds" and access.write and m.memory.read_only(access, at):
            what = "write to a read-only argument"
        m.report(what, access.pc, int(place.lanes[position]), partial(_text, m, access, at))
        kind, position = m.memory.resume(access, place, position)


def _text(m: State, access: Access, at: int) -> str:
    verb = "atomic" if access.atomic else "write" if access.write else "read"
    return f"{access.size}-byte {verb} {m.memory.describe(access.space, at)}"


def _parse(instruction: Instruction) -> tuple[int, int, str, bool]:
    """Parse a load or store to (space, elements, type, whether it polls)."""
    space, count = GENERIC, 1
    *words, ptx_type = instruction.modifiers
    for word in words:
        base = word.partition("::")[0]
        if base in SPACES:
            space = SPACES[base]
        elif base == "param":
            space = LOCAL
        elif word in _VECTOR:
            count = _VECTOR[word]
        elif word not in _IGNORED and base not in ("L1", "L2", "unified"):
            raise Unknown(instruction.form)
    if ptx_type not in DTYPE:
        raise Unknown(instruction.form)
    return space, count, ptx_type, bool(_POLLS & set(words))


def _elements(instruction: Instruction, operand: Operand, count: int) -> tuple[Operand, ...]:
    registers = parts(operand)
    if len(registers) != count:
        raise instruction.error(f"{instruction.form} wants {count} registers")
    return registers


def _register(m: State, operand: Operand) -> int | None:
    return m.register(operand.name) if isinstance(operand, Name) else None


def _load(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    space, count, ptx_type, polls = _parse(instruction)
    target, source = without_policy(m, instruction)
    writers = [writer(m, instruction, part, ptx_type) for part in _elements(instruction, target, count)]
    assert isinstance(source, Address)
    dtype = DTYPE[ptx_type]
    bits = np.dtype(f"u{dtype.itemsize}")
    if "param" in instruction.modifiers and m.register(source.base) is not None:
        space = GLOBAL  # the address of a __grid_constant__ parameter
    elif "param" in instruction.modifiers and source.base not in m.program.local:
        if source.base not in (p.name for p in m.program.parameters):
            raise instruction.error(f"no parameter {source.base}")

        def parameter(mask: Mask) -> None:
            value = m.parameter(source.base, source.offset, count * dtype.itemsize).view(dtype)
            for k, write in enumerate(writers):
                write(value[k : k + 1], mask)

        return ReadyStep(parameter, everyone=True)
    where = address(m, instruction, source)
    access = Access(
        pc,
        space,
        count * dtype.itemsize,
        read=True,
        write=False,
        constant="nc" in instruction.modifiers,
        # The arguments of a call include the padding of structs, which no instruction writes.
        padded="param" in instruction.modifiers,
        tracked=True,
    )
    judged = _judged(m, access, parts(target), dtype)
    first = judged[1] // dtype.itemsize
    targets = [
        [i] if isinstance(t, Name) and (i := m.register(t.name)) is not None else [] for t in parts(target)
    ][first:]
    targets = targets[: judged[0].size // dtype.itemsize]

    def run(mask: Mask) -> None:
        place = locate(m, access, mask, where(), judged=judged)
        out = np.empty((count, m.threads), bits)
        aot.gather(place.host, place.lanes, out)
        for write, row in zip(writers, out, strict=True):
            write(row.view(dtype), mask)
        if m.sanitizer is not None and m.sanitizer.absent:
            undefined.loaded(m, targets, dtype.itemsize, dtype.kind == "i")

    if not polls:
        return ReadyStep(run)

    def poll(group: Group, active: Mask) -> int:
        run(active)
        group.polled = True
        return group.pc + 1

    return ReadyStep(poll, plain=False)


def _judged(
    m: State, access: Access, targets: tuple[Operand, ...], dtype: np.dtype[Any]
) -> tuple[Access, int]:
    """Part of a load that the sanitizer judges, and its offset.

    Compilers widen loads: a register at either end that is named nowhere else is not read. They also copy structs as
    integers that are only stored again, with padding that no instruction writes. One written byte is enough there; a
    vector of bytes needs none, since it may be all padding.
    """
    uses = [m.program.uses.get(t.name, (1, 0)) if isinstance(t, Name) else (0, 0) for t in targets]
    read = [i for i, (named, _) in enumerate(uses) if named != 1]
    if not read:
        return access, 0
    first, last = read[0], read[-1]
    initialised = EACH
    if dtype.kind in "iu" and all(named == stored + 1 for named, stored in uses[first : last + 1]):
        initialised = NO if dtype.itemsize == 1 and len(targets) > 1 else SOME
    size = (last - first + 1) * dtype.itemsize
    return replace(access, size=size, initialised=initialised), first * dtype.itemsize


def _store(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    space, count, ptx_type, _ = _parse(instruction)
    target, source = without_policy(m, instruction)
    bits = f"b{BITS[ptx_type]}"
    elements = _elements(instruction, source, count)
    readers = [reader(m, instruction, part, bits) for part in elements]
    registers = [
        i if isinstance(part, Name) and (i := m.register(part.name)) is not None else -1 for part in elements
    ]
    where = address(m, instruction, target)
    access = Access(pc, space, count * DTYPE[ptx_type].itemsize, read=False, write=True)

    def run(mask: Mask) -> None:
        values = np.empty((count, m.threads), DTYPE[bits])
        for row, read in zip(values, readers, strict=True):
            row[:] = read()
        place = locate(m, access, mask, where(), values)
        if m.undefined:
            undefined.stored(m, pc, place, registers, values.itemsize)
        aot.scatter(place.host, place.lanes, values)

    return ReadyStep(run)


def _atomic(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step of an atomic: ``atom`` returns the old value, ``red`` does not. Lanes at one address run in lane order."""
    space = GENERIC
    *words, ptx_type = instruction.modifiers
    rest = []
    for word in words:
        base = word.partition("::")[0]
        if base in SPACES:
            space = SPACES[base]
        elif word in _VECTOR:
            raise Unknown(instruction.form)
        elif word not in _IGNORED and word != "acq_rel" and base != "L2":
            rest.append(word)
    operation, *modifiers = rest
    turns = in_order(operation, ptx_type, tuple(modifiers))
    operands = without_policy(m, instruction)
    write = writer(m, instruction, operands.pop(0), ptx_type) if instruction.opcode == "atom" else None
    where = address(m, instruction, operands.pop(0))
    readers = [reader(m, instruction, operand, ptx_type) for operand in operands]
    dtype = DTYPE[ptx_type]
    bits = np.dtype(f"u{dtype.itemsize}")
    access = Access(pc, space, dtype.itemsize, read=True, write=True, atomic=True)

    def run(group: Group, active: Mask) -> int:
        place = locate(m, access, active, where())
        values = [np.broadcast_to(read(), m.threads)[place.lanes] for read in readers]
        memory = np.zeros((1, m.threads), bits)
        aot.gather(place.host, place.lanes, memory)
        old, last, new = turns(place.host, memory[0, place.lanes].view(dtype), *values)
        lanes = place.lanes[last]
        memory[0, lanes] = new.view(bits)
        aot.scatter(np.ascontiguousarray(place.host[last]), lanes, memory)
        if write is not None:
            memory[0, place.lanes] = old.view(bits)
            write(memory[0].view(dtype), active)
        group.polled = True
        return group.pc + 1

    return ReadyStep(run, plain=False)


def _copy_async(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step of ``cp.async``: data moves at once. The sanitizer marks the bytes as pending until their thread waits."""
    words = set(instruction.modifiers)
    if instruction.modifiers[:1] != ("async",) or words & {"bulk", "mbarrier", "reduce"}:
        raise Unknown(instruction.form)
    if words & {"commit_group", "wait_group", "wait_all"}:
        return _copy_group(m, instruction)
    target, source, size, *rest = without_policy(m, instruction)
    total = int(reader(m, instruction, size, "u32")()[0])
    register = m.register(getattr(rest[0], "name", "")) if rest else None
    predicate = register is not None and m.dtypes[register] == np.bool_  # ignore-src; otherwise a size
    limit = reader(m, instruction, rest[0], "pred" if predicate else "u32") if rest else None
    target_address, source_address = address(m, instruction, target), address(m, instruction, source)
    write = Access(pc, SHARED, total, read=False, write=True, asynchronous=True)
    read = Access(pc, GLOBAL, total, read=True, write=False)

    def run(mask: Mask) -> None:
        lanes = m.active_lanes(mask)
        valid = np.full(len(lanes), total, np.int64)
        if limit is not None:
            value = np.broadcast_to(limit(), m.threads)[lanes]
            valid = np.where(value, 0, total) if predicate else np.minimum(value.astype(np.int64), total)
        place = locate(m, write, mask, target_address())
        origin = np.zeros(len(lanes), np.int64)
        whole = valid == total
        if whole.all():
            origin = locate(m, read, mask, source_address()).host
        else:  # bytes past the valid ones are not read and need not exist
            here = np.broadcast_to(source_address(), m.threads)
            for n in np.unique(valid[valid > 0]):
                part = np.zeros(m.threads, np.bool_)
                part[lanes[valid == n]] = True
                origin[valid == n] = _host_of(m, pc, part, here, int(n))
        aot.copy(place.host, origin, valid.astype(np.int64), total)

    return ReadyStep(run)


def _host_of(m: State, pc: int, mask: Array, where: Array, size: int) -> Array:
    """Host pointers of the first ``size`` bytes at each address, resolved in pieces of 2^k bytes."""
    hosts, done = [], 0
    for piece in (16, 8, 4, 2, 1):
        if size & piece:
            access = Access(pc, GLOBAL, piece, read=True, write=False)
            hosts.append(locate(m, access, mask, where + np.uint64(done)).host)
            done += piece
    return hosts[0]


def _copy_group(m: State, instruction: Instruction) -> ReadyStep:
    words = set(instruction.modifiers)
    newest = 0
    if "wait_group" in words:
        newest = int(reader(m, instruction, instruction.operands[0], "u32")()[0])

    def run(mask: Mask) -> None:
        if m.sanitizer is None:
            return
        if "commit_group" in words:
            m.sanitizer.commit(m.active_lanes(mask))
        else:
            m.sanitizer.wait(m.active_lanes(mask), -1 if "wait_all" in words else newest)

    return ReadyStep(run)


BUILDERS: dict[str, Builder] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cp": _copy_async,
}
