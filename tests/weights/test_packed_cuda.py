"""Packed matrices on GPUs: unpacked exactly, products with the bits of the unpacked matrix."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import PackedMatrix
from gpu_ops.errors import DeviceError
from gpu_ops.reference.weights.packed_formats import PLAIN
from tests.weights.test_packed import INTEGERS, READ, int8_products, random_matrix

DEVICES = ("emulator", "cuda")
UNPACKED = [name for name in READ if name not in PLAIN]
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


@pytest.mark.parametrize("name", UNPACKED)
def test_rows_are_unpacked_exactly(name, backend, rng):
    matrix = PackedMatrix.joined([random_matrix(name, rows, 512, rng, finite=False) for rows in (37, 40)])
    ids = np.array([[0, 36, 37], [76, 40, 1]], np.int32)
    np.testing.assert_array_equal(gpu_ops.embedding(ids, matrix, **backend), matrix.dequantize()[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNPACKED)
def test_products_have_the_bits_of_the_unpacked_matrix(name, dtype, backend, rng):
    matrix = PackedMatrix.joined([random_matrix(name, rows, 256, rng) for rows in (40, 64)])
    weight = matrix.dequantize(dtype)
    x, dy = (rng.standard_normal((3, n)).astype(dtype) for n in (256, 104))
    bias, residual = rng.standard_normal(104).astype(dtype), rng.standard_normal((3, 104)).astype(dtype)
    right = gpu_ops.linear(x, weight, bias, residual=residual, **backend)
    np.testing.assert_array_equal(gpu_ops.linear(x, matrix, bias, residual=residual, **backend), right)
    right = gpu_ops.linear_backward(dy, x, weight, only="dx", **backend)
    np.testing.assert_array_equal(gpu_ops.linear_backward(dy, x, matrix, only="dx", **backend), right)


def test_reordered_columns(backend, rng):
    order = rng.permutation(128)
    stored = random_matrix("uint4_g64", 40, 128, rng)
    matrix = PackedMatrix(stored.blocks()[0], (40, 128), "uint4_g64", columns=order)
    weight = matrix.dequantize()
    x, dy = (rng.standard_normal((3, n)).astype(np.float32) for n in (128, 40))
    for rows in (x, rng.standard_normal((20, 128)).astype(np.float32)):
        right = gpu_ops.linear(rows[:, order], weight[:, order], **backend)
        np.testing.assert_array_equal(gpu_ops.linear(rows, matrix, **backend), right)
    right = gpu_ops.linear_backward(dy, x, weight, only="dx", **backend)
    np.testing.assert_array_equal(gpu_ops.linear_backward(dy, x, matrix, only="dx", **backend), right)
    targets = rng.integers(0, 40, 3)
    right = gpu_ops.linear_cross_entropy(x, weight, targets, **backend)
    np.testing.assert_array_equal(gpu_ops.linear_cross_entropy(x, matrix, targets, **backend), right)


def test_pieces_of_a_large_matrix(backend, monkeypatch, rng):
    from gpu_ops.kernels.weights import packed

    monkeypatch.setattr(packed, "ROWS", 64)
    matrix = PackedMatrix.joined([random_matrix(format, 96, 64, rng) for format in ("q4_0", "q8_0")])
    x, bias = rng.standard_normal((2, 64)).astype(np.float32), rng.standard_normal(192).astype(np.float32)
    right = gpu_ops.linear(x, matrix.dequantize(), bias, **backend)
    np.testing.assert_allclose(gpu_ops.linear(x, matrix, bias, **backend), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_many_pieces(dtype, backend, monkeypatch, rng):
    """The loss has the bits of the unpacked head; dx is added up in float32, in another order."""
    from gpu_ops.kernels.loss import linear_cross_entropy as loss
    from gpu_ops.kernels.weights import packed

    matrix = PackedMatrix.joined([random_matrix(format, 96, 64, rng) for format in ("q4_0", "q8_0")])
    x, targets = rng.standard_normal((70, 64)).astype(dtype), rng.integers(0, 192, 70)
    more = {
        "bias": rng.standard_normal(192).astype(dtype),
        "grads": True,
        "only": "dx",
        "chunk": 40,
        **backend,
    }
    right, right_dx = gpu_ops.linear_cross_entropy(x, matrix.dequantize(dtype), targets, **more)
    for module in (loss, packed):
        monkeypatch.setattr(module, "ROWS", 64)
    value, dx = gpu_ops.linear_cross_entropy(x, matrix, targets, **more)
    assert value == right
    step = {np.float32: 2.0**-20, ml_dtypes.bfloat16: 2.0**-7, np.float16: 2.0**-10}[dtype]
    largest = np.abs(right_dx.astype(np.float32)).max()
    assert np.abs(dx.astype(np.float32) - right_dx.astype(np.float32)).max() <= step * largest


def test_a_scaled_table_and_ids_outside_it(backend, rng):
    matrix = random_matrix("q4_k", 40, 256, rng)
    rows = gpu_ops.embedding(np.array([3, 39]), matrix, scale=np.sqrt(256.0), **backend)
    np.testing.assert_array_equal(rows, 16 * matrix.dequantize()[[3, 39]])


def test_packed_floats_are_refused(backend, rng):
    matrix = PackedMatrix.joined([random_matrix(format, 40, 64, rng) for format in ("q4_0", "bfloat16")])
    x, ids = np.ones((2, 64), np.float32), np.array([1, 2])
    for call in (
        lambda: gpu_ops.linear(x, matrix, **backend),
        lambda: gpu_ops.linear_backward(np.ones((2, 80), np.float32), x, matrix, only="dx", **backend),
        lambda: gpu_ops.embedding(ids, matrix, **backend),
        lambda: gpu_ops.linear_cross_entropy(x, matrix, ids, **backend),
    ):
        with pytest.raises(DeviceError, match="dequantize"):
            call()


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INTEGERS)
def test_int8_products(name, dtype, tokens, backend, rng):
    """Error within the bound of the CPU's; the bits of a token do not depend on others; zeros and NaN as they are."""
    second = "q8_0" if name == "q6_k" else "q6_k"
    matrix = PackedMatrix.joined([random_matrix(n, rows, 512, rng) for n, rows in ((name, 37), (second, 40))])
    x = rng.standard_normal((tokens, 512)).astype(dtype)
    x[0, :256] = 0
    y = gpu_ops.linear(x, matrix, activations="int8", **backend)
    right, bound = int8_products(matrix, x)
    step = {np.float32: 2.0**-24, ml_dtypes.bfloat16: 2.0**-8, np.float16: 2.0**-11}[dtype]
    assert (np.abs(y.astype(np.float64) - right) <= bound + step * np.abs(right)).all()
    alone = gpu_ops.linear(x[-1:], matrix, activations="int8", **backend)
    np.testing.assert_array_equal(alone[0], y[-1])
    x[0, 300] = np.inf
    assert np.isnan(gpu_ops.linear(x, matrix, activations="int8", **backend)[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_products_with_addends_and_reordered_columns(dtype, backend, rng):
    order = rng.permutation(128)
    stored = random_matrix("uint4_g64", 70, 128, rng)
    matrix = PackedMatrix(stored.blocks()[0], (70, 128), "uint4_g64", columns=order)
    x = rng.standard_normal((5, 256)).astype(dtype)[:, 64:192]
    bias, residual = rng.standard_normal(70).astype(dtype), rng.standard_normal((5, 70)).astype(dtype)
    y = gpu_ops.linear(x, matrix, bias, residual=residual, activations="int8", **backend)
    right, bound = int8_products(stored, x[:, order])
    right += bias.astype(np.float64) + residual.astype(np.float64)
    step = {np.float32: 2.0**-23, ml_dtypes.bfloat16: 2.0**-8, np.float16: 2.0**-11}[dtype]
    assert (np.abs(y.astype(np.float64) - right) <= bound + step * (1 + np.abs(right))).all()


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["q4_0", "q6_k", "uint4_g64"])
def test_few_tokens_have_the_bits_of_the_unpacked_matrix(name, dtype, tokens, backend, rng):
    """Also of strided x, of a K that ends within the turns of a block, and with infinite weights."""
    matrix = random_matrix(name, 45, 1280, rng)
    blocks = matrix.blocks()[0].copy()
    blocks[7, -16:] = 255
    matrix = PackedMatrix(blocks, matrix.shape, name)
    x = rng.standard_normal((tokens, 2600)).astype(dtype)[:, 3:1283]
    right = gpu_ops.linear(x, matrix.dequantize(dtype), **backend)
    y = gpu_ops.linear(x, matrix, **backend)
    np.testing.assert_array_equal(y.astype(np.float32), right.astype(np.float32))  # NaN equals NaN there


@pytest.mark.parametrize("tokens", [17, 33, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNPACKED)
def test_more_tokens_have_the_bits_of_the_unpacked_matrix(name, dtype, tokens, backend, rng):
    """Also with infinite weights, and rows that end within a panel."""
    matrix = random_matrix(name, 77, 256, rng)
    blocks = matrix.blocks()[0].copy()
    blocks[7, -16:] = 255
    matrix = PackedMatrix(blocks, matrix.shape, name)
    x = rng.standard_normal((tokens, 256)).astype(dtype)
    right = gpu_ops.linear(x, matrix.dequantize(dtype), **backend)
    y = gpu_ops.linear(x, matrix, **backend)
    np.testing.assert_array_equal(y.astype(np.float32), right.astype(np.float32))  # NaN equals NaN there


@pytest.mark.parametrize("cols", [32, 96, 1056])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tokens_with_addends_and_strided_x(dtype, cols, backend, rng):
    """Several runs of rows, and a K that ends within a tile, within a group of columns, or is short."""
    parts = [
        random_matrix(format, rows, cols, rng) for format, rows in (("q8_0", 96), ("q4_0", 45), ("mxfp4", 33))
    ]
    x = rng.standard_normal((40, 2 * cols + 5)).astype(dtype)[:, 3 : cols + 3]
    bias, residual = rng.standard_normal(174).astype(dtype), rng.standard_normal((40, 174)).astype(dtype)
    y = gpu_ops.linear(x, PackedMatrix.joined(parts), bias, residual=residual, **backend)
    for part, first in zip(parts, (0, 96, 141), strict=True):
        run = slice(first, first + part.shape[0])
        right = gpu_ops.linear(x, part.dequantize(dtype), bias[run], residual=residual[:, run], **backend)
        np.testing.assert_array_equal(y[:, run], right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows"), [(20, 4100), (60, 2050), (100, 2050), (128, 4100)])
def test_tiles_of_large_products(tokens, rows, dtype, rng):
    """Each tile of gemm_sm80.cu: its warps share the columns of a panel, or a warp has several panels."""
    device = {"device": "emulator", "backend": "raw"}
    matrix = random_matrix("q6_k", rows, 256, rng)
    x = rng.standard_normal((tokens, 256)).astype(dtype)
    right = gpu_ops.linear(x, matrix.dequantize(dtype), **device)
    np.testing.assert_array_equal(gpu_ops.linear(x, matrix, **device), right)


def test_a_matrix_is_unpacked_for_more_than_two_tiles_of_tokens(rng):
    matrix = random_matrix("q4_k", 4096, 256, rng)

    def kernels(tokens, backend):
        x = np.zeros((tokens, 256), ml_dtypes.bfloat16)
        plan = str(gpu_ops.explain(gpu_ops.linear, x, matrix, device="emulator", backend=backend))
        return {name for name in ("packed_gemm ", "packed_unpack") if name in plan}

    for tokens in (17, 64, 128):
        assert kernels(tokens, "raw") == {"packed_gemm "}
    for tokens, backend in ((600, "raw"), (17, "numba")):
        assert kernels(tokens, backend) == {"packed_unpack"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_over_a_packed_head_has_the_bits_of_the_unpacked_one(dtype, backend, rng):
    matrix = PackedMatrix.joined([random_matrix(format, 48, 256, rng) for format in ("nf4", "q6_k")])
    x, targets = rng.standard_normal((5, 256)).astype(dtype), rng.integers(0, 96, 5)
    expected = gpu_ops.linear_cross_entropy(
        x, matrix.dequantize(dtype), targets, grads=True, only="dx", **backend
    )
    results = gpu_ops.linear_cross_entropy(x, matrix, targets, grads=True, only="dx", **backend)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [2, 20])
def test_the_gated_mlp_has_the_bits_of_unpacked_weights(dtype, tokens, backend, rng):
    order = rng.permutation(64)
    gate, up = random_matrix("q4_0", 96, 64, rng), random_matrix("q8_0", 96, 64, rng)
    up = PackedMatrix(up.blocks()[0], (96, 64), "q8_0", columns=order)
    down = rng.standard_normal((72, 96)).astype(dtype)
    x = rng.standard_normal((tokens, 64)).astype(dtype)
    right = gpu_ops.swiglu_mlp(
        x, gate.dequantize(dtype), up.dequantize(dtype), down, keep="gate_up", **backend
    )
    results = gpu_ops.swiglu_mlp(x, gate, up, down, keep="gate_up", **backend)
    for result, expected in zip(results, right, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_runs_of_rows_that_alternate(backend, rng):
    """int8 tokens are in blocks of one size, then of another, then of the first again."""
    parts = [random_matrix(format, 32, 256, rng) for format in ("q4_k", "q8_0", "q6_k", "q4_0", "q5_k")]
    x = rng.standard_normal((3, 256)).astype(np.float32)
    y = gpu_ops.linear(x, PackedMatrix.joined(parts), activations="int8", **backend)
    right = [gpu_ops.linear(x, part, activations="int8", **backend) for part in parts]
    np.testing.assert_array_equal(y, np.concatenate(right, axis=1))


@pytest.mark.parametrize("mode", ["native", "int8"])
def test_runs_without_rows(mode, backend, rng):
    """They launch no kernels, before rows of another format or alone."""
    empty, some = (random_matrix(format, rows, 256, rng) for format, rows in (("q8_0", 0), ("q4_k", 32)))
    matrix = PackedMatrix.joined([empty, some, empty])
    assert matrix.formats == ((32, "q4_k"),)
    x = rng.standard_normal((2, 256)).astype(np.float32)
    y, right = (gpu_ops.linear(x, weight, activations=mode, **backend) for weight in (matrix, some))
    np.testing.assert_array_equal(y, right)
    alone = PackedMatrix.joined([empty, empty])
    assert gpu_ops.linear(x, alone, activations=mode, **backend).shape == (2, 0)


def test_many_int8_tokens_take_a_workspace_of_some(backend, monkeypatch, rng):
    from gpu_ops.kernels.weights import packed

    monkeypatch.setattr(packed, "_INT8_TOKENS", 8)
    matrix = random_matrix("q5_1", 40, 512, rng)  # K is divided
    x, bias = rng.standard_normal((19, 512)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    residual = rng.standard_normal((19, 40)).astype(np.float32)
    y = gpu_ops.linear(x, matrix, bias, residual=residual, activations="int8", **backend)
    for t in (0, 7, 8, 18):
        alone = slice(t, t + 1)
        right = gpu_ops.linear(
            x[alone], matrix, bias, residual=residual[alone], activations="int8", **backend
        )
        np.testing.assert_array_equal(y[alone], right)
