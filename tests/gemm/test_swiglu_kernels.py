"""CUDA C++ kernels of SwiGLU alone: accuracy on all inputs, traffic, accepted inputs, and plan."""

from __future__ import annotations

import itertools
import re
import subprocess

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator
from gpu_ops.kernels.compiler import cubin, jit, toolkit
from gpu_ops.kernels.gemm.swiglu import _kernel, select_config, variants
from gpu_ops.presets import ARCHES, PRESETS
from gpu_ops.reference.gemm import swiglu as reference
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc, needs_ptxas, slow
from tests.support.processes import PATIENCE

pytestmark = needs_nvrtc

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu2"]
RAW = {"device": "emulator", "backend": "raw"}


@pytest.mark.parametrize("activation", ACTIVATIONS[:3])  # relu2 approximates nothing
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_number_of_16_bits(dtype, activation):
    """For all 65536 inputs, approximations add at most a twentieth of a unit to the final rounding."""
    gate = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    ones = np.ones_like(gate)
    with np.errstate(all="ignore"):
        expected = reference.swiglu(gate, ones, activation=activation, precision="float64")
        slope, _ = reference.swiglu_backward(ones, gate, ones, activation=activation, precision="float64")
        exact_gate = gate.astype(np.float64)
    y = gpu_ops.swiglu(gate, ones, activation=activation, **RAW)
    dgate, dup = gpu_ops.swiglu_backward(ones, gate, ones, activation=activation, **RAW)
    assert dup.tobytes() == y.tobytes()
    finite = np.isfinite(exact_gate)
    np.testing.assert_array_equal(y[~finite].astype(np.float64), expected[~finite])
    np.testing.assert_array_equal(dgate[~finite].astype(np.float64), slope[~finite])
    # bfloat16 reaches further down than the exponential: g * c vanishes with c, below 88 * 2^-126
    within(y[finite], expected[finite], dtype, lost=2.0**-119 if dtype == BF16 else 0.0)
    # act' crosses 0, where it is the difference of two numbers of that size
    within(dgate[finite], slope[finite], dtype, least=0.125)


def within(got, want, dtype, *, lost=0.0, least=0.0):
    """Check that errors are at most 0.55 units in the last place of the exact value, or of ``least``, or ``lost``."""
    with np.errstate(over="ignore"):  # of the largest number, which test_limits looks at
        unit = np.spacing(np.maximum(np.abs(want), least).astype(dtype)).astype(np.float64)
    error = np.abs(got.astype(np.float64) - want)
    worst = int(np.argmax(error / np.maximum(0.55 * unit, lost)))
    assert error[worst] <= max(0.55 * unit[worst], lost), f"{got[worst]} for {want[worst]!r}"


