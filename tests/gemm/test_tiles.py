"""Tile registers (AMX): whole tiles of a product, remainders, and a process that may not use them."""

from __future__ import annotations

import os
import threading

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU kernels are compiled by Numba")

import numba

import gpu_ops
from gpu_ops.kernels.common.cpu.codegen.gemm import gemm_rows
from gpu_ops.kernels.common.cpu.codegen.target import TILES
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE, close_tiles, multiply_tiles, open_tiles
from tests.support.processes import PATIENCE, ROOT, exit_code, python

pytestmark = pytest.mark.skipif(
    not TILES, reason="needs an x86 CPU with AMX (Sapphire Rapids or later), on Linux"
)

BFLOAT16 = ml_dtypes.bfloat16


@numba.njit
def whole_tiles(c, a, b, k, accumulate):
    open_tiles()
    ldb = b.shape[1]
    m, n = c.shape[0] // TILE * TILE, c.shape[1] // TILE * TILE
    panel = 2 * TILE * 4 // b.itemsize  # a matrix: the next two tiles of a row
    multiply_tiles(c, 0, c.shape[1], a, 0, a.shape[1], b, 0, ldb, panel, (m, n, k), accumulate, ())
    close_tiles()


@numba.njit
def any_rows(c, a, b, k, accumulate):
    open_tiles()
    gemm_rows(c, 0, c.shape[1], a, 0, a.shape[1], b, 0, b.shape[1], c.shape[0], c.shape[1], k, accumulate)
    close_tiles()


def pairs(rng, m, n, k):
    """A (m, k) and B (k, n) of bfloat16, k words each, in the memory layout of a product, and their product."""
    a, b = (rng.standard_normal(shape).astype(BFLOAT16) for shape in ((m, 2 * k), (2 * k, n)))
    words = b.view(np.uint16).astype(np.uint32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return np.ascontiguousarray(a).view(np.uint32), words[::2] | words[1::2] << 16, exact


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("k", [TILE, 5 * TILE])
@pytest.mark.parametrize("size", [(16, 16), (16, 32), (32, 16), (32, 32), (48, 80), (64, 48)], ids=str)
def test_bfloat16(size, k, accumulate, rng):
    a, b, product = pairs(rng, *size, k)
    c = rng.standard_normal(size, np.float32)
    expected = product + accumulate * c
    whole_tiles(c, a, b, k, accumulate)
    np.testing.assert_allclose(c, expected, atol=1e-6 * 2 * k)


@pytest.mark.parametrize("size", [(16, 16), (32, 32), (48, 80)], ids=str)
def test_int8(size, rng):
    (m, n), k = size, 3 * TILE
    a, b = rng.integers(-128, 128, (m, 4 * k), np.int8), rng.integers(0, 256, (4 * k, n), np.uint8)
    c = rng.integers(-1000, 1000, size, np.int32)
    expected = c + a.astype(np.int64) @ b.astype(np.int64)
    # four elements of a column are adjacent
    fours = b.reshape(k, 4, n).transpose(0, 2, 1).reshape(k, 4 * n).copy()
    whole_tiles(c, a, fours.view(np.int8), k, True)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "size", [(8, 16, 3), (24, 48, 16), (40, 32, 37), (16, 16, 1), (72, 64, 31), (32, 16, 0)], ids=str
)
def test_what_fills_no_tile(size, accumulate, rng):
    m, n, k = size
    a, b, product = pairs(rng, m, n, k)
    c = rng.standard_normal((m, n), np.float32)
    expected = product + accumulate * c
    any_rows(c, a, b, k, accumulate)
    np.testing.assert_allclose(c, expected, atol=1e-6 * 2 * k)


def attend(seed):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 70, 2, 40)).astype(BFLOAT16) for _ in range(3))
    out, lse = gpu_ops.attention(q, k, v, causal=True, return_lse=True, device="cpu")
    return out, *gpu_ops.attention_backward(v, q, k, v, out, lse, causal=True, device="cpu")


def test_threads_have_tiles_of_their_own():
    expected, failed = [attend(seed) for seed in range(4)], []

    def work(seed):
        for _ in range(20):
            if not all(np.array_equal(x, y) for x, y in zip(attend(seed), expected[seed], strict=True)):
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failed


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (200, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("every", [256, 96, 32], ids=lambda every: f"every {every} keys")
@pytest.mark.parametrize("rise", [0.0, 3.0, 7.9, 30.0], ids=lambda rise: f"rise {rise}")
def test_maxima_that_rise_with_the_keys(rise, every, window):
    """O, sums and weights are rescaled to a new maximum when weights have grown 2^8-fold: test smaller and larger
    steps, from one tile to the next, within a tile, and from one chunk to the next."""
    keys, dim, left = 1024, 64, window[0]
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, n, 1, dim)).astype(BFLOAT16) for n in (96, keys, keys))
    q[..., 0], k[..., 0] = 8.0, (np.arange(keys) // every * rise * np.log(2) * np.sqrt(dim) / 8)[:, None]
    out, lse = gpu_ops.attention(q, k, v, window_size=window, return_lse=True, device="cpu")
    scores = q[0, :, 0].astype(np.float64) @ k[0, :, 0].astype(np.float64).T / np.sqrt(dim)
    ahead = np.arange(keys) - np.arange(96)[:, None] - (keys - 96)
    scores[(ahead > 0) & (window[1] == 0) | (ahead < -left) & (left >= 0)] = -np.inf
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    expected = weights @ v[0, :, 0].astype(np.float64) / total
    np.testing.assert_allclose(
        out[0, :, 0].astype(np.float64), expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max()
    )
    np.testing.assert_allclose(lse[0, 0], (top + np.log(total))[:, 0], rtol=1e-5, atol=1e-4)


def test_a_fork_may_use_them():
    expected = attend(0)
    child = os.fork()
    if child == 0:
        os._exit(0 if all(np.array_equal(x, y) for x, y in zip(attend(0), expected, strict=True)) else 1)
    assert exit_code(child) == 0


REFUSED = """
import ctypes
import types
import numba
import numpy as np
load = ctypes.CDLL
refuse = types.SimpleNamespace(syscall=lambda *_: -1)
ctypes.CDLL = lambda name, *more, **options: refuse if name is None else load(name, *more, **options)
from gpu_ops.kernels.common.cpu.codegen.target import TILES
from gpu_ops.kernels.common.cpu.jit import build_id
from tests.gemm.test_tiles import attend
assert not TILES
print(build_id(), *(float(np.abs(x.astype(np.float64)).sum()) for x in attend(0)))
"""


def test_a_process_that_may_not_use_them_has_other_code(tmp_path):
    from gpu_ops.kernels.common.cpu.jit import build_id

    build, *sums = python("-c", REFUSED, GPU_OPS_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT)).split()
    assert build != build_id()
    expected = [np.abs(x.astype(np.float64)).sum() for x in attend(0)]
    np.testing.assert_allclose([float(x) for x in sums], expected, rtol=1e-3)
