"""The Numba CUDA attention kernels, run by the emulator under its sanitizer, against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gpu_ops import BlockMask, emulator
from gpu_ops.core.device import compiler_missing
from gpu_ops.kernels.compiler import cubin, jit, toolkit
from gpu_ops.reference import attention as reference
from tests.attention_cases import DTYPES, assert_lse, expected, make, pairwise, row_id
from tests.compare import assert_close
from tests.programs import run_program

if compiler_missing("numba"):
    pytest.skip(str(compiler_missing("numba")), allow_module_level=True)

from gpu_ops.kernels.numba_cuda.attention import forward_kernel
from gpu_ops.kernels.numba_cuda.attention_config import Config, count_splits, select_config

# A row is a variant of the kernel, and compiling one takes three seconds: hence few levels, and a seed of few rows.
FACTORS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "mask": ("full", "band"),
    "softcap": (0.0, 1.5),
    "sinks": (False, True),
    "alibi": (None, "batch_heads"),
    "bias": (None, "masks", "full"),
    "block_mask": (None, "each"),
    "layout": ("bshd", "bhsd"),
    "shape": (
        {"seqlens": (11, 70), "heads": (3, 1), "head_dims": (32, 32)},
        {"seqlens": (37, 21), "heads": (4, 2), "head_dims": (5, 3)},
    ),
}
EVERYTHING = {name: levels[-1] for name, levels in FACTORS.items()}
PLAIN = {"mask": "causal", "dtype": "float32", "heads": (2, 1), "head_dims": (32, 32), "batch": 1}


def run(q, k, v, *, cu_seqlens=(), layout="bshd", seqused_k=None, num_splits=1, **options):
    """out and lse of attention's own options; both start as NaN."""
    heads, rows = (1, 2) if layout == "bhsd" else (-2, -3)
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    statistics = (*q.shape[:-3], q.shape[heads], q.shape[rows])
    lse = np.full(statistics, np.nan, np.float64 if q.dtype == np.float64 else np.float32)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "seqused_k": seqused_k}
    for name in ("sinks", "alibi_slopes", "bias", "block_table"):
        given[name] = options.pop(name, None)
    op, longest = "attention", (q.shape[rows], k.shape[rows])
    if cu_seqlens:
        op, layout = "attention_varlen", "thd"
        longest = tuple(int(np.diff(side).max()) for side in cu_seqlens)
        given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True))
    if seqused_k is not None:
        op, longest = "attention_decode", (longest[0], int(seqused_k.max()))
        given |= {"k_cache": given.pop("k"), "v_cache": given.pop("v")}
    mask = options.pop("block_mask", None)
    if mask is not None:
        given["block_mask.visible"] = mask.visible
        options |= {"block_q": mask.block_q, "block_k": mask.block_k}
    defaults = {
        "causal": False,
        "window_size": (-1, -1),
        "softmax_scale": q.shape[-1] ** -0.5,
        "softcap": 0.0,
    }
    options = {**defaults, **options, "layout": layout, "num_splits": num_splits}
    options |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    run_program(op, "numba", {name: x for name, x in given.items() if x is not None}, options)
    return out, lse


def check(**settings):
    e = expected(**settings)
    out, lse = run(*e.problem.arrays, **e.problem.options)
    e.check("out", out)
    e.check("lse", lse)


@pytest.mark.parametrize("row", [*pairwise(FACTORS, seed=8), EVERYTHING | {"dtype": "float64"}], ids=row_id)
def test_options(row):
    row = dict(row)
    check(**row.pop("shape"), **row, blocks=(5, 16), batch=2)


@pytest.mark.parametrize(
    "seqlens",
    [(17, 17), (64, 128), (239, 1), (113, 203), (203, 113), (108, 256)],
    ids=lambda s: f"{s[0]}x{s[1]}",
)
def test_shapes(seqlens):
    check(**PLAIN, seqlens=seqlens)


@pytest.mark.parametrize("head_dims", [(59, 40), (40, 59), (192, 160)], ids=lambda d: f"{d[0]}-{d[1]}")
def test_head_dims(head_dims):
    check(dtype="float32", seqlens=(8, 70), head_dims=head_dims, heads=(2, 1), batch=1)


# ---- rows that see nothing, empty inputs, NaN --------------------------------------------------------------


def test_rows_that_see_nothing():
    p = make(**PLAIN, seqlens=(110, 40))
    out, lse = run(*p.arrays, **p.options)
    assert (out[:, :70] == 0).all()
    assert (lse[..., :70] == -np.inf).all()
    assert (out[:, 70:] != 0).any(axis=-1).all()
    assert np.isfinite(lse[..., 70:]).all()


