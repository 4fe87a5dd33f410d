"""Steps of instructions that a whole warp executes: shuffles, votes, matrix fragments and products.

A lane executes one only when every other lane that its mask names has arrived; until then it is parked. Lanes may
arrive at the same instruction in another arm of a branch: see :mod:`.converge`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gpu_ops.emulator import aot, converge, undefined
from gpu_ops.emulator.access import locate
from gpu_ops.emulator.batch import WARP, Mask
from gpu_ops.emulator.instructions import Unknown, matrix
from gpu_ops.emulator.instructions import warp_ops as warp
from gpu_ops.emulator.memory import GENERIC, SHARED, Access
from gpu_ops.emulator.registers import Builder, Reader, address, destinations, parts, reader, writer
from gpu_ops.emulator.state import Group, ReadyStep, State
from gpu_ops.emulator.syntax import Array, Instruction, Name

_FULL = np.array([0xFFFFFFFF], np.uint32)


def _rows(m: State, value: Array) -> Array:
    """Reshape a value per thread to ``[warps, 32]``."""
    if value.size == 1:
        return np.broadcast_to(value, (m.threads // WARP, WARP))
    return value.reshape(-1, WARP)


def _bits(lanes: Array) -> Array:
    """Convert bool ``[W, 32]`` to a mask per lane."""
    return np.repeat(np.packbits(lanes, axis=1, bitorder="little").view(np.uint32), WARP, axis=1)


def _together(here: Array, named: Array) -> Array:
    """Lanes that are here with the same mask, for each lane; lanes with other masks belong to other groups."""
    together = _bits(here)
    mixed = np.flatnonzero((named != named[:, :1]).any(axis=1))
    if mixed.size:
        masks = named[mixed]
        same = (masks[:, :, np.newaxis] == masks[:, np.newaxis, :]) & here[mixed, np.newaxis, :]
        together[mixed] = np.packbits(same, axis=2, bitorder="little").view(np.uint32)[:, :, 0]
    return together


def collective(
    m: State, pc: int, members: Reader | None, run: Callable[[Array, Array, Mask], None]
) -> ReadyStep:
    """Step that calls ``run(active [W, 32], members [W, 32], mask)`` for lanes whose partners have all arrived."""
    if members is not None:
        m.collectives[pc] = members

    def step(group: Group, active: Mask) -> int | None:
        here = m.full(active).reshape(-1, WARP)
        masks = _FULL if members is None else members()
        named = _rows(m, masks)
        following: int | None = group.pc + 1
        if active is not None or masks.size > 1:
            late = _late(m, here, named)
            if late.any():
                here = here & ~late
                if members is not None and m.parked:
                    late = late & ~meet(late, named)
                if late.any():
                    following = m.park(group, late.ravel())
                if not here.any():
                    return following
                active = here.ravel()
        execute(here, named, active)
        return following

    def meet(late: Array, named: Array) -> Array:
        """Run the lanes whose partners wait in other arms of a branch, and return them."""
        others = converge.arms(m, pc)
        everyone, masks = late, named
        for arm in others:
            arm_lanes = m.full(arm.group.mask).reshape(-1, WARP)
            everyone, masks = everyone | arm_lanes, np.where(arm_lanes, _rows(m, arm.members()), masks)
        ready = everyone & ~_late(m, everyone, masks)
        if others and ready.any():
            lanes = ready.ravel()
            converge.run_together(m, others, lanes, lambda: execute(ready, masks, lanes))
        return ready & late

    def execute(here: Array, named: Array, mask: Mask) -> None:
        if m.sanitizer is not None and members is not None:
            m.sanitizer.named(pc, here, named)
        if m.undefined:
            undefined.together(m, pc, here, named)
        run(here, named, mask)

    return ReadyStep(step, plain=False)


def _late(m: State, here: Array, named: Array) -> Array:
    """Lanes that have arrived before a lane that they name."""
    missing: Array = named & _bits(m.alive.reshape(-1, WARP)) & ~_together(here, named)
    late: Array = here & (missing != 0)
    return late


def syncwarp(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step of ``bar.warp.sync``."""
    members = reader(m, instruction, instruction.operands[0], "u32")

    def run(here: Array, named: Array, mask: Mask) -> None:
        if m.sanitizer is not None:
            m.sanitizer.warp_barrier(here)

    return collective(m, pc, members, run)


