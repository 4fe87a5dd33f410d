"""Matrix products of the CPU backend against float64 NumPy, within the error bound of a float32 sum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.rows.cases import views

pytest.importorskip("numba", reason="the CPU kernels are compiled by Numba")

from gpu_ops.kernels.gemm.cpu import gemm
from gpu_ops.kernels.gemm.cpu.gemm import COLUMNS, COLUMNS_OF_TILES, ROWS, matmul

FLAGS = list(itertools.product((False, True), repeat=3))
# one element, primes, whole tiles, one row or column more and less, skinny either way
SIZES = [
    (1, 1, 1),
    (7, 3, 5),
    (37, 61, 101),
    (ROWS, COLUMNS, 256),
    (ROWS + 1, 33, 255),
    (5, 2 * COLUMNS + 31, 257),
    (ROWS - 1, 16, 4519),  # blocks of K of unequal length
]
# dtypes of (A, B, out): those of the gated MLP, and others
DTYPES = [
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    *((t, "float32", t) for t in ("float16", "bfloat16")),
    *((t, t, t) for t in ("float16", "bfloat16")),
    ("float16", "bfloat16", "float32"),
    ("bfloat16", "float64", "bfloat16"),
]
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def make(rng, m, n, k, dtypes, trans_a, trans_b, trans_out):
    """Operands as stored, an out full of NaN, and op(A), op(B) in float64."""
    a = rng.standard_normal((k, m) if trans_a else (m, k)).astype(dtypes[0])
    b = rng.standard_normal((n, k) if trans_b else (k, n)).astype(dtypes[1])
    out = np.full((n, m) if trans_out else (m, n), np.nan, dtypes[2])
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    return a, b, out, a64.T if trans_a else a64, b64.T if trans_b else b64


def check(out, a64, b64, dtypes, trans_out, more=0.0):
    """Check |error| <= (K + 1) u |A| |B| for a sum of K products in any order, then one rounding to out's dtype."""
    sum_dtype = "float64" if "float64" in dtypes[:2] else "float32"
    expected = a64 @ b64
    bound = (a64.shape[1] + 1) * UNIT[sum_dtype] * (np.abs(a64) @ np.abs(b64)) + more
    bound = bound + UNIT[dtypes[2]] * (np.abs(expected) + bound)
    actual = out.astype(np.float64).T if trans_out else out.astype(np.float64)
    if dtypes[2] == "float16":
        bound = bound + 2.0**-25  # half a step of subnormal results
    assert actual.shape == expected.shape
    worst = np.unravel_index(np.argmax(np.abs(actual - expected) - bound), expected.shape)
    assert (np.abs(actual - expected) <= bound).all(), (
        f"{worst}: got {actual[worst]}, expected {expected[worst]}"
    )


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size, flags, rng):
    dtypes = ("float32",) * 3
    a, b, out, a64, b64 = make(rng, *size, dtypes, *flags)
    matmul(a, b, out, **dict(zip(("trans_a", "trans_b", "trans_out"), flags, strict=True)))
    check(out, a64, b64, dtypes, flags[2])


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_dtypes(dtypes, rng):
    for flags in FLAGS:
        a, b, out, a64, b64 = make(rng, 43, 71, 301, dtypes, *flags)
        matmul(a, b, out, **dict(zip(("trans_a", "trans_b", "trans_out"), flags, strict=True)))
        check(out, a64, b64, dtypes, flags[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(size, dtype, rng):
    for flags in FLAGS:
        a, b, out, a64, b64 = make(rng, *size, (dtype,) * 3, *flags)
        matmul(a, b, out, **dict(zip(("trans_a", "trans_b", "trans_out"), flags, strict=True)))
        np.testing.assert_array_equal(out, (a64 @ b64).T if flags[2] else a64 @ b64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_may_lie_anywhere(dtype, rng):
    """Kernels require unit stride on the last axis; row strides of either sign, and 0, give the same bits."""
    for trans_a, trans_b, trans_out in FLAGS:
        a, b, out, _, _ = make(rng, 19, 35, 50, (dtype,) * 3, trans_a, trans_b, trans_out)
        flags = {"trans_a": trans_a, "trans_b": trans_b, "trans_out": trans_out}
        matmul(a, b, out, **flags)
        for (name, va), (_, vb) in zip(views(a), views(b), strict=True):
            if va.strides[-1] != va.itemsize or vb.strides[-1] != vb.itemsize:
                continue
            frame = np.zeros((out.shape[0] * 2, out.shape[1] + 9), dtype)
            target = frame[::-2, 4:-5]
            matmul(va, vb, target, **flags)
            assert target.tobytes() == out.tobytes(), name
            target[...] = 0
            assert not frame.any(), f"{name}: written outside"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "size", [(16, 16, 64), (37, 1, 62), (64, 64, 1030), (40, 65, 64), (33, 17, 31)], ids=str
)
def test_a_where_it_lies(size, dtype, rng):
    """A of whole words and rows is multiplied in place where that is faster, else packed, with the same bits."""
    dtypes = (dtype,) * 3
    a, b, out, a64, b64 = make(rng, *size, dtypes, False, False, False)
    matmul(a, b, out)
    check(out, a64, b64, dtypes, False)
    m, k = a.shape
    between = np.full((m, k + 3), np.nan, dtype)  # elements around A are not read
    for first in (0, 1, 2):
        frame = between.copy()
        frame[:, first : first + k] = a
        again = np.full_like(out, np.nan)
        matmul(frame[:, first : first + k], b, again)
        assert again.tobytes() == out.tobytes(), f"from column {first}"


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("bfloat16",) * 3], ids="-".join)
@pytest.mark.parametrize("trans_out", [False, True])
def test_sum_of_products(dtypes, trans_out, rng):
    """Sums of three terms are kept in float32 between the calls and rounded once."""
    m, n, k = 40, 70, 30
    parts = [make(rng, m, n, k, dtypes, False, False, trans_out) for _ in range(3)]
    out = parts[0][2]
    total = out if dtypes[2] == "float32" else np.full(out.shape, np.nan, np.float32)
    for i, (a, b, *_) in enumerate(parts):
        matmul(a, b, out, trans_out=trans_out, total=total, first=i == 0, last=i == 2)
        if total is not out:
            assert np.isnan(out.astype(np.float32)).all() == (i < 2)  # written by the last call only
    a64 = np.concatenate([p[3] for p in parts], axis=1)
    b64 = np.concatenate([p[4] for p in parts], axis=0)
    check(out, a64, b64, dtypes, trans_out)


