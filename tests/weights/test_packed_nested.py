"""Nested scales: bitsandbytes' rule written out, blocks of every size, values that are not finite, damaged bytes."""

from __future__ import annotations

import pickle
import zlib

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import PackedMatrix
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.reference.weights import packed_bitsandbytes as blocks_of
from gpu_ops.reference.weights.packed_encode import FP4, NF4
from gpu_ops.reference.weights.packed_formats import FORMATS
from tests.weights.test_packed import NESTED

DEVICES = ("cpu", "emulator", "cuda")
VALUES = {"nf4_nested": np.array(NF4, np.float32), "fp4_nested": np.array(FP4, np.float32) / np.float32(12)}
WIDTHS = {64: 64, 320: 64, 384: 128, 768: 256, 2560: 512, 1024: 1024, 20480: 4096, 24576: 8192, 16384: 16384}
"""K, and the weights of a block."""


def matrix_of(name, rows, cols, rng):
    """Matrix of normal weights whose rows have different sizes."""
    w = rng.standard_normal((rows, cols), dtype=np.float32)
    return gpu_ops.quantize(w * rng.uniform(0.5, 2, (rows, 1)).astype(np.float32), name)


def by_definition(w, values):
    """Weights after quantisation, a scale at a time."""
    runs = w.reshape(-1, 64)
    absmax = np.abs(runs).max(axis=1)
    offset = np.float32(absmax.astype(np.float64).mean())
    result = np.empty_like(runs)
    for first in range(0, len(absmax), 256):
        rest = absmax[first : first + 256] - offset
        factor = np.abs(rest).max()
        for i, number in enumerate(rest, first):
            scale = (
                blocks_of.DYNAMIC[np.argmin(np.abs(blocks_of.DYNAMIC - number / factor))] * factor + offset
            )
            codes = np.argmin(np.abs(values - (runs[i] / absmax[i])[:, None]), axis=1)
            result[i] = values[codes] * scale
    return result.reshape(w.shape)


def test_the_map_of_scales():
    """Its bytes are those of bitsandbytes 0.50.2 on CPUs with fused multiply-add."""
    assert zlib.crc32(blocks_of.DYNAMIC.tobytes()) == 454261483
    assert blocks_of.DYNAMIC[[0, 127, 255]].tolist() == [np.float32(-0.99296874), 0, 1]
    assert (np.diff(blocks_of.DYNAMIC) > 0).all()


@pytest.mark.parametrize("cols", [64, 320, 768, 1024])
@pytest.mark.parametrize("name", NESTED)
def test_weights_by_definition(name, cols, rng):
    """Factors change within a row, between rows, and at the end of the matrix after fewer than 256 scales."""
    w = rng.standard_normal((61, cols), dtype=np.float32) * rng.uniform(0.5, 2, (61, 1)).astype(np.float32)
    matrix = gpu_ops.quantize(w, name)
    np.testing.assert_array_equal(matrix.dequantize(), by_definition(w, VALUES[name]))
    flat = gpu_ops.quantize(w, name.removesuffix("_nested")).dequantize()
    assert np.abs(matrix.dequantize() - flat).max() < 0.02 * np.abs(w).max()


