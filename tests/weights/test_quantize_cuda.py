"""GPU kernels of ternary quantisation: runs of every width, bytes read, and codes that stay on the GPU."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator, ternary_matmul, ternary_pack, ternary_quantize
from gpu_ops.core import device as devices
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.kernels.weights import ternary_quantize as kernels
from gpu_ops.presets import ARCHES
from gpu_ops.reference.weights import ternary as reference
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("emulator", "cuda")

BF16 = np.dtype(ml_dtypes.bfloat16)
RAW = {"device": "emulator", "backend": "raw"}


def check(w, method="absmean", group_size=None, threshold=None, **backend):
    """Check codes and scale against the reference: equal bits, except for a scale whose sum is between two floats."""
    actual = ternary_quantize(w, method=method, group_size=group_size, threshold=threshold, **backend)
    t, scale = reference.ternary_quantize(w, method=method, group_size=group_size, threshold=threshold)
    np.testing.assert_array_equal(actual.trits(), t)
    assert actual.codes.tobytes() == reference.ternary_pack(t, "w2").tobytes()  # padding too
    np.testing.assert_array_max_ulp(actual.scale, scale, 1)
    return actual


@pytest.mark.parametrize(
    ("shape", "group_size", "dtype"),
    [
        ((1, 1), None, np.float32),
        ((3, 1), -1, BF16),
        ((5, 63), -1, np.float32),  # padding of one
        ((7, 65), None, np.float16),
        ((17, 257), -1, BF16),  # a part of a warp, and more
        ((9, 192), 64, BF16),  # 8 threads to a group, 16 to a block, the last block short
        ((2, 1152), 384, np.float32),  # a block to a group, and threads without a vector
        ((2, 9001), -1, BF16),  # three sweeps of a block
        ((3, 9001), None, np.float32),
    ],
    ids=str,
)
def test_shapes_and_widths_of_a_run(shape, group_size, dtype, backend, rng):
    w = random(rng, shape, dtype)
    for method in ("absmean", "meanstd"):
        check(w, method, group_size, **backend)


@needs_nvrtc
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_the_same_bits_wherever_the_weights_lie(dtype, rng):
    w = random(rng, (3, 2100), dtype)
    padded = np.zeros((3, 2101), dtype)
    padded[:, 1:] = w
    for group_size in (None, -1):
        expected = check(w, "twn", group_size, **RAW)
        actual = ternary_quantize(padded[:, 1:], method="twn", group_size=group_size, **RAW)
        assert (actual.codes.tobytes(), actual.scale.tobytes()) == (
            expected.codes.tobytes(),
            expected.scale.tobytes(),
        )
    check(w[:, ::-1], **RAW)


@needs_nvrtc
def test_sums_are_double_and_wide(rng):
    """A large weight before many small ones, which float sums would lose; numbers at the ends of the float range."""
    w = np.full((1, 8192), 2.0**-12, np.float32)
    w[0, 0] = 2.0**13
    assert check(w, **RAW).scale == np.float32((2.0**13 + 8191 * 2.0**-12) / 8192)
    check(random(rng, (2, 100), np.float32, 1e38), "twn", **RAW)
    check(random(rng, (2, 100), np.float32, 1e-41), "meanstd", -1, threshold=1.0, **RAW)


@needs_nvrtc
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("group_size", [None, -1, 128])
def test_weights_are_read_twice_and_codes_written_once(dtype, group_size, rng):
    w = random(rng, (4, 2048), dtype)
    for method in ("absmean", "absmax"):
        with emulator.record() as profiles:
            ternary_quantize(w, method=method, group_size=group_size, **RAW)
        buffers = [b for p in profiles for b in p.buffers]
        weights = [i for p in profiles for i in p.instructions if ".v4" in i.form and i.global_requests]
        assert 128 * sum(i.sectors for i in weights) == 4 * 2 * w.nbytes  # sectors of 32 bytes
        assert all(i.sectors_per_128_bytes == 4 for i in weights)
        written = [b.bytes_written for b in buffers if b.name == "codes" and b.bytes_written]
        assert written == [w.size // 4]
        stores = [i for p in profiles for i in p.instructions if i.form == "st.global.u32" and i.warps]
        assert stores
        assert all(i.sectors_per_128_bytes == 4 for i in stores), "4 bytes of a thread, side by side"


@pytest.mark.parametrize(
    ("shape", "group_size", "dtype"),
    [
        ((1, 1), None, np.float32),
        ((3, 9), -1, np.float16),
        ((9, 192), 64, BF16),  # 7 bits at a time, the last block short
        ((5, 640), 128, np.float32),
        ((2, 1152), 384, np.float16),
        ((2, 4500), -1, np.float32),  # 11 bits, a block to a run
        ((7, 300), None, np.float32),
        ((40, 65), None, BF16),
    ],
    ids=str,
)
def test_a_percentile_is_numpys(shape, group_size, dtype, backend, rng):
    w = random(rng, shape, dtype)
    few = np.round(w.astype(np.float32) * 2).astype(dtype)  # few distinct values, each of many weights
    for values, threshold in ((w, 50), (w, 99.7), (few, 37.3), (few, 0), (w, 100)):
        check(values, "percentile", group_size, threshold, **backend)


def test_a_percentile_of_the_ends_of_a_range(backend, rng):
    """Test subnormal numbers, the largest ones, zeros of either sign, and a limit equal to both neighbours."""
    w = np.array([[1e-45, -1e-45, 1e-40, 0.0, -0.0, 3e38, -3e38, 1.0]], np.float32)
    for threshold in (0, 12.5, 30, 45, 60, 80, 99, 100):
        check(w, "percentile", -1, threshold, **backend)
    check(np.full((4, 64), -2.5, np.float32), "percentile", None, 73, **backend)


@pytest.mark.parametrize(
    ("size", "percentile"), [(1, 50), (2, 99.9999), (8192, 33.3), (4096 * 4096, 99.99), (7, 100)]
)
def test_neighbours_are_numpys(size, percentile):
    rank, share = kernels.neighbours(size, percentile)
    assert 0 <= rank < size
    assert 0 <= share < 1
    assert rank + share == pytest.approx((size - 1) * percentile / 100, rel=1e-12)


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "readings"), [(BF16, 3), (np.float16, 3), (np.float32, 4)], ids=str)
def test_a_percentile_reads_the_tensor_a_few_times(dtype, readings, rng):
    w = random(rng, (4, 2048), dtype)
    with emulator.record() as profiles:
        ternary_quantize(w, method="percentile", **RAW)
    assert sum(b.bytes_read for p in profiles for b in p.buffers if b.name == "w") == readings * w.nbytes
    weights = [i for p in profiles for i in p.instructions if ".v4" in i.form and i.global_requests > 1]
    assert all(i.sectors_per_128_bytes == 4 for i in weights)


def test_every_run_has_threads():
    for run in (1, 64, 100, 128, 192, 256, 257, 512, 4096, 9001):
        for itemsize in (2, 4):
            threads, per_block = kernels.block_shape(run, itemsize)
            assert threads * per_block == 128
            assert threads == 128 or threads * 16 >= itemsize * run
            assert threads * 16 >= 64 * itemsize, "the codes of a word come from threads of one run"


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_variants_are_few_and_fit(arch):
    listed = list(kernels.variants(arch))
    assert len({v.kernel for v in listed}) == len(listed) <= 24
    assert all(v.threads_per_block <= ARCHES[arch].max_threads_per_block for v in listed)


@needs_nvrtc
def test_codes_stay_on_the_gpu(cupy, rng, monkeypatch):
    w, x = random(rng, (8, 100), np.float32), random(rng, (2, 100), np.float32)
    fetched = []
    asnumpy = cupy.asnumpy
    monkeypatch.setattr(cupy, "asnumpy", lambda a: fetched.append(a.shape) or asnumpy(a))
    for weights, options in ((FakeArray(w), {}), (w, {"device": "cuda"})):
        fetched.clear()
        matrix = ternary_quantize(weights, group_size=-1, **options)
        assert fetched == [(8, 1)], "its scales alone"
        y = ternary_matmul(FakeArray(x), matrix)
        assert "scale per row" in repr(matrix)
        assert matrix.nbytes == 8 * 32 + 8 * 4
        assert fetched == [(8, 1)]
        t, scale = reference.ternary_quantize(w, group_size=-1)
        np.testing.assert_array_equal(y.host, reference.ternary_matmul(x, t, scale))
        fetched.clear()
        np.testing.assert_array_equal(matrix.trits(), t)
        assert fetched[-1] == (8, 100), "trits come unpacked"
        assert (8, 32) not in fetched
        assert matrix.codes.tobytes() == ternary_pack(t, "w2").tobytes()
        assert fetched[-1] == (8, 32)
        with pytest.raises(ValueError, match="read-only"):
            matrix.codes[0, 0] = 1
        with pytest.raises(AttributeError, match="'TernaryMatrix' object has no attribute 'weights'"):
            matrix.weights  # noqa: B018
    w[3, 3] = np.nan
    with pytest.raises(OptionError, match="NaN or infinity"):
        ternary_quantize(FakeArray(w))


@needs_nvrtc
@pytest.mark.parametrize("name_of_backend", ["raw", pytest.param("numba", marks=pytest.mark.slow)])
def test_a_matrix_on_a_gpu_is_converted_there(cupy, rng, monkeypatch, name_of_backend):
    w = random(rng, (256, 256), np.float32)
    t, scale = reference.ternary_quantize(w, group_size=128)
    matrix = ternary_quantize(FakeArray(w, 1), group_size=128, backend=name_of_backend)
    fetched = []
    asnumpy = cupy.asnumpy
    monkeypatch.setattr(cupy, "asnumpy", lambda a: fetched.append(a.size) or asnumpy(a))
    for name, fmt in FORMATS.items():
        other = matrix.to(name)
        back = other.to("w2").to("w2")
        assert sum(fetched) < 1000, "flags alone"
        assert (other.format, back.format) == (name, "w2")
        assert other.nbytes == math.prod(fmt.packed_shape(w.shape)) + scale.nbytes
        np.testing.assert_array_equal(other.scale, scale)
        assert back.codes.tobytes() == ternary_pack(t, "w2").tobytes()
        assert other.codes.tobytes() == ternary_pack(t, name).tobytes()
        np.testing.assert_array_equal(other.dequantize(), t * np.repeat(scale, 128, axis=1))
        fetched.clear()
    assert {device for _, device, _ in cupy.launched} == {1}
    with pytest.raises(ShapeError, match="K % 256 == 0"):
        ternary_quantize(FakeArray(w[:, :64]), backend=name_of_backend).to("tq1_0")


def test_explain_says_what_is_launched():
    text = str(
        gpu_ops.explain("ternary_quantize", np.ones((9, 256), np.float32), group_size=64, device="emulator")
    )
    if not devices.compiler_missing("raw"):
        assert "ternary_quantize_runs float32: grid 5, block 16 x 8" in text
