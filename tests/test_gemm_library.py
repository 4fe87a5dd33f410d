"""Matrix products by cuBLAS: which they are, and how they are asked for; a stand-in reads the same arguments.

It proves nothing about cuBLAS or CuPy themselves; the tests marked ``gpu`` do.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from compare import random
from compilers import needs_nvrtc
from fake_cupy import FakeArray
from row_cases import close

import gpu_ops
from gpu_ops.core import device as devices
from gpu_ops.kernels.lower import cublas as gemm_library
from gpu_ops.kernels.lower.gemm_args import Operand, product
from gpu_ops.kernels.program import Builder, Layout, Limits, Tensor
from gpu_ops.presets import PRESETS
from gpu_ops.reference import swiglu as reference
from gpu_ops.reference.tolerance import GRADIENT

pytestmark = needs_nvrtc

TYPES = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}


class FakeCublas:
    """cublasGemmEx over host memory: column-major matrices of these leading dimensions."""

    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F = 0, 1, 68

    def __init__(self):
        self.calls = []

    def gemmEx(self, handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algo):
        assert (handle, compute, algo) == (7, self.CUBLAS_COMPUTE_32F, -1)
        left = matrix(a, at, lda, *((k, m) if ta else (m, k)))
        right = matrix(b, bt, ldb, *((n, k) if tb else (k, n)))
        out = matrix(c, ct, ldc, m, n)
        alpha, beta = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
        wide = (x.astype(np.float32) for x in (left.T if ta else left, right.T if tb else right))
        product = alpha * np.matmul(*wide)
        out[...] = (product + beta * out.astype(np.float32)) if beta else product
        self.calls.append((n, m, k, "NT"[tb] + "NT"[ta]))


def matrix(address, kind, leading, rows, cols):
    assert leading >= rows
    dtype = np.dtype(TYPES[kind])
    size = ((cols - 1) * leading + rows) * dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (dtype.itemsize, leading * dtype.itemsize))


@pytest.fixture
def cublas(cupy):
    """A card of sm_90 with CuPy and cuBLAS; its kernels run on the emulator."""
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
    want, naive = (reference.swiglu_mlp(*arguments, precision=p) for p in ("float64", "naive"))
    close(y, want, naive, np.dtype(np.float16), what="y")


@pytest.mark.parametrize("blocks", [1, 3])
def test_backward(cublas, blocks, monkeypatch, rng):
    if blocks > 1:
        monkeypatch.setattr("gpu_ops.kernels.lower.swiglu_mlp.SCRATCH", 1)
        monkeypatch.setattr("gpu_ops.kernels.lower.swiglu_mlp.FFN", 128)
        monkeypatch.setattr("gpu_ops.kernels.lower.swiglu_mlp._MULTIPLE", 8)
        monkeypatch.setattr("gpu_ops.kernels.lower.cublas._MIN_ROWS", 64)
    inputs = make(rng)
    got = gpu_ops.swiglu_mlp_backward(*map(FakeArray, inputs))
    assert len(cublas.calls) == 8 * blocks
    assert {call[3] for call in cublas.calls} == {"NT", "NN", "TN"}
    wants, naives = (reference.swiglu_mlp_backward(*inputs, precision=p) for p in ("float64", "naive"))
    for g, want, naive in zip(got, wants, naives, strict=True):
        close(g.host, want, naive, np.dtype(np.float16), GRADIENT)


def test_explain_says_so(cublas, rng):
    _, *arguments = map(FakeArray, make(rng))
    plan = str(gpu_ops.explain("swiglu_mlp", *arguments))
    assert f"cublasGemmEx: {TOKENS} x {FFN} x {HIDDEN}, NT" in plan
    assert "swiglu_forward" in plan
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
        (False, {"preset": "sm_80"}),
        (False, {"preset": "sm_120"}),
        (False, {"rows": 127}),
        (False, {"offset": 1}),
    ],
    ids=str,
)
def test_the_rules(taken, changes):
    given = {"preset": "sm_90", "card": "H100", "dtype": np.float16, "rows": 128, "offset": 0, **changes}
    on = Builder(Limits(card=given["card"], preset=given["preset"]))
    x, w = (
        Tensor.of(name, Layout.contiguous((rows, 72), given["dtype"]))[:, given["offset"] :][:, :64]
        for name, rows in (("x", given["rows"]), ("w", 128))
    )
    out = Tensor.of("out", Layout.contiguous((given["rows"], 128), given["dtype"]))
    assert gemm_library.takes(on, product(Operand(x), Operand(w), out)) is taken


def test_the_cards_with_cublas_are_those_of_sm_90_and_sm_100():
    assert set(gemm_library._LIBRARY) == {
        name for name, preset in PRESETS.items() if preset.arch.name in ("sm_90", "sm_100")
    }