@pytest.mark.parametrize("shape", [(8, 2048), (5, 1040)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_each_element_moves_once(dtype, shape, rng):
    """Accesses are whole sectors of 16-byte words, split or packed, and move the bytes of the formula."""
    packed, dy = random(rng, (shape[0], 2 * shape[1]), dtype), random(rng, shape, dtype)
    gate, up = packed[:, : shape[1]].copy(), packed[:, shape[1] :].copy()
    for matrices, call, arguments in (
        (3, gpu_ops.swiglu, (gate, up)),
        (3, gpu_ops.swiglu, (packed,)),
        (5, gpu_ops.swiglu_backward, (dy, gate, up)),
        (5, gpu_ops.swiglu_backward, (dy, packed)),
    ):
        with emulator.record() as profiles:
            call(*arguments, **RAW)
        (profile,) = profiles
        assert profile.bytes_read + profile.bytes_written == matrices * dy.nbytes
        assert profile.least_bytes <= 1.02 * matrices * dy.nbytes
        assert profile.counts.sectors_per_128_bytes <= 4.08
        accesses = [i for i in profile.instructions if i.global_requests]
        assert all(".v4" in i.form for i in accesses)
        loads = [i for i in accesses if i.form.startswith("ld")]
        assert len(loads) == 2 * (matrices // 2 + matrices % 2), "two vectors per array and thread"
        stores = [i.pc for i in accesses if i.form.startswith("st")]
        assert max(i.pc for i in loads) < min(stores), "all loads are on their way before the first store"


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_same_bits_wherever_the_numbers_lie(activation, dtype, rng):
    """Bits are equal for aligned, shifted and strided rows, and for packed rows with misaligned halves."""
    rows, cols = 5, 1003
    gate, up, dy = (random(rng, (rows, cols), dtype) for _ in range(3))
    options = {"activation": activation, **RAW}
    y = gpu_ops.swiglu(gate, up, **options)
    gradients = gpu_ops.swiglu_backward(dy, gate, up, **options)
    expected = [x.tobytes() for x in (y, *gradients)]

    def placed(x, before, after):
        padded = np.zeros((rows, before + cols + after), dtype)
        padded[:, before : before + cols] = x
        return padded[:, before : before + cols]

    # (8, 13): aligned rows of whole vectors and three elements
    for before, after in ((1, 0), (8, 13), (3, 2)):
        g, u, d = (placed(x, before, after) for x in (gate, up, dy))
        actual = (gpu_ops.swiglu(g, u, **options), *gpu_ops.swiglu_backward(d, g, u, **options))
        assert [x.tobytes() for x in actual] == expected
    packed = np.concatenate([gate, up], axis=-1)
    assert gpu_ops.swiglu(packed, **options).tobytes() == expected[0]
    dpacked = gpu_ops.swiglu_backward(dy, packed, **options)
    assert [dpacked[:, :cols].tobytes(), dpacked[:, cols:].tobytes()] == expected[1:]


ROWS = (1, 2, 5, 1000, 65535, 65536, 10**6, 1 << 32)
COLS = (1, 7, 8, 15, 64, 65, 100, 1000, 1024, 4096, 14336, 1 << 20, 1 << 36)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_choice_can_be_launched_and_covers_the_rows(itemsize):
    for rows, cols, alignment in itertools.product(ROWS, COLS, (16, 8, itemsize)):
        if rows * cols > 1 << 40:
            continue
        c = select_config(rows, cols, itemsize, alignment=alignment)
        assert alignment % (c.vec * itemsize) == 0
        assert c.vec * itemsize == 16 or alignment < 16
        assert c.threads_per_row * c.rows_per_block == 128
        assert c.threads_per_row >= c.vec, "a thread for every element that fills no vector"
        chunk = c.vec * c.vecs * c.threads_per_row
        assert (c.grid[0] - 1) * chunk < cols <= c.grid[0] * chunk
        assert c.grid[1] * c.grid[2] * c.rows_per_block >= rows
        assert (c.grid[1] * c.grid[2] - 65535) * c.rows_per_block < rows
        assert c.grid[0] < 1 << 31
        assert max(c.grid[1:]) <= 65535


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_choice_is_listed(arch):
    listed = {v.kernel for v in variants(arch)}
    chosen = set()
    for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        for cols, alignment in itertools.product(COLS, (16, 8, itemsize)):
            config = select_config(64, cols, itemsize, alignment=alignment)
            chosen |= {
                _kernel(which, config, dtype, activation)
                for which, activation in itertools.product(("forward", "backward"), ACTIVATIONS)
            }
    assert chosen == listed


def test_rows_past_the_end_of_the_grid(rng):
    """More groups of rows than fit on an axis of a grid continue on the next axis."""
    packed = random(rng, (8 * 65535 + 9, 2), F32)
    y = gpu_ops.swiglu(packed, **RAW)
    assert y.tobytes() == gpu_ops.swiglu(packed[:, :1].copy(), packed[:, 1:].copy(), **RAW).tobytes()


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_120", *slow("sm_90")])
def test_registers_leave_room_for_warps(arch):
    for variant in variants(arch):
        kernel = variant.kernel
        if dict(kernel.defines)["DTYPE"] == "f16":  # as bf16, and test_inspect_kernels sees them all
            continue
        compiled = jit.assemble(jit.compile_kernel(kernel, arch), arch)
        needs = cubin.resources(compiled.cubin, kernel.entry, compiled.log)
        assert needs.spill_bytes == 0
        share = cubin.occupancy(needs, variant.threads_per_block, 0, ARCHES[arch]).share
        assert share > 0.5, kernel.label


def test_arithmetic_hides_behind_memory(tmp_path):
    """Machine instructions per element of a thread with whole vectors take less time than its bytes.

    An SM issues 128 per clock. The tightest case is 16 bits on the card with the highest bandwidth per clock.
    """
    nvdisasm = toolkit.tool("nvdisasm")
    if nvdisasm is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    preset = PRESETS["B200"]
    bytes_per_clock = preset.memory_gbps * 1e9 / (preset.sms * preset.boost_mhz * 1e6)
    for variant in variants(preset.arch.name):
        kernel, macros = variant.kernel, dict(variant.kernel.defines)
        if (macros["DTYPE"], macros["VEC"]) != ("bf16", 8):
            continue
        bytes_per_element = 2 * (3 if kernel.entry.endswith("forward") else 5)
        image = tmp_path / "kernel.cubin"
        compiled = jit.assemble(jit.compile_kernel(kernel, preset.arch.name), preset.arch.name)
        image.write_bytes(compiled.cubin)
        listing = subprocess.run(
            [nvdisasm, "-c", str(image)], capture_output=True, text=True, check=True, timeout=PATIENCE
        ).stdout
        body = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)
        code = dict(zip(body[1::2], body[2::2], strict=True))[kernel.entry]
        opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code)
        last = max(i for i, opcode in enumerate(opcodes) if re.match(r"STG\S*\.128", opcode))
        per_element = (last + 1) / (macros["VEC"] * macros["VECS"])
        assert per_element < 0.9 * 128 * bytes_per_element / bytes_per_clock, kernel.label
