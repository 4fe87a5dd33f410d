"""One instruction form as a kernel: each thread loads its operands, executes the form and stores the results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_ops.emulator import launch
from gpu_ops.emulator.instructions import InstructionForm
from gpu_ops.emulator.syntax import BITS, DTYPE, Array

IMMEDIATE = {"lop3": 3}  # the operand that must be an immediate
BLOCK = 256


def run_kernel(form: str, op: InstructionForm, operands: Sequence[Array]) -> list[Array]:
    """Run ``form`` in a kernel with one thread per element; a single element is shared by all threads."""
    n = max(operand.size for operand in operands)
    results = [np.empty(n, DTYPE.get(ptx_type, np.bool_)) for ptx_type in op.writes]
    immediate = IMMEDIATE.get(form.split(".")[0])
    inputs = [operand for i, operand in enumerate(operands) if i != immediate]
    arrays = [array.view(np.uint8) if array.dtype == np.bool_ else array for array in (*inputs, *results)]
    launch(
        kernel_text(form, op, operands),
        "form",
        -(-n // BLOCK),
        BLOCK,
        [*arrays, n],
        arch="sm_90",
        sanitize=False,
    )
    return results


def kernel_text(form: str, op: InstructionForm, operands: Sequence[Array]) -> str:
    """PTX with a parameter for each operand (a0, ...), each result (d0, ...) and the number of threads."""
    parameters, registers, body, sources, targets = [], [], [], [], []
    opcode = form.split(".")[0]
    borrows = opcode.startswith("sub")

    def address(parameter: str, ptx_type: str, index: str) -> list[str]:
        parameters.append(f".param .u64 {parameter}")
        size = 1 if ptx_type == "cc" else DTYPE[ptx_type].itemsize
        return [f"ld.param.u64 %at, [{parameter}];", f"mad.wide.u32 %at, {index}, {size}, %at;"]

    for i, (ptx_type, operand) in enumerate(zip(op.reads, operands, strict=True)):
        if IMMEDIATE.get(opcode) == i:
            sources.append(str(int(operand[0])))
            continue
        body += address(f"a{i}", ptx_type, "%i" if operand.size > 1 else "0")
        if ptx_type == "cc":
            # Set the carry or the borrow by an instruction that overflows if the byte is 1.
            body += ["ld.global.u8 %byte, [%at];", "cvt.u32.u16 %carry, %byte;"]
            body.append(
                "sub.cc.u32 %carry, 0, %carry;" if borrows else "add.cc.u32 %carry, %carry, 0xffffffff;"
            )
            continue
        sources.append(f"%a{i}")
        registers.append(f".reg .{_held(ptx_type)} %a{i};")
        if ptx_type == "pred":
            body += ["ld.global.u8 %byte, [%at];", f"setp.ne.u16 %a{i}, %byte, 0;"]
        else:
            body.append(f"ld.global.{_moved(ptx_type)} %a{i}, [%at];")

    stores = []
    for i, ptx_type in enumerate(op.writes):
        if ptx_type == "cc":
            stores += ["subc.u32 %carry, 0, 0;" if borrows else "addc.u32 %carry, 0, 0;"]
            stores += ["and.b32 %carry, %carry, 1;", "cvt.u16.u32 %byte, %carry;"]
        else:
            targets.append(f"%d{i}")
            registers.append(f".reg .{_held(ptx_type)} %d{i};")
        stores += address(f"d{i}", ptx_type, "%i")
        if ptx_type == "pred":
            stores.append(f"selp.u16 %byte, 1, 0, %d{i};")
        value = "%byte" if ptx_type in ("pred", "cc") else f"%d{i}"
        stores.append(f"st.global.{_moved(ptx_type)} [%at], {value};")

    newline = "\n"
    return f"""
.version 8.8
.target sm_90
.address_size 64
.visible .entry form({", ".join(parameters)}, .param .u32 n)
{{
.reg .b64 %at; .reg .b32 %i, %x, %y, %carry; .reg .b16 %byte; .reg .pred %beyond;
{newline.join(registers)}
mov.u32 %i, %ctaid.x; mov.u32 %x, %ntid.x; mov.u32 %y, %tid.x; mad.lo.u32 %i, %i, %x, %y;
ld.param.u32 %x, [n]; setp.ge.u32 %beyond, %i, %x;
@%beyond ret;
{newline.join(body)}
{form} {"|".join(targets)}, {", ".join(sources)};
{newline.join(stores)}
ret;
}}
"""


def _held(ptx_type: str) -> str:
    """Type of the register that holds an operand."""
    return ptx_type if ptx_type in ("pred", "f32", "f64") else f"b{max(16, BITS[ptx_type])}"


def _moved(ptx_type: str) -> str:
    """Type that loads and stores an operand; a predicate or a carry is a byte in memory."""
    return "u8" if BITS.get(ptx_type, 1) <= 8 else _held(ptx_type)
