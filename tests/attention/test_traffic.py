"""Traffic and arithmetic of the CUDA C++ attention kernel, counted by the emulator on tiles of long sequences."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import emulator
from gpu_ops.core.device import EmulatorDevice, compiler_missing
from gpu_ops.kernels.attention import forward as kernels
from gpu_ops.kernels.compiler import toolkit
from gpu_ops.kernels.compiler.jit import compile_kernel
from gpu_ops.kernels.program import Tensor
from scripts.inspect_kernels import sass
from scripts.inspect_loops import iterations
from tests.support.programs import run_program

if compiler_missing("raw"):
    pytest.skip(str(compiler_missing("raw")), allow_module_level=True)

BF16 = np.dtype(ml_dtypes.bfloat16)


class Sampler(EmulatorDevice):
    """Device that runs only the chosen blocks (x, 0, 0) of every launch, and keeps the profile."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = blocks

    def _launch(self, launch, views):
        compiled = compile_kernel(launch.kernel, self.limits.arch)
        self.defines = dict(launch.kernel.defines)
        self.grid = launch.grid
        args = [views[a.name] if isinstance(a, Tensor) else a for a in launch.arguments]
        buffers = [self._buffer(a) if isinstance(a, np.ndarray) else a for a in args]
        options = {"shared": launch.shared, "arch": self.limits.arch}
        options["sample"] = [b % launch.grid[0] for b in self.blocks]
        self.profile = emulator.profile(
            compiled.ptx, compiled.entry, launch.grid, launch.block, buffers, **options
        )


def shared(head, batch, heads):
    """Memory of one head shared by all heads, as broadcast_to does, but writable by a kernel."""
    _, seqlen, _, head_dim = head.shape
    return np.lib.stride_tricks.as_strided(
        head, (batch, seqlen, heads, head_dim), (0, head.strides[1], 0, head.itemsize)
    )


def run(device, arrays, **options):
    """Run attention for out only, without lse."""
    seqlens = {"max_seqlen_q": arrays["q"].shape[1], "max_seqlen_k": arrays["k"].shape[1]}
    defaults = {"causal": False, "window_size": (-1, -1), "softcap": 0.0, "layout": "bshd"}
    scale = {"softmax_scale": arrays["q"].shape[3] ** -0.5}
    options = {**defaults, **scale, **seqlens, **options}
    run_program("attention", "raw", arrays, options, device=device)


def sampled(blocks, seqlen, head_dim, dtype=BF16, *, causal=False, heads=16, batch=4):
    """Profile of some blocks of a self-attention. All heads and sequences share the same memory."""
    device = Sampler(*blocks)
    rng = np.random.default_rng(0)
    arrays = {}
    for name in ("q", "k", "v"):
        head = rng.standard_normal((1, seqlen, 1, head_dim)).astype(dtype)
        device.name(name, head)
        arrays[name] = np.broadcast_to(head, (batch, seqlen, heads, head_dim))
    out = shared(device.empty((1, seqlen, 1, head_dim), dtype, "out"), batch, heads)
    run(device, arrays | {"out": out}, causal=causal)
    return device


# Warp instructions outside tensor cores per exp2: PTX has moves and address sums that ptxas removes, so this
# bounds the softmax, the fragments' loads and the loop together. Measured: 8.9, 17.0.
CASES = {
    "full, head_dim 64": (1024, 64, False, 9.5),
    "causal, head_dim 128": (2048, 128, True, 18.0),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request):
    """A first and a last block of rows: in causal attention they see as much as all blocks do on average."""
    seqlen, head_dim, causal, per_exp2 = request.param
    device = sampled((0, -1), seqlen, head_dim, causal=causal)
    assert seqlen % device.defines["BLOCK_M"] == seqlen % device.defines["BLOCK_N"] == 0
    return device, seqlen, head_dim, causal, per_exp2


def tiles_seen(device, seqlen, causal):
    """Keys that the two blocks have to read, in whole tiles."""
    block_m, block_n = device.defines["BLOCK_M"], device.defines["BLOCK_N"]
    if not causal:
        return 2 * seqlen
    return math.ceil(block_m / block_n) * block_n + seqlen


def test_keys_and_values_are_read_once_per_block_of_rows(case):
    device, seqlen, head_dim, causal, _ = case
    rows = 2 * device.defines["BLOCK_M"]
    row = head_dim * BF16.itemsize
    moved = {b.name: (b.bytes_read, b.bytes_written) for b in device.profile.buffers}
    keys = (tiles_seen(device, seqlen, causal) * row, 0)
    assert moved == {"q": (rows * row, 0), "k": keys, "v": keys, "out": (0, rows * row)}


