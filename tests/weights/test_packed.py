"""Packed matrices: formats, conversion without loss, products with the bits of the unpacked matrix, int8 products."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import PackedMatrix
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.formats.packed_part import PackedPart, layout_of
from gpu_ops.kernels.weights.packed_panels import Columns, pack_panels, unpack_panels
from gpu_ops.reference.weights import packed as reference
from gpu_ops.reference.weights.packed_formats import FORMATS, PLAIN, decode

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)
WRITTEN = tuple(name for name, format in FORMATS.items() if format.encode is not None)
GROUPED = ("int4_g128", "uint4_g64", "int8_g32", "uint8_g128", "e4m3_g128")
READ = (*(name for name in FORMATS if "_g" not in name), *GROUPED)  # each rule of blocks, some group sizes
NESTED = tuple(name for name, format in FORMATS.items() if format.nests)
INTEGERS = tuple(name for name in READ if name not in ("nf4", "fp4", "e4m3_g128", *NESTED, *PLAIN))


def random_blocks(format, count, rng):
    """Random bytes; those that tq1_0's encoder writes."""
    blocks = rng.integers(0, 256, (count, format.nbytes), np.uint8)
    return format.join(format.split(blocks)) if format.name == "tq1_0" else blocks


def random_matrix(name, rows, cols, rng, *, finite=True):
    """Matrix of random bytes, with scales of about 0.01 if ``finite``."""
    format = FORMATS[name].for_columns(cols)
    row_bytes = cols // format.block * format.nbytes
    blocks = random_blocks(format, rows * cols // format.block, rng)
    if finite and name in PLAIN:
        blocks = rng.standard_normal((rows, cols)).astype(name).view(np.uint8)
    elif finite:
        fields = format.split(blocks)
        if name.startswith("e4m3"):
            fields = fields._replace(codes=np.where(fields.codes & 127 == 127, 126, fields.codes))
        sizes = rng.uniform(-0.01, 0.01, fields.scale.shape)
        scale = np.full_like(fields.scale, 120) if name == "mxfp4" else sizes.astype(fields.scale.dtype)
        minimum = None if fields.minimum is None else (sizes / 2).astype(np.float16)
        blocks = format.join(fields._replace(scale=scale, minimum=minimum))
    return PackedMatrix(blocks.reshape(rows, row_bytes), (rows, cols), name)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_and_panels_lose_nothing(name, rng):
    format = FORMATS[name].for_columns(256)
    layout = layout_of(format)
    blocks = random_blocks(format, 37 * 3, rng)
    fields = format.split(blocks)
    np.testing.assert_array_equal(format.join(fields), blocks)
    columns = Columns(*(None if x is None else x.reshape(37, 3, -1) for x in fields))
    for lanes in (4, 8, 16):
        panels = pack_panels(layout, columns, lanes)
        assert panels.shape == (-(-37 // lanes), 3 * layout.row_bytes * lanes)
        for before, after in zip(columns, unpack_panels(layout, panels, 37, lanes), strict=True):
            assert (before is None) == (after is None)
            if before is not None:
                assert before.tobytes() == after.tobytes()


def test_bytes_of_tq1_0_with_the_same_digits():
    """256 bytes encode 243 groups of five digits, or 81 of four: a repacked matrix has the lowest byte of each."""
    blocks = np.zeros((256, 54), np.uint8)
    blocks[:, :52], blocks[:, 53] = np.arange(256)[:, None], 0x3C
    matrix = PackedMatrix(blocks, (256, 256), "tq1_0")
    right = matrix.dequantize()
    assert np.unique(right[:, :160:32], axis=0).shape == (243, 5)
    assert np.unique(right[:, 240::4], axis=0).shape == (81, 4)
    np.testing.assert_array_equal(gpu_ops.embedding(np.arange(256), matrix), right)
    again = matrix.blocks()[0]
    np.testing.assert_array_equal(PackedMatrix(again, (256, 256), "tq1_0").dequantize(), right)
    assert (again <= blocks).all()
    assert [len(np.unique(again[:, i])) for i in (0, 47, 48, 51)] == [243, 243, 81, 81]


def test_the_fourth_code_of_tq2_0(rng):
    """3, which no encoder writes, has the value 2."""
    blocks = np.full((3, 66), 0xFF, np.uint8)
    blocks[:, 64:] = np.array([0.5], "<f2").view(np.uint8)
    matrix = PackedMatrix(blocks, (3, 256), "tq2_0")
    x = rng.integers(-127, 128, (2, 256)).astype(np.float32)
    x[:, 7] = 127  # so that int8 activations are exact
    for mode in ("native", "int8"):
        y = gpu_ops.linear(x, matrix, activations=mode)
        np.testing.assert_array_equal(y, np.repeat(x.sum(axis=1, keepdims=True), 3, axis=1))


@pytest.mark.parametrize("name", READ)
def test_kernels_unpack_random_bytes_exactly(name, rng):
    matrix = random_matrix(name, 37, 768, rng, finite=False)
    right = matrix.dequantize()
    blocks = matrix.blocks()[0].copy()
    identity = np.eye(768, dtype=np.float32)[None, :3]
    gpu_ops.linear(identity, matrix)  # repacks
    np.testing.assert_array_equal(matrix.blocks()[0], blocks)
    rows = gpu_ops.embedding(np.arange(37), matrix)
    np.testing.assert_array_equal(rows, right)
    np.testing.assert_array_equal(np.isnan(rows), np.isnan(right))


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", READ)
def test_native_products_have_the_bits_of_the_unpacked_matrix(name, dtype, tokens, rng):
    matrix = PackedMatrix.joined([random_matrix(name, rows, 512, rng) for rows in (37, 520)])
    weight = matrix.dequantize(dtype)
    x, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((tokens, 512), 557))
    residual, dy = (rng.standard_normal((tokens, 557)).astype(dtype) for _ in range(2))
    y = gpu_ops.linear(x, matrix, bias, residual=residual)
    np.testing.assert_array_equal(y, gpu_ops.linear(x, weight, bias, residual=residual))
    dx = gpu_ops.linear_backward(dy, x, matrix, only="dx")
    np.testing.assert_array_equal(dx, gpu_ops.linear_backward(dy, x, weight, only="dx"))


@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 40, 600])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("name", [*PLAIN, "q4_0"])
def test_bits_do_not_depend_on_the_number_of_tokens(name, dtype, tokens, rng):
    """Rows of several groups of panels and of none, K of several sums and blocks: all edges of the kernels."""
    matrix = random_matrix(name, 149, 1056, rng)
    x = rng.standard_normal((tokens, 1056)).astype(dtype)
    y = gpu_ops.linear(x, matrix)
    np.testing.assert_array_equal(y, gpu_ops.linear(x, matrix.dequantize(dtype)))
    np.testing.assert_array_equal(y[-1:], gpu_ops.linear(x[-1:], matrix))