def _write_all(
    m: State, instruction: Instruction, types: tuple[str, ...]
) -> Callable[[tuple[Array, ...], Mask], None]:
    """Function that writes the results to ``d`` or ``d|p``."""
    targets = destinations(instruction.operands[0])
    writers = [writer(m, instruction, d, t) for d, t in zip(targets, types, strict=False)]

    def write(results: tuple[Array, ...], mask: Mask) -> None:
        for store, result in zip(writers, results, strict=False):
            store(np.ascontiguousarray(np.broadcast_to(result, (m.threads // WARP, WARP))).ravel(), mask)

    return write


def _shfl(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    if instruction.modifiers[:1] != ("sync",):
        raise Unknown(instruction.form)
    mode = instruction.modifiers[1]
    _, *sources = instruction.operands
    a, b, c, members = (reader(m, instruction, s, "b32") for s in sources)
    write = _write_all(m, instruction, ("b32", "pred"))

    def run(here: Array, named: Array, mask: Mask) -> None:
        lane, distance, clamp = _rows(m, a()), _rows(m, b()), _rows(m, c())
        if m.sanitizer is not None:
            source, valid = warp.shfl_sources(mode, distance, clamp)
            m.sanitizer.shuffled(pc, here, named, source, valid)
        write(warp.shfl(mode, lane, distance, clamp, named, here), mask)

    return collective(m, pc, members, run)


def _exchange(
    m: State,
    pc: int,
    instruction: Instruction,
    types: tuple[str, ...],
    evaluate: Callable[..., tuple[Array, ...]],
) -> ReadyStep:
    """Step of ``d{|p}, a, members``, with the results ``evaluate(a, members, active)``; ``types``: of a, d, p."""
    _, source, members = instruction.operands
    read = reader(m, instruction, source, types[0])
    write = _write_all(m, instruction, types[1:])

    def run(here: Array, named: Array, mask: Mask) -> None:
        write(evaluate(_rows(m, read()), named, here), mask)

    return collective(m, pc, reader(m, instruction, members, "u32"), run)


def _vote(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    if instruction.modifiers[:1] != ("sync",):
        raise Unknown(instruction.form)
    mode, ptx_type = instruction.modifiers[1:3]
    return _exchange(m, pc, instruction, ("pred", ptx_type), lambda *a: (warp.vote(mode, *a),))


def _match(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    mode, _, ptx_type = instruction.modifiers
    return _exchange(m, pc, instruction, (ptx_type, "b32", "pred"), partial(warp.match, mode))


def _redux(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    _, operation, *modifiers, ptx_type = instruction.modifiers
    warp.check_redux(operation, ptx_type, tuple(modifiers))
    run = partial(warp.redux, operation, ptx_type, modifiers=tuple(modifiers))
    return _exchange(m, pc, instruction, (ptx_type, ptx_type), lambda *a: (run(*a),))


def _elect(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    write = _write_all(m, instruction, ("b32", "pred"))

    def run(here: Array, named: Array, mask: Mask) -> None:
        write(warp.elect(named, here), mask)

    return collective(m, pc, reader(m, instruction, instruction.operands[1], "u32"), run)


def _activemask(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    write = writer(m, instruction, instruction.operands[0], "b32")

    def run(group: Group, active: Mask) -> int:
        write(warp.activemask(m.full(active).reshape(-1, WARP)).ravel(), active)
        return group.pc + 1

    return ReadyStep(run, plain=False)


# ---- matrices: all lanes of a warp take part ---------------------------------------------------------------


def _spread(m: State, warps: Array, values: Array) -> Array:
    """Spread ``[executing warps, 32]`` to one value per thread."""
    if len(values) == m.threads // WARP:
        return values.ravel()
    full = np.zeros((m.threads // WARP, WARP), values.dtype)
    full[warps] = values
    return full.ravel()


def _mma(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    return product(m, pc, instruction, matrix.mma(instruction.modifiers))


def product(m: State, pc: int, instruction: Instruction, form: matrix.Mma) -> ReadyStep:
    """Step of ``d, a, b, c`` that multiplies tiles: ``mma`` and ``wmma.mma``."""
    d, *sources = instruction.operands
    readers = [
        [reader(m, instruction, part, ptx_type) for part in parts(operand)]
        for operand, (_, ptx_type) in zip(sources[:3], (form.a, form.b, form.c), strict=True)
    ]
    writers = [writer(m, instruction, part, form.d[1]) for part in parts(d)]

    def run(here: Array, named: Array, mask: Mask) -> None:
        warps = np.flatnonzero(here.any(axis=1))
        whole = len(warps) == len(here)

        def fragment(read: Reader) -> Array:
            value = read()
            rows = _rows(m, value.view(np.dtype(f"u{value.dtype.itemsize}")))
            return np.ascontiguousarray(rows if whole else rows[warps])

        results = form.run(*([fragment(read) for read in group] for group in readers), m.truncating)
        for write, result in zip(writers, results, strict=True):
            write(_spread(m, warps, result), mask)
        if m.profiler is not None:
            m.profiler.multiplied(form.kind, form.macs * len(warps))

    return collective(m, pc, None, run)


def _matrix_form(instruction: Instruction) -> tuple[bool, int, bool, int]:
    """Form of ldmatrix and stmatrix as (b8, matrices, transposed, space); modifiers may be in any order."""
    words = set(instruction.modifiers)
    known = {"sync", "aligned", "m8n8", "m16n16", "m16n8", "x1", "x2", "x4", "trans", "b16", "b8"}
    spaces = {w for w in words if w.startswith("shared")}
    if words - known - spaces or not words & {"b16", "b8"}:
        raise Unknown(instruction.form)
    count = 4 if "x4" in words else 2 if "x2" in words else 1
    return "b8" in words, count, "trans" in words, SHARED if spaces else GENERIC


def _row_mask(m: State, here: Array, rows: int) -> tuple[Array, Array]:
    """Mask of the lanes whose addresses are used, and the executing warps."""
    mask = here & (np.arange(WARP) < rows)
    return mask.ravel(), np.flatnonzero(here.any(axis=1))


def _ldmatrix(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    narrow, count, transposed, space = _matrix_form(instruction)
    rows = (16 if narrow else 8) * count
    load = matrix.load_fragments_b8 if narrow else partial(matrix.load_fragments, transposed=transposed)
    target, source = instruction.operands
    writers = [writer(m, instruction, part, "b32") for part in parts(target)]
    where = address(m, instruction, source)
    access = Access(pc, space, 16, read=True, write=False, tracked=True)
    registers = [m.index[part.name] for part in parts(target) if isinstance(part, Name)]

    def run(here: Array, named: Array, mask: Mask) -> None:
        lanes, warps = _row_mask(m, here, rows)
        place = locate(m, access, lanes, where())
        words = np.empty((2, m.threads), np.uint64)
        aot.gather(place.host, place.lanes, words)
        data = np.ascontiguousarray(words[:, place.lanes].T).view(np.uint8).reshape(len(warps), rows, 16)
        for write, fragment in zip(writers, load(data), strict=True):
            write(_spread(m, warps, fragment), mask)
        if m.sanitizer is not None and m.sanitizer.absent:
            undefined.loaded_fragments(m, registers, place, rows, load, warps)

    return collective(m, pc, None, run)


def _stmatrix(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    narrow, count, transposed, space = _matrix_form(instruction)
    store = matrix.store_fragments_b8 if narrow else partial(matrix.store_fragments, transposed=transposed)
    target, source = instruction.operands
    readers = [reader(m, instruction, part, "b32") for part in parts(source)]
    registers = [m.index[part.name] for part in parts(source) if isinstance(part, Name)]
    where = address(m, instruction, target)
    access = Access(pc, space, 16, read=False, write=True)

    def run(here: Array, named: Array, mask: Mask) -> None:
        lanes, warps = _row_mask(m, here, 8 * count)
        place = locate(m, access, lanes, where())
        data = store([np.ascontiguousarray(_rows(m, read())[warps]) for read in readers])
        words = np.empty((2, m.threads), np.uint64)
        words[:, place.lanes] = np.ascontiguousarray(data).view(np.uint64).reshape(-1, 2).T
        if m.undefined:
            undefined.stored_fragments(m, pc, place, registers, store, warps)
        aot.scatter(place.host, place.lanes, words)

    return collective(m, pc, None, run)


def _movmatrix(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    target, source = instruction.operands
    read, write = reader(m, instruction, source, "b32"), writer(m, instruction, target, "b32")

    def run(here: Array, named: Array, mask: Mask) -> None:
        write(matrix.movmatrix(np.ascontiguousarray(_rows(m, read()))).ravel(), mask)

    return collective(m, pc, None, run)


BUILDERS: dict[str, Builder] = {
    "shfl": _shfl,
    "vote": _vote,
    "match": _match,
    "redux": _redux,
    "elect": _elect,
    "activemask": _activemask,
    "mma": _mma,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "movmatrix": _movmatrix,
}
