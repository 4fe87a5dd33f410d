"""Ternary x ternary on every backend: equality with integer NumPy, and savings by skipping empty chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import TernaryMatrix, emulator, ternary_matmul
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.compiler import cubin, jit
from gpu_ops.kernels.weights import ternary_planes as kernels
from gpu_ops.ops.weights import ternary_planes
from gpu_ops.reference.weights import ternary as reference
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")

KS = [1, 31, 32, 33, 63, 65, 127, 128, 129, 8191]
DENSITIES = [0, 0.01, 0.3, 1]
SIZES = [(1, 9), (3, 1), (5, 8), (17, 17)]  # rows of x: one, too few for the CPU to skip chunks, ragged tiles


def trits(rng, shape, density):
    """Random signs, nonzero with probability ``density``."""
    return (rng.choice([-1, 1], shape) * (rng.random(shape) < density)).astype(np.int8)


def clustered(rng, shape, share):
    """Trits that are dense in a share of the chunks of 128, zero elsewhere."""
    n, k = shape
    kept = np.repeat(rng.random((n, -(-k // 128))) < share, 128, axis=1)[:, :k]
    return trits(rng, shape, 0.7) * kept


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("k", KS)
def test_equals_integer_numpy(k, density, backend, rng):
    for m, n in SIZES:
        x, w = trits(rng, (m, k), 0.6), trits(rng, (n, k), density)
        y = ternary_matmul(
            TernaryMatrix.from_trits(x, format="planes"), TernaryMatrix.from_trits(w), **backend
        )
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, x.astype(np.int64) @ w.T.astype(np.int64), err_msg=f"{m} x {n}")


@pytest.mark.parametrize("k", [300, 2304])
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_skipped_chunks_change_nothing(k, share, backend, rng):
    for m, n in SIZES:
        x, w = trits(rng, (m, k), 0.6), clustered(rng, (n, k), share)
        w[-1], w[0, -1] = 0, 1  # an empty row, the last weight of a partial chunk
        y = ternary_matmul(TernaryMatrix.from_trits(x), TernaryMatrix.from_trits(w), **backend)
        np.testing.assert_array_equal(y, x.astype(np.int64) @ w.T.astype(np.int64), err_msg=f"{m} x {n}")


def test_a_row_of_more_chunks_than_lanes_take_at_once(backend, rng):
    """One row of w is dense in 40 chunks, and the others are empty."""
    x, w = trits(rng, (19, 40 * 128), 0.6), np.zeros((21, 40 * 128), np.int8)
    w[3] = trits(rng, 40 * 128, 0.7)
    y = ternary_matmul(TernaryMatrix.from_trits(x), TernaryMatrix.from_trits(w), **backend)
    np.testing.assert_array_equal(y, x.astype(np.int64) @ w.T.astype(np.int64))


@pytest.mark.parametrize("share", [0.1, 1])
def test_more_rows_than_a_task_has(share, rng):
    x, w = trits(rng, (515, 260), 0.6), clustered(rng, (19, 260), share)
    y = ternary_matmul(TernaryMatrix.from_trits(x), TernaryMatrix.from_trits(w), device="cpu")
    np.testing.assert_array_equal(y, x.astype(np.int64) @ w.T.astype(np.int64))


@pytest.mark.parametrize("per_row", [(False, True), (True, False), (True, True)])
def test_scales_have_the_bits_of_the_reference(per_row, backend, rng):
    for share in (0.1, 1):
        x, w = trits(rng, (19, 260), 0.6), clustered(rng, (21, 260), share)
        scales = [
            rng.uniform(0.1, 2, len(t) if rows else ()).astype(np.float32)
            for t, rows in zip((x, w), per_row, strict=True)
        ]
        y = ternary_matmul(
            *(TernaryMatrix.from_trits(t, s) for t, s in zip((x, w), scales, strict=True)), **backend
        )
        np.testing.assert_array_equal(y, reference.ternary_product(x, scales[0], w, scales[1]))
        exact = (x.astype(np.float64) * scales[0].reshape(-1, 1)) @ (w * scales[1].reshape(-1, 1)).T
        np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 8), (2, 0, 8), (2, 3, 0), (0, 0, 0), (20, 3, 0)])
def test_empty(m, n, k, backend):
    x, w = (
        TernaryMatrix.from_trits(np.zeros((rows, k), np.int8), np.ones(rows, np.float32)) for rows in (m, n)
    )
    np.testing.assert_array_equal(ternary_matmul(x, w, **backend), np.zeros((m, n), np.float32))


def test_out_and_codes_that_begin_anywhere(backend, rng):
    x, w = trits(rng, (18, 200), 0.6), trits(rng, (11, 200), 0.6)
    packed = gpu_ops.ternary_pack(x, "w2")
    held = np.zeros(packed.size + 3, np.uint8)
    held[3:] = packed.reshape(-1)
    unaligned = TernaryMatrix(held[3:], np.float32(1), x.shape, "w2")
    out = np.full((18, 20), 7, np.float32)
    product = ternary_matmul(unaligned, TernaryMatrix.from_trits(w), out=out[:, 4:15], **backend)
    assert np.shares_memory(product, out)
    np.testing.assert_array_equal(product, x.astype(int) @ w.T.astype(int))
    assert (out[:, :4] == 7).all()
    assert (out[:, 15:] == 7).all()


@settings(max_examples=25)
@given(seed=st.integers(0, 999), k=st.integers(1, 400), m=st.sampled_from([1, 16, 40]))
def test_transposing_the_product_swaps_the_matrices(seed, k, m):
    rng = np.random.default_rng(seed)
    x = TernaryMatrix.from_trits(clustered(rng, (m, k), 0.3), 0.3)
    w = TernaryMatrix.from_trits(trits(rng, (20, k), 0.5), rng.uniform(0.1, 2, 20).astype(np.float32))
    np.testing.assert_array_equal(ternary_matmul(x, w), ternary_matmul(w, x).T)


# ---- skipping ----------------------------------------------------------------------------------------------


def test_the_rule_in_order(rng):
    dense, sparse = (TernaryMatrix.from_trits(clustered(rng, (64, 4096), share)) for share in (0.5, 0.1))
    few, many = (TernaryMatrix.from_trits(trits(rng, (m, 4096), 0.6)) for m in (15, 16))

    def text(*matrices, **how):
        return str(gpu_ops.explain("ternary_matmul", *matrices, **how))

    assert "all chunks" in text(few, sparse)
    assert "all chunks" in text(many, dense)
    assert "occupied chunks of w" in text(many, sparse)
    assert "% of the chunks of w are occupied" in text(many, sparse)
    assert "ternary_planes skip" in text(few, sparse, device="emulator")
    assert "ternary_planes skip" not in text(few, dense, device="emulator")
    assert "(16 x 4096) w2 x (64 x 4096) w2, both ternary" in text(many, sparse)


def test_lists_of_chunks_follow_the_bitmap_and_are_kept(rng):
    w = clustered(rng, (5, 1100), 0.4)
    matrix = TernaryMatrix.from_trits(w, format="base3")
    occupied = ternary_planes._Occupied.of(matrix)
    assert ternary_planes._Occupied.of(matrix) is occupied
    for row in range(5):
        listed = occupied.chunks[occupied.starts[row] : occupied.starts[row + 1]]
        assert listed.tolist() == [c for c in range(9) if w[row, 128 * c : 128 * (c + 1)].any()]
    assert occupied.share == len(occupied.chunks) / 45
    before = len(ternary_planes._made)
    del matrix, occupied
    assert len(ternary_planes._made) == before - 1, "freed with the matrix"


def profile_of(x, w, occupied, monkeypatch):
    monkeypatch.setattr(ternary_planes, "_MOST_OCCUPIED", 1.0 if occupied else -1.0)
    with emulator.record() as profiles:
        y = ternary_matmul(x, w, device="emulator", backend="raw")
    (profile,) = profiles
    return y, profile


@needs_nvrtc
@pytest.mark.parametrize("m", [1, 8])
def test_skipped_chunks_are_not_read(m, rng, monkeypatch):
    """A chunk is a sector of 32 bytes: only codes of occupied chunks are read."""
    w = TernaryMatrix.from_trits(clustered(rng, (24, 8192), 0.1))
    x = TernaryMatrix.from_trits(trits(rng, (m, 8192), 0.6))
    (y_all, everything), (y, skipped) = (
        profile_of(x, w, occupied, monkeypatch) for occupied in (False, True)
    )
    np.testing.assert_array_equal(y, y_all)
    read, read_all = (
        next(b for b in p.buffers if b.name == "w.codes").bytes_read for p in (skipped, everything)
    )
    chunks = len(ternary_planes._Occupied.of(w).chunks)
    rounds = -(-m // 4)
    assert read_all == 24 * 8192 // 4 * rounds
    assert read == 32 * chunks * rounds
    assert skipped.opcodes["popc"].lanes * 24 * 64 == everything.opcodes["popc"].lanes * chunks
    print(f"{m} rows: {read_all} bytes of w, skipping {read}")


@needs_nvrtc
def test_every_kernel_is_listed_and_spills_nothing():
    for variant in kernels.variants("sm_90"):
        compiled = jit.compile_kernel(variant.kernel, "sm_90")
        used = cubin.resources(compiled.cubin, compiled.entry)
        assert used.local_bytes == 0
        assert used.registers <= 64
        text = compiled.ptx
        assert "ld.global.nc.v4" in text, "16 bytes at a time"
    assert len({v.kernel for v in kernels.variants("sm_90")}) == 4


# ---- arrays of a GPU, and mistakes -------------------------------------------------------------------------


@needs_nvrtc
def test_on_a_gpu(cupy, rng):
    x, w = trits(rng, (3, 300), 0.6), clustered(rng, (7, 300), 0.1)
    a, b, expected = TernaryMatrix.from_trits(x), TernaryMatrix.from_trits(w), x.astype(int) @ w.T.astype(int)
    # no argument is on the device: a NumPy result, as for NumPy arguments
    y = ternary_matmul(a, b, device="cuda")
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, expected)
    out = np.zeros((3, 7), np.float32)
    assert ternary_matmul(a, b, device="cuda", out=out) is out
    np.testing.assert_array_equal(out, expected)
    device_out = FakeArray(np.zeros((3, 7), np.float32), 1)
    ternary_matmul(a, b, out=device_out)
    np.testing.assert_array_equal(device_out.host, expected)
    assert "device 1" in str(gpu_ops.explain("ternary_matmul", a, b, out=device_out))
    assert "device 0" in str(gpu_ops.explain("ternary_matmul", a, b, device="cuda"))


X, W = (TernaryMatrix.from_trits(np.ones((rows, 8), np.int8)) for rows in (2, 3))
GROUPED = TernaryMatrix.from_trits(np.ones((2, 8), np.int8), np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda out: ternary_matmul(X, np.ones((3, 8)), out=out), DTypeError, "not a TernaryMatrix; make one"),
        (lambda out: ternary_matmul(X, TernaryMatrix.from_trits(np.ones((3, 7), np.int8)), out=out), ShapeError,
         r"x has shape \(2, 8\), expected \(M, K=7\) for w of shape \(3, 7\)"),
        (lambda out: ternary_matmul(GROUPED, W, out=out), OptionError, "x has a scale per group of 4; .*size=-1"),
        (lambda out: ternary_matmul(X, GROUPED, out=out), OptionError, "w has a scale per group of 4; .*dequantize"),
        (lambda out: ternary_matmul(X, W, activations="int4", out=out), OptionError, "'int8', 'native'"),
        (lambda out: ternary_matmul(X, W, out=out[:1]), ShapeError, r"expected exactly \(2, 3\)"),
        (lambda out: ternary_matmul(X, W, out=out.astype(np.float16)), DTypeError, "expected exactly float32"),
        (lambda out: ternary_matmul(X, W, out=out, device="tpu"), OptionError, "allowed: 'cpu'"),
    ],
)  # fmt: skip
def test_bad_calls(call, error, match):
    out = np.full((2, 3), 5, np.float32)
    with pytest.raises(error, match=match):
        call(out)
    assert (out == 5).all()
