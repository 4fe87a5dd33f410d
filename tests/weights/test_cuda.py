"""GPU kernels of the ternary matmul: exact sums in every kernel and tile, bytes read, instructions."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import TernaryMatrix, emulator, ternary_matmul
from gpu_ops.core.device import EmulatorDevice
from gpu_ops.errors import DeviceError
from gpu_ops.kernels.weights import ternary as kernels
from gpu_ops.kernels.weights.ternary_config import gemv_config
from gpu_ops.reference.weights import ternary as reference
from tests.emulator.machine_loops import INTEGER, loop
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc, needs_ptxas
from tests.support.fake_cupy import FakeArray
from tests.support.programs import run_part, run_program

DEVICES = ("cpu", "emulator", "cuda")
BF16 = np.dtype(ml_dtypes.bfloat16)

# (M, N): one token, few tokens, one token more than the GEMV takes, all tiles of the GEMM, whole and ragged
SIZES = [
    (1, 1),
    (1, 150),
    (2, 33),
    (3, 8),
    (4, 19),
    (5, 32),
    (16, 70),
    (17, 5),
    (32, 64),
    (33, 65),
    (64, 64),
    (130, 9),
]
KS = [1, 63, 64, 65, 128, 192, 640, 1000, 2048, 2049, 4096, 8191, 16384]
SCALES = ("tensor", "row", "group")
FORMATS = ("w2", "planes", "base3", "hf_bitnet")
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BF16)


def quick_on_emulator(raw):
    return {"test_sums_are_exact": {"k": {1, 63, 65, 128, 8191} if raw else {65}}}


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


# Few rows and a large K, so that its sums are divided among warps of the GEMV, and among blocks of the GEMM.
DIVIDED = {
    4096: [(1, 5), (2, 20)],
    8191: [(1, 3), (3, 40), (20, 40), (40, 33)],
    16384: [(4, 2), (9, 30), (34, 17)],
}


def problems(k):
    """Problems (M, N, kind of scale, format, dtype): 24 for most K, all different."""
    first = KS.index(k)
    sizes = (2 * SIZES if k < 16384 else []) + DIVIDED.get(k, [])
    return [
        (*size, SCALES[j % 3], FORMATS[j % 4], (*DTYPES, BF16)[j % 4])
        for j, size in [(first + i + i // len(SIZES), size) for i, size in enumerate(sizes)]
    ]


def test_there_are_more_than_200_problems():
    assert len({(k, *problem) for k in KS for problem in problems(k)}) > 200


@pytest.mark.parametrize("k", KS)
def test_sums_are_exact(k, backend, rng):
    """Tokens that quantise to themselves and power-of-two scales allow no tolerance."""
    for m, n, scale_kind, fmt, dtype in problems(k):
        group = {128: 64, 192: 64, 640: 128, 2048: 64, 4096: 512, 16384: 256}.get(k)
        x, t = rng.integers(-127, 128, (m, k)), trits(rng, (n, k))
        x[:, 0] = 127
        shape = (
            ()
            if scale_kind == "tensor"
            else (n,)
            if scale_kind == "row" or group is None
            else (n, k // group)
        )
        scale = np.float32(2.0) ** rng.integers(-2, 2, shape).astype(np.float32)
        w = TernaryMatrix.from_trits(t, scale, format=fmt)
        y = ternary_matmul(x.astype(dtype), w, **backend)
        weights = 4 * w.dequantize(np.float64)  # whole numbers
        expected = (x @ weights.astype(np.int64).T / 4).astype(np.float32)
        assert y.dtype == dtype
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(
                y, expected.astype(dtype), err_msg=f"{m} x {n} x {k} {scale_kind} {fmt}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("value", [-127, 127])
def test_the_longest_k(value):
    """A sum of 2^23 codes of 2 times 127 is 2^31 - 2^24."""
    w = TernaryMatrix.from_trits(np.ones((1, 1 << 23), np.int8))
    x = np.full((1, 1 << 23), value, np.float32)
    y = ternary_matmul(x, w, device="emulator", backend="raw")
    assert y[0, 0] == np.float32(value << 23)


def test_longer_k_is_refused():
    w = TernaryMatrix.from_trits(np.zeros((1, (1 << 23) + 1), np.int8))
    x = np.zeros((1, (1 << 23) + 1), np.float32)
    with pytest.raises(DeviceError, match=r"raw: K=8388609: int32 sums hold 2\^23 products"):
        ternary_matmul(x, w, device="emulator", backend="raw")


@pytest.mark.parametrize("m", [1, 2, 4, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_have_the_bits_of_the_reference(dtype, m, rng):
    """Quantisation, sums, scales and the rounding of the result match the reference."""
    for n, k, per_row in ((96, 333, True), (128, 512, False)):
        t, x = trits(rng, (n, k)), random(rng, (m, k), dtype)
        scale = rng.uniform(0.1, 2, n).astype(np.float32) if per_row else np.float32(0.37)
        y = ternary_matmul(x, TernaryMatrix.from_trits(t, scale), device="emulator")
        np.testing.assert_array_equal(y, reference.ternary_matmul(x, t, np.asarray(scale)))


@pytest.mark.parametrize("backend_name", ["raw", "numba"])
@pytest.mark.parametrize("m", [4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_are_rounded_as_in_double_precision(dtype, m, backend_name):
    """Test halves of the quantisation step, and their neighbours on either side."""
    halves = (np.arange(-127, 127) + 0.5) / 127
    for absmax in (1.0, 0.7, 3e-6, 127.0, 30000.0):
        near = np.float64(absmax) * halves
        eps = float(ml_dtypes.finfo(dtype).eps)
        x = np.stack([near * (1 + i * eps) for i in range(-2, m - 2)]).astype(dtype)
        x = np.concatenate([x, np.full((m, 2), absmax, dtype)], axis=1)
        t = np.eye(256, dtype=np.int8)
        y = ternary_matmul(x, TernaryMatrix.from_trits(t), device="emulator", backend=backend_name)
        if backend_name == "numba" and dtype == np.float16:  # its results are rounded through float32
            np.testing.assert_allclose(y, reference.ternary_matmul(x, t, np.float32(1)), rtol=1e-3)
        else:
            np.testing.assert_array_equal(y, reference.ternary_matmul(x, t, np.asarray(np.float32(1))))


@pytest.mark.parametrize("group", [None, 64, 192])
def test_quantised_tokens_and_their_sums(group, rng):
    x = random(rng, (6, 1152), np.float32)
    x[1], x[2, 7], x[3, 9] = 0, np.nan, np.inf
    made, views = run_part(kernels._quantized, {"x": x[:, :1100]}, 1100, group is not None)
    q, sums, inverse = (views[t.name] for t in made)
    expected, want_inverse = reference.quantize_activations(x[:, :1100])
    np.testing.assert_array_equal(q, np.pad(expected, ((0, 0), (0, 52))))
    np.testing.assert_array_equal(inverse, want_inverse)
    padded = np.pad(expected, ((0, 0), (0, 52))).astype(int)
    np.testing.assert_array_equal(sums, padded.sum(1) if group is None else padded.reshape(6, -1, 64).sum(2))


# ---- traffic and instructions ------------------------------------------------------------------------------


def profiles_of(m, n, k, dtype, activations="int8", group=None, sms=None):
    """Profiles of the launches of a matmul; ``sms``: number of SMs of the card."""
    rng = np.random.default_rng(3)
    scale = np.float32(1) if group is None else np.ones((n, k // group), np.float32)
    w = TernaryMatrix.from_trits(trits(rng, (n, k)), scale)
    x, y = random(rng, (m, k), dtype), np.empty((m, n), dtype)
    return multiply(x, w, y, activations, sms)


def multiply(x, w, y, activations, sms=None):
    """Fill ``y`` with the CUDA C++ kernels; return the profiles of the launches."""
    device = EmulatorDevice()
    device.limits = replace(device.limits, sms=sms or device.limits.sms)
    codes, scale = w.on(None)
    arrays = {"x": x, "w.codes": codes, "w.scale": scale, "y": y}
    options = {"k": w.shape[1], "activations": activations}
    with emulator.record() as profiles:
        run_program("ternary_matmul", "raw", arrays, options, results=("y",), device=device)
    return profiles


@pytest.mark.parametrize(("m", "n", "k"), [(1, 640, 2048), (1, 64, 4096), (2, 100, 1024), (4, 96, 2048)])
def test_gemv_reads_each_packed_byte_once(m, n, k):
    (profile,) = profiles_of(m, n, k, BF16, sms=2)
    codes = next(b for b in profile.buffers if b.name == "w.codes")
    # otherwise the last rows are computed as a whole, some twice
    assert n % gemv_config(m, n, k, 1, sms=2).rows == 0
    assert codes.bytes_read == n * k // 4
    weights = [i for i in profile.instructions if ".cs" in i.form and i.global_requests]
    assert weights
    assert all(".v4" in i.form and i.sectors_per_128_bytes == 4 for i in weights)


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "activations", "group"),
    [
        (1, 40, 2048, BF16, "int8", None),
        (4, 40, 2048, np.float32, "int8", 64),
        (16, 64, 1024, BF16, "int8", None),
        (32, 64, 1024, BF16, "int8", 128),
        (64, 64, 512, np.float32, "int8", None),
        (16, 64, 512, np.float16, "native", None),
        (64, 64, 256, BF16, "native", 64),
        (32, 64, 256, np.float32, "native", None),
        (64, 64, 256, np.float32, "native", None),
    ],
    ids=str,
)
def test_no_bank_conflicts_and_no_idle_products(m, n, k, dtype, activations, group):
    for profile in profiles_of(m, n, k, dtype, activations, group):
        shared = [i for i in profile.instructions if i.waves]
        assert not [i.ptx for i in shared if i.waves > i.phases]
        if profile.name == "ternary_gemm":
            split = 2 if activations == "native" and dtype == np.float32 else 1
            assert sum(profile.multiply_adds.values()) == split * m * n * k


def test_the_large_tile_on_tensor_cores(rng):
    """The tile of 128 x 128 is exact, without conflicts or needless products."""
    t, x = trits(rng, (256, 192)), rng.integers(-127, 128, (128, 192))
    x[:, 0] = 127
    for activations, dtype in (("int8", BF16), ("native", np.dtype(np.float16))):
        w, y = TernaryMatrix.from_trits(t, np.float32(2**-10)), np.zeros((128, 256), dtype)
        profiles = multiply(x.astype(dtype), w, y, activations, sms=1)
        np.testing.assert_array_equal(y, ((x @ t.T.astype(int)) * 2.0**-10).astype(np.float32).astype(dtype))
        assert profiles[-1].grid == (2, 1, 1)
        assert sum(profiles[-1].multiply_adds.values()) == 128 * 256 * 192
        assert not [i.ptx for i in profiles[-1].instructions if i.waves > i.phases]


@needs_nvrtc
@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_integer_instructions_per_weight(arch):
    """The main loop of the GEMV with one token has at most 0.75, so that memory is the limit on an H200."""
    counts = loop(kernels._gemv_kernel("bfloat16", "bfloat16", 1, 4, False, False), arch, "IDP", 4 * 16)
    issued = sum(counts[opcode] for opcode in INTEGER) / (4 * 64)
    print(f"{arch}: {issued:.2f} integer instructions per weight; {counts}")
    assert counts["IDP"] == 4 * 16
    assert issued <= 0.75


# ---- weights on a device -----------------------------------------------------------------------------------


def test_weights_are_copied_to_a_device_once(cupy, rng):
    copies = []
    copy = cupy.asarray
    cupy.asarray = lambda x, **how: copies.append((x.shape, cupy.current_device())) or copy(x, **how)
    t, x = trits(rng, (9, 70)), random(rng, (3, 70), np.float32)
    w = TernaryMatrix.from_trits(t, format="base3")
    for _ in range(2):
        y = ternary_matmul(FakeArray(x), w)
        assert isinstance(y, FakeArray)
        np.testing.assert_array_equal(y.host, reference.ternary_matmul(x, t, w.scale))
    assert copies == [((9, 32), 0), ((1, 1), 0)]
    ternary_matmul(FakeArray(x, 1), w)
    assert [device for _, device in copies] == [0, 0, 1, 1]
    assert "grid" in str(gpu_ops.explain("ternary_matmul", FakeArray(x), w))
    # x is copied to the device and y back; the weights are on the device
    y = ternary_matmul(x, w, device="cuda")
    np.testing.assert_array_equal(y, reference.ternary_matmul(x, t, w.scale))
    assert [shape for shape, _ in copies[4:]] == [x.shape]


def test_unaligned_codes(rng):
    """Part of a file may start at any address."""
    t, x = trits(rng, (5, 128)), random(rng, (2, 128), np.float32)
    held = np.zeros(5 * 32 + 3, np.uint8)
    held[3:] = gpu_ops.ternary_pack(t, "w2").reshape(-1)
    w = TernaryMatrix(held[3:], np.float32(1), (5, 128), "w2")
    y = ternary_matmul(x, w, device="emulator")
    np.testing.assert_array_equal(y, reference.ternary_matmul(x, t, w.scale))
