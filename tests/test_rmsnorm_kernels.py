"""RMSNorm's CUDA C++ kernels by themselves: every way to keep a row, what they move, how exact dweight is."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from compare import random
from row_cases import close

from gpu_ops import emulator
from gpu_ops.devices import EmulatorDevice
from gpu_ops.kernels import rmsnorm as kernels
from gpu_ops.reference import rmsnorm as reference
from gpu_ops.reference.tolerance import GRADIENT

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
EPS = 1e-5


def device_with(**arrays):
    """An emulated GPU that knows its arrays by name."""
    device = EmulatorDevice()
    for name, array in arrays.items():
        if array is not None:
            device.name(name, array)
    return device


def forward(x, weight, residual=None):
    device = device_with(x=x, weight=weight, residual=residual)
    y, rstd = device.empty(x.shape, x.dtype, "y"), device.empty(x.shape[:1], np.float32, "rstd")
    s = None if residual is None else device.empty(x.shape, x.dtype, "s")
    options = {"eps": EPS, "weight_offset": 0.0, "casting": "fp32"}
    kernels.forward(device, "raw", x, weight, residual, y, s, rstd, **options)
    return y, s, rstd


def backward(dy, x, weight, rstd, dresidual=None):
    device = device_with(dy=dy, x=x, weight=weight, rstd=rstd, dresidual=dresidual)
    dx, dweight = device.empty(x.shape, x.dtype, "dx"), device.empty(x.shape[1:], np.float32, "dweight")
    options = {"weight_offset": 0.0, "casting": "fp32"}
    kernels.backward(device, "raw", dy, x, weight, rstd, dresidual, dx, dweight, **options)
    return dx, dweight


@pytest.mark.parametrize(
    ("arch", "dtype", "cols"),
    [
        ("sm_86", BF16, 8192),  # registers, the longest row there
        ("sm_86", BF16, 16384),  # forward in shared memory, backward in registers of 1024 threads
        ("sm_86", BF16, 65536),  # both read twice
        ("sm_90", BF16, 65536),  # forward in 128 KB of shared memory
        ("sm_120", F32, 16384),  # backward with 1024 threads and 64 KB of sums
    ],
)
def test_long_rows(arch, dtype, cols, rng, monkeypatch):
    monkeypatch.setenv("GPU_OPS_ARCH", arch)
    x, residual, dy, ds = (random(rng, (2, cols), dtype) for _ in range(4))
    weight = random(rng, (cols,), dtype)
    y, s, rstd = forward(x, weight, residual)
    (want, *_), (naive, *_) = (
        reference.rmsnorm(x, weight, eps=EPS, residual=residual, return_rstd=True, precision=p)
        for p in ("float64", "naive")
    )
    close(y, want, naive, dtype, what="y")
    dx, dweight = backward(dy, s, weight, rstd, ds)
    want, naive = (
        reference.rmsnorm_backward(dy, s, weight, rstd, dresidual=ds, precision=p)
        for p in ("float64", "naive")
    )
    close(dx, want[0], naive[0], dtype, GRADIENT, what="dx")
    close(dweight, want[1], naive[1], dtype, GRADIENT, what="dweight")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_misaligned_rows_give_the_same_bits(dtype, rng):
    x, dy = random(rng, (3, 8192), dtype), random(rng, (3, 8192), dtype)
    weight = random(rng, (8192,), dtype)
    wide = np.zeros((3, 8193), dtype)
    wide[:, 1:] = x
    y, _, rstd = forward(x, weight)
    for got, want in zip(forward(wide[:, 1:], weight)[::2], (y, rstd), strict=True):
        assert got.tobytes() == want.tobytes()
    for got, want in zip(backward(dy, wide[:, 1:], weight, rstd), backward(dy, x, weight, rstd), strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("rows", [8192, 40_000])
def test_dweight_of_equal_products(rows):
    """The worst case for a long sum of floats: each addition rounds the same way."""
    x = np.full((rows, 8), 1.7, np.float32)
    rstd = np.full(rows, 0.3, np.float32)
    _, dweight = backward(np.ones_like(x), x, np.ones(8, np.float32), rstd)
    exact = rows * float(np.float32(1.7)) * float(np.float32(0.3))
    assert np.abs(dweight / exact - 1).max() <= 4e-6


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(BF16, (64, 128)), (F32, (16, 512)), (BF16, (4, 4096)), (BF16, (2, 16384))],
    ids=lambda p: str(p),
)
def test_each_element_moves_once(dtype, shape, rng):
    """Whole sectors, no bank conflicts, and one pass over every array with rows."""
    x, residual, dy, ds = (random(rng, shape, dtype) for _ in range(4))
    weight = np.ones(shape[1], dtype)
    with emulator.record() as profiles:
        _, s, rstd = forward(x, weight, residual)
        backward(dy, s, weight, rstd, ds)
    moved = [{b.name: (b.bytes_read, b.bytes_written) for b in p.buffers} for p in profiles]
    read, written = (x.nbytes, 0), (0, x.nbytes)
    for got, want in (
        (moved[0], {"x": read, "residual": read, "y": written, "s": written, "rstd": (0, rstd.nbytes)}),
        (moved[1], {"dy": read, "x": read, "dresidual": read, "dx": written}),
        (moved[2], {"dweight": (0, 4 * shape[1])}),
    ):
        assert {name: got[name] for name in want} == want
    for profile in profiles[:2]:
        vectors = [i for i in profile.instructions if i.global_requests and ".v4" in i.form]
        assert len(vectors) >= 4
        for i in vectors:  # rows in one warp share the weights they read: .nc
            assert i.sectors_per_128_bytes == 4 or (".nc" in i.form and i.sectors_per_128_bytes < 4), i.ptx


@pytest.mark.parametrize("cols", [8, 17, 64, 100, 200, 257, 1000, 4096, 4099, 8192])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_no_bank_conflicts(dtype, cols, rng):
    """Every layout of the sums of dweight: by vectors of 1, 4 and 8 elements, several rows per block and one."""
    x, dy = random(rng, (5, cols), dtype), random(rng, (5, cols), dtype)
    weight = np.ones(cols, dtype)
    with emulator.record() as profiles:
        _, _, rstd = forward(x, weight)
        backward(dy, x, weight, rstd)
    for profile in profiles:
        shared = [i for i in profile.instructions if i.waves]
        assert shared or profile is profiles[0], "short rows of the forward do without"
        assert not [i.ptx for i in shared if i.waves > i.phases]
