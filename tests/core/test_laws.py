"""Laws that hold for every op: any strides, ``out``, in place, empty arrays, containment of NaN; laws of options."""

from __future__ import annotations

import contextlib
import inspect
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import errors
from gpu_ops.core.op import _EQUIVALENTS, forget_calls
from gpu_ops.errors import DeviceError, DTypeError, GpuOpsError, OptionError, UnknownOptionError
from tests.support.calls import ADDED, DTYPES, IN_PLACE, OPS, OPTIONAL, WRITTEN, call
from tests.support.laws import (
    FIRST_OF_OPS,
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
    refused,
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


# Laws of options: numbers no kernel can hold, names of other libraries, flags; each raises a helpful typed error.


def flags_of(name):
    """Options of an op that are True or False."""
    parameters = inspect.signature(getattr(gpu_ops, name)).parameters.values()
    return [p.name for p in parameters if isinstance(p.default, bool)]


def judged(case):
    """Bytes of the results, or the text of the error."""
    try:
        return [x.tobytes() for x in outcome(case)]
    except errors.GpuOpsError as error:
        return f"{type(error).__name__}: {error}"


PARAMETERS = {op: inspect.signature(getattr(gpu_ops, op)).parameters for op in OPS}
FLOAT_OPTIONS = {
    op: {p.name for p in PARAMETERS[op].values() if p.annotation in ("float", "float | None")} for op in OPS
}
EXTREMES = (1e39, -1e39, 1e-50, 1e-40, float("nan"), float("inf"))


def numbers_of(case):
    """Options of a call that may be non-integers, each with an allowed value."""
    arrays = {name for name, x in case.arrays.items() if not isinstance(x, (float, np.ndarray)) or np.ndim(x)}
    arrays |= {"workspace", *WRITTEN.get(case.op, ()), *ADDED.get(case.op, ())}
    for option in PARAMETERS[case.op]:
        if option in arrays:
            continue
        for number in (0.5, 1.5):
            with contextlib.suppress(errors.GpuOpsError):
                outcome(case.having(**{option: number}))
                yield option, number
                break


def check_extreme(case, option, number, value):
    """Check that it is refused by name, in a second call as in a first, or that the result is the reference's."""
    extreme = case.having(**{option: value})
    forget_calls()
    first = judged(extreme)
    outcome(case.having(**{option: number}))
    assert judged(extreme) == first
    if isinstance(first, str):
        assert option in first
        return
    assert np.isfinite(value), option
    if "out" in case.arrays:
        return  # of attention with another value of the option: there is no right gradient
    for x, expected in zip(outcome(extreme), outcome(extreme.having(backend="reference")), strict=True):
        x, expected = x.astype(np.float64), expected.astype(np.float64)
        assert not np.isnan(expected).any(), (option, value)
        size = np.abs(expected[np.isfinite(expected)]).max(initial=0)
        tolerance = 1e-5 * size + 1e-42  # below float32's normal numbers
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=tolerance, err_msg=f"{option}={value}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_numbers_that_the_computing_dtype_cannot_hold(op, dtype):
    """Every option that may be a float, found by trying, is refused by name or gives the reference's result."""
    options = set()
    for name in (n for n in NAMES if n.split()[0] == op):
        case = law_call(name, dtype)
        if "seed" in PARAMETERS[op]:
            case = case.having(seed=3)
        for option, number in numbers_of(case):
            if option not in options:
                options.add(option)
                for value in EXTREMES:
                    check_extreme(case, option, number, value)
    assert FLOAT_OPTIONS[op] <= options


@pytest.mark.parametrize("op", OPS)
def test_unknown_devices_and_backends(op):
    for device in ("tpu", "", "cuda:0", 0):
        refused(call(op).having(device=device), OptionError, f"device={device!r}")
    refused(call(op).having(backend="nmba"), OptionError, "did you mean 'numba'")
    for backend in ("cuda", "raw"):
        refused(call(op).having(backend=backend), OptionError, f"backend={backend!r}")


@pytest.mark.parametrize("op", OPS)
def test_a_misspelt_option_names_the_nearest_and_lists_all(op):
    """The error is a TypeError, as Python raises for such calls, and an OptionError."""
    text = refused(call(op).having(wether=True), UnknownOptionError, "unknown argument 'wether'; options: ")
    parameters = inspect.signature(getattr(gpu_ops, op)).parameters
    assert all(n in text for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY)
    refused(call(op).having(bakend="cpu"), UnknownOptionError, "did you mean 'backend'?")
    assert issubclass(UnknownOptionError, OptionError)
    assert issubclass(UnknownOptionError, TypeError)
    with pytest.raises(UnknownOptionError, match="did you mean 'backend'"):
        gpu_ops.explain(op, *call(op).arrays.values(), bakend="cpu")


@pytest.mark.parametrize("op", [op for op in OPS if "workspace" in gpu_ops.core.op.OPS[op].parameters])
def test_what_is_no_workspace_is_refused_on_the_cpu_too(op):
    for _ in range(2):
        refused(call(op).having(workspace=3), DTypeError, "workspace is int, expected a uint8 array")


FOREIGN = [
    ("attention", "mask", "here it is 'bias' or 'block_mask'"),
    ("attention", "attn_mask", "here it is 'bias' or 'block_mask'"),
    ("attention", "is_causal", "here it is 'causal'"),
    ("attention", "scale", "here it is 'softmax_scale'"),
    ("attention", "dropout", "here it is 'dropout_p'"),
    ("attention", "enable_gqa", "omit it: heads share keys"),
    ("attention", "alibi", "here it is 'alibi_slopes'"),
    ("attention", "s_aux", "here it is 'sinks'"),
    ("attention", "cu_seqlens_q", "attention_varlen takes sequences"),
    ("sample", "temp", "here it is 'temperature'"),
    ("adamw_step", "amsgrad", "omit it: no op keeps the largest v"),
    ("attention_backward", "attn_bias", "here it is 'bias'"),
    ("attention_varlen", "cu_seqlens_kv", "here it is 'cu_seqlens_k'"),
    ("attention_decode", "cache_seqlens", "here it is 'seqused_k'"),
    ("softmax", "attn_mask", "here it is 'mask'"),
    ("softmax", "dim", "omit it: the op works along the last axis"),
    ("rmsnorm", "variance_epsilon", "here it is 'eps'"),
    ("rope", "base", "here it is 'theta'"),
    ("cross_entropy", "labels", "here it is 'targets'"),
    ("adamw_step", "learning_rate", "here it is 'lr'"),
    ("rmsnorm", "wieght_offset", "did you mean 'weight_offset'?"),
]


@pytest.mark.parametrize(("op", "keyword", "hint"), FOREIGN)
def test_a_keyword_of_another_library_names_ours(op, keyword, hint):
    for _ in range(2):
        refused(call(op).having(**{keyword: 1.0}), UnknownOptionError, f"argument {keyword!r}; {hint}")


def test_every_keyword_of_another_library_has_an_op_that_answers():
    parameters = {op: [*inspect.signature(getattr(gpu_ops, op)).parameters] for op in OPS}
    for keyword, ours in _EQUIVALENTS.items():
        assert any(set(ours) & set(names) and keyword not in names for names in parameters.values()), keyword


def test_packed_weights_in_place_of_an_array_are_told_how_to_unpack():
    w = gpu_ops.ternary_quantize(np.eye(4, dtype=np.float32))
    for arguments in ((w,), (w, (4, 4), "w2")):
        with pytest.raises(DTypeError, match=r"packed is TernaryMatrix.*w\.dequantize\(\), w\.trits\(\)"):
            gpu_ops.ternary_unpack(*arguments)
    with pytest.raises(DTypeError, match=r"x is TernaryMatrix.*w\.dequantize\(\)"):
        gpu_ops.softmax(w)


@pytest.mark.parametrize("op", OPS)
def test_an_argument_missing_or_too_many_is_pythons_own_error(op):
    with pytest.raises(TypeError, match="missing") as caught:
        getattr(gpu_ops, op)()
    assert type(caught.value) is TypeError
    with pytest.raises(TypeError, match="positional argument") as caught:
        getattr(gpu_ops, op)(*[1] * 20)
    assert type(caught.value) is TypeError


FLAGGED = [(name, option) for name in FIRST_OF_OPS for option in flags_of(name)]


@pytest.mark.parametrize(("name", "option"), FLAGGED, ids=[" ".join(pair) for pair in FLAGGED])
def test_a_bool_of_numpy_is_a_bool(name, option):
    """It has the outcome of a bool, result or error, in a first call and in a repeated one."""
    case = law_call(name)
    for value in (True, False):
        for form in (bool, np.bool_, bool):
            actual = judged(case.having(**{option: form(value)}))
            if form is bool:
                expected = actual
            assert actual == expected