def test_all_accesses_are_whole_and_no_banks_collide(case):
    profile = case[0].profile
    copies = [i for i in profile.instructions if i.kind == "cp.async" and i.global_requests]
    stores = [i for i in profile.instructions if i.kind == "global" and ".v4" in i.form]
    assert copies
    assert stores
    assert {i.sectors_per_128_bytes for i in copies + stores} == {4.0}
    assert profile.cp_async_bytes == profile.bytes_read
    colliding = [(i.ptx, i.place) for i in profile.instructions if i.waves > i.phases]
    assert not colliding


def test_tensor_cores_do_little_that_is_masked(case):
    device, seqlen, head_dim, causal, _ = case
    block_m = device.defines["BLOCK_M"]
    pairs = 2 * block_m * seqlen
    if causal:  # rows 0 .. block_m - 1 and the last block_m
        pairs = sum(range(1, block_m + 1)) + sum(range(seqlen - block_m + 1, seqlen + 1))
    done = device.profile.multiply_adds["bf16"]
    useful = (
        2 * head_dim + 8
    ) * pairs  # Q K^T, P V and, in a tile of 8 columns, the sums of P as it is rounded
    assert useful <= done <= (1.15 if causal else 1.02) * useful


def test_instructions_per_exponential(case, record_property):
    device, *_, limit = case
    profile = device.profile
    others = profile.counts.warps - profile.classes["tensor core"].warps
    exponentials = profile.opcodes["ex2"].warps
    record_property("instructions per exp2", others / exponentials)
    assert others / exponentials <= limit


# Per score, in addition to tensor-core instructions and loads: scaling, maximum, exp2, sum and half a packing (4.5).
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_machine_instructions_per_exponential(arch, head_dim):
    if toolkit.tool("nvdisasm") is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    names = f"DTYPE=bf16,OUT=bf16,HEAD_DIM={head_dim},", "DROPOUT=0"
    listed = (v.kernel for v in kernels.variants(arch) if all(name in v.kernel.label for name in names))
    compiled = compile_kernel(next(listed), arch)  # the preset's tile; autotuning's candidates follow
    (counts,) = iterations(sass(compiled.cubin, compiled.entry))
    assert counts["softmax"] == pytest.approx(3.5, abs=0.1)
    assert counts["rest"] <= 1.3


def test_a_window_does_not_look_at_what_it_hides():
    """128 rows that see 64 keys each to the left read at most 128 + 64 keys, rounded up to tiles."""
    device = Sampler(-1)
    x = np.random.default_rng(0).standard_normal((1, 4096, 1, 64)).astype(BF16)
    arrays = dict.fromkeys(("q", "k", "v"), np.broadcast_to(x, (4, 4096, 16, 64)))
    device.name("qkv", x)
    out = shared(device.empty(x.shape, BF16, "out"), 4, 16)
    run(device, arrays | {"out": out}, window_size=(64, 0))
    (read,) = (b.bytes_read for b in device.profile.buffers if b.name == "qkv")
    block_m, block_n = device.defines["BLOCK_M"], device.defines["BLOCK_N"]
    keys = block_m + 64 + 2 * block_n
    assert read <= (block_m + 2 * keys) * 64 * BF16.itemsize


class Sparse(EmulatorDevice):
    """Device that passes all of ``memory`` on for views of it: the sanitizer keeps no list of gaps between them."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def _buffer(self, array):
        return super()._buffer(self.memory if array.ctypes.data == self.memory.ctypes.data else array)


@pytest.mark.parametrize(
    ("which", "far"), [("q", 0), ("q", 1), ("k", 1), ("k", 2), ("v", 0), ("v", 1), ("out", 1), ("out", 2)]
)
def test_offsets_have_64_bits(which, far):
    """The last entry along one axis is more than 2^31 elements after the first; the gap is not touched."""
    shape = (2, 34, 2, 32)
    strides = [shape[1] * shape[2] * 32, shape[2] * 32, 32, 1]
    strides[far] = (2**31 // (shape[far] - 1) + 64) // 8 * 8
    elements = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    assert elements > 2**31
    memory = np.zeros(elements, np.uint16).view(BF16)
    rng = np.random.default_rng(0)
    near = {name: rng.standard_normal(shape).astype(BF16) for name in ("q", "k", "v", "out")}
    far_away = near | {which: np.lib.stride_tricks.as_strided(memory, shape, [2 * n for n in strides])}
    far_away[which][...] = near[which]
    for device, arrays in ((Sparse(memory), far_away), (EmulatorDevice(), near)):
        run(device, arrays, softmax_scale=0.2, causal=True)
    assert far_away["out"].tobytes() == near["out"].tobytes()
