"""Cross-entropy of a linear layer by chunks of rows: bits, accuracy of sums, memory, launches."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.kernels.common.cpu.parallel import thread_count
from gpu_ops.kernels.program import Layout, Limits, Spec, lower
from gpu_ops.memory_pool import POOL
from gpu_ops.reference.loss import linear_cross_entropy as reference
from tests.support.compare import random

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
A100, H100 = Limits("sm_80", 108, 166912), Limits("sm_90", 132, 232448, "NVIDIA H100", "H100 SXM")


def problem(rng, rows, hidden, vocab, dtype):
    """x, weight, targets, and a bias."""
    x, weight = random(rng, (rows, hidden), dtype), random(rng, (vocab, hidden), dtype, 3 * hidden**-0.5)
    return (x, weight, rng.integers(0, vocab, rows)), random(rng, (vocab,), dtype)


@pytest.mark.parametrize("case", [(200, 300, 1301), (70, 1100, 700)], ids=str)
def test_chunks_change_no_bits_of_rows(dtype, case, rng):
    """On the CPU, losses, lse and dx have the same bits for any chunk; dweight differs by roundings."""
    arrays, bias = problem(rng, *case, dtype)
    options = {"bias": bias, "grads": True, "return_lse": True, "softcap": 20.0}
    expected = gpu_ops.linear_cross_entropy(*arrays, **options)
    for chunk in (7, 64, 200):
        results = gpu_ops.linear_cross_entropy(*arrays, **options, chunk=chunk)
        for i in (0, 1, 4):
            assert results[i].tobytes() == expected[i].tobytes()
        scale = np.abs(expected[2]).max()
        np.testing.assert_allclose(
            results[2], expected[2], rtol=0, atol=(1e-13 if dtype == np.float64 else 1e-5) * scale
        )


def test_the_same_bits_for_any_number_of_threads(monkeypatch, rng):
    arrays, bias = problem(rng, 150, 130, 700, BF16)
    results = []
    for threads in (thread_count(), 1, 3, 7):
        for module in ("gemm.cpu.gemm", "common.cpu.parallel"):
            monkeypatch.setattr(f"gpu_ops.kernels.{module}.thread_count", lambda n=threads: n)
        gradients = gpu_ops.linear_cross_entropy(*arrays, bias=bias, grads=True, chunk=64)
        results.append([x.tobytes() for x in gradients])
    assert all(bits == results[0] for bits in results)


def test_chunks_cost_no_accuracy(rng):
    """In bfloat16, a gradient summed over 64 chunks errs at most by the sum of the roundings of its terms."""
    (x, weight, targets), _ = problem(rng, 512, 32, 100, BF16)
    arrays = x, weight, targets
    expected = reference.linear_cross_entropy(*arrays, grads=True, precision="float64")[2]
    exact_x, table = x.astype(np.float64), weight.astype(np.float64)
    probs = np.exp(exact_x @ table.T)
    dlogits = (probs / probs.sum(-1, keepdims=True) - np.eye(100)[targets]) / 512
    bound = 2.0**-8 * (np.abs(dlogits).T @ np.abs(exact_x)).max()
    for chunk in (8, 512):
        assert (
            np.abs(gpu_ops.linear_cross_entropy(*arrays, grads=True, chunk=chunk)[2] - expected).max()
            <= bound
        )
    rounded = np.zeros_like(weight)
    for rows in np.split(np.arange(512), 64):  # the fault: sums between chunks in bfloat16
        rounded = (rounded + dlogits[rows].T @ exact_x[rows]).astype(BF16)
    assert np.abs(rounded - expected).max() > bound


def test_memory_on_the_cpu(monkeypatch, rng):
    """Memory is the logits of a chunk and less than 2 MiB; all logits would take 128 MiB."""
    monkeypatch.setattr(POOL, "limit", 0)
    for dtype in (F32, BF16):
        (x, weight, targets), _ = problem(rng, 1024, 64, 32768, dtype)
        outs = (np.empty((), np.float32), np.empty_like(x), np.empty(weight.shape, np.float32))
        gpu_ops.linear_cross_entropy(x[:64], weight, targets[:64], grads=True)
        tracemalloc.start()
        try:
            gpu_ops.linear_cross_entropy(x, weight, targets, grads=True, out=outs)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= (16 << 20) + (2 << 20)


@pytest.mark.parametrize("kernels", ["raw", "numba"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_memory_on_a_gpu(kernels, dtype):
    program = program_of(kernels, dtype, 8192, 4096, 32768)
    assert program.workspace_bytes <= 1024 * 32768 * 4 + (2 << 20)


def program_of(kernels, dtype, rows, hidden, vocab, limits=A100, grads=True, bias=False, chunk=0):
    shapes = {"x": (rows, hidden), "weight": (vocab, hidden), "bias": (vocab,), "dx": (rows, hidden)}
    left_out = ("dx",) * (not grads) + ("bias",) * (not bias)
    arrays = {n: Layout.contiguous(shape, dtype) for n, shape in shapes.items() if n not in left_out}
    arrays |= {"targets": Layout.contiguous((rows,), np.int64), "loss": Layout.contiguous((), np.float32)}
    if grads:
        arrays["dweight"] = Layout.contiguous((vocab, hidden), np.float32)
    options = {"vocab": vocab, "ignore_index": -100, "chunk": chunk, "added": (), "dloss": 1.0}
    options |= {
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "softcap": 0.0,
        "reduction": "mean",
        "denominator": None,
    }
    spec = Spec("linear_cross_entropy", tuple(arrays.items()), tuple(options.items()))
    return lower(spec, kernels, limits)[0]


def test_chunks_of_a_gpu():
    """A thousand rows or more fill a chunk; a program has a bounded number of launches."""
    steps = len(program_of("raw", BF16, 1024, 4096, 128256).steps)
    per_chunk = steps - 2  # the factor, and the mean
    assert len(program_of("raw", BF16, 8192, 4096, 128256).steps) == 2 + 8 * per_chunk
    assert len(program_of("raw", BF16, 8192, 4096, 4096).steps) == 2 + per_chunk
    products = [step for step in program_of("raw", BF16, 10**6, 64, 8, chunk=1).steps if "gemm" in str(step)]
    assert len(products) <= 256 * 5


def test_cublas_takes_the_products_and_no_more_memory():
    """cuBLAS is used with a bias too, which is added to its sums in place."""
    program = program_of("raw", BF16, 4096, 512, 32768, limits=H100, bias=True)
    assert sum("cublas" in str(step) for step in program.steps) == 4 * 3
    assert program.workspace_bytes <= 1024 * 32768 * 4 + (2 << 20)