@pytest.mark.parametrize("name", PLAIN)
def test_packed_floats_are_those_of_the_array(name, rng):
    w = rng.standard_normal((20, 64)).astype(name)
    w[0, :4] = np.inf, -np.inf, np.nan, 0
    matrix = gpu_ops.quantize(w, name)
    assert matrix.dtype == w.dtype
    assert matrix.nbytes == w.nbytes
    blocks = matrix.blocks()[0].copy()
    np.testing.assert_array_equal(blocks, w.view(np.uint8))
    before = w.copy()
    w[:] = 0
    x = np.ones((1, 64), w.dtype)
    y, right = (gpu_ops.linear(x, weight).astype(np.float32) for weight in (matrix, before))
    np.testing.assert_array_equal(y, right)
    np.testing.assert_array_equal(matrix.blocks()[0], blocks)
    np.testing.assert_array_equal(matrix.dequantize(name).view(np.uint8), before.view(np.uint8))


def test_a_float_beyond_the_range_becomes_infinite():
    for format, w in (("float16", np.float32(1e6)), *((name, 1e300) for name in PLAIN)):
        assert np.isinf(gpu_ops.quantize(np.full((1, 32), w), format).dequantize()).all()
    with pytest.raises(OptionError, match="infinity"):
        gpu_ops.quantize(np.full((1, 32), 1e300), "q8_0")


