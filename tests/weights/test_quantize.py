"""Ternary quantisation against its definitions, and TernaryMatrix."""

from __future__ import annotations

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import TernaryMatrix, ternary_pack, ternary_quantize
from gpu_ops.errors import DeviceError, DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.support.compare import random

DEVICES = ("cpu", "emulator", "cuda")

BF16 = np.dtype(ml_dtypes.bfloat16)
METHODS = ["absmean", "absmax", "twn", "percentile", "meanstd", "manual"]
SCOPES = [None, -1, 64, 8, 1]


def quick_on_emulator(raw):
    dtypes = (BF16, np.float32) if raw else (np.float16, np.float64)
    return {
        "test_quantize_follows_the_definition": {
            "dtype": dtypes,
            "group_size": (None, -1, 64) if raw else (None, 8),
        },
    }


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


# ---- quantise ----------------------------------------------------------------------------------------------


def scopes(w, group_size):
    """Parts of w that share a scale, as (index, values)."""
    n, k = w.shape
    if group_size is None:
        yield (), w.reshape(-1)
    elif group_size == -1:
        for r in range(n):
            yield (r,), w[r]
    else:
        for r in range(n):
            for g in range(k // group_size):
                yield (r, g), w[r, g * group_size : (g + 1) * group_size]


def limit(method, magnitude):
    """Threshold of a method with its default, from sorted plain floats."""
    values = sorted(float(a) for a in magnitude)
    mean = math.fsum(values) / len(values)
    if method == "absmax":
        return 0.7 * values[-1]
    if method == "twn":
        return 0.7 * mean
    if method == "meanstd":
        return mean
    if method == "percentile":  # the median
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
    return 0.5


def refusal(backend, group_size):
    """Reason why the kernels of a GPU refuse a group size."""
    if backend["device"] != "cpu" and backend["backend"] == "raw" and group_size in (8, 1):
        return f"group_size {group_size} is not a multiple of 64"
    return None


@pytest.mark.parametrize("group_size", SCOPES)
@pytest.mark.parametrize("method", METHODS)
def test_quantize_follows_the_definition(method, group_size, dtype, backend, rng):
    w = random(rng, (6, 128), dtype)
    options = {"method": method, "group_size": group_size, "threshold": 0.5 if method == "manual" else None}
    if refused := refusal(backend, group_size):
        with pytest.raises(DeviceError, match=refused):
            ternary_quantize(w, **options, **backend)
        return
    matrix = ternary_quantize(w, **options, **backend)
    assert matrix.format == "w2"
    assert matrix.group_size == group_size
    t, codes = matrix.trits(), iter(scopes(matrix.trits(), group_size))
    assert matrix.density == np.count_nonzero(t) / t.size
    for index, values in scopes(w.astype(np.float64), group_size):
        actual = [int(v) for v in next(codes)[1]]
        scale = float(matrix.scale[index])
        if method == "absmean":
            expected_scale = max(math.fsum(abs(v) for v in values) / len(values), 1e-5)
            expected = [max(-1, min(1, round(float(v) / scale))) for v in values]  # round() is half to even
        else:
            d = limit(method, np.abs(values))
            expected = [int(np.sign(v)) if abs(v) > d else 0 for v in values]
            kept = [abs(float(v)) for v in values if abs(v) > d]
            expected_scale = math.fsum(kept) / len(kept) if kept else 1.0
        assert actual == expected
        assert scale == pytest.approx(expected_scale, rel=1e-7)
        assert scale == np.float32(scale)


def test_absmean_rounds_ties_to_even(backend):
    # mean |w| is 1 exactly: 0.5 is a tie and rounds to 0, its neighbour to 1; 1.5 rounds to 2, clipped
    up, down = np.nextafter(np.float32(0.5), np.float32(1)), np.nextafter(np.float32(0.5), np.float32(0))
    w = np.array([[0.5, -0.5, up, -up, down, 1.5, -1.5, 1.0, 2.0]], np.float32)
    w = np.append(w, np.float32(10 - float(np.abs(w, dtype=np.float64).sum()))).reshape(1, -1)
    matrix = ternary_quantize(w, **backend)
    assert matrix.scale == 1
    assert matrix.trits().tolist() == [[0, 0, 1, -1, 0, 1, -1, 1, 1, 1]]


def test_absmean_of_tiny_weights_is_clamped(backend):
    matrix = ternary_quantize(np.full((2, 3), 1e-7, np.float32), **backend)
    assert matrix.scale == np.float32(1e-5)
    assert not matrix.trits().any()
    assert matrix.density == 0


def test_thresholds(backend, rng):
    w = random(rng, (4, 50), np.float32)
    for method, threshold, d in (
        ("absmax", 0.5, 0.5 * np.abs(w).max()),
        ("twn", 1.0, np.abs(w.astype(np.float64)).mean()),
        ("percentile", 90, np.percentile(np.abs(w.astype(np.float64)), 90)),
        ("meanstd", 1.0, np.abs(w.astype(np.float64)).mean() + np.abs(w.astype(np.float64)).std()),
        ("meanstd", -0.5, np.abs(w.astype(np.float64)).mean() - 0.5 * np.abs(w.astype(np.float64)).std()),
        ("manual", 0.25, 0.25),
        ("meanstd", -9.0, -1.0),  # below zero: all of them
        ("manual", 0, 0.0),
    ):
        matrix = ternary_quantize(w, method=method, threshold=threshold, **backend)
        np.testing.assert_array_equal(matrix.trits(), np.where(np.abs(w) > d, np.sign(w), 0), err_msg=method)


@settings(max_examples=40)
@given(data=st.data())
def test_backends_quantize_alike(data):
    n, k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 150))
    group_size = data.draw(st.sampled_from([None, -1, *[g for g in (1, 3, 16, 64) if k % g == 0]]))
    method = data.draw(st.sampled_from(METHODS[:-1]))
    w = random(np.random.default_rng(data.draw(st.integers(0, 999))), (n, k), np.float32)
    a, b = (
        ternary_quantize(w, method=method, group_size=group_size, device="cpu", backend=name)
        for name in ("numba", "reference")
    )
    np.testing.assert_array_equal(a.codes, b.codes)
    np.testing.assert_allclose(a.scale, b.scale, rtol=2e-7)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_quantize_empty(shape, backend):
    matrix = ternary_quantize(np.zeros(shape, np.float32), **backend)
    assert matrix.shape == shape
    assert matrix.trits().shape == shape
    assert matrix.density == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_scale_beyond_float32_is_refused(method, backend):
    if backend["backend"] == "raw":
        pytest.skip("float64 has no CUDA C++ kernels")
    w = np.linspace(-2e39, 2e39, 128).reshape(2, 64)
    threshold = 1.0 if method == "manual" else None
    with pytest.raises(OptionError, match="NaN or infinity"), np.errstate(over="ignore"):
        ternary_quantize(w, method=method, group_size=32, threshold=threshold, **backend)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value, backend, rng):
    w = random(rng, (3, 70), np.float32)
    w[2, 69] = value
    for method in METHODS:
        for group_size in (None, -1):
            threshold = 0.5 if method == "manual" else None
            with pytest.raises(OptionError, match=r"ternary_quantize: w holds NaN or infinity"):
                ternary_quantize(w, method=method, group_size=group_size, threshold=threshold, **backend)


