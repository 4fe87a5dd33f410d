"""mma.sync against matrix products; ldmatrix, stmatrix and movmatrix. Registers are filled element by element."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.emulator.instructions.matrix import (
    DECODE,
    load_fragments,
    load_fragments_b8,
    mma,
    movmatrix,
    store_fragments,
    store_fragments_b8,
)

RANGE = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8), "u4": (0, 16), "b1": (0, 2)}
FLOAT = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
UNIT = {"f16": 2.0**-11, "f32": 2.0**-24, "f64": 2.0**-53}

FLOAT_FORMS = [
    *(f"{shape}.row.col.{c}.f16.f16.{c}" for shape in ("m16n8k8", "m16n8k16") for c in ("f32", "f16")),
    *(f"{shape}.row.col.f32.bf16.bf16.f32" for shape in ("m16n8k8", "m16n8k16")),
    *(f"{shape}.row.col.f32.tf32.tf32.f32" for shape in ("m16n8k4", "m16n8k8")),
    *(f"{shape}.row.col.f64.f64.f64.f64" for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
    *(
        f"{shape}.row.col.{c}.{a}.{b}.{c}"
        for shape in ("m16n8k16", "m16n8k32")
        for c in ("f32", "f16")
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ),
]
INTEGER_FORMS = [
    f"{shape}.row.col{saturate}.s32.{a}.{b}.s32"
    for shapes, types in (
        (("m8n8k16", "m16n8k16", "m16n8k32"), ("s8", "u8")),
        (("m8n8k32", "m16n8k32", "m16n8k64"), ("s4", "u4")),
    )
    for shape in shapes
    for saturate in ("", ".satfinite")
    for a in types
    for b in types
]
BIT_FORMS = [
    f"{shape}.row.col.s32.b1.b1.s32.{combine}.popc"
    for shape in ("m8n8k128", "m16n8k128", "m16n8k256")
    for combine in ("and", "xor")
]


def form(text):
    return mma(("sync", "aligned", *text.split(".")))


def sizes(text):
    return [int(size) for size in re.findall(r"\d+", text.split(".")[0])]


def operand(rng, ptx_type, shape):
    """Random elements: bits, and values (float64 or int64)."""
    if ptx_type in RANGE:
        values = rng.integers(*RANGE[ptx_type], shape)
        return (values & ((1 << WIDTH[ptx_type]) - 1)).astype(np.uint64), values
    if ptx_type == "tf32":
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
        return bits.astype(np.uint64), (bits & 0xFFFFE000).astype(np.uint32).view(np.float32).astype(
            np.float64
        )
    values = (rng.standard_normal(shape) * rng.choice([0.01, 1.0, 8.0], shape)).astype(FLOAT[ptx_type])
    return values.view(f"u{values.itemsize}").astype(np.uint64), values.astype(np.float64)


def types_of(text):
    """Types of A, B and C of a form."""
    named = [part for part in text.split(".") if part in WIDTH or part in ("f32", "s32")]
    return named[1:4]


def run(text, a_bits, b_bits, c, truncating=False):
    """D of each warp, from registers filled with the matrices."""
    op, shape, width = form(text), text.split(".")[0], WIDTH[types_of(text)[0]]
    place_a, place_b = PLACES[shape, width]
    fragments = (
        to_registers(a_bits, place_a, width),
        to_registers(b_bits, place_b, width),
        to_registers(c.view(f"u{c.itemsize}"), place_c, 8 * c.itemsize),
    )
    assert [len(fragment) for fragment in fragments] == [op.a[0], op.b[0], op.c[0]]
    d = op.run(*fragments, truncating)
    assert len(d) == op.d[0]
    assert all(fragment.shape == (len(c), 32) and fragment.dtype == fragments[2][0].dtype for fragment in d)
    return from_registers(d, sizes(text)[0], c.dtype)


@pytest.mark.parametrize("text", FLOAT_FORMS)
def test_float_products_are_the_sum_rounded_once(text, rng):
    m, n, k = sizes(text)
    a_type, b_type, c_type = types_of(text)
    a_bits, a = operand(rng, a_type, (3, m, k))
    b_bits, b = operand(rng, b_type, (3, k, n))
    c = rng.standard_normal((3, m, n)).astype(FLOAT[c_type])
    actual = run(text, a_bits, b_bits, c)
    for w, i, j in np.ndindex(actual.shape):
        products = a[w, i] * b[w, :, j]  # exact, except for f64
        exact = math.fsum([*products, float(c[w, i, j])])
        sums = (k + 2) * 2.0**-53 * (np.abs(products).sum() + abs(float(c[w, i, j])))
        bound = sums + UNIT[c_type] * (abs(exact) + sums) + (2.0**-25 if c_type == "f16" else 0)
        assert abs(float(actual[w, i, j]) - exact) <= bound, (
            f"{(w, i, j)}: {actual[w, i, j]}, expected {exact}"
        )


@pytest.mark.parametrize("text", INTEGER_FORMS)
def test_integer_products_are_exact(text, rng):
    m, n, k = sizes(text)
    a_type, b_type, _ = types_of(text)
    a_bits, a = operand(rng, a_type, (3, m, k))
    b_bits, b = operand(rng, b_type, (3, k, n))
    limits = np.iinfo(np.int32)
    c = rng.choice([0, 12345, -77, limits.max, limits.min, limits.max - 50, limits.min + 50], (3, m, n))
    expected = a @ b + c
    assert ((expected > limits.max) | (expected < limits.min)).any()  # otherwise the next line has no effect
    expected = (
        np.clip(expected, limits.min, limits.max)
        if "satfinite" in text
        else (expected + 2**31) % 2**32 - 2**31
    )
    np.testing.assert_array_equal(run(text, a_bits, b_bits, c.astype(np.int32)), expected)


@pytest.mark.parametrize(("a_type", "b_type"), [("s8", "s8"), ("u8", "u8"), ("s4", "s4"), ("u4", "u4")])
def test_largest_integer_products(a_type, b_type):
    shape = "m16n8k32" if a_type[1] == "8" else "m16n8k64"
    text = f"{shape}.row.col.s32.{a_type}.{b_type}.s32"
    m, n, k = sizes(text)
    largest = 1 << WIDTH[a_type] - 1 if a_type[0] == "s" else (1 << WIDTH[a_type]) - 1  # -128 as bits, or 255
    actual = run(
        text, *(np.full(s, largest, np.uint64) for s in ((1, m, k), (1, k, n))), np.ones((1, m, n), np.int32)
    )
    np.testing.assert_array_equal(actual, k * largest**2 + 1)


@pytest.mark.parametrize("text", BIT_FORMS)
def test_bit_products(text, rng):
    m, n, k = sizes(text)
    a_bits, a = operand(rng, "b1", (2, m, k))
    b_bits, b = operand(rng, "b1", (2, k, n))
    c = rng.integers(-(2**31), 2**31, (2, m, n)).astype(np.int32)
    combine = np.bitwise_and if ".and." in text else np.bitwise_xor
    counts = combine(a[:, :, None, :], b.swapaxes(1, 2)[:, None, :, :]).sum(-1)
    expected = (counts + c + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(run(text, a_bits, b_bits, c), expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_float8_code(name):
    exponent_bits, fraction_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[name]
    for code, value in enumerate(DECODE[name](np.arange(256, dtype=np.uint8).view(np.uint32))):
        exponent, fraction = (code & 0x7F) >> fraction_bits, code & (1 << fraction_bits) - 1
        sign, top = -1.0 if code & 0x80 else 1.0, exponent == (1 << exponent_bits) - 1
        if top and (name == "e5m2" or fraction == 7):
            expected = math.nan if name == "e4m3" or fraction else sign * math.inf
        elif exponent == 0:
            expected = sign * fraction * 2.0 ** (1 - bias - fraction_bits)
        else:
            expected = sign * (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias)
        np.testing.assert_equal(value, expected, err_msg=f"{code:#x}")


def test_sums_have_no_intermediate_rounding():
    """2^24 + 1 + ... + 1 - 2^24: float32 loses the ones in most orders of summation."""
    text = "m16n8k16.row.col.f32.bf16.bf16.f32"
    a = np.ones((1, 16, 16), ml_dtypes.bfloat16)
    a[:, :, -1] = -(2.0**24)
    b = np.ones((1, 16, 8), ml_dtypes.bfloat16)
    c = np.full((1, 16, 8), 2.0**24, np.float32)
    actual = run(text, a.view(np.uint16), b.view(np.uint16), c)
    np.testing.assert_array_equal(actual, 15)


@pytest.mark.parametrize("text", ["m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f16.f16.f16.f16"])
def test_infinity_and_nan(text):
    dtype = FLOAT[types_of(text)[0]]
    a, b = np.ones((1, 16, 16), dtype), np.ones((1, 16, 8), dtype)
    c = np.zeros((1, 16, 8), FLOAT[types_of(text)[2]])
    a[0, 3, 5], a[0, 12, 0], c[0, 7, 1], b[0, 5, 6] = np.inf, np.nan, -np.inf, 0
    with np.errstate(invalid="ignore"):
        actual = run(text, a.view(np.uint16), b.view(np.uint16), c)
        expected = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(c.dtype)
    np.testing.assert_array_equal(actual, expected)
    assert np.isnan(expected[0, 3, 6])
    assert np.isinf(expected[0, 3, 5])
    assert expected[0, 7, 1] == -np.inf


def test_float16_results_overflow_to_infinity():
    text = "m16n8k16.row.col.f16.f16.f16.f16"
    a, b = np.full((1, 16, 16), 200, np.float16), np.full((1, 16, 8), 200, np.float16)
    with np.errstate(over="ignore"):
        actual = run(text, a.view(np.uint16), b.view(np.uint16), np.zeros((1, 16, 8), np.float16))
    assert (actual == np.inf).all()


@pytest.mark.parametrize(
    "text",
    [
        "m16n8k16.row.col.f32.bf16.bf16.f32",
        "m16n8k32.row.col.s32.s8.u8.s32",
        "m8n8k4.row.col.f64.f64.f64.f64",
    ],
)
def test_warps_do_not_depend_on_each_other(text, rng):
    op = form(text)
    dtype, bits = (np.float64, np.uint64) if op.kind == "f64" else (np.float32, np.uint32)
    warps = 1500  # several chunks, the last one partial

    def registers(count):
        return [rng.standard_normal((warps, 32)).astype(dtype).view(bits) for _ in range(count)]

    fragments = [registers(count) for count, _ in (op.a, op.b, op.c)]
    with np.errstate(all="ignore"):  # as bfloat16 the low halves are any number
        together = op.run(*fragments)
        for w in (0, 1, 63, 64, 700, warps - 1):
            alone = op.run(*([register[w : w + 1] for register in fragment] for fragment in fragments))
            for single, batched in zip(alone, together, strict=True):
                np.testing.assert_array_equal(single[0], batched[w])


@pytest.mark.parametrize(
    ("text", "a", "b", "c", "macs", "kind"),
    [
        ("m16n8k16.row.col.f32.bf16.bf16.f32", (4, "b32"), (2, "b32"), (4, "f32"), 2048, "bf16"),
        ("m16n8k8.row.col.f16.f16.f16.f16", (2, "b32"), (1, "b32"), (2, "b32"), 1024, "f16"),
        ("m16n8k4.row.col.f32.tf32.tf32.f32", (2, "b32"), (1, "b32"), (4, "f32"), 512, "tf32"),
        ("m16n8k32.row.col.f32.e4m3.e5m2.f32", (4, "b32"), (2, "b32"), (4, "f32"), 4096, "f8"),
        ("m16n8k32.row.col.satfinite.s32.u8.s8.s32", (4, "b32"), (2, "b32"), (4, "s32"), 4096, "s8"),
        ("m8n8k4.row.col.f64.f64.f64.f64", (1, "f64"), (1, "f64"), (2, "f64"), 256, "f64"),
        ("m16n8k16.row.col.f64.f64.f64.f64", (8, "f64"), (4, "f64"), (4, "f64"), 2048, "f64"),
        ("m16n8k256.row.col.s32.b1.b1.s32.and.popc", (4, "b32"), (2, "b32"), (4, "s32"), 32768, "b1"),
    ],
)
def test_what_a_form_takes(text, a, b, c, macs, kind):
    op = form(text)
    assert (op.a, op.b, op.c, op.d, op.macs, op.kind) == (a, b, c, c, macs, kind)


def towards_zero(x, exponent):
    """Multiple of 2^exponent below ``|x|``, with the sign of x."""
    return math.trunc(x / Fraction(2) ** exponent) * Fraction(2) ** exponent


def truncated(a, b, c, width, kept, result):
    """Adders of a tensor core in exact arithmetic: ``width`` products and the partial sum at a time."""
    total = Fraction(float(c))
    for first in range(0, len(a), width):
        along = slice(first, first + width)
        addends = [
            total,
            *(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[along], b[along], strict=True)),
        ]
        largest = float(max(map(abs, addends)))
        total = sum(towards_zero(x, math.frexp(largest)[1] - kept) for x in addends)
        if result == "f32":
            total = towards_zero(total, math.frexp(float(total))[1] - 24)
    return FLOAT[result](float(total))


@pytest.mark.parametrize(
    ("text", "width", "kept"),
    [
        ("m16n8k16.row.col.f32.bf16.bf16.f32", 8, 25),
        ("m16n8k16.row.col.f16.f16.f16.f16", 8, 25),
        ("m16n8k8.row.col.f32.tf32.tf32.f32", 4, 25),
        ("m16n8k32.row.col.f32.e4m3.e5m2.f32", 32, 14),
    ],
)
def test_truncating_adders(text, width, kept, rng):
    m, n, k = sizes(text)
    a_type, b_type, c_type = types_of(text)
    a_bits, a = operand(rng, a_type, (1, m, k))
    b_bits, b = operand(rng, b_type, (1, k, n))
    c = rng.standard_normal((1, m, n)).astype(FLOAT[c_type])
    actual = run(text, a_bits, b_bits, c, truncating=True)
    expected = [
        [truncated(a[0, i], b[0, :, j], c[0, i, j], width, kept, c_type) for j in range(n)] for i in range(m)
    ]
    np.testing.assert_array_equal(actual[0], expected)
    if c_type == "f32":  # the case distinguishes the two
        assert (actual != run(text, a_bits, b_bits, c)).any()


def test_truncating_adders_keep_infinities_and_nan():
    text = "m16n8k8.row.col.f32.tf32.tf32.f32"
    a, b = np.ones((1, 16, 8), np.float32), np.ones((1, 8, 8), np.float32)
    a[0, 0, 0], a[0, 1, 5], a[0, 2, 7] = np.inf, -np.inf, np.nan
    bits = [x.view(np.uint32).astype(np.uint64) for x in (a, b)]
    actual = run(text, *bits, np.zeros((1, 16, 8), np.float32), truncating=True)[0, :4, 0]
    np.testing.assert_array_equal(actual, [np.inf, -np.inf, np.nan, 8])


# ldmatrix, stmatrix and movmatrix against explicit loops, and together with mma as in a kernel.


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(count, transposed, rng):
    rows = rng.integers(0, 256, (3, 8 * count, 16), np.uint8)
    rows.flags.writeable = False
    registers = load_fragments(rows, transposed)
    assert len(registers) == count
    halves = rows.view(np.uint16).reshape(3, count, 8, 8)
    for j in range(count):
        assert registers[j].shape == (3, 32)
        assert registers[j].dtype == np.uint32
        for w, lane in np.ndindex(3, 32):
            g, t = lane // 4, lane % 4
            matrix = halves[w, j].T if transposed else halves[w, j]
            assert registers[j][w, lane] == int(matrix[g, 2 * t]) | int(matrix[g, 2 * t + 1]) << 16
    stored = store_fragments(registers, transposed)
    assert stored.dtype == np.uint8
    np.testing.assert_array_equal(stored, rows)


def test_movmatrix_transposes(rng):
    rows = rng.integers(0, 256, (5, 8, 16), np.uint8)
    np.testing.assert_array_equal(movmatrix(load_fragments(rows, False)[0]), load_fragments(rows, True)[0])


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_bytes(count, rng):
    rows = rng.integers(0, 256, (2, 16 * count, 16), np.uint8)
    registers = load_fragments_b8(rows)
    assert len(registers) == 2 * count
    for j, q, w, lane in np.ndindex(count, 2, 2, 32):
        g, t = lane // 4, lane % 4
        expected = [rows[w, 16 * j + 4 * t + b, g + 8 * q] for b in range(4)]
        assert registers[2 * j + q][w, lane] == int.from_bytes(bytes(expected), "little")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count, rng):
    registers = [rng.integers(0, 2**32, (2, 32), np.uint32) for _ in range(count)]
    rows = store_fragments_b8(registers)
    assert rows.shape == (2, 8 * count, 16)
    for j, w, lane in np.ndindex(count, 2, 32):
        g, t = lane // 4, lane % 4
        for e, byte in enumerate(int(registers[j][w, lane]).to_bytes(4, "little")):
            assert rows[w, 8 * j + 2 * t + (e & 1), g + 8 * (e >> 1)] == byte


@pytest.mark.parametrize("b_is_kn", [False, True])
def test_ldmatrix_feeds_mma_and_stmatrix_takes_its_result(b_is_kn, rng):
    """A tile product as in a kernel: A [16, 16], B [16, 8] or [8, 16], D [16, 8] in float16."""
    a = rng.integers(-8, 8, (2, 16, 16)).astype(np.float16)
    b = rng.integers(-8, 8, (2, 16, 8)).astype(np.float16)
    # Lane i gives ldmatrix.x4 the row of A that starts at (i % 16, 8 (i / 16)).
    a_rows = np.stack([a[:, i % 16, 8 * (i // 16) :][:, :8] for i in range(32)], axis=1)
    if b_is_kn:
        b_rows = b
    else:
        b_rows = np.stack([b.swapaxes(1, 2)[:, i % 8, 8 * (i // 8) :][:, :8] for i in range(16)], axis=1)
    d = form("m16n8k16.row.col.f16.f16.f16.f16").run(
        load_fragments(a_rows.view(np.uint8), transposed=False),
        load_fragments(b_rows.view(np.uint8), transposed=b_is_kn),
        [np.zeros((2, 32), np.uint32)] * 2,
    )
    stored = store_fragments(d, transposed=False).view(np.float16)
    np.testing.assert_array_equal(stored, a @ b)  # small integers: exact


def test_ldmatrix_of_bytes_feeds_mma(rng):
    a = rng.integers(-128, 128, (1, 16, 32)).astype(np.int8)
    b = rng.integers(-128, 128, (1, 32, 16)).astype(np.int8)
    fragments = load_fragments_b8(b.view(np.uint8))
    text = "m16n8k32.row.col.s32.s8.s8.s32"
    a_registers = to_registers(a.view(np.uint8), PLACES["m16n8k32", 8][0], 8)
    for half in range(2):
        d = form(text).run(a_registers, fragments[half::2], [np.zeros((1, 32), np.uint32)] * 4)
        expected = (a.astype(np.int64) @ b.astype(np.int64))[:, :, 8 * half : 8 * half + 8]
        np.testing.assert_array_equal(from_registers(d, 16, np.int32), expected)


# Layout of tensor-core fragments as in the PTX document: one formula per shape.
#
# The emulator uses one rule for all shapes; the tests compare it with these formulas.

#: Bits of an element in a register.
WIDTH = {"f64": 64, "tf32": 32, "b1": 1}
WIDTH |= dict.fromkeys(("f16", "bf16"), 16) | dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), 8)
WIDTH |= dict.fromkeys(("s4", "u4"), 4)

#: (shape, bits) -> places of element i of a lane's A fragment, (row, column), and of its B fragment, (k, n);
#: g = lane / 4, t = lane % 4.
PLACES = {
    ("m16n8k16", 16): (lambda i, g, t: (g + 8 * (i in (2, 3, 6, 7)), 2 * t + (i & 1) + 8 * (i >= 4)), lambda i, g,
     t: (2 * t + (i & 1) + 8 * (i >= 2), g)),
    ("m16n8k8", 16): (lambda i, g, t: (g + 8 * (i >= 2), 2 * t + (i & 1)), lambda i, g, t: (2 * t + (i & 1), g)),
    ("m16n8k4", 32): (lambda i, g, t: (g + 8 * i, t), lambda i, g, t: (t, g)),
    ("m16n8k8", 32): (lambda i, g, t: (g + 8 * (i in (1, 3)), t + 4 * (i in (2, 3))), lambda i, g,
     t: (t + 4 * (i == 1), g)),
    ("m8n8k16", 8): (lambda i, g, t: (g, 4 * t + i), lambda i, g, t: (4 * t + i, g)),
    ("m16n8k16", 8): (lambda i, g, t: (g + 8 * (i >= 4), 4 * t + (i & 3)), lambda i, g, t: (4 * t + i, g)),
    ("m16n8k32", 8): (lambda i, g, t: (g + 8 * (4 <= i < 8 or i >= 12), 4 * t + (i & 3) + 16 * (i >= 8)), lambda i,
     g, t: (4 * t + (i & 3) + 16 * (i >= 4), g)),
    ("m8n8k32", 4): (lambda i, g, t: (g, 8 * t + i), lambda i, g, t: (8 * t + i, g)),
    ("m16n8k32", 4): (lambda i, g, t: (g + 8 * (i >= 8), 8 * t + (i & 7)), lambda i, g, t: (8 * t + i, g)),
    ("m16n8k64", 4): (lambda i, g, t: (g + 8 * (8 <= i < 16 or i >= 24), 8 * t + (i & 7) + 32 * (i >= 16)), lambda i,
     g, t: (8 * t + (i & 7) + 32 * (i >= 8), g)),
    ("m8n8k128", 1): (lambda i, g, t: (g, 32 * t + i), lambda i, g, t: (32 * t + i, g)),
    ("m16n8k128", 1): (lambda i, g, t: (g + 8 * (i >= 32), 32 * t + (i & 31)), lambda i, g, t: (32 * t + i, g)),
    ("m16n8k256", 1): (lambda i, g, t: (g + 8 * (32 <= i < 64 or i >= 96), 32 * t + (i & 31) + 128 * (i >= 64)),
     lambda i, g, t: (32 * t + (i & 31) + 128 * (i >= 32), g)),
    ("m8n8k4", 64): (lambda i, g, t: (g, t), lambda i, g, t: (t, g)),
    ("m16n8k4", 64): (lambda i, g, t: (g + 8 * i, t), lambda i, g, t: (t, g)),
    ("m16n8k8", 64): (lambda i, g, t: (g if i % 2 == 0 else g + 8, t if i < 2 else t + 4), lambda i, g,
     t: (t + 4 * i, g)),
    ("m16n8k16", 64): (lambda i, g, t: (g if i % 2 == 0 else g + 8, 2 * i + t if i % 2 == 0 else 2 * i - 2 + t),
     lambda i, g, t: (t + 4 * i, g)),
}  # fmt: skip


def to_registers(bits, place, width):
    """Fragment of the matrix ``bits[w]`` of each warp, lane by lane and element by element."""
    word = max(32, width)
    count = bits[0].size // 32
    registers = np.zeros((count * width // word, len(bits), 32), f"u{word // 8}")
    for lane in range(32):
        for i in range(count):
            element = bits[:, *place(i, lane // 4, lane % 4)].astype(registers.dtype)
            registers[i * width // word, :, lane] |= element << registers.dtype.type(i * width % word)
    registers.flags.writeable = False
    return list(registers)


def place_c(i, g, t):
    return g + 8 * (i >= 2), 2 * t + (i & 1)


def from_registers(registers, rows, dtype):
    """Matrix ``[W, rows, 8]`` of a C or D fragment."""
    width = 8 * np.dtype(dtype).itemsize
    matrix = np.empty((len(registers[0]), rows, 8), dtype)
    per_register = max(1, 32 // width)
    for lane in range(32):
        for i in range(rows // 4):
            word = np.ascontiguousarray(registers[i // per_register][:, lane : lane + 1])
            matrix[:, *place_c(i, lane // 4, lane % 4)] = word.view(dtype)[:, i % per_register]
    return matrix