@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_reordered_columns(dtype, tokens, rng, tmp_path):
    order = rng.permutation(256).astype(np.int32)
    parts = [gpu_ops.quantize(rng.standard_normal((rows, 256)), "uint4_g64") for rows in (37, 20)]
    stored = PackedMatrix.joined(parts)
    blocks = stored.blocks()[0]
    matrix = PackedMatrix(blocks, stored.shape, "uint4_g64", columns=order)
    np.testing.assert_array_equal(matrix.dequantize()[:, order], stored.dequantize())
    x, dy = (rng.standard_normal((tokens, n)).astype(dtype) for n in (256, 57))
    for mode in ("native", "int8"):
        right = gpu_ops.linear(x[:, order], stored, activations=mode)
        np.testing.assert_array_equal(gpu_ops.linear(x, matrix, activations=mode), right)
    plain = gpu_ops.linear(x, matrix.dequantize(dtype), backend="reference")
    np.testing.assert_array_equal(gpu_ops.linear(x, matrix, backend="reference"), plain)
    dx = gpu_ops.linear_backward(dy, x, matrix, only="dx")
    np.testing.assert_array_equal(dx[:, order], gpu_ops.linear_backward(dy, x, stored, only="dx"))
    targets, more = rng.integers(0, 57, tokens), {"grads": True, "only": "dx"}
    results = gpu_ops.linear_cross_entropy(x, matrix, targets, **more)
    expected = gpu_ops.linear_cross_entropy(x, matrix.dequantize(dtype), targets, **more)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, right)
    matrix.save(tmp_path / "w")
    for other in (PackedMatrix.load(tmp_path / "w"), pickle.loads(pickle.dumps(matrix)), matrix.rows([3, 1])):
        np.testing.assert_array_equal(other.columns, order)
    assert matrix.to("q8_0").columns is None
    with pytest.raises(OptionError, match="different orders"):
        PackedMatrix.joined([matrix, stored])
    with pytest.raises(OptionError, match="dequantize"):
        gpu_ops.embedding(np.array([1]), matrix)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("name", INTEGERS)
def test_int8_products(name, dtype, tokens, rng):
    """Error within the bound of 128 roundings and the products' own; the bits of a token do not depend on others."""
    second = "q8_0" if name == "q6_k" else "q6_k"
    matrix = PackedMatrix.joined(
        [random_matrix(n, rows, 1024, rng) for n, rows in ((name, 37), (second, 75))]
    )
    x = rng.standard_normal((tokens, 1024)).astype(dtype)
    x[0, :256] = 0
    y = gpu_ops.linear(x, matrix, activations="int8")
    right, bound = int8_products(matrix, x)
    step = {np.float32: 2.0**-24, ml_dtypes.bfloat16: 2.0**-8, np.float16: 2.0**-11}[dtype]
    bound += step * np.abs(right)
    assert (np.abs(y.astype(np.float64) - right) <= bound).all()
    for t in range(tokens):
        np.testing.assert_array_equal(gpu_ops.linear(x[t : t + 1], matrix, activations="int8")[0], y[t])
    expected = gpu_ops.linear(x, matrix, activations="int8", backend="reference").astype(np.float64)
    assert (np.abs(expected - right) <= step * np.abs(right) + 1e-12).all()


