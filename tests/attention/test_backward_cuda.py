"""CUDA C++ kernels of attention backward on the emulator: tiles, passes, work, and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask, emulator
from gpu_ops.core.op import forget_calls
from gpu_ops.kernels.attention import backward_raw
from gpu_ops.kernels.attention.backward_config import (
    bias_shared_bytes,
    head_dims,
    head_parts,
    select_bias_tile,
    select_tile,
    shared_bytes,
)
from gpu_ops.kernels.attention.problem import BACKWARD_SHAPE
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.sources import KERNELS
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import (
    DTYPES,
    HEAD_DIMS,
    KERNEL_FACTORS,
    assert_gradient,
    expected,
    pairwise,
    row_id,
)

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")

RAW = {"device": "emulator", "backend": "raw"}


def run(problem, out, lse, **more):
    """(dq, dk, dv), the gradients of options, and the profiles of the launches by kernel."""
    with emulator.record() as profiles:
        *gradients, extra = gpu_ops.attention_backward(
            problem.dout, *problem.arrays, out, lse, **problem.options, return_extra=True, **more, **RAW
        )
    return gradients, extra, {p.kernel: p for p in profiles}


def check(deterministic=False, **settings):
    """Check the gradients of a problem against the reference; return them and the profiles."""
    e = expected(gradients=True, **settings)
    out, lse = e.exact["out"].astype(e.problem.q.dtype), e.exact["lse"].astype(np.float32)
    gradients, extra, profiles = run(e.problem, out, lse, deterministic=deterministic)
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        e.check(name, x)
    for name, x in extra.items():
        e.check(f"d{name}", x)
    assert set(extra) == {"bias", "sinks"} & set(e.problem.options)
    return gradients, profiles


def test_the_struct_is_what_the_host_packs():
    def fields(dtype, prefix=""):
        for name, (field, offset, *_) in dtype.fields.items():
            if field.fields:
                yield from ((f"{prefix}{name}.{n}", at + offset) for n, at in fields(field))
            else:
                yield name, offset

    offsets = dict(fields(BACKWARD_SHAPE)) | {"": BACKWARD_SHAPE.itemsize}
    stores = "\n".join(
        f"out[{i}] = {f'(char*)&p->{name} - (char*)p' if name else 'sizeof(BackwardShape)'};"
        for i, name in enumerate(offsets)
    )
    source = f"""#include "backward_shape.cuh"
    extern "C" __global__ void layout(int* out) {{ const BackwardShape* p = (BackwardShape*)out; {stores} }}"""
    compiled = np.zeros(len(offsets), np.int32)
    emulator.launch(source, "layout", 1, 1, [compiled], include=[KERNELS / "attention"])
    assert dict(zip(offsets, compiled, strict=True)) == offsets


# dtype, (head_dim, head_dim_v), mask, card: every way to divide rows and columns among warps.
TILES = [
    ("bfloat16", (64, 64), "causal", "sm_80"),
    ("float16", (64, 40), "full", "sm_120"),
    ("bfloat16", (128, 128), "causal", "sm_80"),
    ("float16", (128, 128), "full", "sm_120"),
    ("bfloat16", (256, 192), "causal", "sm_80"),
    ("float32", (64, 64), "causal", "sm_80"),
]
TILES_SLOW = [
    (dtype, dims, "wide_band", arch)
    for dtype, dims, arch in itertools.product(
        ("float32", "bfloat16"),
        (*((d, d) for d in range(32, 257, 32)), (40, 256), (192, 128)),
        ("sm_80", "sm_86", "sm_90"),
    )
]


@pytest.mark.parametrize(("dtype", "dims", "mask", "arch"), TILES, ids=str)
def test_tiles(dtype, dims, mask, arch, monkeypatch):
    monkeypatch.setenv("GPU_OPS_ARCH", arch)
    _, profiles = check(dtype=dtype, head_dims=dims, mask=mask, seqlens=(113, 130), heads=(2, 1), batch=1)
    assert all(p.counts.replays == 0 for p in profiles.values())


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dims", "mask", "arch"), TILES_SLOW, ids=str)
def test_all_tiles(dtype, dims, mask, arch, monkeypatch):
    monkeypatch.setenv("GPU_OPS_ARCH", arch)
    check(dtype=dtype, head_dims=dims, mask=mask, seqlens=(70, 130), heads=(2, 1), batch=1)
    check(
        dtype=dtype, head_dims=dims, mask=mask, seqlens=(70, 130), heads=(2, 1), batch=1, deterministic=True
    )


OPTIONS = [
    {
        "softcap": 2.0,
        "sinks": True,
        "alibi": "batch_heads",
        "layout": "bhsd",
        "softmax_scale": -0.3,
        "q_start": 60,
    },
    {"bias": "masks", "block_mask": "each", "blocks": (16, 32), "mask": "wide_band", "sinks": True},
]


@pytest.mark.parametrize("row", OPTIONS, ids=row_id)
def test_options(row):
    check(dtype="bfloat16", seqlens=(113, 130), head_dims=(32, 32), heads=(4, 2), batch=2, **row)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("row", pairwise(KERNEL_FACTORS, seed=2), ids=row_id)
def test_all_options(row, deterministic):
    check(**row, batch=12 if row["seqlens"][0] == 1 else 2, deterministic=deterministic)


def test_deterministic_gives_the_same_bits_and_no_atomics():
    settings = {
        "dtype": "bfloat16",
        "seqlens": (70, 260),
        "mask": "causal",
        "head_dims": (32, 32),
        "heads": (2, 1),
        "batch": 1,
    }
    first, profiles = check(deterministic=True, **settings)
    assert "attention_backward_rows" not in profiles
    again, _ = check(deterministic=True, **settings)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_varlen(deterministic):
    rng = np.random.default_rng(0)
    lengths_q, lengths_k = (70, 0, 1, 130, 5), (90, 3, 64, 113, 0)
    cu_q, cu_k = (np.cumsum([0, *n], dtype=np.int32) for n in (lengths_q, lengths_k))
    dtype = DTYPES["bfloat16"]
    q, dout = (rng.standard_normal((cu_q[-1], 4, 32)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((cu_k[-1], 2, 32)).astype(dtype) for _ in range(2))
    options = {"causal": True, "sinks": rng.standard_normal(4).astype(np.float32)}
    out, lse = reference.attention_varlen(
        q, k, v, cu_q, cu_k, **options, return_lse=True, precision="float64"
    )
    exact, naive = (
        reference.attention_varlen_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, **options, return_extra=True, precision=precision
        )
        for precision in ("float64", "naive")
    )
    *grads, extra = gpu_ops.attention_varlen_backward(
        *(dout, q, k, v, out.astype(dtype), lse.astype(np.float32), cu_q, cu_k),
        **options,
        deterministic=deterministic,
        return_extra=True,
        **RAW,
    )
    for i, name in enumerate(("dq", "dk", "dv")):
        assert_gradient(name, grads[i], exact[i], naive[i], dtype, lse)
    assert_gradient("dsinks", extra["sinks"], exact[3]["sinks"], naive[3]["sinks"], dtype, lse)


@pytest.mark.parametrize("mask", ["causal", "blocks"])
def test_work_is_five_products_of_the_tiles_that_somebody_sees(mask):
    """A further block of keys that a block mask hides is not read at all."""
    e = expected(
        dtype="bfloat16", seqlens=(256, 384), head_dims=(32, 32), heads=(1, 1), batch=1, mask="causal"
    )
    p = e.problem
    visible = np.tril(np.ones((256, 384), bool), 128)
    if mask == "blocks":
        shown = np.array([[True, False, True], [False, False, True]])
        p.options["block_mask"] = BlockMask(shown, 128, 128)
        visible &= np.kron(shown, np.ones((128, 128), bool))
    out, lse = reference.attention(*p.arrays, **p.options, return_lse=True, precision="float64")
    _, _, profiles = run(p, out.astype(p.q.dtype), lse.astype(np.float32))
    tiles = visible.reshape(4, 64, 3, 128).any(axis=(1, 3))
    profile = profiles["attention_backward"]
    assert profile.multiply_adds["bf16"] == tiles.sum() * 5 * 64 * 128 * 32
    read = {b.name: b.bytes_read for b in profile.buffers}
    assert read["k"] == read["v"] == tiles.any(axis=0).sum() * 128 * 32 * 2


@pytest.mark.parametrize("parts", [1, 2])
def test_keys_of_a_group_are_read_once_for_each_part(parts, monkeypatch):
    monkeypatch.setattr(backward_raw, "head_parts", lambda *_, **__: parts)
    forget_calls()
    _, profiles = check(dtype="bfloat16", seqlens=(64, 113), head_dims=(32, 40), heads=(8, 2), batch=2)
    read = {b.name: b.bytes_read for b in profiles["attention_backward"].buffers}
    assert read["k"] == read["v"] * 32 / 40 == parts * 2 * 2 * 113 * 32 * 2
    forget_calls()


def test_few_blocks_divide_the_heads_of_a_group():
    assert head_parts(1024, 4, 64, 132, causal=False) == 1  # enough blocks
    assert head_parts(128, 4, 32, 132, causal=True) == 2  # one wave, of which half would idle
    assert head_parts(16, 32, 32, 108, causal=True) == 16
    assert head_parts(16, 8, 2, 108, causal=True) == 1  # nothing to gain


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_reach_those_who_see_them_only(bad):
    """Every query and every key of the tile sees a part of it."""
    p = expected(
        dtype="bfloat16", seqlens=(70, 70), head_dims=(32, 32), heads=(1, 1), batch=1, mask="causal"
    ).problem
    out, lse = reference.attention(*p.arrays, **p.options, return_lse=True, precision="float64")
    out, lse = out.astype(p.q.dtype), lse.astype(np.float32)
    dq, dk, dv = run(p, out, lse)[0]
    before = {"q": dq[:, :30], "k": dk[:, 31:], "v": dv[:, 31:]}

    def gradients(**bad_rows):
        arrays = {"dout": p.dout, "q": p.q, "k": p.k, "v": p.v}
        for name, rows in bad_rows.items():
            arrays[name] = arrays[name].copy()
            arrays[name][0, rows] = bad
        return gpu_ops.attention_backward(*arrays.values(), out, lse, causal=True, **RAW)

    dq, dk, dv = gradients(k=slice(30, None), v=slice(30, None))
    np.testing.assert_array_equal(dq[:, :30], before["q"])
    assert not np.isfinite(dq[0, 30:].astype(np.float32)).any()
    dq, dk, dv = gradients(q=30, dout=30)
    np.testing.assert_array_equal(dk[:, 31:], before["k"])
    np.testing.assert_array_equal(dv[:, 31:], before["v"])
    assert not np.isfinite(dk[0, :31].astype(np.float32)).any()
    assert not np.isfinite(dv[0, :31].astype(np.float32)).any()


def test_every_head_dim_fits_every_card():
    for arch, itemsize in itertools.product(("sm_80", "sm_86", "sm_90", "sm_120"), (2, 4)):
        limit = smem_per_block_optin(arch)
        for dims in itertools.product(range(8, 257, 8), (8, 64, 128, 192, 256)):
            sizes = itemsize, *head_dims(*dims)
            for options in range(4):
                tile = select_tile(*sizes, limit, options=options)
                assert shared_bytes(tile, *sizes, keys=True) <= limit
            tile = select_bias_tile(*sizes, limit)
            assert bias_shared_bytes(tile, *sizes) <= limit


def test_a_warp_of_all_columns_takes_a_narrower_strip_where_ptxas_would_spill():
    sizes = 2, 64, 64, smem_per_block_optin("sm_90")
    hopper, blackwell = (select_tile(*sizes, arch=arch) for arch in ("sm_90", "sm_100"))
    assert (hopper.strip, blackwell) == (32, replace(hopper, strip=16))
    by_warps = 2, 128, 128, smem_per_block_optin("sm_100")
    assert select_tile(*by_warps, arch="sm_100") == select_tile(*by_warps, arch="sm_90")


REFUSED = [
    ({"dtype": "float64"}, "float64 has Numba kernels only"),
    ({"head_dims": (264, 64)}, "multiples of 8 up to 256"),
    ({"head_dims": (60, 64)}, "multiples of 8 up to 256"),
]


@pytest.mark.parametrize(("settings", "why"), REFUSED, ids=str)
def test_what_it_refuses_it_refuses_by_name(settings, why):
    p = expected(**({"dtype": "float16", "seqlens": (4, 4), "heads": (1, 1), "batch": 1} | settings)).problem
    out, lse = reference.attention(*p.arrays, return_lse=True)
    with pytest.raises(gpu_ops.errors.DeviceError, match=why):
        gpu_ops.attention_backward(p.dout, *p.arrays, out, lse, **RAW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_dims", [d for d in HEAD_DIMS if max(d) <= 256 and not any(n % 8 for n in d)], ids=str
)
def test_long_rows(head_dims):
    check(dtype="float16", head_dims=head_dims, seqlens=(400, 300), mask="causal", heads=(2, 1), batch=1)


@pytest.mark.parametrize("seqlen_k", [40, 140])
def test_a_large_lse_of_more_keys_than_these_counts(seqlen_k):
    """The other keys have scores larger by 3. float32 holds the lse of all to 2^-9, and its log2 to 2^-8."""
    rng = np.random.default_rng(0)
    q, k = np.zeros((1, 70, 1, 32), np.float32), np.zeros((1, seqlen_k, 1, 32), np.float32)
    q[..., 0], k[..., 0] = 128, 160
    v, dout = (rng.standard_normal(x.shape).astype(np.float32) for x in (k, q))
    lse = np.full((1, 1, 70), 128 * 160 + 3 + np.log(seqlen_k), np.float32)
    dv = gpu_ops.attention_backward(dout, q, k, v, np.zeros_like(q), lse, softmax_scale=1.0, **RAW)[2]
    wanted = dout.sum(1, keepdims=True) * np.exp(-3) / seqlen_k
    np.testing.assert_allclose(dv, np.broadcast_to(wanted, v.shape), rtol=2**-8)
