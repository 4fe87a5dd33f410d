"""Packing and unpacking trits on every device: the reference's bytes, and its words for what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from compilers import needs_nvrtc
from fake_cupy import FakeArray

import gpu_ops
from gpu_ops import devices, emulator, ternary_pack, ternary_unpack
from gpu_ops.devices import EmulatorDevice
from gpu_ops.errors import DTypeError, FormatError, ShapeError
from gpu_ops.kernels import ternary_pack as kernels
from gpu_ops.reference import ternary as reference
from gpu_ops.reference.ternary_formats import FORMATS
from gpu_ops.reference.ternary_layouts import LayoutError, decode

DEVICES = ("cpu", "emulator", "cuda")
REFERENCE = {"device": "cpu", "backend": "reference"}
RAW = {"device": "emulator", "backend": "raw"}

WITH_KERNELS = ["w2", "hf_bitnet", "planes", "base3"]
# one weight; rows that end within a unit; whole vectors; more units than threads
SHAPES = [(1, 1), (6, 67), (9, 31), (4, 160), (3, 128), (2, 4500)]


@pytest.fixture(autouse=True)
def _only_backends_that_pack(request):
    """On the CPU packing is NumPy alone."""
    given = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    if given == {"device": "cpu", "backend": "numba"}:
        pytest.skip("packing has no Numba kernels for the CPU")


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_bytes_are_the_references(name, backend, rng):
    for shape in SHAPES:
        t = trits(rng, shape)
        want = reference.ternary_pack(t, name)
        packed = ternary_pack(t, name, **backend)
        assert (packed.dtype, packed.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(packed, want, err_msg=str(shape))
        for strict in (True, False):
            back = ternary_unpack(want, shape, name, strict=strict, **backend)
            assert back.dtype == np.int8
            np.testing.assert_array_equal(back, t, err_msg=str(shape))


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(WITH_KERNELS)))
def test_other_formats_run_on_the_host(name, backend, rng):
    fmt = FORMATS[name]
    t = trits(rng, (fmt.unit_rows, fmt.unit_cols))
    packed = ternary_pack(t, name, **backend)
    assert packed.tobytes() == reference.ternary_pack(t, name).tobytes()
    np.testing.assert_array_equal(ternary_unpack(packed, t.shape, name, **backend), t)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_wherever_the_bytes_lie(name, backend, rng):
    wide, shape = trits(rng, (6, 200)), (6, 96)
    for t in (wide[:, 1:97], wide[::2, 16:112], wide[:, ::2][:, :96], wide.T[:96, :6].T):
        packed = ternary_pack(t, name, **backend)
        np.testing.assert_array_equal(packed, reference.ternary_pack(t, name))
    packed = ternary_pack(wide[:, :96], name)
    for before in (1, 4, 8):
        held = np.zeros(packed.size + before, np.uint8)
        held[before:] = packed.reshape(-1)
        back = ternary_unpack(held[before:], shape, name, **backend)
        np.testing.assert_array_equal(back, wide[:, :96])
    longer = np.append(packed.reshape(-1), np.uint8(255))
    np.testing.assert_array_equal(ternary_unpack(longer, shape, name, strict=False, **backend), wide[:, :96])
    apart = np.zeros((2, *packed.shape), np.uint8).transpose(1, 2, 0)  # not contiguous
    apart[..., 0] = packed
    np.testing.assert_array_equal(ternary_unpack(apart[..., 0], shape, name, **backend), wide[:, :96])


def message(call):
    with pytest.raises(FormatError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_bad_input_is_refused_in_the_references_words(name, backend, rng):
    for shape, where, value in (((5, 40), (4, 39), 2), ((5, 40), (0, 0), -2), ((3, 7), (1, 3), 127)):
        t = trits(rng, shape)
        t[where] = value
        assert message(lambda t=t: ternary_pack(t, name, **backend)) == (
            f"ternary_pack: trits[{where[0]}, {where[1]}] is {value}; a trit is -1, 0 or +1"
        )
    shape = (5, 41)  # padding in every format: rows and columns
    packed = ternary_pack(trits(rng, shape), name)
    for at in (0, packed.size // 2, packed.size - 1):
        bad = packed.copy()
        bad.reshape(-1)[at] = 255
        if name == "planes":  # of either plane
            bad[...] = 255
        found = message(lambda bad=bad: ternary_unpack(bad, shape, name, **backend))
        assert found == message(lambda bad=bad: ternary_unpack(bad, shape, name, **REFERENCE))
        np.testing.assert_array_equal(
            ternary_unpack(bad, shape, name, strict=False, **backend),
            decode(bad, shape, name, strict=False),
        )
    assert "bytes, got" in message(lambda: ternary_unpack(packed[:-1], shape, name, **backend))
    with pytest.raises(DTypeError, match="expected uint8"):
        ternary_unpack(packed.view(np.int8), shape, name, **backend)
    with pytest.raises(DTypeError, match="signed integer"):
        ternary_pack(np.zeros((2, 2), np.uint8), name, **backend)


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


# --- every value of a byte -----------------------------------------------------------------------


@pytest.mark.parametrize("backend_name", ["raw", "numba"])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_flags_of_every_trit(name, backend_name):
    """One value per line, and so per block, which has a flag of its own."""
    t = np.zeros((1024 if name == "hf_bitnet" else 256, 35), np.int8)
    values = np.arange(-128, 128)
    t[:256, 34] = values
    device = EmulatorDevice()
    packed = device.empty(FORMATS[name].packed_shape(t.shape), np.uint8)
    flags = kernels.pack(device, backend_name, t, packed, name)
    np.testing.assert_array_equal(flags != 0, np.abs(values) > 1)


@pytest.mark.parametrize("backend_name", ["raw", "numba"])
@pytest.mark.parametrize("column", [0, -1])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_flags_of_every_packed_byte(name, column, backend_name):
    """Inside and at the end of a line, where some of it is padding; the same trits as the lenient reference."""
    rows, k = (4 if name == "hf_bitnet" else 1), 67
    packed = np.tile(ternary_pack(np.zeros((rows, k), np.int8), name), (256, 1))
    packed[:, column] = np.arange(256)
    if name == "planes":
        packed[:, packed.shape[1] // 2] = 0b101
    device = EmulatorDevice()
    out = device.empty((256 * rows, k), np.int8)
    flags = kernels.unpack(device, backend_name, packed, out, name)
    np.testing.assert_array_equal(flags != 0, [not _sound(line, (rows, k), name) for line in packed])
    np.testing.assert_array_equal(out, decode(packed, out.shape, name, strict=False))


def _sound(line, shape, name):
    try:
        decode(line, shape, name)
    except LayoutError:
        return False
    return True


# --- what they move, and where it stays ------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_each_byte_moves_once(name, rng):
    t = trits(rng, (8, 1280))
    with emulator.record() as profiles:
        packed = ternary_pack(t, name, **RAW)
        ternary_unpack(packed, t.shape, name, **RAW)
    moved = [{b.name: (b.bytes_read, b.bytes_written) for b in p.buffers} for p in profiles]
    assert [moved[0][n] for n in ("trits", "packed")] == [(t.size, 0), (0, packed.size)]
    assert [moved[1][n] for n in ("packed", "trits")] == [(packed.size, 0), (0, t.size)]
    vectors = [i for p in profiles for i in p.instructions if ".v4" in i.form and i.warps]
    assert sum(i.sectors for i in vectors) >= 2 * t.size // 32
    elsewhere = [
        i for p in profiles for i in p.instructions if i.global_requests and i.form != "st.global.u32"
    ]
    assert all(i.sectors_per_128_bytes == 4 for i in elsewhere)  # but for the flags


def test_explain_says_who_packs():
    t = np.zeros((5, 128), np.int8)
    if not devices.compiler_missing("raw"):
        text = str(gpu_ops.explain("ternary_pack", t, "w2", device="emulator"))
        assert "ternary_pack[FORMAT=kW2]: grid 5, block 256" in text
        text = str(
            gpu_ops.explain("ternary_unpack", np.zeros(36, np.uint8), (2, 64), "q2_0", device="emulator")
        )
        assert "NumPy, on the host: q2_0 has no kernel; w2, hf_bitnet, planes, base3 have" in text
    assert "not       numba: packing is NumPy code" in str(gpu_ops.explain("ternary_pack", t, "w2"))


def test_variants_are_few():
    assert len(list(kernels.variants("sm_80"))) == 2 * len(WITH_KERNELS)
    assert set(kernels.LAYOUTS) == set(WITH_KERNELS)


@needs_nvrtc
def test_arrays_on_a_gpu(cupy, rng):
    t = trits(rng, (4, 256))
    for name in ("w2", "q2_0"):
        packed = ternary_pack(FakeArray(t, 1), name)
        assert isinstance(packed, FakeArray)
        assert packed.device.id == 1
        assert packed.host.tobytes() == reference.ternary_pack(t, name).tobytes()
        back = ternary_unpack(packed, t.shape, name)
        assert isinstance(back, FakeArray)
        np.testing.assert_array_equal(back.host, t)
    assert [launch[:2] for launch in cupy.launched] == [
        ("ternary_pack[FORMAT=kW2]", 1), ("ternary_unpack[FORMAT=kW2]", 1),
    ]  # fmt: skip
    np.testing.assert_array_equal(ternary_pack(t, "w2", device="cuda"), reference.ternary_pack(t, "w2"))
    scale = np.array([0.5, 1, 2, 4], np.float32)
    want = reference.ternary_pack(t, "tq2_0", scale=scale)
    np.testing.assert_array_equal(ternary_pack(FakeArray(t), "tq2_0", scale=FakeArray(scale)).host, want)
    np.testing.assert_array_equal(ternary_pack(t, "tq2_0", scale=scale, device="cuda"), want)
    t[3, 200] = 5
    for name in ("w2", "q2_0"):
        assert "trits[3, 200] is 5" in message(lambda name=name: ternary_pack(FakeArray(t), name))
        assert "trits[3, 200] is 5" in message(lambda name=name: ternary_pack(t, name, device="cuda"))