def int8_products(matrix, x):
    """Products with quantised activations, and the bound of their sums: codes and minimums are summed apart."""
    results, bounds = [], []
    for blocks, (rows, name) in zip(matrix.blocks(), matrix.formats, strict=True):
        format = FORMATS[name]
        fields = format.split(blocks.reshape(-1, format.nbytes))
        weight = decode(format, format.join(fields)).reshape(rows, -1).astype(np.float64)
        rounded = reference.quantized_activations(x, format.block)
        size = np.abs(rounded) @ np.abs(weight).T
        if fields.minimum is not None:
            zero = fields._replace(codes=np.zeros_like(fields.codes))
            lows = decode(format, format.join(zero)).reshape(rows, -1)
            size = size + 2 * np.abs(rounded) @ np.abs(lows).T
        results.append(rounded @ weight.T)
        bounds.append((1024 / 32 + 128) * 2.0**-24 * size)
    return np.concatenate(results, axis=1), np.concatenate(bounds, axis=1)


def test_int8_activations_are_close_to_float(rng):
    """Root mean square error of 0.6 % (blocks of 32) and 0.75 % (of 256) of the results' size."""
    w = rng.standard_normal((256, 4096), dtype=np.float32)
    x = rng.standard_normal((8, 4096), dtype=np.float32)
    for name, limit in (("q4_0", 0.006), ("q4_k", 0.0075)):
        matrix = gpu_ops.quantize(w, name)
        right = x.astype(np.float64) @ matrix.dequantize(np.float64).T
        error = gpu_ops.linear(x, matrix, activations="int8") - right
        assert np.sqrt((error**2).mean() / (right**2).mean()) < limit


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_gives_nan_alone(bad, rng):
    matrix = random_matrix("q4_0", 20, 64, rng)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    right = gpu_ops.linear(x, matrix, activations="int8")
    x[1, 40] = bad
    y = gpu_ops.linear(x, matrix, activations="int8")
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], right[[0, 2]])


def test_tiny_activations_count_as_zeros(rng):
    matrix = random_matrix("q8_0", 20, 64, rng)
    x = np.full((1, 64), 1e-38, np.float32)
    np.testing.assert_array_equal(gpu_ops.linear(x, matrix, activations="int8"), np.zeros((1, 20)))


def test_the_lowest_code_of_q8_0(rng):
    """-128, which no encoder writes, and whose negative no int8 holds."""
    blocks = np.full((3, 34), 128, np.uint8)
    blocks[:, :2] = np.array([0.5], "<f2").view(np.uint8)
    matrix = PackedMatrix(blocks, (3, 32), "q8_0")
    x = np.full((1, 32), -1.0, np.float32)
    np.testing.assert_array_equal(matrix.dequantize(), np.full((3, 32), -64.0))
    for mode in ("native", "int8"):
        np.testing.assert_allclose(gpu_ops.linear(x, matrix, activations=mode), 2048.0, rtol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 15, 17])
def test_odd_and_empty_shapes(rows, rng):
    matrix = random_matrix("q4_k", rows, 256, rng)
    for tokens in (0, 1, 5):
        x = rng.standard_normal((tokens, 256)).astype(np.float32)
        right = gpu_ops.linear(x, matrix.dequantize())
        np.testing.assert_array_equal(gpu_ops.linear(x, matrix), right)
        assert gpu_ops.linear(x, matrix, activations="int8").shape == right.shape
        dx = gpu_ops.linear_backward(np.ones_like(right), x, matrix, only="dx")
        np.testing.assert_array_equal(
            dx, gpu_ops.linear_backward(np.ones_like(right), x, matrix.dequantize(), only="dx")
        )
    empty = PackedMatrix(np.zeros((rows, 0), np.uint8), (rows, 0), "q4_0")
    for mode, tokens in (("native", 2), ("native", 40), ("int8", 2)):
        x, bias = np.ones((tokens, 0), np.float32), np.ones(rows, np.float32)
        y = gpu_ops.linear(x, empty, bias, activations=mode)
        np.testing.assert_array_equal(y, np.ones((tokens, rows)))