@pytest.mark.parametrize("cols", WIDTHS)
def test_blocks_are_as_large_as_rows_allow(cols, rng):
    block = WIDTHS[cols]
    matrix = matrix_of("nf4_nested", 16, cols, rng)
    nbytes = 8 + block // 64 + block // 2
    assert matrix.blocks()[0].shape == (16, cols // block * nbytes)
    assert matrix.file_nbytes == matrix.nbytes == 16 * cols // block * nbytes
    assert matrix.bits_per_weight == 8 * nbytes / block
    assert block < 1024 or 4.128 < matrix.bits_per_weight < 4.2
    weights = matrix.dequantize()
    x = rng.standard_normal((2, cols), dtype=np.float32)
    np.testing.assert_array_equal(gpu_ops.linear(x, matrix), gpu_ops.linear(x, weights))
    assert matrix.nbytes == 16 * cols // block * nbytes
    np.testing.assert_array_equal(matrix.dequantize(), weights)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("cols", [320, 1024])
def test_products_on_every_backend(cols, dtype, backend, rng):
    matrix = PackedMatrix.joined([matrix_of(name, 37, cols, rng) for name in NESTED])
    weight = matrix.dequantize(dtype)
    for tokens in (1, 20):
        x = rng.standard_normal((tokens, cols)).astype(dtype)
        y = gpu_ops.linear(x, matrix, **backend)
        np.testing.assert_array_equal(y, gpu_ops.linear(x, weight, **backend))
    rows = gpu_ops.embedding(np.array([0, 36, 37, 73]), matrix, **backend)
    np.testing.assert_array_equal(rows, matrix.dequantize()[[0, 36, 37, 73]])
    targets = np.array([3, 40] * 10)
    results = (gpu_ops.linear_cross_entropy(x, w, targets, **backend) for w in (matrix, weight))
    np.testing.assert_array_equal(*results)


def test_rows_keep_their_offsets(rng, tmp_path):
    """Joined matrices have different offsets, and a row keeps its factors wherever it goes."""
    parts = [gpu_ops.quantize(size * rng.standard_normal((9, 320)), "nf4_nested") for size in (1, 50)]
    right = np.concatenate([part.dequantize() for part in parts])
    matrix = PackedMatrix.joined(parts)
    assert matrix.formats == ((18, "nf4_nested"),)
    order = rng.permutation(18)
    matrix.save(tmp_path / "w")
    gpu_ops.linear(np.ones((1, 320), np.float32), matrix)  # repacks
    for other in (matrix, PackedMatrix.load(tmp_path / "w"), pickle.loads(pickle.dumps(matrix))):
        np.testing.assert_array_equal(other.dequantize(), right)
        np.testing.assert_array_equal(other.rows(order).dequantize(), right[order])
        assert other.to("nf4_nested") is other
        np.testing.assert_array_equal(other.to("float32").dequantize(), right)
    data = (tmp_path / "w").read_bytes()
    for damaged in (data[:-1], data.replace(b"320]", b"384]"), data.replace(b"nf4_nested", b"nf4_nestee")):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(FormatError):
            PackedMatrix.load(tmp_path / "damaged")


@pytest.mark.parametrize("name", NESTED)
def test_zeros_and_equal_scales_lose_nothing(name):
    """The factor is 0: all scales are the offset."""
    w = np.zeros((40, 128), np.float32)
    assert not gpu_ops.quantize(w, name).dequantize().any()
    w[:] = VALUES[name][np.arange(128) % 16] * np.float32(0.75)
    np.testing.assert_array_equal(gpu_ops.quantize(w, name).dequantize(), w)
    w[0, :64] = 0  # a scale of 0 among others is nearly 0
    assert np.abs(gpu_ops.quantize(w, name).dequantize() - w).max() < 0.01


@pytest.mark.parametrize("size", [1e-38, 1e-45, 3e38])
def test_tiny_and_huge_weights(size, rng):
    w = np.full((8, 128), size, np.float32) * rng.choice(np.array([-1, 0, 1], np.float32), (8, 128))
    weights = (gpu_ops.quantize(w, name).dequantize() for name in ("nf4", "nf4_nested"))
    np.testing.assert_array_equal(*weights)  # all scales are equal


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_factors_and_offsets_that_are_not_finite(place, bad, backend, rng):
    """They reach the weights of their block, and no others."""
    matrix = matrix_of("nf4_nested", 20, 384, rng)
    blocks = matrix.blocks()[0].copy()
    row = blocks[5].reshape(3, -1)
    row[1, 4 * place : 4 * place + 4] = np.array([bad], np.float32).view(np.uint8)
    row[1, 8] = 127  # of the value 0
    damaged = PackedMatrix(blocks, (20, 384), "nf4_nested")
    weights, right = damaged.dequantize(), matrix.dequantize()
    assert not np.isfinite(weights[5, 128:256][right[5, 128:256] != 0]).any()
    right[5, 128:256] = weights[5, 128:256]
    np.testing.assert_array_equal(weights, right)
    np.testing.assert_array_equal(gpu_ops.embedding(np.arange(20), damaged, **backend), weights)


W = np.ones((4, 128), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gpu_ops.quantize(W[:, :96], "nf4_nested"), ShapeError, "blocks of 64, .*multiple of 64"),
        (lambda: gpu_ops.quantize(W * np.nan, "fp4_nested"), OptionError, "NaN"),
        (
            lambda: PackedMatrix(np.zeros((4, 73), np.uint8), (4, 128), "nf4_nested"),
            ShapeError,
            r"\(4, 74\) for nf4_nested",
        ),
        (
            lambda: PackedMatrix(np.zeros((4, 74), np.uint8), (4, 96), "nf4_nested"),
            ShapeError,
            "multiple of 64",
        ),
        (lambda: gpu_ops.quantize(W, "nf4_nested").with_activations("int8"), OptionError, "has floats"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (1, 64)])
def test_empty_and_small_shapes(shape, rng):
    matrix = gpu_ops.quantize(rng.standard_normal(shape), "nf4_nested")
    assert matrix.shape == shape
    x = np.ones((2, shape[1]), np.float32)
    np.testing.assert_array_equal(gpu_ops.linear(x, matrix), gpu_ops.linear(x, matrix.dequantize()))


def test_a_format_of_rows():
    format = FORMATS["nf4_nested"]
    assert (format.block, format.least_block) == (16384, 64)
    assert format.for_columns(16384) == format
    assert FORMATS["nf4"].for_columns(64) is FORMATS["nf4"]
