"""GPU kernels of RoPE alone: plans for every card, traffic, registers, angles, arrays on a device."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator, rope
from gpu_ops.core.device import EmulatorDevice
from gpu_ops.core.op import forget_calls
from gpu_ops.kernels.compiler import cubin, jit
from gpu_ops.kernels.rope import rope as kernels
from gpu_ops.kernels.rope.rope import turns
from gpu_ops.presets import ARCHES, PRESETS
from gpu_ops.reference.rope import rope as reference
from tests.support.compare import random
from tests.support.compilers import CARDS, each_card, needs_nvrtc, slow

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
RAW = {"device": "emulator", "backend": "raw"}


def choose(tokens, nheads, nheads_kv, head_dim, card, *, itemsize=2, alignment=16, rotary_dim=None, **order):
    rotary_dim = rotary_dim or head_dim // 2 * 2
    sizes = (tokens, nheads, nheads_kv, rotary_dim, head_dim - rotary_dim, itemsize)
    order = order or {"tokens_inner": False}
    return kernels.select_config(kernels.RopeShape(*sizes), alignment=alignment, sms=card.sms, **order)


# ---- the plan ----------------------------------------------------------------------------------------------


@each_card
@pytest.mark.parametrize("tokens_inner", [False, True])
def test_every_plan_can_be_launched_and_has_no_idle_block(tokens_inner, card):
    for head_dim in (2, 3, 7, 40, 64, 80, 96, 128, 256, 1000, 4099):
        for tokens in (1, 7, 4096, 1 << 20, 2**31 - 1):
            for nheads, nheads_kv in ((1, 0), (0, 1), (32, 8), (71, 1), (10**6, 3)):
                c = choose(tokens, nheads, nheads_kv, head_dim, card, tokens_inner=tokens_inner)
                x, y, z = c.block
                assert x * y * z <= 128
                assert z <= 64
                assert c.grid[0] <= 2**31 - 1
                assert max(c.grid[1:]) <= 65535
                assert (c.grid[0] - 1) * z < tokens <= c.grid[0] * z
                units = -(-(head_dim // 2 * 2) // (2 * c.vec)) + -(-(head_dim % 2) // (2 * c.vec))
                assert (c.grid[2] - 1) * x < units <= c.grid[2] * x
                for heads, blocks in ((nheads, c.q_blocks), (nheads_kv, c.grid[1] - c.q_blocks)):
                    assert (blocks - 1) * y < max(heads, 1)
                    assert (blocks > 0) == (heads > 0)


def test_vectors_are_as_long_as_shapes_and_alignment_allow():
    h100 = PRESETS["H100 SXM"]
    for head_dim, more, vec in (
        *((head_dim, {}, vec) for head_dim, vec in ((128, 8), (80, 8), (72, 4), (100, 2), (6, 1))),
        (128, {"itemsize": 4}, 4),
        *((128, {"alignment": alignment}, vec) for alignment, vec in ((8, 4), (2, 1))),
        *((d, {"rotary_dim": rotary}, vec) for d, rotary, vec in ((128, 8, 4), (96, 64, 8), (7, 4, 1))),
    ):
        assert choose(64, 32, 8, head_dim, h100, **more).vec == vec, (head_dim, more)


def test_long_sequences_share_their_angles_and_short_ones_fill_the_card():
    h100 = PRESETS["H100 SXM"]
    decode = choose(1, 32, 8, 128, h100)
    assert (decode.block, decode.grid) == ((8, 4, 1), (1, 10, 1))  # one head per thread
    prefill = choose(8192, 32, 8, 128, h100)
    assert (prefill.block, prefill.grid) == ((8, 4, 4), (2048, 2, 1))  # 8 heads of q, 2 of k
    assert choose(8192, 32, 8, 128, h100, tokens_inner=True).block == (8, 1, 16)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", *slow("sm_90", "sm_120")])
def test_more_than_half_of_the_warps_and_no_spills(arch):
    for variant in kernels.variants(arch):
        compiled = jit.compile_kernel(variant.kernel, arch)
        needs = cubin.resources(compiled.cubin, "rope", compiled.log)
        assert needs.spill_bytes == needs.local_bytes == 0, variant.kernel.label
        assert cubin.occupancy(needs, variant.threads_per_block, 0, ARCHES[arch]).share > 0.5


def test_every_plan_is_listed():
    listed = {v.kernel for v in kernels.variants("sm_80")}
    for head_dim in (2, 7, 40, 72, 80, 100, 128, 256):
        for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
            for alignment in (16, 8, 4, itemsize):
                c = choose(64, 32, 8, head_dim, CARDS[0], itemsize=itemsize, alignment=alignment)
                assert {kernels._kernel(c, dtype, pairs) for pairs in (False, True)} <= listed


# ---- what moves --------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, {}),
        (BF16, {"interleaved": True}),
        (F32, {}),
        (BF16, {"rotary_dim": 32}),
        (BF16, {"layout": "bhsd"}),
        (BF16, {"in_place": True}),
    ],
    ids=str,
)
def test_each_element_moves_once(dtype, options, rng):
    """Traffic is whole sectors in 16-byte accesses, in one launch: q, k and the positions only."""
    options = dict(options)
    q, k = (random(rng, (2, 48, heads, 128), dtype) for heads in (8, 2))
    if options.get("layout"):
        q, k = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k))
    in_place = options.pop("in_place", False)
    positions = rng.integers(0, 10**6, (2, 48))
    with emulator.record() as profiles:
        rope(q, k, positions=positions, out=(q, k) if in_place else None, **options, **RAW)
    (profile,) = profiles
    moved = {b.name: (b.bytes_read, b.bytes_written) for b in profile.buffers}
    for name, x in (("q", q), ("k", k)):
        if in_place:
            assert moved[name] == (x.nbytes, x.nbytes)
        else:
            assert (moved[name], moved[f"rotated {name}"]) == ((x.nbytes, 0), (0, x.nbytes))
    least = 2 * (q.nbytes + k.nbytes) + positions.nbytes
    frequencies = 8 * 64  # bytes, which stay in L1
    assert profile.least_bytes <= least + frequencies
    vectors = [i for i in profile.instructions if i.global_requests and "v4" in i.form]
    assert len(vectors) == 4
    assert {i.sectors_per_128_bytes for i in vectors} == {4.0}
    assert sum(i.global_bytes for i in vectors) == 2 * (q.nbytes + k.nbytes)


@needs_nvrtc
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_that_share_a_thread(interleaved, layout, monkeypatch, rng):
    """Heads share a thread as on a full device: the bits of a head per thread, with fewer instructions."""
    axes = (2, 5, 45, 128) if layout == "bshd" else (2, 45, 5, 128)
    q = random(rng, axes, BF16)
    k = random(rng, (2, 5, 3, 128) if layout == "bshd" else (2, 3, 5, 128), BF16)
    options = {"interleaved": interleaved, "layout": layout, **RAW}
    with emulator.record() as profiles:
        expected = rope(q, k, **options)
        monkeypatch.setattr(kernels, "_RESIDENT", 1)
        forget_calls()
        actual = rope(q, k, **options)
    forget_calls()
    for g, w in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(g, w)
    pairs = (q.size + k.size) // 2
    alone, shared = (p.counts.lanes / pairs for p in profiles)
    assert alone <= 72, "of the PTX, of which ptxas saves a part; measured: 64 to 71"
    assert shared <= 24, "measured: 18 to 22"


@needs_nvrtc
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_heads_of_one_pair(layout, rng):
    """Each token is a thread, and a block has at most 64 along its last axis."""
    x = random(rng, (1, 200, 2, 2), F32)
    x = x if layout == "bshd" else x.swapaxes(1, 2).copy()
    expected = rope(x, layout=layout, backend="reference")
    np.testing.assert_allclose(rope(x, layout=layout, **RAW), expected, rtol=0, atol=1e-6)


@needs_nvrtc
@pytest.mark.parametrize("interleaved", [False, True])
def test_more_units_than_a_block_has_threads(interleaved, rng):
    q = random(rng, (1, 3, 2, 1103), F32)
    options = {"rotary_dim": 1002, "interleaved": interleaved, "positions": 50}
    expected = reference.rope(q, **{**options, "positions": 50 + np.arange(3)}, precision="float64")
    np.testing.assert_allclose(rope(q, **options, **RAW), expected, rtol=0, atol=2.0**-22 * np.abs(q).max())


@needs_nvrtc
@pytest.mark.parametrize("interleaved", [False, True])
def test_misaligned_heads_give_the_same_bits(interleaved, rng):
    q = random(rng, (2, 5, 3, 32), BF16)
    padded = np.zeros((2, 5, 3, 37), BF16)
    padded[..., 1:33] = q
    options = {"interleaved": interleaved, "rotary_dim": 24, **RAW}
    expected = rope(q, **options)
    np.testing.assert_array_equal(rope(padded[..., 1:33], **options), expected)
    rope(padded[..., 1:33], out=padded[..., 1:33], **options)
    np.testing.assert_array_equal(padded[..., 1:33], expected)
    assert not padded[..., 0].any()
    assert not padded[..., 33:].any()


class Sparse(EmulatorDevice):
    """Device that passes all of ``memory`` on for views of it: the sanitizer keeps no list of gaps between them."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def _buffer(self, array):
        return super()._buffer(self.memory if array.ctypes.data == self.memory.ctypes.data else array)


