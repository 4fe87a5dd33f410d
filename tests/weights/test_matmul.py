"""Ternary matmul on every backend: exact with int8 activations, within tolerance with float activations."""

from __future__ import annotations

import os
import threading
from itertools import cycle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import TernaryMatrix, ternary_matmul, ternary_quantize
from gpu_ops.errors import DeviceError
from gpu_ops.reference.weights import ternary as reference
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.support.compare import assert_close, random
from tests.support.compilers import slow
from tests.support.processes import PATIENCE, python

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    """Levels to run on the emulator by default; test_cuda.py tests more of each kernel."""
    return {
        "test_int8_equals_integer_numpy": {"k": {65}} if raw else None,
        "test_worst_case_magnitudes": {"m": {1, 20}, "value": {1}} if raw else None,
        "test_matmul_within_tolerance": {"m": {1, 21}, "kind": {"row", "group64", "group4"}}
        if raw
        else {"m": {6}, "kind": {"group4"}},
        "test_native_equals_integer_numpy_on_small_integers": {"m": {3}},
    }


def float_dtypes(backend):
    """Float dtypes of a backend: CUDA C++ kernels take no float64."""
    return (np.float32,) if backend["backend"] == "raw" else (np.float32, np.float64)


def trits(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.int8)


KS = [1, 2, 63, 64, 65, 255, 256, 257, 1000, 8191]
# (tokens, N): one token, ragged tiles of 4 and 8, of 4, 16 and 32 rows, few and many tokens
SIZES = [(1, 1), (1, 67), (2, 5), (4, 33), (5, 64), (16, 17), (17, 31), (24, 65), (129, 3), (9, 96)]


def integers(rng, shape):
    """Activations that quantise to themselves: integers, with 127 in every row."""
    x = rng.integers(-127, 128, shape)
    x[..., 0] = 127
    return x


@pytest.mark.parametrize("k", KS)
def test_int8_equals_integer_numpy(k, backend, rng):
    """100 problems with no tolerance; formats that take any shape alternate."""
    formats = cycle(name for name, f in FORMATS.items() if f.pads)
    for m, n in SIZES:
        x, t = integers(rng, (m, k)), trits(rng, (n, k))
        w = TernaryMatrix.from_trits(t, format=next(formats))
        expected = x.astype(np.int64) @ t.T.astype(np.int64)
        for x_dtype in float_dtypes(backend):
            y = ternary_matmul(x.astype(x_dtype), w, **backend)
            assert y.dtype == x_dtype
            np.testing.assert_array_equal(y, expected, err_msg=f"{m} x {n} x {k}")


@pytest.mark.parametrize("activations", ["int8", "native"])
def test_groups_of_several_blocks(activations, rng):
    """The CPU unpacks up to 512 codes of a row at a time, and later groups have other scales."""
    x, t = integers(rng, (17, 1344)), trits(rng, (70, 1344))
    w = TernaryMatrix.from_trits(t, rng.uniform(0.1, 2, (70, 21)).astype(np.float32))
    y = ternary_matmul(x.astype(np.float32), w, activations=activations, device="cpu", backend="numba")
    weights = w.dequantize().astype(np.float64)
    bound = 1e-6 * np.max(np.abs(x) @ np.abs(weights).T)
    np.testing.assert_allclose(y, x @ weights.T, rtol=0, atol=bound)


@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("value", [-1, 1])
@pytest.mark.parametrize("x_value", [-127, 127])
def test_worst_case_magnitudes(m, value, x_value, backend):
    for k in (128, 8191, 65536):
        w = TernaryMatrix.from_trits(np.full((5, k), value, np.int8))
        y = ternary_matmul(np.full((m, k), x_value, np.float32), w, **backend)
        np.testing.assert_array_equal(y, np.full((m, 5), float(k * value * x_value)))


@pytest.mark.parametrize("groups", [1, 2])
def test_sums_beyond_int32(groups):
    """The sum of codes (2 * 127 per weight) passes 2^31; more than one group takes the panel kernel."""
    k = 8_600_000 * groups
    w = TernaryMatrix.from_trits(np.ones((1, k), np.int8), np.ones((1, groups), np.float32))
    y = ternary_matmul(np.full((1, k), 127, np.float32), w, device="cpu", backend="numba")
    assert y[0, 0] == np.float32(127 * k)
    y = ternary_matmul(np.full((1, k), -127, np.float32), w, device="cpu", backend="numba")
    assert y[0, 0] == np.float32(-127 * k)


