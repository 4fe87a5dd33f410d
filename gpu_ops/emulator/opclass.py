"""What kind of work an instruction is, for the instruction mix, and how many operations a lane does in it."""

from __future__ import annotations

from gpu_ops.emulator.instructions import FLOAT
from gpu_ops.emulator.syntax import Instruction

__all__ = ["CLASSES", "classify", "operations"]

#: Classes of the instruction mix, in the order they are shown.
CLASSES = (
    "tensor core", "float", "special", "integer", "convert", "move", "global", "shared", "local", "constant",
    "generic", "atomic", "cp.async", "warp", "barrier", "control", "other",
)  # fmt: skip

_BY_OPCODE = {
    **dict.fromkeys(("mma", "wgmma", "wmma"), "tensor core"),
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "rcp", "sqrt"), "special"),
    **dict.fromkeys(("ldmatrix", "stmatrix"), "shared"),
    **dict.fromkeys(("mov", "cvta", "selp", "prmt", "isspacep"), "move"),
    **dict.fromkeys(("shfl", "vote", "match", "redux", "elect", "activemask", "movmatrix"), "warp"),
    **dict.fromkeys(("bar", "barrier", "mbarrier"), "barrier"),
    **dict.fromkeys(("bra", "brx", "ret", "exit", "trap", "brkpt", "nanosleep"), "control"),
    **dict.fromkeys(
        ("membar", "fence", "prefetch", "prefetchu", "discard", "griddepcontrol", "setmaxnreg"), "other"
    ),
    **dict.fromkeys(("atom", "red"), "atomic"),
    "cvt": "convert",
    "cp": "cp.async",
}
_SPACES = {"global": "global", "shared": "shared", "local": "local", "param": "constant", "const": "constant"}

_FLOPS = {"add": 1, "sub": 1, "mul": 1, "div": 1, "fma": 2, "mad": 2}
_INTEGER_OPERATIONS = {"mad": 2, "mad24": 2, "madc": 2, "dp4a": 8, "dp2a": 4}
_FLOAT_NAMES = {"f32": "fp32", "f64": "fp64", "f16": "fp16", "bf16": "bf16"}


def classify(instruction: Instruction) -> str:
    """One of :data:`CLASSES`."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in ("ld", "ldu", "st"):
        spaces = (_SPACES.get(word.partition("::")[0]) for word in modifiers)
        return next((space for space in spaces if space), "generic")
    if opcode in _BY_OPCODE:
        return _BY_OPCODE[opcode]
    if opcode in ("setp", "set"):
        return "float" if modifiers[-1] in FLOAT else "integer"
    return "float" if modifiers and modifiers[-1] in FLOAT else "integer"


def operations(instruction: Instruction) -> tuple[str, int]:
    """(fp16, bf16, fp32, fp64, int or "", operations per lane).

    A fused multiply-add is two, a special function one, comparisons, selections and moves none; on integers every
    arithmetic, bit and logic instruction counts, addresses included. Packed types do twice the work.
    """
    opcode, kind = instruction.opcode, classify(instruction)
    if kind in ("float", "special"):
        ptx_type = instruction.modifiers[-1]
        packed = ptx_type.endswith("x2")
        count = 1 if kind == "special" else _FLOPS.get(opcode, 0)
        return _FLOAT_NAMES[ptx_type.removesuffix("x2")] if count else "", count * (1 + packed)
    if kind == "integer" and opcode not in ("setp", "set"):
        return "int", _INTEGER_OPERATIONS.get(opcode, 1)
    return "", 0