@needs_nvrtc
@pytest.mark.parametrize("far", [0, 1, 2], ids=["batch", "seqlen", "head"])
@pytest.mark.parametrize("which", ["input", "output"])
def test_offsets_have_64_bits(which, far, monkeypatch):
    """The last entry along one axis is more than 2^31 elements after the first; the gap is not touched."""
    monkeypatch.setenv("GPU_OPS_SANITIZE", "0")  # its notes on 4 GB take half a minute
    shape = (2, 3, 5, 16)
    strides = [3 * 5 * 16, 5 * 16, 16, 1]
    strides[far] = (2**31 // (shape[far] - 1) + 64) // 8 * 8
    memory = np.zeros(sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1, np.uint16).view(BF16)
    assert memory.size > 2**31
    far_away = np.lib.stride_tricks.as_strided(memory, shape, [2 * n for n in strides])
    x = random(np.random.default_rng(0), shape, BF16)
    expected = rope(x, **RAW)
    monkeypatch.setattr("gpu_ops.core.device.EmulatorDevice", functools.partial(Sparse, memory))
    if which == "input":
        far_away[...] = x
        actual = rope(far_away, out=np.empty_like(x), **RAW)
    else:
        actual = rope(x, out=far_away, **RAW)
    np.testing.assert_array_equal(actual, expected)


# ---- angles ------------------------------------------------------------------------------------------------


def test_turns_of_one_radian():
    """1 / (2 pi) in base 16 is .28BE60DB9391054A7F09D5F47D4D3770...; whole turns of a fast frequency are dropped."""
    digits = 0x28BE60DB9391054A7F09D5F47D4D3770
    fractions = turns(np.array([1.0, 2.0**-40, 2.0**40, 7.0]).tobytes())
    assert fractions.tolist() == [
        digits >> 64,
        (digits >> 104) + 1,
        (digits >> 24) % 2**64,
        (7 * digits >> 64) % 2**64,
    ]


@pytest.mark.parametrize("name", ["raw", "numba"])
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_angles_far_out(name, theta, rng):
    """Pairs (1, 0) give cos and sin. From 2^31 on the 53 bits of the angles limit the accuracy."""
    near = rng.integers(-(2**20), 2**20, 250)
    positions = np.concatenate([near, [0, 1, -1, 2**20, 10**6, 2**31 - 1]])
    q = np.zeros((1, len(positions), 1, 128), np.float32)
    q[..., :64] = 1.0
    for dtype in (np.int32, np.int64):
        actual = rope(q, positions=positions.astype(dtype), theta=theta, device="emulator", backend=name)[
            0, :, 0
        ]
        angle = np.fmod(positions[:, None].astype(np.longdouble) * theta ** (-np.arange(64) / 64), 2 * np.pi)
        bound = np.where(np.abs(positions) <= 2**20, 8e-8, 2.0**-22)[:, None]
        assert (np.abs(actual[:, :64] - np.cos(angle)) <= bound).all()
        assert (np.abs(actual[:, 64:] - np.sin(angle)) <= bound).all()


@needs_nvrtc
def test_explain_names_the_kernel():
    q, k = np.ones((1, 64, 32, 128), np.float16), np.ones((1, 64, 8, 128), np.float16)
    text = str(gpu_ops.explain("rope", q, k, **RAW))
    assert "rope float16 vec8: grid 16 x 10, block 8 x 4 x 4" in text
    float64_plan = gpu_ops.explain("rope", q.astype(np.float64), device="emulator")
    assert float64_plan.choice.backend == "numba"
    assert "float64 has Numba kernels only" in str(float64_plan)
