"""Encoders of packed formats: bytes of ggml and gguf-py, nearest codes, errors of Gaussian weights."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.reference.weights import packed_encode
from gpu_ops.reference.weights.packed_encode import FP4, NF4
from gpu_ops.reference.weights.packed_formats import FORMATS, PLAIN, decode, encode

SIZED = {name: format.for_columns(256) for name, format in FORMATS.items()}
WRITTEN = [name for name, format in FORMATS.items() if format.encode and name not in PLAIN]
GGUF = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "tq1_0", "tq2_0"]

# Of ramp(block). Formats of gguf-py: gguf 0.19; the others: ggml_quantize_chunk of ggml.
BYTES = {
    "q4_0": "8da8794b290795a7705c3a68d7b4816d7b28",
    "q4_1": "0028e6b184a2d5f75a477f91c486173b6e8073d6",
    "q5_0": "8da487e3301cd397420e2a3df1b964c09f5713cae640",
    "q5_1": "be23e6b150188fa30954a9fea48fde32870c1e67bc10f5bc",
    "q8_0": "9618eacaec0f321578bcdf0109476aaed1fd16395c7ff1e5082b4e1cb5d8fa1d1063",
    "mxfp4": "7b2a4c596194a2163c5a20d1b5062d1b60",
    "iq4_nl": "73986a3c1a0794a6704d2b58d7b3815e6c18",
    "q4_k": (
        "981c5526f2f2f2f5fdf3eabb44ffa5e4a5c2f5472a587fa072f5072a5d6fa0d6f5085a5d89a0d38508385d8f70d3f608"
        "e205275a6c9fc3e205575a77afc08205355a7d7fc0f405386a8da3c0f3553856574a678fa072e5264a6c6fa0c505285a"
        "6d88a0c34528476d8f71c306284b6d8f4c5e90c5e5074a5c78a0c37507275c7f60c3f6083a5d8fa5c3f5483a588fa173"
    ),
    "q5_k": (
        "22187026f9f9f7f9fef4ebbc39ff99f84a5282b4a52d694a509294212d094ad212b5ad65495ac296b58c694b58d29631"
        "3a85da8f54a0fe40f5ea0e54a9ce409ceb00a5aaf241960b106fba0fe1a6fd10e40a5fa4e94e97e50abfa4fe4f90151a"
        "6bb50affa0f91b60d50a56a1f6ab70cdaf84df1e6005fa4c94d9ee60ba0a5fc4e92071b69b509eea3ff1c61b50a5da3f"
        "a9ce409bea0f94a9f14095fa0f5ea90ed1a6fc1065ba0f5aa6fb8065b00f52e7"
    ),
    "q6_k": (
        "8701871e941b417a00870fa30af079f4e6fc830ae827ee75fc7d59d066ed61cb129af165fc33aa028a4054cb229e8178"
        "d142b2d2a91159c812b921990c58c031ba226a3143ca32ae8159c042b2d1991039b810b821a92c59a120a820a81028a0"
        "14e71f98101a211e960f8e8f08850d81ce941bf2760f860d840b4178ff75ffa326e3929949492427e7929d59482467d2"
        "928d49482527d2968d4968242792929d8949752427d6928959742463d29e8949742523929a8949642427929e59493464"
        "9b96918b848399928d868097918a8984e010"
    ),
    "tq1_0": (
        "83999c818889d82e7d9d657fdfd82b999d6d88df832e99816e89d5d82e9c9d818689939dd682d88980769db9d52e868988ded79bc540"
    ),
    "tq2_0": (
        "95195955656596941559515566965419596165669594195561655696945959556565459698155965554696585951656546959859"
        "556565969695595155658656c540"
    ),
}

# RMSE / sigma of Gaussian weights, as measured with ggml, gguf-py and bitsandbytes.
ERRORS = {
    **{"q4_0": 0.0859, "q4_1": 0.0782, "q5_0": 0.0427, "q5_1": 0.0379, "q8_0": 0.0053, "iq4_nl": 0.0761},
    **{"mxfp4": 0.1141, "q4_k": 0.0713, "q5_k": 0.0361, "q6_k": 0.0178, "nf4": 0.0920, "fp4": 0.1220},
    **{"nf4_nested": 0.0920, "fp4_nested": 0.1220},
    **{"tq1_0": 0.8088, "tq2_0": 0.8088},
    # Groups, rounded to nearest: of 4 bits as in compressed-tensors.
    **{"int4_g128": 0.1107, "int4_g64": 0.1028, "int4_g32": 0.0948},
    **{"uint4_g128": 0.1006, "uint4_g64": 0.0911, "uint4_g32": 0.0807},
    **{"int8_g128": 0.0065, "int8_g64": 0.0060, "int8_g32": 0.0056},
    **{"uint8_g128": 0.0059, "uint8_g64": 0.0054, "uint8_g32": 0.0048},
    **{"e4m3_g128": 0.0257, "e4m3_g64": 0.0250, "e4m3_g32": 0.0240},
}


def ramp(block):
    """Weights of many magnitudes and both signs, in an order that is not theirs."""
    index = np.arange(block)
    weights = (index * 37 % block - 0.4 * block) / 64 * np.where(index % 5 == 0, 0.25, 1)
    return weights.astype(np.float32)[None]


def gaussian(block, seed=0):
    return (
        (np.random.default_rng(seed).standard_normal((64, 1024)) * 0.02).astype(np.float32).reshape(-1, block)
    )


def odd_rows():
    """Zeros, constants, ties, denormals, numbers next to powers of two, and every order of magnitude."""
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((64, 256)).astype(np.float32)
    tiny, huge = np.float32(2.0**-149), np.float32(3.4e38)
    return np.concatenate(
        [
            np.zeros((1, 256), np.float32),
            np.full((1, 256), -0.0, np.float32),
            *(np.full((1, 256), value, np.float32) for value in (3.25, -3.25, tiny, huge, -huge)),
            np.where(np.arange(256) % 32 == 5, normal[:1], np.float32(0)),
            np.abs(normal[:2]),
            -np.abs(normal[:2]),
            np.rint(normal * 3),
            rng.integers(-9, 9, (8, 256)).astype(np.float32) * tiny,
            rng.choice(np.array([huge, -huge, 0, 1], np.float32), (8, 256)),
            *(np.clip(normal[:2], -1, 1) * np.float32(2.0**exponent) for exponent in range(-149, 128, 3)),
            *(np.exp2(np.rint(normal[:4] * 20)) * np.float32(1 + ulps * 2.0**-23) for ulps in (-1, 1)),
        ]
    )


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_ramp(name):
    format = SIZED[name]
    assert encode(format, ramp(format.block)).tobytes().hex() == BYTES[name]


@pytest.mark.parametrize("name", GGUF)
def test_bytes_equal_gguf(name):
    gguf = pytest.importorskip("gguf")
    format = SIZED[name]
    for rows in (odd_rows(), gaussian(256)):
        with np.errstate(all="ignore"):
            expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name.upper()])
        blocks = encode(format, rows.reshape(-1, format.block))
        np.testing.assert_array_equal(blocks, expected.reshape(blocks.shape))


@pytest.mark.parametrize("name", WRITTEN)
def test_fields(name):
    format = SIZED[name]
    fields = format.encode(gaussian(format.block)[:5])
    assert fields.codes.shape == (5, format.block)
    assert fields.codes.dtype == np.uint8
    assert fields.codes.max() < 1 << format.bits
    assert fields.scale.shape == (5, 2 if format.nests else 1)
    decoded = format.split(format.join(fields))
    for field, stored in zip(fields, decoded, strict=True):
        assert (field is None) == (stored is None)
        if field is not None:
            assert field.dtype == stored.dtype
            np.testing.assert_array_equal(field, stored)


@pytest.mark.parametrize("name", WRITTEN)
def test_zeros(name):
    format = SIZED[name]
    fields = format.encode(np.zeros((3, format.block), np.float32))
    assert not fields.scale.any()
    assert fields.minimum is None or not fields.minimum.any()
    assert not decode(format, format.join(fields)).any()


@pytest.mark.parametrize("name", WRITTEN)
def test_odd_rows_and_numbers_that_are_not_finite_give_no_warning(name):
    format = SIZED[name]
    rows = odd_rows()
    rows = np.concatenate([rows, rows[-3:]])
    rows[-3, 7], rows[-2, 9], rows[-1, 11] = np.inf, -np.inf, np.nan
    assert encode(format, rows.reshape(-1, format.block)).shape == (rows.size // format.block, format.nbytes)


@pytest.mark.parametrize("name", WRITTEN)
def test_pieces_and_single_blocks_give_the_same_bytes(name, monkeypatch):
    format = SIZED[name]
    weights = gaussian(format.block)[:24]
    expected = encode(format, weights)
    for piece in (1, 7 * format.block):
        monkeypatch.setattr(packed_encode, "PIECE", piece)
        np.testing.assert_array_equal(encode(format, weights), expected)
    assert format.encode(weights[:0]).codes.shape == (0, format.block)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_error_is_at_most_half_a_step(name):
    format = SIZED[name]
    weights = gaussian(format.block)
    fields = format.encode(weights)
    error = np.abs(decode(format, format.join(fields)) - weights)
    step = np.abs(fields.scale.astype(np.float32))
    rounding = 2.0**-10 * np.abs(weights).max(axis=1, keepdims=True)  # float16 scales and minimums
    highest = (fields.codes == fields.codes.max()) & (name in ("q4_0", "q5_0"))  # the range has no +8 or +16
    assert (error <= np.where(highest, step, step / 2) + 2 * rounding).all()


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0"])
def test_ternary_weights_lose_nothing(name, rng):
    format = SIZED[name]
    scales = rng.uniform(2.0**-14, 60000, (50, 1)).astype(np.float16)
    weights = rng.integers(-1, 2, (50, 256)).astype(np.float32) * scales.astype(np.float32)
    np.testing.assert_array_equal(decode(format, encode(format, weights)), weights)
    tie, below = np.float32(0.5), np.nextafter(np.float32(0.5), np.float32(0))
    edges = np.tile(np.array([1, tie, -tie, below, -below, 0, -0.0, -1], np.float32), 32)[None]
    assert format.encode(edges).codes[0, :8].tolist() == [2, 2, 0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("name", ["mxfp4", "iq4_nl", "nf4", "fp4"])
def test_no_other_value_of_the_table_is_nearer(name):
    format = SIZED[name]
    weights = gaussian(format.block)
    blocks = encode(format, weights)
    fields = format.split(blocks)
    distances = [
        np.abs(decode(format, format.join(fields._replace(codes=np.full_like(fields.codes, code)))) - weights)
        for code in range(16)
    ]
    rounding = 2.0**-10 * np.abs(weights).max(axis=1, keepdims=True)
    assert (np.abs(decode(format, blocks) - weights) <= np.min(distances, axis=0) + rounding).all()


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codes_of_table_values_and_midpoints(name):
    table = np.array(NF4 if name == "nf4" else FP4, np.float32) / np.float32(1 if name == "nf4" else 12)
    weights = np.zeros((1, 64), np.float32)
    weights[0, :16] = table
    ordered = np.sort(np.unique(table))
    midpoints = (ordered[1:] + ordered[:-1]) / 2
    weights[0, 16 : 16 + len(midpoints)] = midpoints
    fields = FORMATS[name].encode(weights)
    values = table[fields.codes[0]]
    assert fields.scale == 1
    np.testing.assert_array_equal(values[:16], table)
    np.testing.assert_array_equal(values[16 : 16 + len(midpoints)], ordered[:-1])


@pytest.mark.parametrize("name", WRITTEN)
def test_error_of_gaussian_weights(name):
    format = SIZED[name]
    weights = gaussian(format.block)
    error = decode(format, encode(format, weights)).astype(np.float64) - weights
    ratio = np.sqrt(np.square(error).mean() / np.square(weights.astype(np.float64)).mean())
    assert ratio == pytest.approx(ERRORS[name], rel=0.02)
