"""How each instruction moves values between registers, and which registers decide what it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpu_ops.emulator.instructions import Op, lookup, matrix, wmma
from gpu_ops.emulator.instructions.matrix import Mma
from gpu_ops.emulator.registers import Reader, destinations, parts, reader
from gpu_ops.emulator.state import State
from gpu_ops.emulator.syntax import Address, Name, Negated, Operand

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
_BITWISE = {"and", "or", "lop3", "selp", "slct", "prmt"}  # the result may not depend on a source


@dataclass(eq=False)
class Flow:
    """How an instruction moves values. Registers are indices."""

    pc: int
    guard: int
    targets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)  # what the instruction does depends on these
    use: str = "decides by the value what to do"
    visible: str = ""  # how its guard matters; empty if it only writes registers
    warp: bool = False  # it computes when the lanes of its warp are here
    op: Op | None = None  # of an instruction whose result may not depend on a source
    tile: Mma | None = None  # of a product of tiles of numbers that have a NaN
    tiles: list[list[int | None]] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    operands: list[int | None] = field(default_factory=list)  # the register of each reader


def _registers(m: State, operand: Operand) -> Iterator[int]:
    for part in (p for piece in parts(operand) for p in destinations(piece)):
        if isinstance(part, Name | Negated) and (i := m.register(part.name)) is not None:
            yield i


def _all(m: State, operands: tuple[Operand, ...]) -> list[int]:
    return [i for operand in operands for i in _registers(m, operand)]


def _flow(m: State, pc: int) -> Flow:
    code = m.program.code[pc]
    opcode, words, operands = code.opcode, set(code.modifiers), code.operands
    flow = Flow(pc, m.steps[pc].guard)
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
        if opcode in _BITWISE or (opcode == "setp" and words & {"and", "or"}):
            flow.op = lookup(opcode, code.modifiers)
            sources = zip(operands[1:], flow.op.reads, strict=True)
            flow.readers = [reader(m, code, operand, ptx_type) for operand, ptx_type in sources]
            flow.operands = [next(_registers(m, operand), None) for operand in operands[1:]]
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
            flow.operands = [next(_registers(m, operand), None) for operand in operands[1:4]]
        return
    flow.sources = _all(m, operands[1:])
    words = set(code.modifiers)
    if opcode == "mma" or "mma" in words:
        form = (matrix.mma if opcode == "mma" else wmma.mma)(code.modifiers)
        if form.kind in ("f64", "tf32", "f16", "bf16", "f8") and not words & {"e2m1", "e2m3", "e3m2"}:
            flow.tile = form
            flow.tiles = [[next(_registers(m, part), None) for part in parts(o)] for o in operands[1:4]]


def flow_at(m: State, pc: int) -> Flow:
    if pc not in m.flows:
        m.flows[pc] = _flow(m, pc)
    flow: Flow = m.flows[pc]
    return flow
