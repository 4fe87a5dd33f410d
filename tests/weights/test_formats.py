"""Every ternary format against an independent version of its table, byte by byte, and against bad bytes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import TernaryMatrix, ternary_pack, ternary_unpack
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.reference.weights.ternary_formats import FORMATS, TernaryFormat, describe_formats, ternary_format
from tests.weights.tables import SHAPES, TABLES

NAMES = list(FORMATS)
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_pack_equals_the_table(name, shape, rng):
    t = trits(rng, shape)
    packed = ternary_pack(t, name)
    assert packed.dtype == np.uint8
    assert packed.shape == FORMATS[name].packed_shape(shape)
    assert packed.tobytes() == TABLES[name](t)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_unpack_inverts_the_table(name, shape, rng):
    t = trits(rng, shape)
    packed = np.frombuffer(TABLES[name](t), np.uint8)
    for strict in (True, False):
        back = ternary_unpack(packed, shape, name, strict=strict)
        assert back.dtype == np.int8
        np.testing.assert_array_equal(back, t)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, 0, 1])
def test_constant_matrices(name, value):
    t = np.full(SHAPES[name][0], value, np.int8)
    assert ternary_pack(t, name).tobytes() == TABLES[name](t)


UNITS = {name: (f.unit_rows, f.unit_cols) if not f.pads else (1, 1) for name, f in FORMATS.items()}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_round_trip(name, data):
    rows, cols = UNITS[name]
    n = rows * data.draw(st.integers(0, 6), "rows")
    k = cols * data.draw(st.integers(0, 3 if cols > 1 else 140), "columns")
    t = trits(np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed")), (n, k))
    packed = ternary_pack(t, name)
    np.testing.assert_array_equal(ternary_unpack(packed, (n, k), name), t)
    if FORMATS[name].pads:  # a packed matrix has one encoding: packing again gives the same bytes
        assert ternary_pack(ternary_unpack(packed, (n, k), name), name).tobytes() == packed.tobytes()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(data=st.data())
def test_fuzzed_buffers_decode_or_are_refused(name, data):
    """Any bytes of any length give trits or a typed error, and strict trits pack to the same bytes again."""
    rows, cols = (
        (FORMATS[name].unit_rows, FORMATS[name].unit_cols) if data.draw(st.booleans(), "fits") else (1, 1)
    )
    shape = (rows * data.draw(st.integers(0, 2), "N"), cols * data.draw(st.integers(0, 3), "K"))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    buffer = rng.integers(
        0, 256, _bytes_of(name, shape) + data.draw(st.sampled_from([0, 0, 0, -1, 7]), "more or less")
    )
    if data.draw(st.booleans(), "few values"):  # so that some of them are valid
        buffer = rng.choice(
            data.draw(st.sampled_from([[0], [85], [0, 68, 136], [0, 21, 170]]), "values"), buffer.size
        )
    buffer = buffer.astype(np.uint8)
    for strict in (True, False):
        try:
            t = ternary_unpack(buffer, shape, name, strict=strict)
        except (FormatError, ShapeError):
            continue
        assert t.shape == shape
        if strict:
            assert set(np.unique(t)) <= {-1, 0, 1}
            assert ternary_pack(t, name, **_scale_of(buffer, shape, name)).tobytes() == buffer.tobytes()


def _bytes_of(name, shape):
    try:
        return max(1, math.prod(FORMATS[name].packed_shape(shape)))
    except ValueError:
        return 64


def _scale_of(buffer, shape, name):
    fmt = FORMATS[name]
    if not fmt.block_scale:
        return {}
    blocks = buffer.reshape(-1, fmt.unit_bytes)
    scales = (blocks[:, :2] if fmt.scale_first else blocks[:, -2:]).copy().view(np.float16)
    return {"scale": scales.reshape(shape[0], shape[1] // fmt.block_scale).astype(np.float32)}


# ---- embedded scales ---------------------------------------------------------------------------------------


BLOCKS = ["tq1_0", "tq2_0", "q2_0"]


@pytest.mark.parametrize("name", BLOCKS)
def test_block_scales(name, rng):
    block = FORMATS[name].block_scale
    t = trits(rng, (2, 2 * block))
    per_block = np.array([[0.5, 2.0], [1.25, -3.0]], np.float32)
    for scale, blocks in (
        (0.5, np.full((2, 2), 0.5)),
        (per_block[:, 0], per_block[:, :1]),
        (per_block, per_block),
    ):
        packed = ternary_pack(t, name, scale=scale)
        np.testing.assert_array_equal(ternary_unpack(packed, t.shape, name), t)
        w = TernaryMatrix(packed, 1.0, t.shape, name)
        expected = t * np.repeat(np.broadcast_to(blocks, (2, 2)), block, axis=1)
        np.testing.assert_array_equal(w.dequantize(), expected)
        np.testing.assert_array_equal(w.to("w2").dequantize(), expected)
        # a separate scale multiplies the embedded ones, whatever its grouping
        for outer, factor in (
            (np.float32(3), 3),
            (np.array([1, 2], np.float32), [[1], [2]]),
            (np.full((2, 8), 4, np.float32), 4),  # groups of a quarter of a block
            (np.array([[1], [2]], np.float32), [[1], [2]]),  # of two blocks
        ):
            both = TernaryMatrix(packed, outer, t.shape, name)
            np.testing.assert_array_equal(both.to("planes").dequantize(), expected * factor)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_block_scale_that_is_not_finite_is_refused(name, scale):
    packed = ternary_pack(np.zeros((1, 256), np.int8), name)
    last = slice(0, 2) if FORMATS[name].scale_first else slice(-2, None)
    packed[0, last] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(FormatError, match="not finite"):
        ternary_unpack(packed, (1, 256), name)
    assert not ternary_unpack(packed, (1, 256), name, strict=False).any()


HALF = [0.5, *(dtype(0.5) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))]


@pytest.mark.parametrize(
    "scale", [*HALF, *map(np.array, HALF)], ids=lambda x: f"{type(x).__name__} {np.asarray(x).dtype}"
)
@pytest.mark.parametrize("name", ["tq1_0", "tq2_0", "q2_0"])
def test_a_number_of_any_type_is_a_scale(name, scale, rng):
    t = trits(rng, (2, 256))
    expected = ternary_pack(t, name, scale=np.full(2, 0.5, np.float32))
    for _ in range(2):  # found again by its call key
        np.testing.assert_array_equal(ternary_pack(t, name, scale=scale), expected)
    w = TernaryMatrix.from_trits(t, scale, format=name)
    assert (w.scale.shape, w.scale.dtype, float(w.scale)) == ((), np.float32, 0.5)


@pytest.mark.parametrize("scale", [2, np.uint8(2), np.array(2)])
def test_a_whole_number_is_a_scale(scale, rng):
    t = trits(rng, (2, 256))
    np.testing.assert_array_equal(ternary_pack(t, "q2_0", scale=scale), ternary_pack(t, "q2_0", scale=2.0))


@pytest.mark.parametrize(
    "scale", [True, np.True_, np.array(True), 1j, "1", np.array("1"), np.timedelta64(1), np.array(None)]
)
def test_what_is_no_number_is_no_scale(scale):
    t = np.zeros((1, 256), np.int8)
    for name, call in (
        ("ternary_pack", lambda: ternary_pack(t, "tq2_0", scale=scale)),
        ("TernaryMatrix", lambda: TernaryMatrix.from_trits(t, scale)),
    ):
        with pytest.raises(DTypeError, match=f"^{name}: scale is "):
            call()


def test_a_scale_beyond_fp16_is_refused():
    with pytest.raises(FormatError, match="does not fit fp16"):
        ternary_pack(np.zeros((1, 256), np.int8), "tq2_0", scale=1e6)


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0"])
def test_equals_the_gguf_package(name, rng):
    gguf = pytest.importorskip("gguf.quants", reason="pip install gguf compares with llama.cpp's own encoder")
    tensor_type = getattr(gguf.GGMLQuantizationType, name.upper())
    t = trits(rng, (8, 1024))
    t[:, ::256] = 1  # its scale is max |w| of each block
    scale = rng.uniform(0.1, 2, (8, 4)).astype(np.float16).astype(np.float32)
    packed = gguf.quantize(t * np.repeat(scale, 256, axis=1), tensor_type)
    assert ternary_pack(t, name, scale=scale).tobytes() == packed.tobytes()
    w = TernaryMatrix(packed.view(np.uint8), 1.0, t.shape, name)
    np.testing.assert_array_equal(w.dequantize(), gguf.dequantize(packed, tensor_type))


@pytest.mark.peers
def test_equals_the_transformers_package(rng):
    pytest.importorskip("torch", reason="pip install torch transformers compares with BitNet checkpoints")
    bitnet = pytest.importorskip(
        "transformers.integrations.bitnet", reason="pip install transformers compares with BitNet checkpoints"
    )
    import torch

    for n in (8, 6, 5, 1):
        t = trits(rng, (n, 7))
        packed = bitnet.pack_weights(torch.from_numpy(t.copy()))
        assert ternary_pack(t, "hf_bitnet").tobytes() == packed.numpy().tobytes()
        unpack = getattr(bitnet.unpack_weights, "_torchdynamo_orig_callable", bitnet.unpack_weights)
        np.testing.assert_array_equal(unpack(packed, torch.float32)[:n].numpy(), t)


# ---- the table ---------------------------------------------------------------------------------------------


def test_table_rows_are_unlike():
    """Any two formats of the same size disagree on some matrix: a tag is needed, and decides."""
    rng = np.random.default_rng(3)
    t = trits(rng, (256, 768))
    blobs = {name: ternary_pack(t, name).tobytes() for name in NAMES}
    assert len(set(blobs.values())) == len(NAMES)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("planes", 2),
        ("base3", 1.6),
        ("hf_bitnet", 2),
        ("bitnet_gpu", 2),
        ("i2_s", 2),
        ("tl1", 2),
        ("tl2", 5 / 3),
        ("tq1_0", 1.6875),
        ("tq2_0", 2.0625),
        ("q2_0", 2.25),
        ("w2", 2),
    ],
)
def test_bits_per_weight(name, bits):
    assert FORMATS[name].bits_per_weight == bits
    rows, cols = FORMATS[name].unit_rows, FORMATS[name].unit_cols
    packed = ternary_pack(np.zeros((rows, cols), np.int8), name)
    assert 8 * packed.size / (rows * cols) == bits


def test_table_refuses_a_row_that_contradicts_itself():
    from gpu_ops.reference.weights import ternary_formats

    for row in (
        TernaryFormat("thin", 1, 8, 1, True, "apart", "", ""),
        TernaryFormat("both", 1, 64, 16, True, "apart", "", "", linear=True),
        TernaryFormat("blocks", 1, 64, 18, False, "apart", "", "", block_scale=64),
    ):
        with pytest.raises(AssertionError, match=row.name):
            ternary_formats._check((row,))
    with pytest.raises(AssertionError, match="share a name"):
        ternary_formats._check((FORMATS["w2"], FORMATS["w2"]))


def test_the_table_prints():
    assert TernaryMatrix.describe_formats() == describe_formats()
    for name in NAMES:
        assert f"| {name} |" in describe_formats()


# ---- bad calls ---------------------------------------------------------------------------------------------

T = np.zeros((2, 5), np.int8)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ternary_pack(T, "tq2"), OptionError, "did you mean 'tq2_0'.*'planes', 'base3'"),
        (lambda: ternary_unpack(T.view(np.uint8), (2, 5), "tl9"), OptionError, "allowed: 'planes'"),
        (lambda: ternary_pack(T.astype(np.float32), "w2"), DTypeError, "float32; pass a signed integer"),
        (lambda: ternary_pack(T.view(np.uint8), "w2"), DTypeError, "uint8"),
        (lambda: ternary_pack(T[0], "w2"), ShapeError, r"\(5,\); expected \(N, K\)"),
        (lambda: ternary_pack(T + np.int8(2), "w2"), FormatError, r"trits\[0, 0\] is 2"),
        (lambda: ternary_pack(T - np.int64(200), "w2"), FormatError, "is -200"),
        (lambda: ternary_pack(T.tolist(), "w2"), DTypeError, "list"),
        (lambda: ternary_pack(T, "i2_s"), ShapeError, r"N\*K % 128 == 0, got shape \(2, 5\); .*'planes'"),
        (lambda: ternary_pack(T, "tq1_0"), ShapeError, "K % 256 == 0"),
        (lambda: ternary_pack(T, "tl1"), ShapeError, "N % 256 == 0 and K % 128 == 0, got shape"),
        (lambda: ternary_pack(np.zeros((256, 100), np.int8), "tl2"), ShapeError, r"\(K % 96\) % 32 == 0, got shape"),
        (lambda: ternary_unpack(T.view(np.uint8), (1536, 100), "tl2"), ShapeError, r"N % 256 == 0"),
        (lambda: ternary_pack(T, "bitnet_gpu"), ShapeError, "N % 16 == 0 and K % 32 == 0"),
        (lambda: ternary_pack(T, "w2", scale=2.0), OptionError, "only tq1_0, tq2_0, q2_0 embed"),
        (lambda: ternary_pack(np.zeros((2, 256), np.int8), "tq2_0", scale=np.ones(3, np.float32)), ShapeError,
         r"expected \(\), \(2,\) or \(2, 1\)"),
        (lambda: ternary_unpack(T, (2, 5), "w2"), DTypeError, "int8; expected uint8"),
        (lambda: ternary_unpack(T.view(np.uint8), (2, 5, 1), "w2"), ShapeError, r"must be \(N, K\)"),
        (lambda: ternary_unpack(T.view(np.uint8), 10, "w2"), ShapeError, r"must be \(N, K\)"),
        (lambda: ternary_unpack(T.view(np.uint8), (2, -5), "w2"), OptionError, "shape must lie in"),
        (lambda: ternary_unpack(T.view(np.uint8), (2, 5.0), "w2"), OptionError, "shape must be an integer"),
        (lambda: ternary_unpack(T.view(np.uint8), (2, 5), "w2", strict="yes"), OptionError, "True or False"),
        (lambda: TernaryMatrix.from_trits(T, format="q2"), OptionError, "allowed"),
    ],
)  # fmt: skip
def test_bad_calls(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, gpu_ops.errors.GpuOpsError)


def test_unknown_format_in_the_reference_lists_what_exists():
    with pytest.raises(ValueError, match="i2_s, tl1, tl2, tq1_0, tq2_0, q2_0, w2"):
        ternary_format("tl9")