def test_other_ops_take_it(rng):
    gate, up, down = (random_matrix("q4_0", *shape, rng) for shape in ((96, 64), (96, 64), (64, 96)))
    x = rng.standard_normal((5, 64)).astype(np.float32)
    right = gpu_ops.swiglu_mlp(x, gate.dequantize(), up.dequantize(), down.dequantize())
    np.testing.assert_array_equal(gpu_ops.swiglu_mlp(x, gate, up, down), right)
    targets = rng.integers(0, 96, 5)
    loss, dx = gpu_ops.linear_cross_entropy(x, gate, targets, grads=True, only="dx")
    expected = gpu_ops.linear_cross_entropy(x, gate.dequantize(), targets, grads=True, only="dx")
    np.testing.assert_array_equal(loss, expected[0])
    np.testing.assert_array_equal(dx, expected[1])
    with pytest.raises(OptionError, match="frozen"):
        gpu_ops.linear_cross_entropy(x, gate, targets, grads=True)
    rows = gpu_ops.embedding(np.array([[3, 95]]), gate, scale=8.0)
    np.testing.assert_array_equal(rows, 8 * gate.dequantize()[None, [3, 95]])
    with pytest.raises(gpu_ops.errors.GpuOpsError, match="96"):
        gpu_ops.embedding(np.array([96]), gate)


@pytest.mark.parametrize("name", WRITTEN)
def test_quantize(name, rng):
    w = rng.standard_normal((6, 512)).astype(np.float32)
    matrix = gpu_ops.quantize(w, name)
    assert matrix.shape == w.shape
    assert matrix.formats == ((6, name),)
    assert matrix.bits_per_weight == pytest.approx(FORMATS[name].for_columns(512).bits_per_weight)
    of_bytes = 0.03 if name.startswith("e4m3") else 0.01
    limit = {2: 0.9, 4: 0.13, 5: 0.05, 6: 0.025, 8: of_bytes, 16: 0.003, 32: 1e-9}[FORMATS[name].bits]
    assert np.sqrt(np.mean((matrix.dequantize() - w) ** 2)) < limit
    assert gpu_ops.quantize(w.astype(np.float16), name).dtype == np.float16
    assert matrix.to(name) is matrix
    assert matrix.to("q8_0").formats == ((6, "q8_0"),)
    for dtype in DTYPES:
        np.testing.assert_array_equal(matrix.dequantize(dtype), matrix.dequantize().astype(dtype))


@pytest.mark.parametrize("used", [False, True])
def test_copies_and_files(used, rng, tmp_path):
    parts = [random_matrix(format, 9, 256, rng) for format in ("q4_k", "q6_k")]
    matrix = PackedMatrix.joined(parts).with_activations("int8")
    x = rng.standard_normal((2, 256)).astype(np.float32)
    right = gpu_ops.linear(x, matrix.dequantize())
    if used:
        gpu_ops.linear(x, matrix)
    matrix.save(tmp_path / "w")
    for other in (
        copy.deepcopy(matrix),
        pickle.loads(pickle.dumps(matrix)),
        PackedMatrix.load(tmp_path / "w"),
    ):
        assert other.formats == ((9, "q4_k"), (9, "q6_k"))
        assert (other.activations, other.dtype) == ("int8", np.float32)
        np.testing.assert_array_equal(gpu_ops.linear(x, other, activations="native"), right)
        for blocks, expected in zip(other.blocks(), matrix.blocks(), strict=True):
            np.testing.assert_array_equal(blocks, expected)
    order = rng.permutation(9)
    np.testing.assert_array_equal(parts[0].rows(order).dequantize(), parts[0].dequantize()[order])
    data = (tmp_path / "w").read_bytes()
    damages = [(b"q4_k", b"q4_9"), (b"256]", b"999]"), (b"int8", b"int9")]
    for damaged in (data[:-1], b"", *(data.replace(*change) for change in damages)):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(FormatError):
            PackedMatrix.load(tmp_path / "damaged")


