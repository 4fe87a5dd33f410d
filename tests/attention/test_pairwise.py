"""attention, attention_varlen and attention_decode with every pair of options, on the emulator and on a GPU.

Every level of a factor meets every level of every other factor in some case. The inputs may be views of arrays whose
other elements are NaN, and unused parts of a cache are NaN. A third of ``FEW`` runs by default; the rest are slow,
and so is ``MANY`` with odd shapes and all head widths.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest

import gpu_ops
from gpu_ops.core.device import compiler_missing
from gpu_ops.reference.attention import forward as reference
from tests.attention import test_decode as decode
from tests.attention import test_paged as paged
from tests.attention import test_varlen as varlen
from tests.attention.cases import SHAPES, SHAPES_SLOW, assert_lse, make, pairwise
from tests.support.compare import assert_close

FEW = {
    "backend": ("raw", "numba"),
    "form": ("dense", "varlen", "cache", "pages", "varlen pages"),
    "dtype": ("bfloat16", "float16", "float32"),
    "seqlens": ((37, 70), (70, 37), (5, 130)),
    "head_dim": (64, 40, 128),
    "head_dim_v": ("same", 32),
    "heads": ((2, 1), (2, 2), (3, 1)),
    "causal": (False, True),
    "window_size": ((-1, -1), (20, 0), (9, 30)),
    "softcap": (0.0, 2.0),
    "alibi": (None, "heads", "batch_heads"),
    "sinks": (False, True),
    "bias": (None, "full", "keys", "masks"),
    "block_mask": (None, "shared", "each"),
    "layout": ("bshd", "bhsd"),
    "num_splits": (0, 1, 3),
    "view": ("whole", "wide"),
    "out": ("new", "given"),
}
MANY = FEW | {
    "backend": ("raw",),
    "seqlens": (*SHAPES, *SHAPES_SLOW),
    "head_dim": (32, 40, 64, 72, 80, 96, 128, 160, 192, 256),
    "head_dim_v": ("same", 32, 128, 200),
    "heads": ((2, 1), (2, 2), (3, 1), (4, 2)),
    "window_size": ((-1, -1), (20, 0), (9, 30), (-1, 4), (0, 0), (150, 33)),
}
SOME = MANY | {"backend": ("numba",), "seqlens": SHAPES[::2], "head_dim": (40, 96, 256)}
ONLY_DENSE = ("bias", "block_mask", "layout")


def applicable(row):
    """Row without the options that its form does not have."""
    drop = () if row["form"] == "dense" else ONLY_DENSE
    if row["form"] not in ("cache", "pages"):
        drop = (*drop, "num_splits")
    return row | {name: FEW[name][0] for name in drop}


def cases(factors):
    return [
        pytest.param(row, id="-".join(str(level).replace(" ", "") for level in row.values()))
        for row in pairwise(factors, allowed=applicable)
    ]


FEW_CASES, MANY_CASES = cases(FEW), cases(MANY) + cases(SOME)
DEVICES = [
    pytest.param("emulator", marks=pytest.mark.skipif(bool(compiler_missing("raw")), reason="no compiler")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def wide(x):
    """Copy of ``x`` in the middle of an array of NaNs."""
    around = np.full((*(n + 1 for n in x.shape[:-1]), x.shape[-1] + 16), np.nan, x.dtype)
    view = around[(*(slice(n) for n in x.shape[:-1]), slice(8, 8 + x.shape[-1]))]
    view[...] = x
    return view


def problem(row):
    """(public function, its reference, arrays, options of both, options of the first, shape of out)."""
    head_dim = row["head_dim"]
    head_dims = (head_dim, head_dim if row["head_dim_v"] == "same" else row["head_dim_v"])
    same = ("dtype", "heads", "sinks", "alibi", "causal", "window_size", "softcap")
    settings = {name: row[name] for name in same} | {"head_dims": head_dims}
    seqlen_q, seqlen_k = row["seqlens"]
    long = seqlen_q * seqlen_k > 2**17
    if row["form"] == "dense":
        settings |= {name: row[name] for name in ONLY_DENSE} | {"heads": (1, 1) if long else row["heads"]}
        p = make(**settings, seqlens=row["seqlens"], batch=1 if long else 2, blocks=(16, 32))
        return gpu_ops.attention, reference.attention, p.arrays, p.options, {}, p.dout.shape
    lengths = ((seqlen_q, seqlen_k),) if long else ((seqlen_q, seqlen_k), (0, 5), (7, 0), (3, 11))
    if row["form"] == "varlen pages":
        arrays, options = paged.make(lengths=lengths, **settings)
        ops = gpu_ops.attention_varlen, reference.attention_varlen
        return *ops, arrays, options, {}, (*arrays[0].shape[:2], head_dims[1])
    if row["form"] == "varlen":
        (dout, *arrays), offsets, options, longest = varlen.make(lengths=lengths, **settings)
        more = longest if row["view"] == "wide" else {}
        ops = gpu_ops.attention_varlen, reference.attention_varlen
        return *ops, (*arrays, *offsets), options, more, dout.shape
    arrays, options = decode.make(
        used=(seqlen_k, 0, 1, seqlen_k // 2)[: 2 if long else 4],
        seqlen_q=seqlen_q % 17 + 1,
        page_size=16 if row["form"] == "pages" else None,
        **settings,
    )
    ops = gpu_ops.attention_decode, reference.attention_decode
    return *ops, arrays, options, {"num_splits": row["num_splits"]}, (*arrays[0].shape[:3], head_dims[1])


def check(row, device):
    op, by_reference, arrays, options, more, shape = problem(row)
    if row["view"] == "wide":
        arrays = [wide(x) if x.ndim > 2 else x for x in arrays]
    out = np.full(shape, np.nan, arrays[0].dtype) if row["out"] == "given" else None
    actual, lse = op(
        *arrays, **options, **more, out=out, return_lse=True, device=device, backend=row["backend"]
    )
    assert out is None or actual is out
    exact, naive = (
        by_reference(*arrays, **options, return_lse=True, precision=p) for p in ("float64", "naive")
    )
    assert_close(actual, exact[0], naive[0], actual.dtype, what="out")
    assert_lse(lse, exact[1], actual.dtype, options.get("softcap"))


def by_default(rows):
    """Run every sixth row by default and mark the others slow: on the emulator each compiles a separate kernel."""
    return [
        p if i % 6 == 0 else pytest.param(*p.values, id=p.id, marks=pytest.mark.slow)
        for i, p in enumerate(rows)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", by_default(FEW_CASES))
def test_options(row, device):
    check(row, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", MANY_CASES)
def test_shapes_and_options(row, device):
    check(row, device)


@pytest.mark.parametrize("factors", [FEW, MANY, SOME], ids=["few", "many", "some"])
def test_the_cases_cover_every_pair(factors):
    """Every pair is covered, except of an option and a form that does not have it."""
    assert len(FEW_CASES) + len(MANY_CASES) >= 300
    rows = [p.values[0] for p in FEW_CASES + MANY_CASES]
    seen = {(a, row[a], b, row[b]) for row in rows for a in row for b in row}
    first = {name: levels[0] for name, levels in factors.items()}
    for a, b in itertools.combinations(factors, 2):
        for i, j in itertools.product(factors[a], factors[b]):
            if (a, i, b, j) in seen:
                continue
            for form in factors["form"]:
                row = applicable({**first, "form": form, a: i, b: j})
                assert (row[a], row[b]) != (i, j), f"{a}={i} never meets {b}={j}"


# Options of scores: every attention function takes the same ones, and a new option touches few files.

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("causal", "window_size", "softmax_scale", "softcap", "sinks", "alibi_slopes")
WEIGHTS = (*SHARED, "dropout_p", "seed")
DENSE = (*WEIGHTS, "bias", "block_mask", "q_start", "k_start")
TAKEN = {
    "attention": DENSE,
    "attention_backward": DENSE,
    "attention_varlen": WEIGHTS,
    "attention_varlen_backward": WEIGHTS,
    "attention_decode": SHARED,
}


def test_an_option_is_named_in_few_files():
    """Eight files: documentation and check, lowering, one file for each kind of kernel, the reference.

    ``rglob`` does not follow the links in gpu_ops.
    """
    files = [p for folder in ("gpu_ops", "kernels", "reference") for p in (ROOT / folder).rglob("*.*")]
    sources = [p for p in files if p.suffix in (".py", ".cu", ".cuh")]
    # Losses have a softcap too, and models have both; core/op.py lists the names that other libraries use.
    others = ("cross_entropy", "ops/loss", "gpu_ops/models", "gpu_ops/inference", "gpu_ops/distributed")
    others += ("gpu_ops/core/op.py",)
    of_attention = [p for p in sources if not any(name in str(p.relative_to(ROOT)) for name in others)]
    naming = sorted(
        str(p.relative_to(ROOT)) for p in of_attention if "softcap" in p.read_text(encoding="utf-8")
    )
    assert "reference/attention/core.py" in naming
    assert len(naming) <= 8, naming


@pytest.mark.parametrize("op", TAKEN)
def test_all_attention_functions_take_the_same_options(op):
    first = inspect.signature(gpu_ops.attention).parameters
    taken = inspect.signature(getattr(gpu_ops, op)).parameters
    assert tuple(name for name in taken if name in DENSE) == TAKEN[op]
    for name in TAKEN[op]:
        assert taken[name] == first[name]


REFUSED = [(op, name) for op in TAKEN for name in ("softcapp", "dropout_p", "bias") if name not in TAKEN[op]]


@pytest.mark.parametrize(("op", "name"), REFUSED)
def test_other_options_are_refused_by_the_functions_name(op, name):
    required = [
        p.name for p in inspect.signature(getattr(gpu_ops, op)).parameters.values() if p.default is p.empty
    ]
    arguments = dict.fromkeys(required, np.ones((1, 1, 1, 8)))
    with pytest.raises(TypeError, match=f"^{op}: unknown argument '{name}'"):
        getattr(gpu_ops, op)(**arguments, **{name: 1})