def test_nan_and_inf_stay_in_their_row_and_column(rng):
    a, b, out, _, _ = make(rng, 21, 37, 300, ("float32",) * 3, False, False, False)
    clean = np.empty_like(out)
    matmul(a, b, clean)
    a[5, 290], b[3, 30] = np.nan, np.inf
    matmul(a, b, out)
    assert np.isnan(out[5]).all()
    assert not np.isfinite(out[:, 30]).any()
    rest = np.delete(np.delete(out, 5, axis=0), 30, axis=1)
    assert rest.tobytes() == np.delete(np.delete(clean, 5, axis=0), 30, axis=1).tobytes()


def test_float16_overflow_is_infinite():
    a, out = np.full((3, 4), 300.0, np.float32), np.empty((3, 3), np.float16)
    matmul(a, np.array([[300.0] * 3] * 4, np.float16), out)
    assert np.isposinf(out).all()


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("size", [(1, 1), (14336, 16), (100, 5000), (255, 257), (4096, 1024)], ids=str)
def test_tiles_cover_the_result(size, threads, tiles, monkeypatch):
    monkeypatch.setattr(gemm, "thread_count", lambda: threads)
    monkeypatch.setattr(gemm, "in_registers", lambda dtype: tiles)
    m, n = size
    rows, columns = gemm.tile_shape(m, n, "uint32")
    assert 0 < rows <= ROWS
    assert 0 < columns <= (COLUMNS_OF_TILES if tiles else COLUMNS)
    tasks = -(-m // rows) * -(-n // columns)
    assert tasks >= min(gemm.TASKS_PER_THREAD * threads, -(-m // 32))
    assert (-(-m // rows) - 1) * rows < m  # no empty tile
    assert (-(-n // columns) - 1) * columns < n
