"""Matrix products by cuBLAS: which products, and with which arguments; a fake reads the same arguments.

The fake proves nothing about cuBLAS or CuPy; the tests marked ``gpu`` do.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.core import device as devices
from gpu_ops.kernels.gemm.args import Operand, product
from gpu_ops.kernels.gemm.cublas import _LIBRARY, takes
from gpu_ops.kernels.program import Builder, Layout, Limits, Tensor
from gpu_ops.presets import PRESETS
from gpu_ops.reference.gemm import swiglu as reference
from gpu_ops.reference.loss.linear_cross_entropy import linear_cross_entropy
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

pytestmark = needs_nvrtc

TYPES = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}


class FakeCublas:
    """Fake of cublasGemmEx over host memory: column-major matrices of these leading dimensions."""

    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F = 0, 1, 68

    def __init__(self):
        self.calls = []

    def gemmEx(self, handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algo):
        assert (handle, compute, algo) == (7, self.CUBLAS_COMPUTE_32F, -1)
        left = matrix(a, at, lda, *((k, m) if ta else (m, k)))
        right = matrix(b, bt, ldb, *((n, k) if tb else (k, n)))
        out = matrix(c, ct, ldc, m, n)
        alpha, beta = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
        factors = (x.astype(np.float32) for x in (left.T if ta else left, right.T if tb else right))
        product = alpha * np.matmul(*factors)
        out[...] = (product + beta * out.astype(np.float32)) if beta else product
        self.calls.append((n, m, k, "NT"[tb] + "NT"[ta]))


def matrix(address, code, leading, rows, cols):
    assert leading >= rows
    dtype = np.dtype(TYPES[code])
    size = ((cols - 1) * leading + rows) * dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (dtype.itemsize, leading * dtype.itemsize))


@pytest.fixture
def cublas(cupy):
    """Fake card of sm_90 with CuPy and cuBLAS; its kernels run on the emulator."""
    library = FakeCublas()
    cupy.cuda.device = SimpleNamespace(get_cublas_handle=lambda: 7)
    cupy.cuda.cublas = library
    device = devices.cuda_device(0)
    device.limits = replace(device.limits, arch="sm_90", preset="sm_90")
    return library


TOKENS, HIDDEN, FFN, HIDDEN_OUT = 136, 144, 288, 128


def make(rng, dtype=np.float16):
    shapes = (TOKENS, HIDDEN_OUT), (TOKENS, HIDDEN), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN_OUT, FFN)
    return [random(rng, shape, dtype, shape[1] ** -0.5) for shape in shapes]


def test_forward(cublas, rng):
    _, *arguments = make(rng)
    y = gpu_ops.swiglu_mlp(*map(FakeArray, arguments)).host
    assert cublas.calls == [
        (TOKENS, FFN, HIDDEN, "NT"),
        (TOKENS, FFN, HIDDEN, "NT"),
        (TOKENS, HIDDEN_OUT, FFN, "NT"),
    ]
    expected, naive = (reference.swiglu_mlp(*arguments, precision=p) for p in ("float64", "naive"))
    close(y, expected, naive, np.dtype(np.float16), what="y")


@pytest.mark.parametrize("blocks", [1, 3])
def test_backward(cublas, blocks, monkeypatch, rng):
    if blocks > 1:
        monkeypatch.setattr("gpu_ops.kernels.gemm.swiglu_mlp.SCRATCH", 1)
        monkeypatch.setattr("gpu_ops.kernels.gemm.swiglu_mlp.FFN", 128)
        monkeypatch.setattr("gpu_ops.kernels.gemm.swiglu_mlp._MULTIPLE", 8)
        monkeypatch.setattr("gpu_ops.kernels.gemm.cublas._MIN_ROWS", 64)
    inputs = make(rng)
    actual = gpu_ops.swiglu_mlp_backward(*map(FakeArray, inputs))
    assert len(cublas.calls) == 8 * blocks
    assert {call[3] for call in cublas.calls} == {"NT", "NN", "TN"}
    wants, naives = (reference.swiglu_mlp_backward(*inputs, precision=p) for p in ("float64", "naive"))
    for g, expected, naive in zip(actual, wants, naives, strict=True):
        close(g.host, expected, naive, np.dtype(np.float16), GRADIENT)


def test_gate_and_up_are_kept(cublas, rng):
    """Products are written to the kept array, and not computed again."""
    dy, *arguments = make(rng)
    device_arguments = list(map(FakeArray, arguments))
    y, gate_up = gpu_ops.swiglu_mlp(*device_arguments, keep="gate_up")
    assert len(cublas.calls) == 3
    actual = gpu_ops.swiglu_mlp_backward(FakeArray(dy), *device_arguments, gate_up=gate_up)
    assert len(cublas.calls) == 3 + 6
    wants, naives = (
        (
            *reference.swiglu_mlp(*arguments, keep="gate_up", precision=p),
            *reference.swiglu_mlp_backward(dy, *arguments, precision=p),
        )
        for p in ("float64", "naive")
    )
    for g, expected, naive in zip((y, gate_up, *actual), wants, naives, strict=True):
        close(g.host, expected, naive, np.dtype(np.float16), GRADIENT)


def test_explain_says_so(cublas, rng):
    _, *arguments = map(FakeArray, make(rng))
    plan = str(gpu_ops.explain("swiglu_mlp", *arguments))
    assert f"cublasGemmEx: {TOKENS} x {FFN} x {HIDDEN}, NT" in plan
    assert "swiglu_forward" in plan
    assert "cuBLAS multiplies by wgmma" in plan
    assert not cublas.calls


@pytest.mark.parametrize(
    ("taken", "changes"),
    [
        (True, {}),
        (True, {"preset": "sm_100"}),
        (True, {"preset": "H100 SXM"}),
        (True, {"preset": "H200"}),
        (False, {"card": ""}),
        (False, {"dtype": np.float32}),
        (True, {"dtype": np.float32, "preset": "RTX 4090"}),
        (False, {"dtype": np.float16, "preset": "RTX 4090"}),
        (False, {"dtype": np.float32, "preset": "A100-80"}),
        (False, {"preset": "sm_80"}),
        (False, {"preset": "sm_120"}),
        (False, {"rows": 127}),
        (False, {"offset": 1}),
    ],
    ids=str,
)
def test_the_rules(taken, changes):
    case = {"preset": "sm_90", "card": "H100", "dtype": np.float16, "rows": 128, "offset": 0, **changes}
    builder = Builder(Limits(card=case["card"], preset=case["preset"]))
    x, w = (
        Tensor.of(name, Layout.contiguous((rows, 72), case["dtype"]))[:, case["offset"] :][:, :64]
        for name, rows in (("x", case["rows"]), ("w", 128))
    )
    out = Tensor.of("out", Layout.contiguous((case["rows"], 128), case["dtype"]))
    assert takes(builder, product(Operand(x), Operand(w), out)) is taken


def test_the_rows_follow_from_the_presets():
    """cuBLAS is used for tensor cores that mma.sync does not fill, and multiply-adds faster than a third of TF32."""
    for name, preset in PRESETS.items():
        expected = {"float16", "bfloat16"} if preset.arch.name in ("sm_90", "sm_100") else set()
        peaks = preset.peaks
        if peaks.tf32 and peaks.tf32 / 3 < peaks.float32:
            expected.add("float32")
        row = _LIBRARY.get(name, {})
        assert set(row) == expected, name
        if "float32" in expected:
            figures = f"{peaks.float32:.3g} TFLOPS against {peaks.tf32 / 3:.3g} TFLOPS by 3 x TF32"
            assert figures in row["float32"], name


def test_float32_on_geforce(cublas, rng):
    """cuBLAS uses multiply-adds; kernels on the emulator add the activation."""
    devices.cuda_device(0).limits = replace(devices.cuda_device(0).limits, arch="sm_86", preset="RTX 3090 Ti")
    _, *arguments = make(rng, np.float32)
    device_arguments = list(map(FakeArray, arguments))
    plan = str(gpu_ops.explain("swiglu_mlp", *device_arguments))
    assert plan.count("cuBLAS multiplies by float32 multiply-adds, 40 TFLOPS against 13.3 TFLOPS") == 1
    y = gpu_ops.swiglu_mlp(*device_arguments).host
    assert len(cublas.calls) == 3
    expected, naive = (reference.swiglu_mlp(*arguments, precision=p) for p in ("float64", "naive"))
    close(y, expected, naive, np.dtype(np.float32), what="y")


def test_logits_with_a_bias(cublas, rng):
    """The bias is added in place to float32 sums of 16-bit products; dlogits overwrite them."""
    x, weight = (
        random(rng, (TOKENS, HIDDEN), np.float16),
        random(rng, (FFN, HIDDEN), np.float16, HIDDEN**-0.5),
    )
    targets, bias = rng.integers(0, FFN, TOKENS), random(rng, (FFN,), np.float16)
    options = {"grads": True, "dloss": 64.0}
    arrays = map(FakeArray, (x, weight, targets))
    actual = gpu_ops.linear_cross_entropy(*arrays, bias=FakeArray(bias), **options)
    assert [call[3] for call in cublas.calls] == ["NT", "NN", "TN"]
    expected, naive = (
        linear_cross_entropy(x, weight, targets, bias=bias, **options, precision=p)
        for p in ("float64", "naive")
    )
    assert float(actual[0].host) == pytest.approx(float(expected[0]), rel=1e-6)
    for g, w, n in zip(actual[1:], expected[1:], naive[1:], strict=True):
        close(g.host, w, n, np.dtype(np.float16), GRADIENT)
