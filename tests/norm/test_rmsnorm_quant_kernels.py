"""CUDA C++ kernel of rmsnorm_quant_int8 alone: every way to keep a row, traffic, registers, range."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator
from gpu_ops.kernels.compiler import cubin, jit
from gpu_ops.kernels.norm.rmsnorm_quant import _kernel, select_config, variants
from gpu_ops.presets import ARCHES
from tests.norm.test_rmsnorm_quant import check
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc, needs_ptxas, slow

pytestmark = needs_nvrtc

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
RAW = {"device": "emulator", "backend": "raw"}


@pytest.mark.parametrize(
    ("dtype", "cols"),
    [
        (BF16, 512),  # a warp per row, four rows per block: the last of five rows alone
        (BF16, 16384),  # registers of 1024 threads
        (BF16, 20000),  # read again
        (F32, 8192),
        (F32, 9001),  # read again, by single elements
    ],
    ids=str,
)
@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_ways_to_keep_a_row(dtype, cols, casting, rng):
    x, weight = random(rng, (5, cols), dtype), random(rng, (cols,), dtype)
    actual = gpu_ops.rmsnorm_quant_int8(x, weight, casting=casting, **RAW)
    check(*actual, x, weight, casting=casting)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", [256, 1001])
def test_numbers_at_the_ends_of_floats_range(dtype, cols, rng):
    """Squares or products with the weight leave the range of float in some rows, and not in others."""
    x, weight = (random(rng, shape, dtype).astype(np.float32) for shape in ((6, cols), (cols,)))
    plain = gpu_ops.rmsnorm_quant_int8(x.astype(dtype), weight.astype(dtype), eps=1e-38, **RAW)
    powers = np.array([0, 120, -50, 60, -60, 0])
    scaled = np.ldexp(x, powers[:, None]).astype(dtype)
    actual = gpu_ops.rmsnorm_quant_int8(scaled, weight.astype(dtype), eps=1e-38, **RAW)
    same = powers == 0
    assert all(a[same].tobytes() == b[same].tobytes() for a, b in zip(actual, plain, strict=True))
    check(*actual, scaled, weight.astype(dtype), eps=1e-38)
    large = np.ldexp(weight, 100).astype(dtype)
    check(*gpu_ops.rmsnorm_quant_int8(scaled[:2], large, **RAW), scaled[:2], large)


@pytest.mark.parametrize("shape", [(8, 512), (4, 4096)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_each_element_moves_once(dtype, residual, shape, rng):
    x, weight = random(rng, shape, dtype), random(rng, shape[-1:], dtype)
    options = {"residual": random(rng, shape, dtype)} if residual else {}
    with emulator.record() as profiles:
        gpu_ops.rmsnorm_quant_int8(x, weight, **options, **RAW)
    (profile,) = profiles
    moved = {b.name: (b.bytes_read, b.bytes_written) for b in profile.buffers}
    expected = {"x": (x.nbytes, 0), "q": (0, x.size), "scale": (0, 4 * shape[0]), "rowsum": (0, 4 * shape[0])}
    if residual:
        expected |= {"residual": (x.nbytes, 0), "s": (0, x.nbytes)}
    assert {name: moved[name] for name in expected} == expected
    for i in profile.instructions:
        if i.global_requests and ".v" in i.form:
            assert i.sectors_per_128_bytes == 4, i.ptx
        assert i.waves == i.phases, "no bank conflicts"


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_same_bits_wherever_the_numbers_lie(dtype, rng):
    x, weight = random(rng, (3, 2048), dtype), random(rng, (2048,), dtype)
    expected = [a.tobytes() for a in gpu_ops.rmsnorm_quant_int8(x, weight, **RAW)]
    padded = np.zeros((3, 2049), dtype)
    padded[:, 1:] = x
    assert [a.tobytes() for a in gpu_ops.rmsnorm_quant_int8(padded[:, 1:], weight, **RAW)] == expected
    codes = np.zeros((3, 2050), np.int8)
    out = (codes[:, 1:-1], np.zeros(3, np.float32), np.zeros(3, np.int32))
    assert [a.tobytes() for a in gpu_ops.rmsnorm_quant_int8(x, weight, out=out, **RAW)] == expected


COLS = (1, 7, 8, 64, 100, 512, 520, 1001, 4096, 8192, 8200, 16384, 16392, 1 << 20, (1 << 20) + 1)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_choice_can_be_launched_and_covers_the_rows(itemsize):
    for rows, cols, aligned in itertools.product((1, 3, 10**6, 1 << 33), COLS, (True, False)):
        c = select_config(rows, cols, itemsize, aligned=aligned)
        assert cols % c.vec == 0
        assert c.access == (c.vec if aligned else 1)
        assert c.threads_per_row % 32 == 0
        assert c.threads <= 1024
        assert c.rows_per_block == 1 or c.threads_per_row == 32
        assert c.vecs == 0 or c.vecs * c.vec * c.threads_per_row >= cols
        assert c.grid[0] * c.grid[1] * c.rows_per_block >= rows
        assert c.grid[0] < 1 << 31
        assert (c.vecs > 0) == (c.vec > 1 and cols <= 2048 * c.vec)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_every_choice_is_listed(arch):
    chosen = {
        _kernel(select_config(64, cols, itemsize, aligned=aligned), dtype)
        for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4))
        for cols, aligned in itertools.product(COLS, (True, False))
    }
    assert chosen == {v.kernel for v in variants(arch)}


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", *slow("sm_120")])
def test_registers_leave_room_for_warps(arch):
    """Kernels fill more than half of the warps of an SM up to 8192 columns of 16 bits; none spills."""
    for variant in variants(arch):
        kernel = variant.kernel
        if dict(kernel.defines)["DTYPE"] == "f16":  # as bf16, and test_inspect_kernels sees them all
            continue
        compiled = jit.assemble(jit.compile_kernel(kernel, arch), arch)
        needs = cubin.resources(compiled.cubin, kernel.entry, compiled.log)
        assert needs.spill_bytes == 0
        assert cubin.occupancy(needs, 256, 0, ARCHES[arch]).share > 0.5, kernel.label
        assert cubin.occupancy(needs, 1024, 0, ARCHES[arch]).blocks >= 1
