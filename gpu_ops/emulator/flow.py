"""Flow of values between registers for each instruction, and the registers that decide its effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from gpu_ops.emulator.instructions import InstructionForm, lookup, matrix, warp_ops
from gpu_ops.emulator.instructions.matrix import Mma
from gpu_ops.emulator.registers import Reader, destinations, parts, reader
from gpu_ops.emulator.state import State
from gpu_ops.emulator.syntax import BITS, Address, Array, Instruction, Name, Negated, Operand

_NOTHING = {
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    "membar",
    "fence",
    "griddepcontrol",
    "setmaxnreg",
}
_NOTHING |= {"activemask"}
_CONTROL = {
    "bra",
    "brx",
    "exit",
    "ret",
    "trap",
    "brkpt",
    "host",
    "dispatch",
    "refuse",
    "bar",
    "barrier",
    "nanosleep",
}
_WARP = {"shfl", "vote", "match", "redux", "elect", "mma", "wmma", "ldmatrix", "stmatrix", "movmatrix"}
_WHETHER = "decides by the value whether to run this"
#: Instructions where each bit of the result depends on one bit of each source, and the sources that decide which.
CONTROLS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("mov", "cvt", "not", "and", "or", "xor", "selp", "slct"), ()),
    **{"lop3": (3,), "shl": (1,), "shr": (1,), "shf": (2,), "prmt": (2,), "bfe": (1, 2), "bfi": (2, 3)},
}
_INTEGER = re.compile(r"[bsu]\d+|pred")


@dataclass(eq=False)
class Flow:
    """Flow of values through an instruction. Registers are indices."""

    pc: int
    guard: int
    targets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)  # registers that decide the effect of the instruction
    use: str = "decides by the value what to do"
    visible: str = ""  # effect that its guard decides; empty if it only writes registers
    warp: bool = False  # it computes when the lanes of its warp have arrived
    op: InstructionForm | None = (
        None  # operation of an instruction whose result may not depend on each bit of a source
    )
    compares: bool = False  # ``op`` is a comparison
    words: set[str] = field(default_factory=set)
    controls: tuple[int, ...] = ()  # sources of ``op`` that decide which bits of the others matter
    # result of op and first bit, for each target
    results: list[tuple[int, int]] = field(default_factory=list)
    tile: Mma | None = None  # product of tiles of numbers that have a NaN
    tiles: list[list[int | None]] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    operands: list[list[int | None]] = field(default_factory=list)  # the registers of each reader
    exchange: Callable[..., Array] | None = None  # function of a warp instruction that some lanes can decide


def _registers(m: State, operand: Operand) -> Iterator[int]:
    for part in (p for piece in parts(operand) for p in destinations(piece)):
        if isinstance(part, Name | Negated) and (i := m.register(part.name)) is not None:
            yield i


def _all(m: State, operands: tuple[Operand, ...]) -> list[int]:
    return [i for operand in operands for i in _registers(m, operand)]


def _each(m: State, operand: Operand) -> list[int | None]:
    return [next(_registers(m, part), None) for part in parts(operand)]


def _operation(code: Instruction) -> InstructionForm | None:
    """Operation of an instruction whose result may not depend on each bit of a source."""
    opcode, words = code.opcode, code.modifiers
    if opcode == "mov":
        return InstructionForm(words, words, lambda a: a)
    if opcode == "cvt" and not all(_INTEGER.fullmatch(word) for word in words):
        return None
    return lookup(opcode, words) if opcode in CONTROLS or opcode == "setp" else None


def _flow(m: State, pc: int) -> Flow:
    code = m.program.code[pc]
    opcode, words, operands = code.opcode, set(code.modifiers), code.operands
    flow = Flow(pc, m.steps[pc].guard, words=words)
    if opcode in _NOTHING:
        return flow
    bases = [m.register(o.base) for o in operands if isinstance(o, Address)]
    flow.addresses = [i for i in bases if i is not None]
    if opcode in _CONTROL:
        flow.visible = "branches on the value" if opcode in ("bra", "exit", "ret") else _WHETHER
        flow.use = flow.use if opcode in ("bar", "barrier") else "branches on the value"
        flow.targets = list(_registers(m, operands[0])) if "red" in words else []
        flow.uses = _all(m, operands[1:] if "red" in words else operands)
    elif opcode in ("st", "red", "cp"):
        flow.visible, flow.use = _WHETHER, "gives the value to an atomic" if opcode == "red" else flow.use
        flow.uses = [] if opcode == "st" else _all(m, operands)
    elif opcode == "atom":
        flow.visible, flow.use = _WHETHER, "gives the value to an atomic"
        flow.targets, flow.uses = list(_registers(m, operands[0])), _all(m, operands[1:])
    elif opcode in _WARP:
        _warp(m, flow)
    else:
        flow.targets, flow.sources = list(_registers(m, operands[0])), _all(m, operands[1:])
        if "cc" in words:
            flow.targets.append(m.carry)
        if opcode in ("addc", "subc", "madc"):
            flow.sources.append(m.carry)
        if (op := _operation(code)) is not None:
            flow.op, flow.compares, flow.controls = op, opcode == "setp", CONTROLS.get(opcode, ())
            sources = zip(operands[1:], op.reads, strict=True)
            flow.readers = [reader(m, code, operand, ptx_type) for operand, ptx_type in sources]
            flow.operands = [_each(m, operand) for operand in operands[1:]]
            flow.results = [
                (number, k * BITS[op.writes[number]] // len(parts(result)))
                for number, result in enumerate(destinations(operands[0]))
                for k, register in enumerate(_each(m, result))
                if register is not None
            ]
    return flow


def _warp(m: State, flow: Flow) -> None:
    code = m.program.code[flow.pc]
    opcode, operands = code.opcode, code.operands
    flow.warp, flow.visible = True, _WHETHER
    stores = opcode == "stmatrix" or (opcode == "wmma" and "store" in code.modifiers)
    loads = opcode == "ldmatrix" or (opcode == "wmma" and "load" in code.modifiers)
    if not stores:
        flow.targets = list(_registers(m, operands[0]))
    if stores or loads:
        flow.uses = _all(m, operands[2:])
        return
    if opcode in ("shfl", "vote", "match", "redux", "elect"):
        flow.uses = list(_registers(m, operands[-1]))
        flow.sources = _all(m, operands[1:-1])
        if opcode == "shfl":
            flow.readers = [reader(m, code, operand, "b32") for operand in operands[2:4]]
            flow.operands = [_each(m, operand) for operand in operands[1:4]]
        elif opcode == "vote" and code.modifiers[1] in ("any", "all", "ballot"):
            flow.exchange = partial(warp_ops.vote, code.modifiers[1])
            flow.readers, flow.operands = [reader(m, code, operands[1], "pred")], [_each(m, operands[1])]
        elif opcode == "redux" and code.modifiers[1] in ("and", "or"):
            flow.exchange = partial(warp_ops.redux, code.modifiers[1], code.modifiers[-1])
            flow.readers, flow.operands = [reader(m, code, operands[1], "b32")], [_each(m, operands[1])]
        return
    flow.sources = _all(m, operands[1:])
    words = set(code.modifiers)
    if opcode == "mma" or "mma" in words:
        form = (matrix.mma if opcode == "mma" else matrix.wmma_mma)(code.modifiers)
        if form.kind in ("f64", "tf32", "f16", "bf16", "f8") and not words & {"e2m1", "e2m3", "e3m2"}:
            flow.tile = form
            flow.tiles = [_each(m, operand) for operand in operands[1:4]]


def flow_at(m: State, pc: int) -> Flow:
    if pc not in m.flows:
        m.flows[pc] = _flow(m, pc)
    flow: Flow = m.flows[pc]
    return flow