def test_copies_and_files_of_packed_floats(rng, tmp_path):
    matrix = PackedMatrix.joined(
        [random_matrix(format, 9, 64, rng) for format in ("bfloat16", "q8_0", "float32")]
    )
    x = rng.standard_normal((2, 64)).astype(np.float32)
    right = gpu_ops.linear(x, matrix)
    matrix.save(tmp_path / "w")
    for other in (pickle.loads(pickle.dumps(matrix)), PackedMatrix.load(tmp_path / "w")):
        assert other.formats == ((9, "bfloat16"), (9, "q8_0"), (9, "float32"))
        np.testing.assert_array_equal(gpu_ops.linear(x, other), right)


def test_a_file_without_activations_has_native_ones(rng, tmp_path):
    """Files of earlier versions."""
    matrix = random_matrix("q4_0", 4, 64, rng).with_activations("int8")
    matrix.save(tmp_path / "w")
    data = (tmp_path / "w").read_bytes()
    earlier = data.replace(rb", \"activations\": \"int8\"}", b"}" + b" " * 27)
    assert len(earlier) == len(data)
    assert earlier != data
    (tmp_path / "w").write_bytes(earlier)
    other = PackedMatrix.load(tmp_path / "w")
    assert other.activations == "native"
    np.testing.assert_array_equal(other.blocks()[0], matrix.blocks()[0])


def test_its_bytes_are_held_once(rng):
    matrix = gpu_ops.quantize(rng.standard_normal((64, 256)).astype(np.float32), "q4_0")
    before = matrix.nbytes
    gpu_ops.linear(np.ones((1, 256), np.float32), matrix)
    assert matrix.nbytes == before == sum(array.nbytes for array in matrix.call_arrays)


def test_results_may_not_overlap_it(rng):
    memory = np.zeros(18 * 32 * 8, np.uint8)
    matrix = PackedMatrix(memory.reshape(32, -1), (32, 256), "q4_0")
    out = memory[:128].view(np.float32).reshape(1, 32)
    with pytest.raises(ShapeError, match="memory"):
        gpu_ops.linear(np.ones((1, 256), np.float32), matrix, out=out)


def reordered(columns):
    return PackedMatrix(np.zeros((4, 36), np.uint8), (4, 64), "q4_0", columns=columns)


