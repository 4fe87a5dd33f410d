"""Packing and unpacking trits on every device: bytes and error messages of the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator, ternary_pack, ternary_unpack
from gpu_ops.core import device as devices
from gpu_ops.errors import DTypeError, FormatError, ShapeError
from gpu_ops.kernels.weights import ternary_pack as kernels
from gpu_ops.reference.weights import ternary as reference
from gpu_ops.reference.weights.ternary_formats import FORMATS
from gpu_ops.reference.weights.ternary_layouts import LayoutError, decode, tl1_encode, tl2_encode
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray
from tests.support.programs import run_program

DEVICES = ("cpu", "emulator", "cuda")
REFERENCE = {"device": "cpu", "backend": "reference"}
RAW = {"device": "emulator", "backend": "raw"}

NAMES = list(FORMATS)
# Lines: one weight; rows that end within a unit; whole vectors; more units than threads, or than a block takes.
LINES = [(1, 1), (6, 67), (9, 31), (4, 160), (3, 128), (2, 4500), (1, 20500)]
SHAPES = dict.fromkeys(("w2", "hf_bitnet", "planes", "base3"), LINES) | {
    "i2_s": [(2, 192), (3, 128), (1, 65664)],
    "bitnet_gpu": [(16, 32), (48, 160), (16, 1056)],
    **{name: [(1, 256), (3, 512), (3, 3328)] for name in ("tq1_0", "tq2_0")},  # a block; fewer than 32; more
    "q2_0": [(1, 64), (5, 128), (3, 704)],
    "tl1": [(256, 128), (512, 256)],
    "tl2": [(256, 96), (256, 160), (512, 64)],  # triples, triples and pairs, an odd number of tiles of pairs
}
STRIDED = dict.fromkeys(NAMES, (6, 96)) | {
    "bitnet_gpu": (16, 96),
    "i2_s": (4, 96),
    "q2_0": (3, 128),
    **dict.fromkeys(("tq1_0", "tq2_0"), (3, 512)),
    **dict.fromkeys(("tl1", "tl2"), (256, 128)),
}
BAD = {"tq1_0": 1, "bitnet_gpu": 0}  # an invalid byte; 255 for other formats


def runs(case):
    """Whether a case runs: on the CPU packing has NumPy only."""
    return case["backend"] != {"device": "cpu", "backend": "numba"}


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_references(name, backend, rng):
    for shape in SHAPES[name]:
        t = trits(rng, shape)
        expected = reference.ternary_pack(t, name)
        packed = ternary_pack(t, name, **backend)
        assert (packed.dtype, packed.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(packed, expected, err_msg=str(shape))
        back = ternary_unpack(expected, shape, name, **backend)
        assert back.dtype == np.int8
        np.testing.assert_array_equal(back, t, err_msg=str(shape))


@pytest.mark.parametrize("name", NAMES)
def test_wherever_the_bytes_lie(name, backend, rng):
    rows, columns = shape = STRIDED[name]
    array = trits(rng, (2 * rows, columns + 48))
    for t in (array[:rows, 1 : columns + 1], array[::2, 16 : columns + 16], array[:rows, ::-1][:, :columns]):
        packed = ternary_pack(t, name, **backend)
        np.testing.assert_array_equal(packed, reference.ternary_pack(t, name))
    t = array[:rows, :columns]
    packed = ternary_pack(t, name)
    for before in (1, 4):
        held = np.zeros(packed.size + before, np.uint8)
        held[before:] = packed.reshape(-1)
        np.testing.assert_array_equal(ternary_unpack(held[before:], shape, name, **backend), t)
    longer = np.append(packed.reshape(-1), np.uint8(255))
    np.testing.assert_array_equal(ternary_unpack(longer, shape, name, strict=False, **backend), t)
    strided = np.zeros((2, *packed.shape), np.uint8).T  # not contiguous
    strided[..., 0] = packed.T
    np.testing.assert_array_equal(ternary_unpack(strided[..., 0].T, shape, name, **backend), t)


def message(call):
    with pytest.raises(FormatError) as caught:
        call()
    return str(caught.value)


def outcome(call):
    """Result of a call, or its error message."""
    try:
        return call()
    except FormatError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_bad_trits_are_refused_in_the_references_words(name, backend, rng):
    rows, columns = shape = STRIDED[name]
    for where, value in (((rows - 1, columns - 1), 2), ((0, 0), -2), ((1, 3), 127)):
        t = trits(rng, shape)
        t[where] = value
        assert message(lambda t=t: ternary_pack(t, name, **backend)) == (
            f"ternary_pack: trits[{where[0]}, {where[1]}] is {value}; a trit is -1, 0 or +1"
        )
    with pytest.raises(DTypeError, match="signed integer"):
        ternary_pack(np.zeros(shape, np.uint8), name, **backend)


@pytest.mark.parametrize("name", NAMES)
def test_bad_bytes_are_refused_in_the_references_words(name, backend, rng):
    fmt = FORMATS[name]
    shape = (5, 41) if fmt.pads else STRIDED[name]  # padding of rows and columns
    packed = ternary_pack(trits(rng, shape), name)
    refused = 0
    for at in (2, packed.size // 2, packed.size - 1):
        bad = packed.copy()
        bad.reshape(-1)[at] = BAD.get(name, 255)
        if name == "planes":  # in either plane
            bad[...] = 255
        expected = outcome(lambda bad=bad: ternary_unpack(bad, shape, name, **REFERENCE))
        actual = outcome(lambda bad=bad: ternary_unpack(bad, shape, name, **backend))
        np.testing.assert_array_equal(actual, expected)
        refused += isinstance(expected, str)
        actual = ternary_unpack(bad, shape, name, strict=False, **backend)
        np.testing.assert_array_equal(actual, decode(bad, shape, name, strict=False))
    assert refused >= 2
    assert "bytes, got" in message(lambda: ternary_unpack(packed.reshape(-1)[:-1], shape, name, **backend))
    with pytest.raises(DTypeError, match="expected uint8"):
        ternary_unpack(packed.view(np.int8), shape, name, **backend)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_decode_as_the_reference_does(name, backend, rng):
    """Decode random bytes; the sanitizer of the emulator would report an access outside."""
    shape = (5, 41) if FORMATS[name].pads else STRIDED[name]
    size = math.prod(FORMATS[name].packed_shape(shape))
    for values in (256, 16):
        noise = rng.integers(0, values, size).astype(np.uint8)
        actual = ternary_unpack(noise, shape, name, strict=False, **backend)
        np.testing.assert_array_equal(actual, decode(noise, shape, name, strict=False))
        expected = outcome(lambda noise=noise: ternary_unpack(noise, shape, name, **REFERENCE))
        actual = outcome(lambda noise=noise: ternary_unpack(noise, shape, name, **backend))
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0", "q2_0"])
def test_embedded_scales(name, backend, rng):
    block = FORMATS[name].block_scale
    t = trits(rng, (5, 3 * block))
    whole = rng.uniform(-2, 2, (5, 6)).astype(np.float32)
    for scale in (
        0.3,
        -2.0,
        whole[:, 0].copy(),
        whole[:, :3],
        whole[:, ::2],
        whole.astype(np.float64)[:, 3:],
    ):
        packed = ternary_pack(t, name, scale=scale, **backend)
        np.testing.assert_array_equal(packed, ternary_pack(t, name, scale=scale, **REFERENCE))
    whole[4, 2] = 65520.0  # rounds to infinity
    for scale in (whole[:, :3], np.nan):
        call = message(lambda scale=scale: ternary_pack(t, name, scale=scale, **backend))
        assert call.startswith("ternary_pack: scale does not fit fp16")


def test_empty_and_wide_integers(backend, rng):
    for shape in ((0, 5), (4, 0)):
        assert ternary_pack(np.zeros(shape, np.int8), "w2", **backend).size == 0
        assert ternary_unpack(np.zeros(0, np.uint8), shape, "w2", **backend).shape == shape
    t = trits(rng, (3, 20)).astype(np.int64)
    np.testing.assert_array_equal(ternary_pack(t, "w2", **backend), reference.ternary_pack(t, "w2"))
    t[2, 2] = 256  # 0 in eight bits
    assert "trits[2, 2] is 256" in message(lambda: ternary_pack(t, "w2", **backend))
    with pytest.raises(ShapeError, match="K % 256 == 0"):
        ternary_pack(np.zeros((3, 20), np.int8), "tq2_0", **backend)


def run(which, backend_name, trits, packed, name, tile=()):
    """Flags of errors, from the kernels alone."""
    written = "packed" if which == "pack" else "trits"
    options = {"format": name, "tile": tile, "by_numpy": "", "need": packed.size}
    arrays = {"trits": trits, "packed": packed}
    return run_program(f"ternary_{which}", backend_name, arrays, options, results=(written,))["flags"]


# ---- tiles of every size -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend_name", ["raw", "numba"])
@pytest.mark.parametrize("name", ["tl1", "tl2"])
def test_tiles_of_every_size(name, backend_name, rng):
    encode = {"tl1": tl1_encode, "tl2": tl2_encode}[name]
    for tile in sorted(set(FORMATS[name].tiles.values())):
        rows, columns, _ = tile
        t = trits(rng, (2 * rows, columns + (columns if name == "tl1" else 64)))
        expected = encode((t + 1).astype(np.uint8), tile)
        packed, back = np.empty(expected.shape, np.uint8), np.empty(t.shape, np.int8)
        assert not run("pack", backend_name, t, packed, name, tile).any()
        np.testing.assert_array_equal(packed, expected, err_msg=str(tile))
        assert not run("unpack", backend_name, back, packed, name, tile).any()
        np.testing.assert_array_equal(back, t, err_msg=str(tile))


# ---- every value of a byte ---------------------------------------------------------------------------------


LINE_PER_BLOCK = ["w2", "hf_bitnet", "planes", "base3"]


@pytest.mark.parametrize("backend_name", ["raw", "numba"])
@pytest.mark.parametrize("name", LINE_PER_BLOCK)
def test_flags_of_every_trit(name, backend_name):
    """Test one value per line, and so per block, which has a separate flag."""
    t = np.zeros((1024 if name == "hf_bitnet" else 256, 35), np.int8)
    values = np.arange(-128, 128)
    t[:256, 34] = values
    packed = np.empty(FORMATS[name].packed_shape(t.shape), np.uint8)
    flags = run("pack", backend_name, t, packed, name)
    np.testing.assert_array_equal(flags != 0, np.abs(values) > 1)


@pytest.mark.parametrize("backend_name", ["raw", "numba"])
@pytest.mark.parametrize("column", [0, -1])
@pytest.mark.parametrize("name", LINE_PER_BLOCK)
def test_flags_of_every_packed_byte(name, column, backend_name):
    """Bytes inside and at the end of a line, which is partly padding, give the trits of the lenient reference."""
    rows, k = (4 if name == "hf_bitnet" else 1), 67
    packed = np.tile(ternary_pack(np.zeros((rows, k), np.int8), name), (256, 1))
    packed[:, column] = np.arange(256)
    if name == "planes":
        packed[:, packed.shape[1] // 2] = 0b101
    out = np.empty((256 * rows, k), np.int8)
    flags = run("unpack", backend_name, out, packed, name)
    np.testing.assert_array_equal(flags != 0, [not _sound(line, (rows, k), name) for line in packed])
    np.testing.assert_array_equal(out, decode(packed, out.shape, name, strict=False))


@pytest.mark.parametrize("backend_name", ["raw", "numba"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(LINE_PER_BLOCK)))
def test_every_packed_byte(name, backend_name, rng):
    """Test all values of one byte, each in a separate matrix: valid ones together, others alone."""
    fmt = FORMATS[name]
    unit = {"bitnet_gpu": (16, 32), "i2_s": (1, 128), "tl1": (256, 128), "tl2": (256, 128)}.get(
        name, (1, fmt.unit_cols)
    )
    tile = fmt.tile(unit) if fmt.tiles else ()
    zeros = ternary_pack(np.zeros(unit, np.int8), name).reshape(-1)
    places = {"tq1_0": (0, 40, 50), "q2_0": (2,), "tl2": (0, -1)}.get(name, (0,))  # bytes of codes only
    for at in places:
        ones = np.tile(zeros, (256, 1))
        ones[:, at] = np.arange(256)
        sound = np.array([_sound(line, unit, name) for line in ones])
        assert 0 < sound.sum() < 256
        batches = [ones[sound][:4], *ones[~sound][:: max(1, (~sound).sum() // 4)]]
        many = ones[:32] if fmt.tiles else ones
        for lines, lenient in [(many, True), *((lines.reshape(-1, zeros.size), False) for lines in batches)]:
            if fmt.tiles:
                lines = lines[:1]
            out = np.empty((len(lines) * unit[0], unit[1]), np.int8)
            flags = run("unpack", backend_name, out, np.ascontiguousarray(lines), name, tile)
            np.testing.assert_array_equal(out, decode(lines, out.shape, name, strict=False))
            if not lenient:
                assert flags.any() != _sound(lines, out.shape, name)


def _sound(line, shape, name):
    try:
        decode(line, shape, name)
    except LayoutError:
        return False
    return True


# ---- traffic, and device of the results --------------------------------------------------------------------


FULL = {"tl1": (256, 128), "tl2": (256, 96), "base3": (8, 1280)}


@needs_nvrtc
@pytest.mark.parametrize("name", NAMES)
def test_each_byte_moves_once_and_no_lanes_meet_in_a_bank(name, rng):
    t = trits(rng, FULL.get(name, (16, 1024)))
    with emulator.record() as profiles:
        packed = ternary_pack(t, name, **RAW)
        ternary_unpack(packed, t.shape, name, **RAW)
    moved = [{b.name: (b.bytes_read, b.bytes_written) for b in p.buffers} for p in profiles]
    assert [moved[0][n] for n in ("trits", "packed")] == [(t.size, 0), (0, packed.size)]
    assert [moved[1][n] for n in ("packed", "trits")] == [(packed.size, 0), (0, t.size)]
    vectors = [i for p in profiles for i in p.instructions if ".v4" in i.form and i.global_requests]
    assert sum(i.sectors for i in vectors) >= 2 * t.size // 32
    for p in profiles:
        assert p.counts.replays == 0
        for i in p.instructions:
            single = i.global_bytes == 4 * i.global_requests  # the flags, or a single scale
            assert (
                not i.global_requests or single or i.sectors_per_128_bytes <= 4 or i.form == "ld.global.f32"
            )


def test_explain_says_who_packs():
    t = np.zeros((5, 128), np.int8)
    if not devices.compiler_missing("raw"):
        text = str(gpu_ops.explain("ternary_pack", t, "w2", device="emulator"))
        assert "ternary_pack w2: grid 5, block 256" in text
        packed = np.zeros(36, np.uint8)
        text = str(gpu_ops.explain("ternary_unpack", packed, (2, 64), "q2_0", device="emulator"))
        assert "ternary_unpack_blocks q2: grid 1, block 256" in text
        text = str(gpu_ops.explain("ternary_pack", np.zeros((256, 160), np.int8), "tl2", device="emulator"))
        for kernel in ("tl2", "tl2pairs"):
            assert f"ternary_pack_tiles {kernel}: grid 2, block 128" in text
        text = str(gpu_ops.explain("ternary_pack", t.astype(np.int64), "w2", device="emulator"))
        assert "NumPy, on the host: trits are int64" in text
    assert "not       numba: packing is NumPy code" in str(gpu_ops.explain("ternary_pack", t, "w2"))


def test_variants_are_few():
    listed = [variant.kernel for variant in kernels.variants("sm_80")]
    assert len(set(listed)) == len(listed) == 2 * (len(NAMES) + 1)  # tl2 has two
    assert {*kernels.LINES, *kernels.BLOCKS, "tl1", "tl2"} == set(NAMES)


# Packing and unpacking of CUDA arrays, on the fake CuPy.


@needs_nvrtc
def test_arrays_on_a_gpu(cupy, rng):
    t = rng.integers(-1, 2, (4, 256)).astype(np.int8)
    for name in ("w2", "q2_0"):
        packed = ternary_pack(FakeArray(t, 1), name)
        assert isinstance(packed, FakeArray)
        assert packed.device.id == 1
        assert packed.host.tobytes() == reference.ternary_pack(t, name).tobytes()
        back = ternary_unpack(packed, t.shape, name)
        assert isinstance(back, FakeArray)
        np.testing.assert_array_equal(back.host, t)
    names = ("[FORMAT=kW2]", "_blocks[FORMAT=kQ2]")
    launched = [(f"ternary_{way}{kernel}", 1) for kernel in names for way in ("pack", "unpack")]
    assert [launch[:2] for launch in cupy.launched] == launched
    np.testing.assert_array_equal(ternary_pack(t, "w2", device="cuda"), reference.ternary_pack(t, "w2"))
    expected = reference.ternary_pack(t, "tq2_0", scale=(scale := np.array([0.5, 1, 2, 4], np.float32)))
    np.testing.assert_array_equal(ternary_pack(FakeArray(t), "tq2_0", scale=FakeArray(scale)).host, expected)
    np.testing.assert_array_equal(ternary_pack(t, "tq2_0", scale=scale, device="cuda"), expected)
    t[3, 200] = 5
    for name in ("w2", "q2_0"):
        assert "trits[3, 200] is 5" in message(lambda name=name: ternary_pack(FakeArray(t), name))
        assert "trits[3, 200] is 5" in message(lambda name=name: ternary_pack(t, name, device="cuda"))