# ---- TernaryMatrix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [np.float32(0.5), np.arange(1, 257, dtype=np.float32), np.full((256, 6), 3, np.float32)]
)
def test_conversions_are_exact(scale, rng):
    t = trits(rng, (256, 768))  # the smallest matrix that fits every format
    first = TernaryMatrix.from_trits(t, scale)
    dense = t * (
        scale[:, None] if scale.ndim == 1 else np.repeat(scale, 128, axis=1) if scale.ndim else scale
    )
    for source in FORMATS:
        for target in FORMATS:
            w = first.to(source).to(target)
            assert w.format == target
            assert w.codes.tobytes() == ternary_pack(t, target).tobytes()
            np.testing.assert_array_equal(w.trits(), t)
            np.testing.assert_array_equal(w.dequantize(), dense)
            assert w.scale.shape == scale.shape


def test_matrix_properties(rng):
    t = trits(rng, (10, 70))
    w = TernaryMatrix.from_trits(t, np.ones(10, np.float32), format="planes")
    assert w.nbytes == 10 * 3 * 8 + 40
    assert w.bits_per_weight == 8 * w.nbytes / 700
    assert w.density == np.count_nonzero(t) / 700
    assert w.group_size == -1
    assert w.to("planes") is w
    assert w.to("w2") is w.to("w2")  # cached: every matmul needs it
    assert "format='planes', scale per row" in repr(w)
    assert w.dequantize(np.float16).dtype == np.float16
    with pytest.raises(AttributeError):
        w.format = "w2"
    with pytest.raises(ValueError, match="read-only"):
        w.codes[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        w.scale[0] = 1


def test_memory_is_an_eighth_of_float16(rng):
    w = ternary_quantize(random(rng, (256, 1024), np.float16))
    assert w.nbytes <= 256 * 1024 * 2 / 8 + 4


# ---- bad calls ---------------------------------------------------------------------------------------------

W = TernaryMatrix.from_trits(np.ones((3, 8), np.int8))
DENSE = np.ones((3, 8), np.float32)
CODES = ternary_pack(np.ones((3, 8), np.int8), "w2")
BYTE_0 = (np.arange(16) == 0).astype(np.uint8)
W3 = TernaryMatrix.from_trits(np.ones((3, 3), np.int8))
Q4 = gpu_ops.quantize(np.ones((3, 32), np.float32), "q4_0")


def packed_ones(scale=1.0, code=2, *, order=False):
    """Packed matrix of one code in each place."""
    blocks = np.full((3, 66), code * 0b01010101, np.uint8)
    blocks[:, 64:] = np.array([scale], "<f2").view(np.uint8)
    columns = np.arange(256)[::-1] if order else None
    return gpu_ops.PackedMatrix(blocks, (3, 256), "tq2_0", columns=columns)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ternary_quantize(DENSE[0]), ShapeError, r"\(8,\); expected \(N, K\)"),
        (lambda: ternary_quantize(DENSE.astype(np.int8)), DTypeError, "int8; allowed"),
        (lambda: ternary_quantize(DENSE, method="absmin"), OptionError, "did you mean 'absm"),
        (lambda: ternary_quantize(DENSE, method="manual"), OptionError, "needs threshold="),
        (lambda: ternary_quantize(DENSE, threshold=0.5), OptionError, "'absmean' takes no threshold"),
        (lambda: ternary_quantize(DENSE, method="twn", threshold=-1), OptionError, "threshold must be finite"),
        (lambda: ternary_quantize(DENSE, method="twn", threshold="a"), OptionError, "threshold must be a number"),
        (lambda: ternary_quantize(DENSE, method="percentile", threshold=101), OptionError, "no percentile"),
        (lambda: ternary_quantize(DENSE, group_size=3), ShapeError, "group_size=3 does not divide K=8"),
        (lambda: ternary_quantize(DENSE, group_size=0), OptionError, "-1 per row"),
        (lambda: ternary_quantize(DENSE, group_size=-2), OptionError, "group_size must lie in"),
        (lambda: ternary_quantize(DENSE, group_size=4.0), OptionError, "group_size must be an integer"),
        (lambda: ternary_quantize(DENSE * np.nan), OptionError, "NaN or infinity"),
        (lambda: ternary_quantize(DENSE * np.inf, method="manual", threshold=1), OptionError, "NaN or inf"),
        (lambda: ternary_quantize(DENSE * np.nan, backend="reference"), OptionError, "NaN or infinity"),
        (lambda: TernaryMatrix(CODES | BYTE_0, 1.0, (3, 8), "w2"), FormatError, "w2: code 3 at"),
        (lambda: TernaryMatrix(CODES, 1.0, (3, 7), "w2"), FormatError, "padding"),
        (lambda: TernaryMatrix(CODES[:2], 1.0, (3, 8), "w2"), FormatError, "takes 48 bytes, got 32"),
        (lambda: TernaryMatrix(CODES.view(np.int8), 1.0, (3, 8), "w2"), DTypeError, "expected uint8"),
        (lambda: TernaryMatrix(CODES, 1.0, (3, 8), "bitnet"), OptionError, "allowed: 'planes'"),
        (lambda: TernaryMatrix(CODES, np.ones(4, np.float32), (3, 8), "w2"), ShapeError, r"\(3,\) per row"),
        (lambda: TernaryMatrix(CODES, np.ones((3, 3), np.float32), (3, 8), "w2"), ShapeError, "divide K=8"),
        (lambda: TernaryMatrix(CODES, np.ones(3), (3, 8), "w2"), DTypeError, "scale is float64"),
        (lambda: TernaryMatrix(CODES, math.nan, (3, 8), "w2"), OptionError, "scale holds NaN"),
        (lambda: TernaryMatrix(CODES, "1", (3, 8), "w2"), DTypeError, "scale is str"),
        (lambda: TernaryMatrix(CODES, np.complex64(1j), (3, 8), "w2"), DTypeError, "scale is complex64"),
        (lambda: TernaryMatrix(CODES, np.timedelta64(2), (3, 8), "w2"), DTypeError, "scale is timedelta64"),
        (lambda: TernaryMatrix.from_trits(W.trits(), 10**400), OptionError, "scale is an integer that float32"),
        (lambda: W.to(["w2"]), OptionError, r"TernaryMatrix.to: format=\['w2'\] is unknown"),
        (lambda: W.to("gguf"), OptionError, "allowed"),
        (lambda: W.to("tq1_0"), ShapeError, "K % 256 == 0, got shape"),
        (lambda: TernaryMatrix.joined([]), DTypeError, "expected a list"),
        (lambda: TernaryMatrix.joined([DENSE]), DTypeError, "expected a list"),
        (lambda: TernaryMatrix.joined([W, W3]), ShapeError, "K must be the same"),
        (lambda: TernaryMatrix.from_packed(W), DTypeError, "expected a PackedMatrix, got TernaryMatrix"),
        (lambda: TernaryMatrix.from_packed(Q4), OptionError, "has the format q4_0; expected tq1_0 or tq2_0"),
        (lambda: TernaryMatrix.from_packed(packed_ones(order=True)), OptionError, "columns in another order"),
        (lambda: TernaryMatrix.from_packed(packed_ones(code=3)), FormatError, "from_packed: .*tq2_0: code 3"),
        (lambda: TernaryMatrix.from_packed(packed_ones(np.inf)), FormatError, "from_packed: .*not finite"),
    ],
)  # fmt: skip
def test_bad_calls(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, gpu_ops.errors.GpuOpsError)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_immutable_too(copied, rng):
    w = TernaryMatrix.from_trits(trits(rng, (3, 8)), np.ones(3, np.float32), format="base3")
    w.to("w2")  # is cached
    made = copied(w)
    for matrix in (made, made.to("w2")):
        np.testing.assert_array_equal(matrix.trits(), w.trits())
        for array in (matrix.codes, matrix.scale):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_joined(rng):
    t = [trits(rng, (rows, 12)) for rows in (3, 2, 4)]
    scales = 0.5, np.array([2, 3], np.float32), rng.uniform(1, 2, (4, 3)).astype(np.float32)
    matrices = [
        TernaryMatrix.from_trits(x, scale, format=format)
        for x, scale, format in zip(t, scales, ("base3", "w2", "planes"), strict=True)
    ]
    for count, group in ((1, None), (2, -1), (3, 4)):
        joined = TernaryMatrix.joined(matrices[:count])
        expected = np.concatenate([matrix.dequantize() for matrix in matrices[:count]])
        np.testing.assert_array_equal(joined.dequantize(), expected)
        assert (joined.format, joined.group_size) == ("w2", group)
    halves = TernaryMatrix.from_trits(t[0], np.tile(np.array([0.5, 2], np.float32), (3, 1)))
    joined = TernaryMatrix.joined([matrices[2], halves])  # groups of 4 and of 6
    np.testing.assert_array_equal(joined.dequantize()[4:], halves.dequantize())
    assert joined.group_size == 2
    empty = TernaryMatrix.from_trits(t[0][:0], 0.5)
    assert TernaryMatrix.joined([empty, empty]).shape == (0, 12)


