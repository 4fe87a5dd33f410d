"""Laws that hold for every op: any strides, ``out``, in place, empty arrays, containment of NaN."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.errors import DeviceError, GpuOpsError
from tests.support.calls import DTYPES, IN_PLACE, OPTIONAL
from tests.support.laws import (
    NAMES,
    SENTINEL,
    VIEWS,
    WITH_OUT,
    apart,
    assert_same,
    filled,
    given_out,
    is_slow,  # noqa: F401 - conftest.py calls it
    law_call,
    outcome,
    outs_like,
    quick,
    runs,  # noqa: F401 - conftest.py calls it
    takes_one,
    unaligned,
    viewed,
)

DEVICES = ("cpu", "emulator", "cuda")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
each_name = pytest.mark.parametrize("name", NAMES)


def quick_on_emulator(raw):
    laws = ("any_strides", "out", "in_place", "empty", "nan_stays_in_its_slice")
    return {f"test_{law}": quick(raw) for law in laws} | {"test_a_strict_error_state": None}


# A single repeated row would put two tokens in one place, or give offsets that end before the last token.
INTEGERS_ARE_APART = [n for n in NAMES if n.startswith(("attention_varlen", "rope_append_kv "))]


@each_name
@each_dtype
def test_any_strides(name, dtype, backend):
    """Every view gives the bits of the contiguous array, and no input is written to."""
    case = law_call(name, dtype)
    expected = outcome(case, **backend)
    if name not in INTEGERS_ARE_APART:
        repeated = {key: np.broadcast_to(x[:1], x.shape) for key, x in case.inputs.items() if x.ndim}
        repeated = case.having(**repeated)
        copied = case.having(**{key: x.copy() for key, x in repeated.inputs.items()})
        assert_same(outcome(repeated, **backend), outcome(copied, **backend), "zero strides")
    for view in VIEWS:
        if view is unaligned and backend["device"] != "cpu":
            continue  # GPUs have no such arrays
        changed = viewed(case, view)
        try:
            actual = outcome(changed, **backend)
        except DeviceError as error:
            if backend["backend"] != "raw" or "are not all multiples of 16 bytes" not in str(error):
                raise
            continue
        assert_same(actual, expected, view.__name__)
        for key, x in changed.inputs.items():
            assert np.array_equal(x, case.inputs[key]), f"{view.__name__}: {key} was written to"


def reordered(name, backend):
    """Allowed ulps: Numba sums the squares of a head in another order if the rows of out are not adjacent."""
    return (
        8 if name in ("rope_append_kv pages", "rope_append_kv int8") and backend["backend"] == "numba" else 0
    )


@pytest.mark.parametrize("name", WITH_OUT)
@each_dtype
def test_out(name, dtype, backend):
    """Results go into the given arrays, whole ones and columns of wider ones, and nowhere else."""
    case = law_call(name, dtype)
    expected = outcome(case, **backend)
    for place in (filled, lambda x: apart(filled(x), 8, 8)):
        outs = outs_like(case, expected, place)
        actual = outcome(case, **given_out(case, outs), **backend)
        assert_same(actual, expected, ulps=reordered(name, backend))
        assert all(f is x for f, x in zip(actual, outs, strict=False)), "out is returned"
        for x in outs:
            if x.base is not None:
                x[...] = SENTINEL
                assert (x.base == SENTINEL).all(), "written beside out"
    outs = outs_like(case, expected)
    shapes = [x.shape for x in outs if x.ndim]
    if len(shapes) == 2 and shapes[0][:-1] == shapes[1][:-1]:  # the two halves of one array
        halves = np.concatenate(outs, axis=-1)
        outs = np.split(halves, [outs[0].shape[-1]], axis=-1)
        assert_same(outcome(case, **given_out(case, outs), **backend), expected)
        assert_same(outs, expected)


@pytest.mark.parametrize("name", [n for n in NAMES if n.split()[0] in IN_PLACE and n not in OPTIONAL])
@each_dtype
def test_in_place(name, dtype, backend):
    """``out`` may be the input itself or another view of it, or columns of a wider array; nothing else changes."""
    case = law_call(name, dtype)
    expected = outcome(case, **backend)
    shared = [key for key in IN_PLACE[case.op] if key in case.arrays]
    columns = partial(apart, before=8, after=8)
    for place, view in ((np.copy, lambda x: x), (np.copy, lambda x: x[:]), (columns, lambda x: x)):
        mine = case.having(**{key: place(case.arrays[key]) for key in shared})
        outs = [view(mine.arrays[key]) for key in shared]
        actual = outcome(mine, **given_out(case, outs), **backend)
        assert_same(actual, expected, "in place", ulps=reordered(name, backend) * (place is columns))
        assert_same(outs, actual[: len(outs)])
        if place is columns:
            for x in outs:
                x[...] = SENTINEL
                assert (x.base == SENTINEL).all(), "written beside it"
        if takes_one(case):
            continue
        mine = case.having(**{key: place(case.arrays[key]) for key in shared})
        fresh = outs_like(case, expected)
        outcome(mine, **given_out(case, [view(mine.arrays[shared[0]]), *fresh[1:]]), **backend)
        assert_same([mine.arrays[shared[0]], *fresh[1:]], expected, "the first in place")
        for key, x in mine.inputs.items():
            assert key == shared[0] or np.array_equal(x, case.inputs[key]), f"{key} was written to"


@each_name
@each_dtype
def test_a_strict_error_state(name, dtype, backend):
    """Overflow gives inf and underflow 0 in any error state of NumPy: a call that starts also completes."""
    case = law_call(name, dtype)
    floats = {key: x for key, x in case.inputs.items() if x.dtype.kind not in "iub"}
    for extreme in ("max", "smallest_normal"):
        size = {key: getattr(ml_dtypes.finfo(x.dtype), extreme) for key, x in floats.items()}
        changed = case.having(**{key: np.sign(x) * size[key] for key, x in floats.items()})
        try:
            expected = outcome(changed, **backend)
        except GpuOpsError:
            continue  # a scale of 3e38, say
        with np.errstate(all="raise"):
            actual = outcome(changed, **backend)
        assert [x.tobytes() for x in actual] == [x.tobytes() for x in expected], extreme


NORM = ("batch", "rows")
ATTENTION = ("batch", "seqlen_q", "seqlen_k")
MLP = ("rows", "hidden", "hidden_out", "ffn")
GATED = ("batch", "rows", "cols", "width")
EMPTY = {
    "adamw_step": ("cols",),
    "attention": ATTENTION,
    "attention_backward": ATTENTION,
    "attention_decode": ("batch",),
    "attention_varlen": ("total",),
    "cross_entropy": GATED,
    "cross_entropy_backward": GATED,
    "dropout": GATED,
    "dropout_backward": GATED,
    "embedding": ("rows", "width"),
    "embedding_backward": ("rows", "cols"),
    "global_norm": ("rows", "cols"),
    "layernorm": NORM,
    "layernorm_backward": NORM,
    "linear": ("batch", "rows", "hidden_out"),
    "linear_backward": ("rows", "hidden_out"),
    "linear_cross_entropy": ("batch", "rows", "width"),
    "rmsnorm": NORM,
    "rmsnorm_backward": NORM,
    "rmsnorm_quant_int8": NORM,
    "rope": ("batch", "seqlen", "nheads"),
    "rope_append_kv": ("batch", "seqlen_new"),
    "rope_backward": ("batch", "seqlen", "nheads"),
    "sample": ("batch", "rows"),  # no token of no vocabulary
    "softmax": GATED,
    "softmax_backward": GATED,
    "swiglu": GATED,
    "swiglu_backward": GATED,
    "swiglu_mlp": MLP,
    "swiglu_mlp_backward": MLP,
    "ternary_matmul": ("rows", "N", "K"),
    "ternary_matmul_backward": ("rows", "N", "K"),
}


WITH_EMPTY = [
    n for n in NAMES if n.split()[0] in EMPTY and n not in ("attention_varlen", "ternary_matmul both")
]


@pytest.mark.parametrize("name", WITH_EMPTY)
@each_dtype
def test_empty(name, dtype, backend):
    """An empty axis gives the shapes and dtypes of the reference; an empty sum is 0, its log -inf."""
    full = law_call(name, dtype)
    axes = EMPTY[full.op] if name != "rope_append_kv slots" else ("total",)
    axes = [axis for axis in axes if any(axis in named for named in full.axes.values())]
    if getattr(full.arrays.get("w"), "group_size", None):
        axes.remove("K")  # no groups of nothing
    for empty in (*((axis,) for axis in axes), axes):
        case = law_call(name, dtype, **dict.fromkeys(empty, 0))
        actual, expected = outcome(case, **backend), outcome(case, backend="reference")
        for f, w in zip(actual, expected, strict=True):
            assert (f.dtype, f.shape) == (w.dtype, w.shape), empty
        assert_same(actual[len(actual) - len(case.written) :], list(case.written.values()))
        if "nheads" in empty or "scores" in name or (name.endswith("keep") and empty == ("hidden_out",)):
            continue  # k is rotated; a sink is a separate logit; gate and up have other axes
        for x in actual[: len(actual) - len(case.written)]:
            assert ((x == 0) | (x == -np.inf)).all(), empty


# Number of results that have the first axis of the first array; all if no number is given.
SLICED = {
    "attention_backward": 3,
    "layernorm_backward": 1,
    "linear_backward": 1,
    "linear_cross_entropy": 2,
    "rmsnorm_backward": 1,
    "swiglu_mlp_backward": 1,
    "ternary_matmul_backward": 1,
}
MIXED = ("attention_varlen", "embedding", "ternary_quantize", "ternary_pack", "ternary_unpack")
WHOLE = (
    *("cross_entropy mean", "cross_entropy_backward mean", "linear_cross_entropy mean"),
    *("global_norm", "linear_backward weights", "rope_append_kv pages", "rope_append_kv int8"),
    *("ternary_matmul both", "ternary_matmul given"),  # x has no NaN
)
SEPARATE = [n for n in NAMES if not n.startswith(MIXED) and n not in WHOLE]


@pytest.mark.parametrize("name", SEPARATE)
@each_dtype
def test_nan_stays_in_its_slice(name, dtype, backend):
    """A NaN in a sequence of the batch or in a row appears there, and changes no bit elsewhere."""
    case = law_call(name, dtype)
    axis = next(iter(case.axes.values()))[0]
    clean = outcome(case, **backend)
    poisoned = {}
    for key, x in case.arrays.items():
        if case.axes.get(key, ("",))[:1] == (axis,) and x.dtype.kind != "i":
            poisoned[key] = x.copy()
            poisoned[key][(1, *(n // 2 for n in x.shape[1:]))] = np.nan
    with np.errstate(invalid="ignore"):
        actual = outcome(case.having(**poisoned), **backend)
    sliced = [r for r in range(len(clean))][: SLICED.get(case.op, len(clean))]
    for r in sliced:
        others = [i for i in range(len(clean[r])) if i != 1]
        np.testing.assert_array_equal(actual[r][others], clean[r][others], err_msg=f"result {r}")
    floats = [actual[r] for r in sliced if actual[r].dtype.kind not in "iu"]
    assert any(np.isnan(x[1].astype(np.float64)).any() for x in floats), "the NaN is lost"