@pytest.mark.parametrize(("batch", "seqlens"), [(0, (3, 4)), (2, (0, 4)), (2, (3, 0)), (2, (0, 0))], ids=str)
def test_empty_inputs(batch, seqlens):
    p = make(**PLAIN | {"batch": batch}, seqlens=seqlens)
    out, lse = run(*p.arrays, **p.options)
    assert out.shape == p.dout.shape
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_behind_a_mask_may_hold_anything(bad):
    p = make(**PLAIN, seqlens=(70, 110))
    before, lse = run(*p.arrays, **p.options)
    k, v = p.k.copy(), p.v.copy()
    k[:, 90] = v[:, 90] = bad  # query i sees keys up to i + 40
    after, lse_after = run(p.q, k, v, **p.options)
    np.testing.assert_array_equal(after[:, :50], before[:, :50])
    np.testing.assert_array_equal(lse_after[..., :50], lse[..., :50])
    assert not np.isfinite(after[:, 50:]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_behind_bias_and_block_mask_may_hold_anything(bad):
    p = make(seqlens=(16, 150), head_dims=(32, 32), heads=(1, 1), batch=1, dtype="float32")
    visible = np.ones((2, 10), bool)
    # keys 64 to 143: a tile of keys that is skipped, and parts of one
    visible[:, 4:9] = visible[0, 1] = False
    bias = np.zeros((16, 150), np.float32)
    bias[:, 3] = bias[:10, 5] = -np.inf
    options = {"bias": bias, "block_mask": BlockMask(visible, 8, 16)}
    before, _ = run(*p.arrays, **options)
    p.k[:, 64:144] = p.v[:, 64:144] = p.v[:, 3] = p.k[:, 3] = bad
    np.testing.assert_array_equal(run(*p.arrays, **options)[0], before)
    p.v[:, 16] = p.v[:, 5] = bad  # seen from query 8 on, and from 10 on
    after, _ = run(*p.arrays, **options)
    np.testing.assert_array_equal(after[:, :8], before[:, :8])
    assert not np.isfinite(after[:, 8:]).any()
    for masks in (
        {"bias": np.full((1, 1), -np.inf, np.float32)},
        {"block_mask": BlockMask(~visible & False, 8, 16)},
    ):
        out, lse = run(*p.arrays, **options | masks)
        assert (out == 0).all()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_visible_nan_is_not_lost(which):
    p = make(**PLAIN, seqlens=(70, 70))
    getattr(p, which)[0, 30, 0, 3] = np.nan
    out, _ = run(*p.arrays, **p.options)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(reference.attention(*p.arrays, **p.options)))
    assert np.isnan(out).sum() == {"q": 32, "k": 2 * 40 * 32, "v": 2 * 40}[which]


# ---- layouts -------------------------------------------------------------------------------------------------


def test_strided_views():
    p = make(**PLAIN, seqlens=(70, 70))
    out, lse = run(*p.arrays, **p.options)
    spread = [np.full((*x.shape[:3], 2 * x.shape[3]), np.nan, x.dtype) for x in p.arrays]
    views = [x[:, ::-1, :, ::2] for x in spread]  # a stride on the last axis, and a negative one
    for view, x in zip(views, p.arrays, strict=True):
        view[...] = x
    strided, strided_lse = run(*views, **p.options)
    np.testing.assert_array_equal(strided, out)
    np.testing.assert_array_equal(strided_lse, lse)


def test_sequences_end_to_end():
    lengths = np.array([(5, 80), (0, 7), (40, 40), (1, 1), (9, 0), (0, 0), (30, 12)])
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((n, h, 32), np.float32) for n, h in zip((85, 140, 140), (2, 1, 1), strict=True)
    )
    ends = lengths.cumsum(axis=0)
    cu = [np.concatenate([[0], side]).astype(np.int32) for side in ends.T]
    out, lse = run(q, k, v, cu_seqlens=cu, causal=True)
    exact, naive = (
        reference.attention_varlen(q, k, v, *cu, causal=True, return_lse=True, precision=precision)
        for precision in ("float64", "naive")
    )
    assert_close(out, exact[0], naive[0], q.dtype)
    assert_lse(lse, exact[1])


DECODE = {
    "paged": {"used": (130, 1, 0, 77), "dtype": "bfloat16", "page": 3, "seqlen_q": 3, "heads": (4, 2)},
    "parts": {"used": (300, 1, 0, 77), "dtype": "float32", "splits": 3, "heads": (8, 1), "sinks": True},
    "paged parts": {"used": (90, 1, 33), "dtype": "float64", "page": 16, "splits": 2, "heads": (2, 2)},
}


