"""Instruction forms of the emulator by their PTX names, and operands for them.

``run_form("mad.lo.s32", a, b, c)`` runs one form on arrays. ``edges("s32", rng, n)`` makes operands of any PTX type:
the values at which definitions differ, mixed with random ones. ``check_form`` compares a form with its definition in
Python integers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from gpu_ops.emulator import launch
from gpu_ops.emulator.instructions import InstructionForm, lookup
from gpu_ops.emulator.syntax import BITS, DTYPE, Array

#: (exponent bits, stored fraction bits, bits below the fraction) of each floating-point format.
FORMATS = {
    "f16": (5, 10, 0),
    "bf16": (8, 7, 0),
    "tf32": (8, 10, 13),
    "f32": (8, 23, 0),
    "f64": (11, 52, 0),
    "e4m3": (4, 3, 0),
    "e5m2": (5, 2, 0),
}


def form_op(form: str) -> InstructionForm:
    """:class:`InstructionForm` of a form named as in PTX, for instance ``"setp.lt.and.f32"``."""
    opcode, *modifiers = form.split(".")
    return lookup(opcode, tuple(modifiers))


def dtype_of(ptx_type: str) -> np.dtype[Any]:
    """Dtype of an operand; ``cc``, the carry flag, is a bool."""
    return np.dtype(np.bool_) if ptx_type == "cc" else DTYPE[ptx_type]


def pack(ptx_type: str, values: Iterable[int | float]) -> Array:
    """Operand from Python numbers; integers wrap to the width of the type."""
    dtype = dtype_of(ptx_type)
    if dtype.kind not in "iu":
        return np.array(list(values), dtype)
    bits = 8 * dtype.itemsize
    return np.array([int(v) % (1 << bits) for v in values], f"u{dtype.itemsize}").view(dtype)


def bits_of(array: Array) -> Array:
    """Bits of an operand or result as unsigned integers; bool stays bool."""
    return array if array.dtype == np.bool_ else array.view(f"u{array.itemsize}")


def run_form(form: str, *operands: Array) -> list[Array]:
    """Run one form and check the contract between machine and instructions.

    Operands have the dtypes that the form reads, and T elements or 1. Results must have the dtypes that the form
    writes and the common length. Operands must not change, an operand that is equal for all threads may have one
    element, and a kernel on the emulator must store the same results.
    """
    op = form_op(form)
    assert len(operands) == len(op.reads), f"{form} reads {op.reads}"
    for ptx_type, operand in zip(op.reads, operands, strict=True):
        assert operand.dtype == dtype_of(ptx_type), f"{form}: {operand.dtype} for .{ptx_type}"
    results = _evaluate(form, op, operands)
    for i, operand in enumerate(operands):
        if operand.size > 1:
            short = [*operands[:i], operand[:1], *operands[i + 1 :]]
            long = [*operands[:i], np.repeat(operand[:1], operand.size), *operands[i + 1 :]]
            _assert_same(f"{form}, operand {i} alike", _evaluate(form, op, short), _evaluate(form, op, long))
    alone = _evaluate(form, op, [operand[:1] for operand in operands])
    _assert_same(f"{form}, all operands alike", alone, [result[:1] for result in results])
    _assert_same(f"{form} in a kernel", run_kernel(form, op, operands), results)
    return results


def _evaluate(form: str, op: InstructionForm, operands: Sequence[Array]) -> list[Array]:
    """Run ``op`` on read-only operands and check the dtypes and shapes of its results."""
    guarded = [operand.copy() for operand in operands]
    for operand in guarded:
        operand.flags.writeable = False
    with np.errstate(all="ignore"):  # as the machine does
        returned = op.run(*guarded)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    assert len(results) == len(op.writes), f"{form} writes {op.writes}"
    shape = np.broadcast_shapes(*(operand.shape for operand in operands))
    for ptx_type, result in zip(op.writes, results, strict=True):
        assert isinstance(result, np.ndarray), form
        assert result.dtype == dtype_of(ptx_type), f"{form}: {result.dtype} for .{ptx_type}"
        assert result.shape == shape, f"{form}: {result.shape} from operands that broadcast to {shape}"
    return results


def _assert_same(what: str, got: Sequence[Array], want: Sequence[Array]) -> None:
    """Check for equal bits, except that any NaN equals any other."""
    for actual, expected in zip(got, want, strict=True):
        broadcast = np.broadcast_to(actual, expected.shape)
        same = bits_of(broadcast) == bits_of(expected)
        same |= (broadcast != broadcast) & (expected != expected)
        assert same.all(), f"{what}: element {np.argmin(same)} differs"


def check_form(form: str, oracle: Callable[..., Any], operands: Sequence[Array]) -> None:
    """Compare one form with its definition in Python integers, element by element.

    ``oracle`` takes integers for integer types and bits for all others, and returns the same: one result or a tuple.
    Results wrap to the width of the type that the form writes.
    """
    results = run_form(form, *operands)
    columns = [(bits_of(x) if x.dtype.kind == "f" else x).tolist() for x in np.broadcast_arrays(*operands)]
    wanted = [oracle(*row) for row in zip(*columns, strict=True)]
    for i, result in enumerate(results):
        actual = bits_of(result)
        width = 1 if actual.dtype == np.bool_ else 8 * actual.itemsize
        expected = [(row[i] if isinstance(row, tuple) else row) % (1 << width) for row in wanted]
        for j in np.flatnonzero(actual != np.array(expected, actual.dtype))[:1]:
            row = [column[j] for column in columns]
            pytest.fail(f"{form} of {row}: result {i} is {actual[j]:#x}, should be {expected[j]:#x}")


def expand(*patterns: str) -> list[str]:
    """Form names from patterns with shell brace expansion: ``mul.{lo,hi}.u32``."""
    names: list[str] = []
    for pattern in patterns:
        pieces = re.split(r"\{([^}]*)\}", pattern)
        choices = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def operands_of(form: str, rng: np.random.Generator, n: int = 400) -> list[Array]:
    """Operands for a form: ``n`` drawn by :func:`edges`, then every pair of special values of the first two."""
    reads = form_op(form).reads
    pairs = [special(ptx_type, rng) for ptx_type in reads[:2]]
    crossed = [grid.ravel() for grid in np.meshgrid(*pairs)]
    rest = [edges(ptx_type, rng, crossed[0].size) for ptx_type in reads[2:]]
    drawn = [edges(ptx_type, rng, n) for ptx_type in reads]
    return [np.concatenate(parts) for parts in zip(drawn, [*crossed, *rest], strict=True)]


def edges(ptx_type: str, rng: np.random.Generator, n: int) -> Array:
    """``n`` operands of a PTX type in random order: about half special values, the others random."""
    dtype = dtype_of(ptx_type)
    if dtype == np.bool_:
        return rng.integers(0, 2, n).astype(np.bool_)
    values = special(ptx_type, rng)
    chosen = np.concatenate([values, rng.choice(values, n)])[: n // 2]
    half, shifts = _halves(ptx_type)
    drawn = sum(_random_bits(half, rng, n - chosen.size) << np.uint64(shift) for shift in shifts)
    random = np.asarray(drawn).astype(f"u{dtype.itemsize}").view(dtype)
    return rng.permutation(np.concatenate([chosen, random]))


def special(ptx_type: str, rng: np.random.Generator) -> Array:
    """Values of a PTX type at which definitions differ, in random order; for a pair type, pairs of them."""
    dtype = dtype_of(ptx_type)
    if dtype == np.bool_:
        return rng.permutation(np.array([False, True]))
    half, shifts = _halves(ptx_type)
    width = BITS.get(half, 8)
    bits = _float_bits(*FORMATS[half]) if half in FORMATS else _integer_bits(width)
    values = np.array([value % (1 << width) for value in bits], np.uint64)
    words = sum(rng.permutation(values) << np.uint64(shift) for shift in shifts)
    return np.asarray(words).astype(f"u{dtype.itemsize}").view(dtype)


def _halves(ptx_type: str) -> tuple[str, tuple[int, ...]]:
    """Type of the values that an operand holds, and the bits at which they start."""
    if ptx_type.endswith("x2"):
        return ptx_type[:-2], (0, BITS[ptx_type] // 2)
    return ptx_type, (0,)


def _random_bits(ptx_type: str, rng: np.random.Generator, n: int) -> Array:
    width = BITS.get(ptx_type, 8)  # the 8-bit formats are types only in pairs
    random = rng.integers(0, 1 << width, n, np.uint64)
    if ptx_type not in FORMATS:
        # Half of them are short: a random number of leading zeros.
        return np.where(rng.random(n) < 0.5, random >> rng.integers(0, width, n, np.uint64), random)
    exponent, fraction, below = FORMATS[ptx_type]
    random &= ~np.uint64((1 << below) - 1)
    # A third of them are near 1, where operands are comparable: random bits alone are far apart in magnitude.
    field = ((1 << exponent) - 1) << fraction + below
    near = rng.integers((1 << exponent - 1) - 4, (1 << exponent - 1) + 3, n, np.uint64)
    moved = random & ~np.uint64(field) | near << np.uint64(fraction + below)
    return np.where(rng.random(n) < 1 / 3, moved, random)


def _integer_bits(width: int) -> list[int]:
    top = 1 << width - 1
    small = [0, 1, 2, 3, 7, 8, 15, 16, 24, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257]
    around = [width - 1, width, width + 1, -1, -2, -3, -width]
    return [*small, *around, top, top + 1, top - 1, top - 2, top >> 1, 0x5555555555555555, 0xAAAAAAAAAAAAAAAA]


def _float_bits(exponent: int, fraction: int, below: int) -> list[int]:
    bias = (1 << exponent - 1) - 1
    unity = bias << fraction
    infinity = ((1 << exponent) - 1) << fraction  # in e4m3 an ordinary number
    last = (1 << fraction) - 1
    positive = [0, 1, 2, last]  # zero, the smallest and the largest subnormals
    positive += [last + 1, last + 2]  # the smallest normals
    positive += [
        unity - 1,
        unity,
        unity + 1,
        unity + (1 << fraction - 1),
        unity + (1 << fraction),
        unity - (1 << fraction),
    ]
    positive += [infinity - 1, infinity, infinity + 1, infinity + (1 << fraction - 1), infinity + last]
    sign = 1 << exponent + fraction
    return [bits << below for value in positive for bits in (value, value | sign)]


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
