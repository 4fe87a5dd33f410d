"""The CUDA C++ attention kernel with chosen tiles and packing, on the emulator against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpu_ops import BlockMask, emulator
from gpu_ops.kernels.attention.problem import ATTENTION_SHAPE
from gpu_ops.kernels.compiler.sources import KERNELS
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import DTYPES, assert_lse, expected, make, row_id
from tests.attention.cuda import Tiles, run_attention
from tests.support.compare import assert_close

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")

DECODE = Tiles(block_m=16, block_n=64, warps_m=1, warps_n=4)


def check(tiles=None, arch="sm_80", **settings):
    e = expected(**settings)
    run = run_attention(*e.problem.arrays, **e.problem.options, tiles=tiles, arch=arch)
    e.check("out", run.out)
    e.check("lse", run.lse)
    return run


def test_the_struct_is_what_the_host_packs():
    def fields(dtype, prefix=""):
        for name, (field, offset, *_) in dtype.fields.items():
            if field.fields:
                yield from ((f"{prefix}{name}.{n}", at + offset) for n, at in fields(field))
            else:
                yield name, offset

    offsets = dict(fields(ATTENTION_SHAPE)) | {"": ATTENTION_SHAPE.itemsize}
    stores = "\n".join(
        f"out[{i}] = {f'(char*)&p->{name} - (char*)p' if name else 'sizeof(AttentionShape)'};"
        for i, name in enumerate(offsets)
    )
    source = f"""#include "shape.cuh"
    extern "C" __global__ void layout(int* out) {{ const AttentionShape* p = (AttentionShape*)out; {stores} }}"""
    compiled = np.zeros(len(offsets), np.int32)
    emulator.launch(source, "layout", 1, 1, [compiled], include=[KERNELS / "attention"])
    assert dict(zip(offsets, compiled, strict=True)) == offsets


# (head_dim, head_dim_v), tiles: registers or shared memory for Q, one or two slabs, thin and wide rows.
SHAPES = [
    ("bfloat16", (64, 64), Tiles(128, 64)),
    ("float16", (128, 128), Tiles(64, 64)),
    ("bfloat16", (128, 128), Tiles(128, 32)),
    ("float16", (40, 24), Tiles(64, 32)),
    ("bfloat16", (96, 80), Tiles(64, 64)),
    ("float16", (256, 256), Tiles(64, 32)),
    ("bfloat16", (256, 256), Tiles(64, 64, one_k=True)),
    ("float16", (128, 120), Tiles(128, 32, one_k=True)),
    ("float32", (96, 72), Tiles(64, 64, one_k=True)),
    ("bfloat16", (64, 64), Tiles(128, 128)),
    ("float32", (64, 64), Tiles(64, 32)),
    ("float32", (40, 72), Tiles(64, 32)),
    ("bfloat16", (512, 512), Tiles(64, 32, value_parts=2)),
]


@pytest.mark.parametrize(("dtype", "head_dims", "tiles"), SHAPES, ids=str)
def test_head_dims(dtype, head_dims, tiles):
    run = check(tiles, dtype=dtype, head_dims=head_dims, seqlens=(77, 150), heads=(2, 1), batch=1)
    assert run.profiles[0].counts.replays == 0


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_other_architectures(arch):
    check(arch=arch, dtype="bfloat16", head_dims=(64, 64), seqlens=(70, 90), heads=(2, 1), batch=1)


@pytest.mark.parametrize("mask", ["full", "causal", "wide_band"])
def test_hidden_tiles_are_skipped(mask):
    run = check(mask=mask, dtype="bfloat16", seqlens=(256, 512), head_dims=(32, 32), heads=(1, 1), batch=1)
    visible = np.tril(np.ones((256, 512), bool), 256)
    if mask == "wide_band":
        visible = np.tril(np.ones((256, 512), bool), 256 + 33) & np.triu(np.ones((256, 512), bool), 256 - 65)
    tiles = np.ones((4, 8), bool) if mask == "full" else visible.reshape(4, 64, 8, 64).any(axis=(1, 3))
    assert run.profiles[0].multiply_adds["bf16"] == tiles.sum() * 64 * 64 * (2 * 32 + 8)  # 8: sums of weights


def test_hidden_blocks_are_not_read():
    p = make(dtype="bfloat16", seqlens=(64, 320), head_dims=(32, 32), heads=(1, 1), batch=1)
    mask = BlockMask(np.array([[True, False, True, False, True]]), 64, 64)
    run = run_attention(*p.arrays, block_mask=mask)
    read = {b.name: b.bytes_read for b in run.profiles[0].buffers}
    assert read["k"] == read["v"] == 3 * 64 * 32 * 2


# ---- sequences laid end to end ------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal, pack):
    rng = np.random.default_rng(0)
    lengths_q, lengths_k = (70, 0, 1, 130, 5), (90, 3, 64, 130, 0)
    cu_q, cu_k = (np.cumsum([0, *n], dtype=np.int32) for n in (lengths_q, lengths_k))
    dtype = DTYPES["bfloat16"]
    q = rng.standard_normal((cu_q[-1], 4, 32)).astype(dtype)
    k, v = (rng.standard_normal((cu_k[-1], 2, 32)).astype(dtype) for _ in range(2))
    slopes = rng.uniform(0.05, 0.5, (5, 4)).astype(np.float32)
    options = {"causal": causal, "alibi_slopes": slopes}
    run = run_attention(q, k, v, cu_seqlens=(cu_q, cu_k), max_seqlen_q=140, pack_gqa=pack, **options)
    exact, naive = (
        reference.attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True, precision=precision)
        for precision in ("float64", "naive")
    )
    assert_close(run.out, exact[0], naive[0], dtype)
    assert_lse(run.lse, exact[1])


# ---- decode -------------------------------------------------------------------------------------------


def decode(
    *,
    used=(200, 1, 129),
    seqlen_q=1,
    heads=(4, 2),
    head_dim=64,
    dtype="bfloat16",
    page_size=None,
    sinks=False,
    alibi=False,
    tiles=DECODE,
    num_splits=1,
    pack_gqa=True,
    **options,
):
    """Check a decode step; the cache is NaN where it is not used."""
    rng = np.random.default_rng(0)
    native, batch = DTYPES[dtype], len(used)
    q = rng.standard_normal((batch, seqlen_q, heads[0], head_dim)).astype(native)
    seqused_k = np.array(used, np.int32)
    table = None
    if page_size is None:
        rows = (batch, max(used) + 5)
        unused = np.arange(rows[1]) >= seqused_k[:, None]
    else:
        pages = -(-seqused_k // page_size)
        order = rng.permutation(pages.sum() + 3)
        table = np.full((batch, pages.max() + 2), -1, np.int32)
        table[np.arange(table.shape[1]) < pages[:, None]] = order[: pages.sum()]
        rows = (len(order), page_size)
        unused = np.ones(rows, bool)
        for b, n in enumerate(used):
            unused[table[b, np.arange(n) // page_size], np.arange(n) % page_size] = False
    k, v = (rng.standard_normal((*rows, heads[1], head_dim)).astype(native) for _ in range(2))
    k[unused] = v[unused] = np.nan
    if sinks:
        options["sinks"] = rng.standard_normal(heads[0]).astype(np.float32)
    if alibi:
        options["alibi_slopes"] = rng.uniform(0.05, 0.5, (batch, heads[0])).astype(np.float32)
    inputs = {"seqused_k": seqused_k, "block_table": table, **options}
    run = run_attention(q, k, v, **inputs, pack_gqa=pack_gqa, num_splits=num_splits, tiles=tiles)
    exact, naive = (
        reference.attention_decode(q, k, v, **inputs, return_lse=True, precision=precision)
        for precision in ("float64", "naive")
    )
    assert_close(run.out, exact[0], naive[0], native)
    assert_lse(run.lse, exact[1], native, options.get("softcap"))
    return run


DECODES = [
    {},
    {"seqlen_q": 5, "causal": True},
    {"seqlen_q": 2, "pack_gqa": False, "sinks": True},
    {"page_size": 16},
    {"page_size": 7, "seqlen_q": 3, "causal": True, "sinks": True, "num_splits": 3},
    {"page_size": 1, "dtype": "float16", "tiles": Tiles(32, 128, 1, 4), "seqlen_q": 5},
    {"num_splits": 4, "alibi": True, "seqlen_q": 2, "causal": True},
    {"used": (0, 5, 64), "num_splits": 2, "sinks": True},
    {"window_size": (40, 0), "seqlen_q": 4, "heads": (6, 2), "tiles": Tiles(32, 64, 2, 2)},
    {"dtype": "float32", "seqlen_q": 3, "num_splits": 2},
    {"head_dim": 128, "softcap": 2.0, "tiles": replace(DECODE, block_n=128)},
]


@pytest.mark.parametrize("case", DECODES, ids=row_id)
def test_decode(case):
    decode(**case)


def test_a_group_shares_its_keys():
    read = {}
    for pack in (False, True):
        run = decode(used=(256,), heads=(4, 1), pack_gqa=pack)
        (read[pack],) = [b.bytes_read for b in run.profiles[0].buffers if b.name == "k"]
    assert read[False] == 4 * read[True] == 4 * 256 * 64 * 2