SCALES = {
    "tensor": lambda rng, n, k: np.float32(0.37),
    "row": lambda rng, n, k: rng.uniform(0.1, 2, n).astype(np.float32),
    "group64": lambda rng, n, k: rng.uniform(0.1, 2, (n, k // 64)).astype(np.float32),
    "group4": lambda rng, n, k: rng.uniform(0.1, 2, (n, k // 4)).astype(np.float32),
    "group128": lambda rng, n, k: rng.uniform(0.1, 2, (n, k // 128)).astype(np.float32),
}


@pytest.mark.parametrize("m", [1, 6, 21])
@pytest.mark.parametrize("kind", SCALES)
def test_int8_scales_equal_the_reference_bit_for_bit(kind, m, rng):
    t = trits(rng, (37, 640))
    w = TernaryMatrix.from_trits(t, SCALES[kind](rng, 37, 640))
    for x_dtype in (np.float32, np.float64):
        x = random(rng, (m, 640), x_dtype)
        y = ternary_matmul(x, w, device="cpu", backend="numba")
        np.testing.assert_array_equal(y, reference.ternary_matmul(x, t, w.scale))


@pytest.mark.parametrize("m", [1, 6, 21])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("activations", ["int8", "native"])
def test_matmul_within_tolerance(activations, kind, m, dtype, backend, rng):
    t = trits(rng, (37, 640))
    w = TernaryMatrix.from_trits(t, SCALES[kind](rng, 37, 640))
    x = random(rng, (m, 640), dtype)
    if kind == "group4" and backend["backend"] == "raw":
        with pytest.raises(DeviceError, match="raw: group_size 4 is not a multiple of 64"):
            ternary_matmul(x, w, activations=activations, **backend)
        return
    y = ternary_matmul(x, w, activations=activations, **backend)
    assert y.dtype == dtype
    exact, naive = (
        reference.ternary_matmul(x, t, w.scale, activations=activations, precision=p)
        for p in ("float64", "naive")
    )
    if dtype == np.float64 and activations == "native" and backend["backend"] != "reference":
        # neither of two float64 sums is exact: compare both with a wider one
        exact = x.astype(np.longdouble) @ w.dequantize(np.float64).astype(np.longdouble).T
    assert_close(y, exact, naive, dtype)


@pytest.mark.parametrize("m", [1, 3, 130])
def test_native_equals_integer_numpy_on_small_integers(m, backend, rng):
    """Sums below 2^24 are exact in float32 too."""
    for k in (1, 65, 257, 1000):
        x, t = rng.integers(-8, 9, (m, k)), trits(rng, (50, k))
        y = ternary_matmul(x.astype(np.float32), TernaryMatrix.from_trits(t), activations="native", **backend)
        np.testing.assert_array_equal(y, x @ t.T.astype(np.int64))


def test_a_group_size_without_a_kernel_goes_to_the_reference(rng):
    t = trits(rng, (5, 9))
    w = TernaryMatrix.from_trits(t, rng.uniform(1, 2, (5, 3)).astype(np.float32))
    x = random(rng, (2, 9), np.float32)
    np.testing.assert_array_equal(ternary_matmul(x, w), reference.ternary_matmul(x, t, w.scale))
    plan = gpu_ops.explain("ternary_matmul", x, w)
    assert plan.choice.backend == "reference"
    assert "group_size 3 is not a multiple of 4" in str(plan)
    with pytest.raises(DeviceError, match="group_size 3"):
        ternary_matmul(x, w, backend="numba")


@pytest.mark.parametrize("activations", ["int8", "native"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 8), (2, 0, 8), (2, 3, 0), (0, 0, 0), (20, 3, 0)])
def test_empty(m, n, k, activations, backend):
    for scale in (1.0, np.ones(n, np.float32)):
        w = TernaryMatrix.from_trits(np.zeros((n, k), np.int8), scale)
        x = np.ones((m, k), np.float32)
        y = ternary_matmul(x, w, activations=activations, **backend)
        np.testing.assert_array_equal(y, np.zeros((m, n)))
        assert str(gpu_ops.explain("ternary_matmul", x, w, activations=activations, **backend))


@pytest.mark.parametrize("m", [2, 40])
def test_nonfinite_and_zero_tokens(m, backend, rng):
    t = trits(rng, (9, 100))
    t[:, 5] = 1
    x = random(rng, (m, 100), np.float32)
    x[0, 5], x[1] = np.nan, 0
    y = ternary_matmul(x, TernaryMatrix.from_trits(t), **backend)
    assert np.isnan(y[0]).all()
    assert (y[1] == 0).all()
    assert np.isfinite(y[1:]).all()
    x[0, 5] = np.inf
    assert np.isnan(ternary_matmul(x, TernaryMatrix.from_trits(t), **backend)[0]).all()
    native = ternary_matmul(x, TernaryMatrix.from_trits(t), activations="native", **backend)
    assert (native[0] == np.inf).all()
    assert np.isfinite(native[1:]).all()


@pytest.mark.parametrize("activations", ["int8", "native"])
def test_a_token_may_be_a_vector(activations, dtype, backend, rng):
    w = TernaryMatrix.from_trits(trits(rng, (19, 70)), np.float32(0.5))
    x = random(rng, (1, 70), dtype)
    expected = ternary_matmul(x, w, activations=activations, **backend)[0]
    np.testing.assert_array_equal(ternary_matmul(x[0], w, activations=activations, **backend), expected)


@settings(max_examples=25)
@given(seed=st.integers(0, 999), k=st.integers(1, 300), m=st.sampled_from([1, 5, 20]))
def test_the_order_of_k_does_not_matter(seed, k, m):
    rng = np.random.default_rng(seed)
    x, t, order = random(rng, (m, k), np.float32), trits(rng, (7, k)), rng.permutation(k)
    y = ternary_matmul(x, TernaryMatrix.from_trits(t))
    np.testing.assert_array_equal(ternary_matmul(x[:, order], TernaryMatrix.from_trits(t[:, order])), y)


def test_quantised_layer_is_close_to_the_dense_one(rng):
    """Quantise, pack and multiply weights that are ternary up to noise."""
    t = trits(rng, (64, 512))
    dense = (0.05 * t + 0.002 * rng.standard_normal(t.shape)).astype(np.float32)
    w = ternary_quantize(dense, method="twn", group_size=-1)
    np.testing.assert_array_equal(w.trits(), t)
    x = random(rng, (8, 512), np.float32)
    y, expected = ternary_matmul(x, w), x @ dense.T
    assert np.linalg.norm(y - expected) < 0.06 * np.linalg.norm(expected)


def test_two_threads_at_once(rng):
    w = ternary_quantize(random(rng, (300, 512), np.float32))
    x = random(rng, (33, 512), np.float32)
    want, results = ternary_matmul(x, w), []

    def work():
        results.extend(np.array_equal(ternary_matmul(x, w), want) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [True] * 80


@pytest.mark.peers
def test_torch_in_torch_out(rng):
    torch = pytest.importorskip("torch", reason="pip install torch tries its tensors")
    w = ternary_quantize(torch.from_numpy(random(rng, (20, 64), np.float32)))
    x = random(rng, (3, 64), np.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.from_numpy(x).to(dtype)
        y = ternary_matmul(tensor, w)
        assert isinstance(y, torch.Tensor)
        assert y.dtype == dtype
        dense = torch.from_numpy(w.dequantize()).double()
        torch.testing.assert_close(y.double(), tensor.double() @ dense.T, rtol=0.05, atol=0.3)


OTHER_CPUS = {  # NUMBA_CPU_NAME, NUMBA_CPU_FEATURES, vector code that the kernels choose
    "generic": ("generic", "", "128-bit vectors"),
    "avx2": ("haswell", "+avx2,+fma", "AVX2"),
    "avx-vnni": ("alderlake", "+avx2,+fma,+avxvnni", "AVX-VNNI"),
}
WORST_CASE_PROGRAM = """
import sys
import numpy as np
from gpu_ops import TernaryMatrix, explain, ternary_matmul
rng = np.random.default_rng(5)
for n, k in ((1, 1), (37, 333), (5, 2100)):
    for m in (1, 3, 21):
        for t in (rng.integers(-1, 2, (n, k)), np.ones((n, k), int), -np.ones((n, k), int)):
            for x in (rng.integers(-127, 128, (m, k)), np.full((m, k), 127), np.full((m, k), -127)):
                x[:, 0] = 127
                w = TernaryMatrix.from_trits(t.astype(np.int8))
                for mode in ("int8", "native"):
                    y = ternary_matmul(x.astype(np.float32), w, activations=mode, backend="numba")
                    assert (y == x @ t.T).all(), (n, k, m, mode)
assert sys.argv[1] in str(explain("ternary_matmul", x.astype(np.float32), w))
"""


@pytest.mark.parametrize("cpu", ["generic", *slow("avx2", "avx-vnni")])
def test_kernels_for_other_cpus(cpu, tmp_path, monkeypatch):
    """Vector code of narrower machines, compiled for them and run on this one."""
    cpuinfo = Path("/proc/cpuinfo")
    here = cpuinfo.read_text() if cpuinfo.exists() else ""
    needs = {"generic": "sse2", "avx2": "avx2", "avx-vnni": "avx_vnni"}[cpu]
    if needs not in here:
        pytest.skip(f"needs an x86 CPU with {needs}")
    name, features, expected = OTHER_CPUS[cpu]
    # settings of the caller, such as backend or number of threads, are not tested; the folder belongs to this test
    variables = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "GPU_OPS_CACHE_DIR": str(tmp_path)}
    # settings of the caller, such as backend or number of threads, are not tested; the folder belongs to this test
    for key in [key for key in os.environ if key.startswith(("GPU_OPS_", "NUMBA_"))]:
        monkeypatch.delenv(key)
    python("-c", WORST_CASE_PROGRAM, expected, **variables)


# ---- bad calls ---------------------------------------------------------------------------------------------

W = TernaryMatrix.from_trits(np.ones((3, 8), np.int8))
X = np.ones((2, 8), np.float32)


def test_explain_says_what_runs():
    text = str(gpu_ops.explain("ternary_matmul", X, W))
    assert "2 tokens x (3 x 8) w2, float32, activations int8" in text
    assert "lanes along K" in text
    text = str(
        gpu_ops.explain("ternary_matmul", np.ones((40, 8), ml_dtypes.bfloat16), W, activations="native")
    )
    assert "lanes along N" in text
