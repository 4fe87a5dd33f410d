"""Gradient of x on tensor cores: exact where nothing rounds; traffic and instructions."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import TernaryMatrix, emulator, explain, ternary_matmul_backward
from gpu_ops.core.device import EmulatorDevice
from gpu_ops.kernels.weights import ternary_backward as kernels
from gpu_ops.kernels.weights.ternary_config import backward_config, backward_tiles
from gpu_ops.reference.tolerance import GRADIENT
from gpu_ops.reference.weights import ternary as reference
from tests.emulator.machine_loops import INTEGER, loop
from tests.support.compare import assert_close, random
from tests.support.compilers import needs_nvrtc, needs_ptxas
from tests.support.programs import run_part

BF16, F16, F32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))


def problem(rng, m, n, k, dtype, group=None):
    """Problem of small integers and power-of-two scales: exact in any dtype. group: None per tensor, 0 per row."""
    t, dy = rng.integers(-1, 2, (n, k)).astype(np.int8), rng.integers(-3, 4, (m, n)).astype(dtype)
    shape = () if group is None else (n,) if group == 0 else (n, k // group)
    w = TernaryMatrix.from_trits(t, np.float32(2.0) ** rng.integers(-2, 2, shape).astype(np.float32))
    return dy, w, dy.astype(float) @ w.dequantize(np.float64)


def dx_of(dy, w, sms=None):
    """dx, and the profiles of its launches; ``sms``: number of SMs of the card."""
    device = EmulatorDevice()
    device.limits = replace(device.limits, sms=sms or device.limits.sms)
    codes, scale = w.on(None)
    dx = np.empty((dy.shape[0], w.shape[1]), dy.dtype)
    arrays = {"dy": dy, "w.codes": codes, "w.scale": scale, "dx": dx}
    with emulator.record() as profiles:
        run_part(kernels._dx, arrays, results=("dx",), device=device, unit=8.0)
    return dx, profiles


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "group", "sms"),
    [
        (128, 64, 128, BF16, None, 1),  # the tiles, whole
        (64, 64, 128, F16, 64, 1),
        (32, 64, 256, BF16, 0, 1),
        (64, 32, 128, F32, 64, 1),
        (32, 32, 256, F32, None, 1),
        (150, 40, 200, F16, 0, 1),  # ragged
        (70, 24, 264, F32, 0, 1),
        (5, 4096, 64, BF16, 0, 108),  # parts of N
    ],
    ids=str,
)
def test_dx_is_exact_and_wastes_nothing(m, n, k, dtype, group, sms, rng):
    dy, w, expected = problem(rng, m, n, k, dtype, group)
    dx, profiles = dx_of(dy, w, sms)
    np.testing.assert_array_equal(dx, expected.astype(dtype))
    tile, splits = backward_config(m, n, k, dtype.itemsize, sms=sms)
    assert [p.name for p in profiles] == ["ternary_backward"] + ["gemm_sum"] * (splits > 1)
    assert profiles[0].grid == (tile.blocks(m, k), splits, 1)
    assert (splits > 1) is (n == 4096)
    instructions = profiles[0].instructions
    assert not [i.ptx for i in instructions if i.waves > i.phases]
    if m % tile.block_m == 0 and k % tile.block_k == 0:
        assert sum(profiles[0].multiply_adds.values()) == (2 if dtype == F32 else 1) * m * n * k
        codes, result = (next(b for b in profiles[0].buffers if b.name == name) for name in ("w.codes", "dx"))
        assert codes.bytes_read == n * k // 4 * (m // tile.block_m)
        assert result.bytes_written == dx.nbytes
        stores = [i for i in instructions if i.form.startswith("st.global") and i.global_requests]
        assert stores
        assert all(".v4" in i.form and i.sectors_per_128_bytes == 4 for i in stores)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("offset", [1, 8])
def test_views(offset, dtype, rng):
    """Strided rows, at aligned and unaligned addresses; no element outside the view is read or written."""
    m, n, k = 37, 40, 72
    dy, w, expected = problem(rng, m, n, k, dtype)
    padded = np.full((m, n + 16), np.nan, dtype)
    padded[:, offset : n + offset] = dy
    out = np.zeros((m, k + 16), dtype)
    x = rng.integers(-4, 5, (m, k)).astype(dtype)
    dw = np.zeros((n, k + 16), np.float32)
    views = padded[:, offset : n + offset], (out[:, offset : k + offset], dw[:, offset : k + offset])
    ternary_matmul_backward(
        views[0], x, w, activations="native", out=views[1], device="emulator", backend="raw"
    )
    np.testing.assert_array_equal(views[1][0], expected.astype(dtype))
    np.testing.assert_array_equal(views[1][1], dy.astype(float).T @ x.astype(float))
    for array, view in ((out, views[1][0]), (dw, views[1][1])):
        view.fill(0)
        assert not array.any()


@pytest.mark.parametrize("largest", [1e6, 1e-6])
def test_scales_beyond_float16(largest, rng):
    """Row scales that float16 cannot hold, or not precisely, and gradients that compensate for them."""
    t = rng.integers(-1, 2, (48, 64)).astype(np.int8)
    scale = (largest * rng.uniform(0.1, 1, 48)).astype(np.float32)
    dy = random(rng, (9, 48), F16, 1 / largest if largest > 1 else 1e3)
    dx, _ = ternary_matmul_backward(
        dy, np.zeros((9, 64), F16), TernaryMatrix.from_trits(t, scale), device="emulator", backend="raw"
    )
    exact = dy.astype(float) @ (scale.astype(float)[:, None] * t)
    rounding = (
        np.abs(dy.astype(float)) @ (scale.astype(float)[:, None] * np.abs(t)) * 2.0**-11
        + np.abs(exact) * 2.0**-11
    )
    assert (np.abs(dx.astype(float) - exact) <= rounding + 2.0**-25).all()


@pytest.mark.parametrize("which", ["raw", pytest.param("numba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_what_is_not_finite_shows(dtype, which, rng):
    """An infinite gradient stays infinite; a non-finite token makes dw NaN, and dx does not depend on it."""
    dy, w, _ = problem(rng, 3, 8, 64, dtype)
    w = TernaryMatrix.from_trits(np.ones((8, 64), np.int8), w.scale)
    x = random(rng, (3, 64), dtype)
    x[2, 5], dy[1, 4] = np.nan, np.inf
    dx, dw = ternary_matmul_backward(dy, x, w, device="emulator", backend=which)
    assert (dx[1] == np.inf).all()
    assert np.isfinite(dx[[0, 2]]).all()
    assert np.isnan(dw).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("k", [8, 33])
def test_activations_as_the_forward_rounds_them(dtype, k, rng):
    """Activations are within two units of q / s, which the reference computes in double."""
    x = random(rng, (5, k), dtype, 3.0)
    x[1] = 0
    q, step = reference.quantize_activations(x)
    exact = q * step[:, None]
    rounded, views = run_part(kernels._rounded, {"x": x})
    actual = views[rounded.name].astype(float)
    assert (np.abs(actual - exact) <= np.abs(exact) * float(ml_dtypes.finfo(dtype).eps) * 0.51).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("group", [None, 0, 64])
def test_long_sums(dtype, group, rng):
    m, n, k = 33, 1500, 192
    dy, x = random(rng, (m, n), dtype), random(rng, (m, k), dtype)
    shape = () if group is None else (n,) if group == 0 else (n, k // group)
    w = TernaryMatrix.from_trits(
        rng.integers(-1, 2, (n, k)).astype(np.int8), rng.uniform(0.5, 1.5, shape).astype(np.float32)
    )
    grads = ternary_matmul_backward(dy, x, w, device="emulator", backend="raw")
    exact, naive = (
        reference.ternary_matmul_backward(dy, x, w.trits(), w.scale, precision=p)
        for p in ("float64", "naive")
    )
    for actual, expected, textbook in zip(grads, exact, naive, strict=True):
        assert_close(actual, expected, textbook, dtype, factor=GRADIENT)


def test_explain_tells_the_launches(rng):
    dy, w, _ = problem(rng, 40, 64, 128, BF16)
    text = str(explain("ternary_matmul_backward", dy, np.ones((40, 128), BF16), w, device="emulator"))
    for kernel in ("ternary_backward bfloat16", "ternary_round_tokens bfloat16", "gemm bfloat16 to float32"):
        assert kernel in text
    assert "a_along_k" not in text


@needs_nvrtc
@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("scaled", [False, True])
def test_instructions_per_product(scaled, arch):
    """A warp of the largest tile issues few instructions of integer units per product of the tensor cores.

    A step is 64 products; mma.sync of sm_80 takes 8 clocks each, in which the integer units start 4 instructions.
    """
    kernel = kernels._kernel("bfloat16", "bfloat16", scaled, True, backward_tiles(2)[0])
    counts = loop(kernel, arch, "HMMA", 64)
    integer = sum(counts[opcode] for opcode in INTEGER) / counts["HMMA"]
    every = (counts.total() - counts["NOP"]) / counts["HMMA"]  # padding by ptxas uses no unit
    print(f"{arch}: {integer:.2f} integer instructions per product, {every:.2f} of all; {counts}")
    assert counts["HMMA"] == 64
    assert integer <= 1.5
    assert every <= 5
