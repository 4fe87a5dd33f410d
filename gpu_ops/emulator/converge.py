"""Warp instructions whose lanes wait at several places: each arm of a branch has one, with its own registers.

Instructions such as ``shfl.sync`` wait until all lanes of their mask execute the same kind of instruction with the
same mask, anywhere in the code. The emulator runs such an instruction once, for the lanes of all places: operands of
lanes at other places are copied to the registers used here, and results are copied back to theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpu_ops.emulator.registers import Reader, destinations
from gpu_ops.emulator.state import Group, State
from gpu_ops.emulator.syntax import Array, Name, Operand


class Arm(NamedTuple):
    """Lanes that wait at an instruction of the same form at another pc.

    ``results`` and ``sources``: pairs of a register of the instruction here and the corresponding one there.
    """

    group: Group
    members: Reader
    results: list[tuple[int, int]]
    sources: list[tuple[int, int]]


def arms(m: State, pc: int) -> list[Arm]:
    """Other places where lanes wait. ``.aligned`` instructions must be at one pc and are not in ``m.collectives``."""
    here = m.program.code[pc]
    first = 0 if here.opcode in ("bar", "barrier") else 1  # source
    arms = []
    for group in m.parked:
        other = m.program.code[group.pc]
        if group.pc == pc or group.pc not in m.collectives or other.form != here.form:
            continue
        results = _pairs(m, here.operands[:first], other.operands[:first])
        sources = _pairs(m, here.operands[first:], other.operands[first:])
        if results is None or sources is None or len({i for i, _ in sources}) < len(set(sources)):
            continue  # one instruction cannot represent these operands
        arms.append(Arm(group, m.collectives[group.pc], results, sources))
    return arms


def _pairs(m: State, here: tuple[Operand, ...], there: tuple[Operand, ...]) -> list[tuple[int, int]] | None:
    """Pairs of registers in the same places; None if other operands differ."""
    mine, others = ([part for x in operands for part in destinations(x)] for operands in (here, there))
    if len(mine) != len(others):
        return None
    pairs = []
    for own_part, other_part in zip(mine, others, strict=True):
        i, j = (m.register(x.name) if isinstance(x, Name) else None for x in (own_part, other_part))
        if i is not None and j is not None and m.dtypes[i] == m.dtypes[j]:
            pairs.append((i, j))
        elif own_part != other_part:
            return None
    return pairs


def run_together(m: State, arms: list[Arm], ready: Array, run: Callable[[], None]) -> None:
    """Call ``run()``, which uses the registers of one place, for the ready lanes of several places."""
    lent = []
    for arm in arms:
        lanes = ready & m.full(arm.group.mask)
        kept = [(i, _of(m, i, lanes)) for i, _ in (*arm.results, *arm.sources)]
        sources = [(i, _of(m, j, lanes)) for i, j in arm.sources]
        for i, values in sources:
            _put(m, i, lanes, values)
        lent.append((arm, lanes, kept))
    run()
    for arm, lanes, kept in lent:
        results = [(j, _of(m, i, lanes)) for i, j in arm.results]
        for register, values in (*kept, *results):
            _put(m, register, lanes, values)
        if not lanes.any():
            continue
        m.groups.append(Group(arm.group.pc + 1, lanes))
        rest = m.full(arm.group.mask) & ~lanes
        m.parked.remove(arm.group)
        if rest.any():
            m.parked.append(Group(arm.group.pc, rest))
    m.failed = 0


def _of(m: State, register: int, lanes: Array) -> tuple[Array, Array | None]:
    """Values of a register, and their marks if it has any (see :mod:`.undefined`)."""
    marks = m.undefined.get(register)
    return np.broadcast_to(m.registers[register], m.threads)[lanes], None if marks is None else marks[
        :, lanes
    ]


def _put(m: State, register: int, lanes: Array, values: tuple[Array, Array | None]) -> None:
    whole = np.broadcast_to(m.registers[register], m.threads).copy()
    whole[lanes], marks = values
    m.registers[register] = whole
    if marks is not None or register in m.undefined:
        known = m.undefined.get(register, np.zeros((2, m.threads), np.int64)).copy()
        known[:, lanes] = 0 if marks is None else marks
        m.undefined[register] = known
