"""Matrix-product kernels stay within tolerance on tensor cores that truncate, such as those of A100 and H100."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import TernaryMatrix, emulator
from gpu_ops.reference.gemm import swiglu
from gpu_ops.reference.tolerance import GRADIENT
from gpu_ops.reference.weights import ternary
from tests.attention.cases import expected
from tests.support.compare import assert_close, random

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")

RAW = {"device": "emulator", "backend": "raw"}
DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32)]


@pytest.fixture(autouse=True)
def truncating(monkeypatch):
    monkeypatch.setenv("GPU_OPS_SANITIZE", "0")
    monkeypatch.setenv("GPU_OPS_TENSOR_CORES", "truncate")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(dtype):
    sizes = {"seqlens": (70, 150), "head_dims": (64, 64), "heads": (2, 1), "batch": 1}
    e = expected(gradients=True, dtype=dtype.name, mask="causal", **sizes)
    out, lse = gpu_ops.attention(*e.problem.arrays, **e.problem.options, return_lse=True, **RAW)
    e.check("out", out)
    e.check("lse", lse)
    out, lse = e.exact["out"].astype(dtype), e.exact["lse"].astype(np.float32)
    gradients = gpu_ops.attention_backward(
        e.problem.dout, *e.problem.arrays, out, lse, **e.problem.options, **RAW
    )
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        e.check(name, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_mlp(dtype, rng):
    x, dy = random(rng, (70, 96), dtype), random(rng, (70, 40), dtype)
    weights = [random(rng, shape, dtype, shape[1] ** -0.5) for shape in ((120, 96), (120, 96), (40, 120))]
    y = gpu_ops.swiglu_mlp(x, *weights, **RAW)
    want, naive = (swiglu.swiglu_mlp(x, *weights, precision=p) for p in ("float64", "naive"))
    assert_close(y, want, naive, dtype)
    got = gpu_ops.swiglu_mlp_backward(dy, x, *weights, **RAW)
    wanted, naives = (swiglu.swiglu_mlp_backward(dy, x, *weights, precision=p) for p in ("float64", "naive"))
    for actual, want, naive in zip(got, wanted, naives, strict=True):
        assert_close(actual, want, naive, dtype, GRADIENT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ternary_matmul(dtype, rng):
    w = TernaryMatrix.from_trits(rng.integers(-1, 2, (256, 512)).astype(np.int8), np.float32(0.7))
    x, dy = random(rng, (33, 512), dtype), random(rng, (33, 256), dtype)
    weights = w.trits(), w.scale
    exact, naive = (
        ternary.ternary_matmul(x, *weights, activations="native", precision=p) for p in ("float64", "naive")
    )
    assert_close(gpu_ops.ternary_matmul(x, w, activations="native", **RAW), exact, naive, dtype)
    exact, naive = (
        ternary.ternary_matmul_backward(dy, x, *weights, activations="native", precision=p)
        for p in ("float64", "naive")
    )
    grads = gpu_ops.ternary_matmul_backward(dy, x, w, activations="native", **RAW)
    for actual, want, textbook in zip(grads, exact, naive, strict=True):
        assert_close(actual, want, textbook, dtype, GRADIENT)


def test_the_option_takes_effect(monkeypatch, rng):
    q, k, v = (random(rng, (1, 64, 1, 64), np.float32) for _ in range(3))
    truncated = gpu_ops.attention(q, k, v, **RAW)
    monkeypatch.setenv("GPU_OPS_TENSOR_CORES", "exact")
    assert (gpu_ops.attention(q, k, v, **RAW) != truncated).any()
    monkeypatch.setenv("GPU_OPS_TENSOR_CORES", "round")
    with pytest.raises(emulator.EmulatorError, match="GPU_OPS_TENSOR_CORES is 'round'; pass 'exact' or"):
        gpu_ops.attention(q, k, v, **RAW)
