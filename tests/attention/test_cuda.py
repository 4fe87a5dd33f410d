"""The CUDA C++ attention kernel with chosen tiles and packing, on the emulator against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gpu_ops import BlockMask, emulator
from gpu_ops.kernels.attention.problem import ATTENTION_SHAPE, UNLIMITED, shared_bytes
from gpu_ops.kernels.compiler.jit import CudaKernel, compile_kernel
from gpu_ops.kernels.compiler.sources import KERNELS
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import DTYPES, assert_lse, expected, make, row_id
from tests.support.compare import assert_close

NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
NULL = 0


@dataclass(frozen=True)
class Tiles:
    """Tile shape of a block."""

    block_m: int = 64
    block_n: int = 64
    warps_m: int = 4
    warps_n: int = 1
    value_parts: int = 1
    one_k: bool = False


@dataclass
class Run:
    """Results of a launch and its profiles."""

    out: np.ndarray
    lse: np.ndarray
    profiles: list[emulator.Profile]


def variant(tiles: Tiles, dtype: Any, head_dim: int, head_dim_v: int, **macros: Any) -> CudaKernel:
    """Kernel for these sizes; macros that are not passed are off."""
    part = -(-head_dim_v // tiles.value_parts)
    defines = {
        **dict.fromkeys(("DTYPE", "PAGE_DTYPE", "OUT"), NAMES[np.dtype(dtype).name]),
        "HEAD_DIM": -(-head_dim // 32) * 32,
        "HEAD_DIM_V": -(-part // 32) * 32,
        "VALUE_PARTS": tiles.value_parts,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "WARPS_M": tiles.warps_m,
        "WARPS_N": tiles.warps_n,
        "ONE_K": int(tiles.one_k),
        "MASK": "kNone",
        "BIAS": "kNone",
        **dict.fromkeys(("SOFTCAP", "ALIBI", "SINKS", "BLOCK_MASK", "VARLEN", "SEQUSED_K", "PAGED"), 0),
        **dict.fromkeys(("PACK_GQA", "SPLIT", "WIDE_LSE", "DROPOUT"), 0),
    }
    assert set(macros) <= set(defines)
    return CudaKernel("attention/forward_sm80", "attention_forward", tuple((defines | macros).items()))


def elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(s // itemsize for s in strides)


def bits(x: np.ndarray, name: str, written: bool = True) -> emulator.Buffer:
    raw = x.view(np.uint16) if x.dtype.name == "bfloat16" else x
    return emulator.Buffer(raw, name, written)


def run_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    block_mask: Any = None,
    layout: str = "bshd",
    cu_seqlens: tuple[np.ndarray, np.ndarray] | None = None,
    seqused_k: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    max_seqlen_q: int = 0,
    pack_gqa: bool = False,
    num_splits: int = 1,
    tiles: Tiles | None = None,
    arch: str = "sm_80",
) -> Run:
    """Attention of "bshd" or "bhsd" arrays, or of (total, nheads, head_dim) arrays with ``cu_seqlens``."""
    tiles = tiles or Tiles()
    if cu_seqlens is not None:
        q, k, v = q[None], k[None], v[None]
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    batch = q.shape[0] if cu_seqlens is None else len(cu_seqlens[0]) - 1
    rows, nheads, head_dim = q.shape[1:]
    seqlen_q = rows if cu_seqlens is None else max_seqlen_q
    seqlen_k, nheads_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    split = num_splits > 1
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    log2e = float(np.log2(np.e))

    left, right = (UNLIMITED if side < 0 else min(side, UNLIMITED) for side in window_size)
    right = min(right, 0) if causal else right
    mask = "kLocal" if left < UNLIMITED else "kCausal" if right < UNLIMITED else "kNone"
    kernel = variant(
        tiles,
        q.dtype,
        head_dim,
        head_dim_v,
        MASK=mask,
        SOFTCAP=int(softcap > 0),
        ALIBI=int(alibi_slopes is not None),
        SINKS=int(sinks is not None),
        BIAS="kNone" if bias is None else "kFloat" if bias.dtype == np.float32 else "kSame",
        BLOCK_MASK=int(block_mask is not None),
        VARLEN=int(cu_seqlens is not None),
        SEQUSED_K=int(seqused_k is not None),
        PAGED=int(block_table is not None),
        PACK_GQA=int(pack_gqa),
        SPLIT=int(split),
    )

    out = np.full((q.shape[0], rows, nheads, head_dim_v), np.nan, q.dtype)
    if layout == "bhsd":
        out = np.ascontiguousarray(out.swapaxes(1, 2)).swapaxes(1, 2)
    lse = np.full((batch if cu_seqlens is None else 1, nheads, rows), np.nan, np.float32)
    parts = np.full((num_splits, batch, nheads, rows, head_dim_v), np.nan, np.float32)
    part_lse = np.full((2, num_splits, *lse.shape), np.nan, np.float32)

    shape = np.zeros((), ATTENTION_SHAPE)
    stored = parts[0].swapaxes(1, 2) if split else out
    for name, x in {"q": q, "k": k, "v": v, "out": stored}.items():
        assert x.strides[3] == x.itemsize or x.size == 0
        of_batch, of_row, of_head = elements(x.strides[:3], x.itemsize)
        shape[name] = (0 if cu_seqlens is not None else of_batch, of_row, of_head)
    shape["lse_batch"] = 0 if cu_seqlens is not None else nheads * rows
    shape["lse_head"] = rows
    shape["out_split"], shape["lse_split"] = parts[0].size, lse.size
    shape["seqlen_q"], shape["seqlen_k"] = seqlen_q, seqlen_k
    shape["nheads"], shape["group"] = nheads, nheads // nheads_kv
    shape["head_dim"], shape["head_dim_v"] = head_dim, head_dim_v
    shape["window_left"], shape["window_right"], shape["num_splits"] = left, right, num_splits
    scores = shape["scores"]
    scores["scale_log2"] = max(abs(scale) * log2e, 1e-30)
    if softcap:
        scores["softcap_in"], scores["softcap_log2"] = abs(scale) / softcap, softcap * log2e
    scores["negate"] = scale < 0
    visible: Any = NULL
    if bias is not None:
        full = np.broadcast_to(bias, (batch, nheads, rows, seqlen_k))
        shape["bias"] = elements(full.strides, bias.itemsize)
    if block_mask is not None:
        visible = np.ascontiguousarray(block_mask.visible).view(np.uint8)
        blocks = block_mask.num_blocks(rows, seqlen_k)
        shape["block_mask"] = np.broadcast_to(visible, (batch, nheads, *blocks)).strides
        shape["block_q"], shape["block_k"] = block_mask.block_q, block_mask.block_k
    if block_table is not None:
        shape["page_size"], shape["block_table_batch"] = k.shape[1], block_table.shape[1]
    if alibi_slopes is not None:
        shape["alibi_batch"] = nheads if alibi_slopes.ndim == 2 else 0

    q_rows = seqlen_q * (nheads // nheads_kv if pack_gqa else 1)
    grid = (
        -(-q_rows // tiles.block_m) * num_splits,
        (nheads_kv if pack_gqa else nheads) * tiles.value_parts,
        batch,
    )
    defines = dict(kernel.defines)
    shared = shared_bytes(
        q.itemsize,
        tiles.block_m,
        tiles.block_n,
        tiles.warps_m,
        tiles.warps_n,
        int(defines["HEAD_DIM"]),
        int(defines["HEAD_DIM_V"]),
        one_k=tiles.one_k,
        split=split,
    )
    arguments = [
        *(NULL if x is None else np.ascontiguousarray(x) for x in (*(cu_seqlens or (None, None)), seqused_k)),
        *(NULL if x is None else x for x in (block_table, None, None, sinks, alibi_slopes)),
        NULL if bias is None else bits(np.ascontiguousarray(bias), "bias"),
        visible,
        NULL,  # the seed of dropout
    ]
    compiled = compile_kernel(kernel, arch)
    with emulator.record() as profiles:
        emulator.launch(
            compiled.ptx,
            compiled.entry,
            grid,
            32 * tiles.warps_m * tiles.warps_n,
            [
                *(bits(x, name) for name, x in {"q": q, "k": k, "v": v}.items()),
                bits(parts if split else out, "out", written=False),
                bits(part_lse if split else lse, "lse", written=False),
                *arguments,
                shape.tobytes(),
            ],
            shared=shared,
            arch=arch,
        )
        if split:
            combine(parts, part_lse, sinks, out, lse, shape, arch)
    result = out[0] if cu_seqlens is not None else out.swapaxes(1, 2) if layout == "bhsd" else out
    return Run(result, lse[0] if cu_seqlens is not None else lse, profiles)


def combine(
    parts: np.ndarray,
    part_lse: np.ndarray,
    sinks: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray,
    shape: np.ndarray,
    arch: str,
) -> None:
    shape = shape.copy()
    shape["out"] = elements(out.strides[:3], out.itemsize)
    defines = (("DTYPE", NAMES[out.dtype.name]), ("SINKS", int(sinks is not None)), ("WIDE_LSE", 0))
    compiled = compile_kernel(CudaKernel("attention/combine", "attention_combine", defines), arch)
    emulator.launch(
        compiled.ptx,
        compiled.entry,
        -(-lse.size // 4),
        128,
        [
            bits(parts, "partial"),
            bits(part_lse, "row_max"),
            NULL if sinks is None else sinks,
            bits(out, "out", written=False),
            bits(lse, "lse", written=False),
            lse.size,
            shape.tobytes(),
        ],
        arch=arch,
    )


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


# ---- sequences laid end to end -----------------------------------------------------------------------------


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


# ---- decode ------------------------------------------------------------------------------------------------


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