X = np.ones((2, 64), np.float32)
W = np.ones((4, 64), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: PackedMatrix(np.zeros((4, 36), np.uint8), (4, 65), "q4_0"), ShapeError, "multiple of 32"),
        (lambda: PackedMatrix(np.zeros((4, 35), np.uint8), (4, 64), "q4_0"), ShapeError, r"\(4, 36\)"),
        (lambda: PackedMatrix(np.zeros((4, 36), np.int8), (4, 64), "q4_0"), DTypeError, "uint8"),
        (lambda: PackedMatrix(np.zeros((4, 36), np.uint8), (4, 64), "q4"), OptionError, "q4_0"),
        (lambda: PackedMatrix(np.zeros((4, 36), np.uint8), (4, -64), "q4_0"), OptionError, "shape"),
        (lambda: PackedMatrix.joined([]), DTypeError, "list"),
        (lambda: reordered(np.arange(63)), ShapeError, r"\(64,\)"),
        (lambda: reordered(np.zeros(64, int)), OptionError, "permutation"),
        (
            lambda: PackedMatrix.joined([gpu_ops.quantize(W, "q4_0"), gpu_ops.quantize(W[:, :32], "q4_0")]),
            ShapeError,
            "same",
        ),
        (lambda: gpu_ops.quantize(W, "q2_k"), OptionError, "only read"),
        (lambda: gpu_ops.quantize(W * np.nan, "q4_0"), OptionError, "NaN"),
        (lambda: gpu_ops.quantize(W[0], "q4_0"), ShapeError, r"\(N, K\)"),
        (lambda: gpu_ops.quantize(W.astype(np.int8), "q4_0"), DTypeError, "int8"),
        (lambda: gpu_ops.quantize(W, "nf4").with_activations("int8"), OptionError, "nf4 has floats"),
        (lambda: gpu_ops.linear(X, gpu_ops.quantize(W, "fp4"), activations="int8"), OptionError, "floats"),
        (
            lambda: gpu_ops.linear(X, gpu_ops.quantize(W, "float16"), activations="int8"),
            OptionError,
            "floats",
        ),
        (lambda: gpu_ops.quantize(W[:, :48], "bfloat16"), ShapeError, "multiple of 32"),
        (lambda: gpu_ops.linear(X, W, activations="int8"), OptionError, "array"),
        (lambda: gpu_ops.linear(X, gpu_ops.quantize(W, "q4_0"), activations="int4"), OptionError, "int8"),
        (lambda: gpu_ops.linear(X[:, :32], gpu_ops.quantize(W, "q4_0")), ShapeError, "in_features=64"),
        (lambda: gpu_ops.linear_backward(X[:, :4], X, gpu_ops.quantize(W, "q4_0")), OptionError, "frozen"),
        (lambda: X @ gpu_ops.quantize(W, "q4_0"), TypeError, "@"),
        (lambda: np.asarray(gpu_ops.quantize(W, "q4_0")), DTypeError, "dequantize"),
        (lambda: gpu_ops.quantize(W, "q4_0").dequantize(np.int8), DTypeError, "int8"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_the_table_of_formats():
    lines = PackedMatrix.describe_formats().splitlines()
    assert len(lines) == 2 + len(FORMATS)
    assert "| q4_k | 4.5 | 256 | 32 |" in lines[2 + list(FORMATS).index("q4_k")]
    assert "| nf4_nested | 4.129 | 64 to 16384 | 64 |" in lines[2 + list(FORMATS).index("nf4_nested")]
    assert "| bfloat16 | 16 | 32 | - |" in lines[2 + list(FORMATS).index("bfloat16")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_many_pieces_has_the_bits_of_the_unpacked_one(dtype, rng):
    matrix = PackedMatrix.joined(
        [random_matrix(format, rows, 64, rng) for format, rows in (("q4_0", 900), ("q8_0", 8205))]
    )
    x, targets = rng.standard_normal((600, 64)).astype(dtype), rng.integers(0, 9105, 600)
    more = {"bias": rng.standard_normal(9105).astype(dtype), "grads": True, "only": "dx"}
    expected = gpu_ops.linear_cross_entropy(x, matrix.dequantize(dtype), targets, **more)
    results = gpu_ops.linear_cross_entropy(x, matrix, targets, **more)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, right)


def test_blocks_while_another_thread_repacks_them(rng):
    """It may run between any two reads of the fields."""

    class Repacked(PackedPart):
        after = ""

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name == Repacked.after:
                Repacked.after = ""
                self.panels(16)
            return value

    blocks = random_matrix("q4_0", 20, 64, rng).blocks()[0]
    for field in ("_blocks", "_panels"):
        part = Repacked(FORMATS["q4_0"], 20, 64, blocks)
        Repacked.after = field
        np.testing.assert_array_equal(part.blocks(), blocks)
        part = Repacked(FORMATS["q4_0"], 20, 64, blocks)
        Repacked.after = field
        assert len(part.arrays()) == 1


def test_rows_of_several_formats_are_not_reordered(rng):
    matrix = PackedMatrix.joined([random_matrix(format, 4, 64, rng) for format in ("q8_0", "q4_0")])
    with pytest.raises(OptionError, match="q8_0 and q4_0"):
        matrix.rows(np.array([1, 0]))
