"""Linker of a module's entry into one flat program: calls inlined, labels resolved, variables laid out.

A device function is cloned at each call, and its parameters are bound to the caller's ``.param`` variables, which
become per-thread memory. The machine therefore needs no stack and no scopes: a call disappears and a return is a
branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property

from gpu_ops.emulator.aot import LOCAL_BASE, SHARED_BASE
from gpu_ops.emulator.errors import EmulatorError, PtxError, UnknownInstruction
from gpu_ops.emulator.parser import parse
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.signature import plain_name
from gpu_ops.emulator.syntax import (
    Address,
    CallOperands,
    Function,
    Instruction,
    Label,
    Module,
    Name,
    Negated,
    Operand,
    Pair,
    Variable,
    Vector,
)

#: Functions without a body that the machine runs itself.
HOST_FUNCTIONS = ("vprintf", "__assertfail")

_Rename = Callable[[str], str]

_LONGEST = 1 << 20  # instructions of a program; clones of indirect calls can multiply
_FUNCTION_BASE, _FUNCTION_STEP = 1 << 16, 1 << 8  # addresses of functions, where no variable is


def link(module: Module, name: str) -> PtxProgram:
    """Link the program of an entry, named as in PTX or as in the source."""
    entries = [f.name for f in module.functions.values() if f.entry]
    matches = [e for e in entries if e == name] or [e for e in entries if plain_name(e) == name]
    if len(matches) != 1:
        many = f"{len(matches)} kernels are" if matches else "no kernel"
        raise EmulatorError(f"{many} named {name!r}; the module has: {', '.join(entries) or 'none'}")
    entry = module.functions[matches[0]]
    linker = _Linker(module, PtxProgram(entry.name, module))
    linker.program.parameters = entry.parameters
    linker.inline(entry, "", {}, ())
    linker.lay_out()
    return linker.program


class _Linker:
    def __init__(self, module: Module, program: PtxProgram) -> None:
        self.module = module
        self.program = program
        self.clones = 0
        self.variables: list[Variable] = []
        program.functions = {
            name: _FUNCTION_BASE + i * _FUNCTION_STEP for i, name in enumerate(module.functions)
        }

    def inline(
        self,
        function: Function,
        prefix: str,
        bound: dict[str, str],
        callers: tuple[str, ...],
        call: Instruction | None = None,
    ) -> None:
        """Append a clone of a function. ``call``: the call, for a function of the runtime, which has no lines."""
        program = self.program
        if len(program.code) > _LONGEST:
            raise PtxError(f"{program.title} has more than {_LONGEST} instructions after calls are expanded")
        labels = {s.name for s in function.body if isinstance(s, Label)}
        variables = {v.name for v in function.variables}
        mine = labels | variables | function.registers.keys()

        def rename(name: str) -> str:
            return prefix + name if name in mine else bound.get(name, name)

        for name, ptx_type in function.registers.items():
            program.registers[prefix + name] = ptx_type
        for parameter in (*function.parameters, *function.results):
            if parameter.space == "reg":  # hand-written PTX may pass registers
                raise PtxError(f"{function.name} takes registers; pass .param variables")
        for name, targets in function.tables.items():
            program.tables[prefix + name] = [rename(t) for t in targets]
        for variable in function.variables:
            self.variables.append(replace(variable, name=rename(variable.name)))
        end = f"{prefix}end of {function.name}"
        callers = (*callers, function.name)
        for statement in function.body:
            if isinstance(statement, Label):
                program.labels[rename(statement.name)] = len(program.code)
            elif statement.opcode == "call":
                self.call(statement, function, rename, callers)
            else:
                placed = _placed(statement, rename)
                if call is not None:
                    placed = placed._replace(line=call.line, location=call.location)
                if statement.opcode == "ret" and not function.entry:
                    placed = placed._replace(opcode="bra", modifiers=(), operands=(Name(end),))
                program.code.append(placed)
        program.labels[end] = len(program.code)
        if function.entry:  # the end of the code returns
            line = program.code[-1].line if program.code else 1
            program.code.append(Instruction(line, None, None, "ret", (), ()))

    def call(
        self, statement: Instruction, caller: Function, rename: _Rename, callers: tuple[str, ...]
    ) -> None:
        call = statement.operands[0]
        assert isinstance(call, CallOperands)
        actual = (*call.results, *call.arguments)
        if statement.guard is not None:
            raise statement.error("a predicated call is not supported")
        if call.callee in caller.registers:
            self.call_indirectly(statement, call, rename, callers)
            return
        function = self.module.functions.get(call.callee)
        ours = function is None or function.declared_only
        if ours:
            function = module().functions.get(call.callee)
        if function is None:
            opcode = "host" if call.callee in HOST_FUNCTIONS else "trap"
            operands = (Name(call.callee), *(_rename(a, rename) for a in actual))
            self.program.code.append(statement._replace(opcode=opcode, modifiers=(), operands=operands))
            return
        if function.name in callers:
            self.program.code.append(statement)
            where = self.program.where(len(self.program.code) - 1)
            raise UnknownInstruction(
                f"{function.name} calls itself: recursion is not supported\n  at {where}"
            )
        formal = (*function.results, *function.parameters)
        if len(formal) != len(actual) or not all(isinstance(a, Name) for a in actual):
            raise statement.error(f"{call.callee} wants {len(formal)} .param variables")
        self.expand(function, actual, rename, callers, statement if ours else None)

    def expand(
        self,
        function: Function,
        actual: tuple[Operand, ...],
        rename: _Rename,
        callers: tuple[str, ...],
        call: Instruction | None = None,
    ) -> None:
        """Append a clone of a function whose parameters are these variables of the caller."""
        self.clones += 1
        formal = (*function.results, *function.parameters)
        bound = {f.name: rename(a.name) for f, a in zip(formal, actual, strict=True) if isinstance(a, Name)}
        self.inline(function, f"{self.clones}:", bound, callers, call)

    def call_indirectly(
        self, statement: Instruction, call: CallOperands, rename: _Rename, callers: tuple[str, ...]
    ) -> None:
        """Expand a call through a pointer: clone each possible callee, and jump to one by its address."""
        program, actual = self.program, (*call.results, *call.arguments)
        self.clones += 1
        table, end = f"{self.clones}:functions", f"{self.clones}:end of call"
        wanted = [self.bytes_of(rename(a.name)) for a in actual if isinstance(a, Name)]
        operands = (Name(rename(call.callee)), Name(table))
        program.code.append(statement._replace(opcode="dispatch", modifiers=(), operands=operands))
        program.tables[table], program.callees[table] = [], []
        for function in self.pointed_to:
            if [v.bytes for v in (*function.results, *function.parameters)] != wanted:
                continue
            label = f"{table} {function.name}"
            program.labels[label] = len(program.code)
            program.tables[table].append(label)
            program.callees[table].append(program.functions[function.name])
            if function.name in callers:
                what = Name(f"{function.name} calls itself: recursion is not supported")
                program.code.append(statement._replace(opcode="refuse", modifiers=(), operands=(what,)))
            else:
                self.expand(function, actual, rename, callers)
            program.code.append(statement._replace(opcode="bra", modifiers=(), operands=(Name(end),)))
        program.labels[end] = len(program.code)

    def bytes_of(self, variable: str) -> int:
        return next((v.bytes for v in self.variables if v.name == variable), 0)

    @cached_property
    def pointed_to(self) -> list[Function]:
        """Functions whose address the module takes."""
        functions = self.module.functions.values()
        used = [o for f in functions for s in f.body if isinstance(s, Instruction) for o in s.operands]
        used += [o for v in self.module.variables.values() for o in v.initial]
        names = {o.name for o in used if isinstance(o, Name)}
        return [f for f in functions if f.name in names and not f.entry and not f.declared_only]

    def lay_out(self) -> None:
        """Lay out static variables in order, then dynamic shared memory, whose symbols share one address."""
        program = self.program
        shared, local, dynamic = SHARED_BASE, LOCAL_BASE, []
        for variable in (*self.module.variables.values(), *self.variables):
            if variable.space == "shared":
                if variable.extern:
                    dynamic.append(variable)
                    continue
                shared = _round_up(shared, variable.align)
                program.shared[variable.name] = shared
                shared += variable.bytes
            elif variable.space in ("local", "param"):
                local = _round_up(local, variable.align)
                program.local[variable.name] = local
                local += variable.bytes
            else:
                program.globals.append(variable)
        if dynamic:
            shared = _round_up(shared, max(16, *(v.align for v in dynamic)))
            program.shared.update((v.name, shared) for v in dynamic)
        program.shared_bytes = shared - SHARED_BASE
        program.local_bytes = local - LOCAL_BASE


def _round_up(n: int, multiple: int) -> int:
    return -(-n // max(1, multiple)) * max(1, multiple)


def _rename(operand: Operand, rename: _Rename) -> Operand:
    match operand:
        case Name(name):
            return Name(rename(name))
        case Negated(name):
            return Negated(rename(name))
        case Address(base, offset):
            return Address(rename(base), offset)
        case Vector(parts):
            return Vector(tuple(_rename(p, rename) for p in parts))
        case Pair(first, second):
            return Pair(_rename(first, rename), _rename(second, rename))
    return operand


def _placed(statement: Instruction, rename: _Rename) -> Instruction:
    placed = statement._replace(operands=tuple(_rename(o, rename) for o in statement.operands))
    if statement.guard is not None:
        placed = placed._replace(guard=statement.guard._replace(name=rename(statement.guard.name)))
    return placed


# The barrier of cooperative groups: each block adds 1, the first one 2^31 less the others, so that the top bit of the
# count flips once all have arrived. %envreg1 and %envreg2 hold the address of the count.
_PTX = """
.version 8.0
.target sm_80
.address_size 64
.func (.param .b64 handle) cudaCGGetIntrinsicHandle(.param .b32 scope)
{
    .reg .b32 %low, %high;
    .reg .b64 %at;
    mov.u32 %low, %envreg2;
    mov.u32 %high, %envreg1;
    mov.b64 %at, {%low, %high};
    st.param.b64 [handle], %at;
    ret;
}
.func (.param .b32 status) cudaCGSynchronize(.param .b64 handle, .param .b32 flags)
{
    .reg .pred %p;
    .reg .b32 %a, %b, %c, %add, %old;
    .reg .b64 %at;
    ld.param.u64 %at, [handle];
    setp.eq.u64 %p, %at, 0;
    @%p trap;
    bar.sync 0;
    mov.u32 %a, %tid.x;
    mov.u32 %b, %tid.y;
    mov.u32 %c, %tid.z;
    or.b32 %a, %a, %b;
    or.b32 %a, %a, %c;
    setp.ne.u32 %p, %a, 0;
    @%p bra MET;
    mov.u32 %a, %ctaid.x;
    mov.u32 %b, %ctaid.y;
    mov.u32 %c, %ctaid.z;
    or.b32 %a, %a, %b;
    or.b32 %a, %a, %c;
    setp.ne.u32 %p, %a, 0;
    mov.u32 %a, %nctaid.x;
    mov.u32 %b, %nctaid.y;
    mov.u32 %c, %nctaid.z;
    mul.lo.u32 %a, %a, %b;
    mul.lo.u32 %a, %a, %c;
    sub.u32 %add, 0x80000001, %a;
    selp.u32 %add, 1, %add, %p;
    atom.add.u32 %old, [%at], %add;
WAIT:
    ld.acquire.gpu.u32 %a, [%at];
    xor.b32 %a, %a, %old;
    setp.ge.s32 %p, %a, 0;
    @%p bra WAIT;
MET:
    bar.sync 0;
    st.param.b32 [status], 0;
    ret;
}
"""


@cache
def module() -> Module:
    return parse(_PTX)
