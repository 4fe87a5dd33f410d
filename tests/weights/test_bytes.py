"""Bytes that no encoder writes: every strict decoder refuses them, and names the position."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import TernaryMatrix, ternary_pack, ternary_unpack
from gpu_ops.errors import FormatError
from gpu_ops.reference.weights import ternary_layouts as tl
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.weights.tables import SHAPES, tl1, tl2

NAMES = list(FORMATS)


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


TWO_BIT = {
    "hf_bitnet": (4, 1),
    "bitnet_gpu": (16, 32),
    "i2_s": (1, 128),
    "tq2_0": (1, 256),
    "q2_0": (1, 64),
    "w2": (1, 64),
}


@pytest.mark.parametrize("name", TWO_BIT)
def test_every_byte_with_an_invalid_code_is_refused(name):
    shape, position = TWO_BIT[name], FORMATS[name].scale_first * 2
    good = ternary_pack(np.zeros(shape, np.int8), name)
    bad_code = 0 if name == "bitnet_gpu" else 3
    for byte in range(256):
        packed = good.reshape(-1).copy()
        packed[position] = byte
        codes = [byte >> 2 * i & 3 for i in range(4)]
        if bad_code in codes:
            with pytest.raises(FormatError, match=f"{name}: code {bad_code}"):
                ternary_unpack(packed, shape, name)
            lenient = ternary_unpack(packed, shape, name, strict=False)
            assert lenient.max() == (
                1 if name == "bitnet_gpu" and 3 in codes else 2 if bad_code == 3 else lenient.max()
            )
            assert name != "bitnet_gpu" or lenient.min() == -2
        else:
            assert set(np.unique(ternary_unpack(packed, shape, name))) <= {-1, 0, 1}


def test_base3_refuses_bytes_from_243_on():
    for byte in range(256):
        packed = np.array([byte], np.uint8)
        if byte < 243:
            assert ternary_pack(ternary_unpack(packed, (1, 5), "base3"), "base3")[0, 0] == byte
        else:
            with pytest.raises(FormatError, match=f"base3: value {byte} at"):
                ternary_unpack(packed, (1, 5), "base3")


@pytest.mark.parametrize("position", [0, 31, 32, 47, 48, 51])
def test_tq1_0_refuses_every_byte_that_encodes_no_digits(position):
    good = ternary_pack(np.zeros((1, 256), np.int8), "tq1_0")
    digits = 5 if position < 48 else 4
    step = 1 if digits == 5 else 3
    valid = {-(-q * step * 256 // 243) for q in range(3**digits)}
    assert len(valid) == 3**digits
    if digits == 5:
        assert set(range(256)) - valid == {1, 20, 40, 60, 79, 99, 119, 138, 158, 178, 197, 217, 237}
    for byte in range(256):
        packed = good.copy()
        packed[0, position] = byte
        if byte in valid:
            t = ternary_unpack(packed, (1, 256), "tq1_0")
            assert ternary_pack(t, "tq1_0").tobytes() == packed.tobytes()
        else:
            with pytest.raises(FormatError, match=f"tq1_0: value {byte} at"):
                ternary_unpack(packed, (1, 256), "tq1_0")


def test_planes_refuse_a_weight_that_is_both():
    packed = ternary_pack(np.array([[1, 0, -1]], np.int8), "planes")
    packed[0, 4] |= 1  # the minus bit of weight 0
    with pytest.raises(FormatError, match=r"planes: position \(0, 0\) marks a weight that is both"):
        ternary_unpack(packed, (1, 3), "planes")
    assert ternary_unpack(packed, (1, 3), "planes", strict=False).tolist() == [[0, 0, -1]]


@pytest.mark.parametrize(
    ("name", "shape", "byte", "bits"),
    [
        ("planes", (1, 3), 0, 0b1000),
        ("planes", (1, 3), 7, 0b1),
        ("base3", (1, 3), 0, 27),  # digit 3 becomes 2
        ("hf_bitnet", (3, 1), 0, 0b01000000),
        ("w2", (1, 60), 15, 0b01000000),  # code 63
    ],
)
def test_filled_padding_is_refused(name, shape, byte, bits):
    packed = ternary_pack(np.zeros(shape, np.int8), name).reshape(-1)
    packed[byte] += bits
    with pytest.raises(FormatError, match=f"{name}: the padding"):
        ternary_unpack(packed, shape, name)
    np.testing.assert_array_equal(ternary_unpack(packed, shape, name, strict=False), np.zeros(shape))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_length_is_refused(name, rng):
    shape = SHAPES[name][0]
    packed = ternary_pack(trits(rng, shape), name).reshape(-1)
    for wrong in (packed[:-1], packed[:0], np.append(packed, np.uint8(0))):
        with pytest.raises(
            FormatError, match=f"{name}: shape .* takes {packed.size} bytes, got {wrong.size}"
        ):
            ternary_unpack(wrong, shape, name)
    longer = np.concatenate([packed, np.zeros(32, np.uint8)])
    np.testing.assert_array_equal(
        ternary_unpack(longer, shape, name, strict=False), ternary_unpack(packed, shape, name)
    )
    with pytest.raises(FormatError):
        ternary_unpack(packed[:-1], shape, name, strict=False)


def test_an_i2_s_trailer_is_explained():
    packed = ternary_pack(np.zeros((1, 128), np.int8), "i2_s")
    with pytest.raises(FormatError, match="takes 32 bytes, got 64; a tensor from a file ends in"):
        ternary_unpack(np.concatenate([packed, np.zeros(32, np.uint8)]), (1, 128), "i2_s")


# ---- tl1 and tl2 -------------------------------------------------------------------------------------------

# One position in each of the parts: two nibbles of magnitudes (256 x 96), signs, pairs of the remaining columns.
SHAPE = (256, 128)
MAGNITUDES, SIGNS = 256 * 96 // 6, 256 * 96 // 24


@pytest.mark.parametrize(
    ("name", "position"), [("tl1", 0), ("tl1", -1), ("tl2", MAGNITUDES + SIGNS), ("tl2", -1)]
)
def test_every_byte_that_is_no_two_pairs_is_refused(name, position):
    good = ternary_pack(np.zeros(SHAPE, np.int8), name)
    for byte in range(256):
        packed = good.copy()
        packed[position] = byte
        if byte >> 4 < 9 and byte & 15 < 9:
            assert ternary_pack(ternary_unpack(packed, SHAPE, name), name).tobytes() == packed.tobytes()
            continue
        with pytest.raises(FormatError, match=f"{name}: number .* is not a pair of trits"):
            ternary_unpack(packed, SHAPE, name)
        high, low = byte >> 4 if byte >> 4 < 9 else 4, byte & 15 if byte & 15 < 9 else 4
        packed[position] = high << 4 | low
        lenient = ternary_unpack(packed, SHAPE, name)
        packed[position] = byte
        np.testing.assert_array_equal(ternary_unpack(packed, SHAPE, name, strict=False), lenient)


def test_every_magnitude_above_13_is_refused():
    good = ternary_pack(np.zeros(SHAPE, np.int8), "tl2")
    for byte in range(256):
        packed = good.copy()
        packed[MAGNITUDES - 1] = byte
        if byte >> 4 < 14 and byte & 15 < 14:
            assert ternary_pack(ternary_unpack(packed, SHAPE, "tl2"), "tl2").tobytes() == packed.tobytes()
            continue
        with pytest.raises(
            FormatError, match=r"tl2: number 1[45] of the weights at \(255, 9[03]\.\.\) is not a triple"
        ):
            ternary_unpack(packed, SHAPE, "tl2")
        assert set(np.unique(ternary_unpack(packed, SHAPE, "tl2", strict=False))) <= {-1, 0, 1}


def test_a_minus_zero_is_refused():
    packed = ternary_pack(np.zeros(SHAPE, np.int8), "tl2")
    packed[MAGNITUDES + 1] = 1 << 7  # bit 15 of the first word: row 0, first triple
    with pytest.raises(
        FormatError, match=r"tl2: number 0 of the weights at \(0, 0\.\.\) has the sign of minus zero"
    ):
        ternary_unpack(packed, SHAPE, "tl2")
    assert not ternary_unpack(packed, SHAPE, "tl2", strict=False).any()


@pytest.mark.parametrize(
    "tile", [(256, 128, 32), (128, 64, 64), (160, 64, 32), (320, 128, 64), (320, 64, 32)]
)
def test_tl1_in_every_published_tile(tile, rng):
    assert tile in FORMATS["tl1"].tiles.values()
    t = trits(rng, (2 * tile[0], 2 * tile[1]))
    packed = tl.tl1_encode((t + 1).astype(np.uint8), tile)
    assert packed.tobytes() == tl1(t, tile)
    np.testing.assert_array_equal(tl.tl1_decode(packed, t.shape, tile, True), t)


@pytest.mark.parametrize("tile", [(256, 96, 32), (128, 96, 32), (128, 192, 32), (160, 96, 32), (320, 96, 32)])
def test_tl2_in_every_published_tile(tile, rng):
    assert tile in FORMATS["tl2"].tiles.values()
    t = trits(rng, (2 * tile[0], tile[1] + 64))
    packed = tl.tl2_encode((t + 1).astype(np.uint8), tile)
    assert packed.tobytes() == tl2(t, tile[:2])
    np.testing.assert_array_equal(tl.tl2_decode(packed, t.shape, tile, True), t)


@pytest.mark.parametrize("name", ["tl1", "tl2"])
def test_published_shapes_fit_their_tiles(name):
    fmt = FORMATS[name]
    for shape, tile in fmt.tiles.items():
        rest = shape[1] % tile[1] if name == "tl2" else 0
        bits = (shape[1] - rest) * fmt.bits_per_weight + rest * 2
        assert fmt.packed_shape(shape) == (round(shape[0] * bits / 8),)
    assert fmt.tile((1536, 1536)) != fmt.tile((512, 384)) == (256, fmt.unit_cols, 32)


# ---- sparsity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 127, 128, 129, 1024, 1025, 2500])
def test_chunk_bitmap(k, rng):
    t = np.zeros((5, k), np.int8)
    t[1, 0] = t[2, -1] = 1
    t[3] = np.where(rng.random(k) < 0.002, -1, 0)
    t[4] = 1
    w = TernaryMatrix.from_trits(t, format="planes")
    bits = w.chunk_bitmap()
    assert bits.shape == (5, -(-k // 1024))
    for row in range(5):
        for chunk in range(8 * bits.shape[1]):
            used = t[row, 128 * chunk : 128 * (chunk + 1)].any()
            assert bits[row, chunk // 8] >> chunk % 8 & 1 == used
    assert w.density == np.count_nonzero(t) / t.size


def test_chunk_bitmap_of_nothing():
    assert TernaryMatrix.from_trits(np.zeros((3, 0), np.int8)).chunk_bitmap().shape == (3, 0)
    assert TernaryMatrix.from_trits(np.zeros((0, 300), np.int8)).chunk_bitmap().shape == (0, 1)