@pytest.mark.parametrize("used", [False, True])
def test_from_packed(used, rng):
    scales = rng.uniform(0.5, 1, (5, 2)).astype(np.float16).astype(np.float32)
    scales[2] = -scales[2]
    w = np.repeat(scales, 256, axis=1) * trits(rng, (5, 512))
    parts = [gpu_ops.quantize(w[rows], name) for name, rows in (("tq1_0", slice(2)), ("tq2_0", slice(2, 5)))]
    packed = gpu_ops.PackedMatrix.joined(parts)
    if used:
        gpu_ops.linear(np.ones((1, 512), np.float32), packed)  # replaces the blocks
    made = TernaryMatrix.from_packed(packed)
    np.testing.assert_array_equal(made.dequantize(), w)
    assert made.group_size == 256
    assert TernaryMatrix.from_packed(packed_ones()).group_size is None


def test_it_is_no_array_to_numpy():
    """NumPy must not convert it to an array of one object, and multiply that."""
    for product in (lambda: DENSE @ W, lambda: W @ DENSE, lambda: DENSE * W, lambda: np.matmul(DENSE, W)):
        with pytest.raises(TypeError, match="TernaryMatrix"):
            product()
    for array in (np.asarray, np.array, lambda w: np.dot(DENSE, w)):
        with pytest.raises(DTypeError, match=r"ternary_matmul\(x, w\).* w.dequantize\(\), w.trits\(\)"):
            array(W)
    assert (W == W, DENSE == W, copy.copy(W) == W) == (True, False, False)


def test_explain_says_what_runs():
    assert "absmean per row" in str(gpu_ops.explain("ternary_quantize", DENSE, group_size=-1))