@pytest.mark.parametrize("case", DECODE.values(), ids=DECODE)
def test_decode(case):
    rng = np.random.default_rng(0)
    used, dtype, page = np.array(case["used"], np.int32), DTYPES[case["dtype"]], case.get("page")
    nheads, nheads_kv = case["heads"]
    batch, capacity = len(used), int(used.max()) + 6
    q = rng.standard_normal((batch, case.get("seqlen_q", 1), nheads, 32)).astype(dtype)
    size = page or capacity
    each = -(-capacity // size)
    order = rng.permutation(batch * each).reshape(batch, each)
    options = {"seqused_k": used, "causal": case.get("seqlen_q", 1) > 1}
    caches = np.full((2, batch * each, size, nheads_kv, 32), np.nan, dtype)  # what is not used stays NaN
    for b in range(batch):
        for token in range(used[b]):
            caches[:, order[b, token // size], token % size] = rng.standard_normal((2, nheads_kv, 32))
    if page:
        needed = np.arange(each) < -(-used[:, None] // page)
        options["block_table"] = np.where(needed, order, -1).astype(np.int32)
    else:
        caches = caches[:, order[:, 0]]
    if case.get("sinks"):
        options["sinks"] = rng.standard_normal(nheads).astype(np.float32)
    out, lse = run(q, *caches, **options, num_splits=case.get("splits", 1))
    exact, naive = (
        reference.attention_decode(q, *caches, **options, return_lse=True, precision=precision)
        for precision in ("float64", "naive")
    )
    if dtype == np.float64:
        np.testing.assert_allclose(out, exact[0], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(lse, exact[1], rtol=1e-11, atol=1e-13)
    else:
        assert_close(out, exact[0], naive[0], dtype)
        assert_lse(lse, exact[1])


# ---- tiles -----------------------------------------------------------------------------------------------------

LIMIT = 48 * 1024  # of static shared memory; Numba has no way to ask for more


def configs():
    sizes = (1, 8, 16, 17, 32, 40, 64, 80, 96, 111, 128, 192, 256, 512, 576)
    for dtype, rows in itertools.product(DTYPES, (1, 8, 9, 16, 17, 32, 33, 10**6)):
        for head_dim, head_dim_v in itertools.product(sizes, sizes):
            yield rows, head_dim_v, select_config(dtype, head_dim, head_dim_v, rows)


def test_tiles_fit():
    for rows, head_dim_v, c in configs():
        assert c.shared_bytes <= LIMIT, c
        assert c.block_m >= min(rows, 32)
        assert c.slab >= min(head_dim_v, 128)
        # what the kernel's division of work among 128 threads takes for granted
        assert c.block_m % 8 == 0 == c.block_n % 16
        assert c.block_n % c.chunk_v == 0
        assert c.chunk_v * c.slab <= c.staged
        lanes = 32 if c.slab % 32 == 0 else 16
        assert c.chunk_v % (128 // lanes) == 0 == c.block_m % (128 // min(c.chunk, 32))
        assert c.slab % lanes == 0


OPTIONS = ("masked", "softcap", "sinks", "alibi", "block_mask")


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        # the longest loops of all: those that are not unrolled put their arrays in memory
        ("bfloat16", 1024),
        *(
            pytest.param(dtype, rows, marks=pytest.mark.slow)
            for dtype in DTYPES
            for rows in (8, 16, 32, 1024)
        ),
    ],
)
def test_tiles_stay_in_registers(dtype, rows):
    c = select_config(dtype, 128, 128, rows, bias=dtype, **dict.fromkeys(OPTIONS, True))
    compiled = jit.compile_kernel(forward_kernel(c), "sm_80")
    image, log = toolkit.assemble(compiled.ptx, "sm_80")
    needs = cubin.resources(image, compiled.entry, log)
    assert needs.static_shared_bytes == c.shared_bytes
    assert needs.spill_bytes == needs.local_bytes == 0


def test_memory_accesses_are_whole():
    p = make(**PLAIN, seqlens=(64, 320))
    with emulator.record() as profiles:
        run(*p.arrays, **p.options)
    (profile,) = profiles
    assert profile.counts.replays == 0  # no bank conflict
    assert [b.sectors_per_128_bytes for b in profile.buffers[:4]] == [
        4.0
    ] * 4  # q, k, v, out: no byte is wasted
    # Of all that is issued, by head_dim 32, where the softmax weighs most.
    assert profile.by(lambda i: i.form)["fma.rn.f32"].warps > 0.45 * profile.counts.warps


@pytest.mark.parametrize(
    ("blocks", "seqlen_k", "parts"), [(1, 100, 1), (1, 512, 2), (1, 10**6, 20), (19, 10**6, 2)]
)
def test_few_blocks_split_their_keys(blocks, seqlen_k, parts):
    config = Config("float32", 8, 64, 32, 64, 16)
    assert count_splits(config, blocks, seqlen_k, sms=10) == parts
