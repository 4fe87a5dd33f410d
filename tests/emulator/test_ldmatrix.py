"""ldmatrix, stmatrix and movmatrix against explicit loops, and together with mma as in a kernel."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator.instructions.matrix import (
    load_fragments,
    load_fragments_b8,
    mma,
    movmatrix,
    store_fragments,
    store_fragments_b8,
)
from tests.emulator.fragment_layout import PLACES, from_registers, to_registers


def form(text):
    return mma(("sync", "aligned", *text.split(".")))


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
