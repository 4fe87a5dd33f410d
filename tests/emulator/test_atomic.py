"""Atomics against Python loops over the lanes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.emulator.instructions.atomic import combine, in_order
from gpu_ops.emulator.syntax import BITS, DTYPE
from tests.emulator.forms import edges

HALF = {"f16": np.float16, "f16x2": np.float16, "bf16": ml_dtypes.bfloat16, "bf16x2": ml_dtypes.bfloat16}
FLOAT = {**HALF, "f32": np.float32, "f64": np.float64}
FORMS = [
    *(("add", ptx_type) for ptx_type in ("u32", "s32", "u64", "f32", "f64", *HALF)),
    *((op, ptx_type) for op in ("min", "max") for ptx_type in ("u32", "s32", "u64", "s64")),
    *((op, ptx_type) for op in ("and", "or", "xor", "exch") for ptx_type in ("b32", "b64")),
    *(("cas", ptx_type) for ptx_type in ("b16", "b32", "b64")),
    ("inc", "u32"),
    ("dec", "u32"),
]


def modifiers(ptx_type):
    return ("noftz",) if ptx_type in HALF else ()


def round_bfloat16(value):
    """Round a float32 (not NaN) to the nearest bfloat16, ties to even, as bits."""
    word = int(np.float32(value).view(np.uint32))
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


def half_sum(dtype, old, operand):
    """Sum of two 16-bit patterns."""
    if dtype == "f16":
        x, y = (float(np.uint16(bits).view(np.float16)) for bits in (old, operand))
        return int(np.float64(x + y).astype(np.float16).view(np.uint16))  # exact in float64
    x, y = (np.uint32(bits << 16).view(np.float32) for bits in (old, operand))
    total = x + y
    return 0x7FFF if np.isnan(total) else round_bfloat16(total)


def one_step(op, ptx_type, old, *operands):
    """Value in memory after one lane: a Python integer, or a NumPy scalar for f32 and f64."""
    if op == "add" and ptx_type in HALF:
        element = ptx_type.removesuffix("x2")
        parts = range(0, BITS[ptx_type], 16)
        return sum(half_sum(element, old >> i & 0xFFFF, operands[0] >> i & 0xFFFF) << i for i in parts)
    if op == "add" and ptx_type[0] == "f":
        return old + operands[0]
    value = operands[-1]
    result = {
        "add": lambda: old + value,
        "min": lambda: min(old, value),
        "max": lambda: max(old, value),
        "and": lambda: old & value,
        "or": lambda: old | value,
        "xor": lambda: old ^ value,
        "exch": lambda: value,
        "cas": lambda: value if old == operands[0] else old,
        "inc": lambda: 0 if old >= value else old + 1,
        "dec": lambda: value if old == 0 or old > value else old - 1,
    }[op]()
    if ptx_type[0] == "s":
        return (result + (1 << BITS[ptx_type] - 1)) % (1 << BITS[ptx_type]) - (1 << BITS[ptx_type] - 1)
    return result % (1 << BITS[ptx_type])


def scalars(array, ptx_type):
    """One Python integer per element, bits for half types; f32 and f64 stay NumPy scalars."""
    if ptx_type in ("f32", "f64"):
        return list(array)
    return (array.view(np.uint16) if array.dtype == np.float16 else array).tolist()


def same(got, want, ptx_type):
    """Check for equal bits, except that any NaN equals any other."""
    assert got.dtype == DTYPE[ptx_type]
    want = np.array(want, f"u{got.itemsize}" if ptx_type in HALF else got.dtype)
    if ptx_type in FLOAT:
        got, want = (np.ascontiguousarray(x).view(FLOAT[ptx_type]) for x in (got, want))
        with np.errstate(invalid="ignore"):  # NumPy widens bfloat16, and a signalling NaN is invalid there
            nan = np.isnan(want)
            np.testing.assert_array_equal(np.isnan(got), nan)
        got, want = (x.view(f"u{x.itemsize}")[~nan] for x in (got, want))
    np.testing.assert_array_equal(got, want)


def operands_of(op, ptx_type, rng, n):
    """Operands at which definitions differ; few distinct values where equal or close ones matter."""
    if op == "cas":
        return [rng.integers(0, 4, n).astype(DTYPE[ptx_type]) for _ in range(2)]
    if op in ("inc", "dec") and n > 4:
        return [
            np.where(rng.random(n) < 0.8, rng.integers(0, 6, n), edges(ptx_type, rng, n)).astype(np.uint32)
        ]
    return [edges(ptx_type, rng, n)]


@pytest.mark.parametrize(("op", "ptx_type"), FORMS)
def test_combine(op, ptx_type, rng):
    old, operands = operands_of(op, ptx_type, rng, 500)[0], operands_of(op, ptx_type, rng, 500)
    for array in (old, *operands):
        array.flags.writeable = False
    with np.errstate(all="ignore"):
        actual = combine(op, ptx_type, modifiers(ptx_type))(old, *operands)
        uniform = combine(op, ptx_type, modifiers(ptx_type))(old, *(operand[:1] for operand in operands))
        rows = list(zip(*(scalars(x, ptx_type) for x in (old, *operands)), strict=True))
        same(actual, [one_step(op, ptx_type, *row) for row in rows], ptx_type)
        same(uniform, [one_step(op, ptx_type, row[0], *rows[0][1:]) for row in rows], ptx_type)


def address_patterns(rng, n):
    yield np.full(n, 1 << 40)
    yield 4 * np.arange(n)
    yield 4 * rng.permutation(n)
    yield 4 * rng.integers(0, n, n)
    yield 4 * rng.integers(0, 3, n)
    yield np.where(rng.random(n) < 0.5, 8, 4 * np.arange(n)).astype(np.uint64)
    yield np.array([12])


@pytest.mark.parametrize(("op", "ptx_type"), FORMS)
def test_lanes_take_turns_in_order(op, ptx_type, rng):
    run = in_order(op, ptx_type, modifiers(ptx_type))
    for addresses in address_patterns(rng, 200):
        n = len(addresses)
        operands = operands_of(op, ptx_type, rng, n)
        places = {int(address): i for i, address in enumerate(addresses)}
        values = operands_of(op, ptx_type, rng, n)[0]
        before = values[[places[int(address)] for address in addresses]]
        for array in (addresses, before, *operands):
            array.flags.writeable = False
        with np.errstate(all="ignore"):
            old, last, new = run(addresses, before, *operands)
            memory = dict(zip(addresses.tolist(), scalars(before, ptx_type), strict=True))
            previous = []
            for address, *row in zip(
                addresses.tolist(), *(scalars(x, ptx_type) for x in operands), strict=True
            ):
                previous.append(memory[address])
                memory[address] = one_step(op, ptx_type, memory[address], *row)
        same(old, previous, ptx_type)
        assert sorted(last) == sorted(places.values())
        same(new, [memory[address] for address in addresses[last].tolist()], ptx_type)


@pytest.mark.parametrize("op", ["add", "max", "xor", "exch", "cas"])
def test_one_operand_for_all_lanes(op, rng):
    """A value that is the same for all threads may have one element."""
    ptx_type = "u32" if op in ("add", "max") else "b32"
    addresses = rng.integers(0, 5, 64)
    operands = [np.array([3], np.uint32)] * (2 if op == "cas" else 1)
    before = addresses.astype(np.uint32)
    short = in_order(op, ptx_type, ())(addresses, before, *operands)
    long = in_order(op, ptx_type, ())(addresses, before, *(np.repeat(operand, 64) for operand in operands))
    for actual, expected in zip(short, long, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_inc_and_dec_wrap():
    """Count in a ring of five: 0 1 2 3 4 0 1 ..., and back."""
    addresses, limit, zero = np.zeros(12, np.int64), np.full(12, 4, np.uint32), np.zeros(12, np.uint32)
    np.testing.assert_array_equal(in_order("inc", "u32", ())(addresses, zero, limit)[0], np.arange(12) % 5)
    np.testing.assert_array_equal(in_order("dec", "u32", ())(addresses, zero, limit)[0], -np.arange(12) % 5)


def test_a_lock_goes_to_the_first_lane():
    addresses, free = np.repeat([8, 16], 50), np.zeros(100, np.uint32)
    taken = np.arange(1, 101, dtype=np.uint32)
    old, last, new = in_order("cas", "b32", ())(addresses, free, free, taken)
    np.testing.assert_array_equal(np.flatnonzero(old == 0), [0, 50])
    assert dict(zip(addresses[last], new, strict=True)) == {8: 1, 16: 51}


def test_many_lanes_on_one_counter(rng):
    """Atomics are fast enough for a grid-wide counter; float32 is still added one value at a time."""
    addresses, operand = np.zeros(65536, np.int64), rng.integers(0, 2**32, 65536, np.uint32)
    old, _, new = in_order("add", "u32", ())(addresses, np.full(65536, 7, np.uint32), operand)
    running = 7 + np.concatenate([[0], operand.cumsum(dtype=np.uint64)])
    np.testing.assert_array_equal(old, running[:-1] % 2**32)
    np.testing.assert_array_equal(new, running[-1:] % 2**32)
    values, total = rng.standard_normal(5000).astype(np.float32), np.float32(0)
    _, _, new = in_order("add", "f32", ())(addresses[:5000], np.zeros(5000, np.float32), values)
    for value in values:
        total += value
    assert new[0] == total
