"""Laws of refused calls: the right type of error, in words that help, and no array changed."""

from __future__ import annotations

import contextlib
import inspect
import itertools

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import gpu_ops
from gpu_ops import errors
from gpu_ops.core import foreign
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DTypeError, OptionError, ShapeError, UnknownOptionError
from tests.calls import ADDED, IN_PLACE, OPS, OPTIONAL, OUT, WRITTEN, Call, call
from tests.laws import (
    FIRST_OF_OPS,
    NAMES,
    WITH_OUT,
    every_other,
    filled,
    given_out,
    law_call,
    outcome,
    outs_like,
    read_only,
    refused,
    sharing,
    takes_one,
    unaligned,
    with_result,
)


def flags_of(name):
    """The options of an op that are True or False."""
    parameters = inspect.signature(getattr(gpu_ops, name)).parameters.values()
    return [p.name for p in parameters if isinstance(p.default, bool)]


def judged(one):
    """The bytes of the results, or the error in words."""
    try:
        return [x.tobytes() for x in outcome(one)]
    except errors.GpuOpsError as error:
        return f"{type(error).__name__}: {error}"


with_out = pytest.mark.parametrize("name", WITH_OUT)


def results_of(name):
    """The call, and arrays that its results fit into."""
    one = law_call(name)
    return one, outs_like(one, outcome(one), filled)


@with_out
def test_out_shares_memory_with_an_input(name):
    """One element is enough, whichever input and whichever result. No input is allowed but by being out itself."""
    one, outs = results_of(name)
    for i, out in enumerate(outs):
        for key, x in one.inputs.items():
            moved, overlapping = sharing(x, out)
            wrong = with_result(one.having(**{key: moved}), outs, i, overlapping)
            refused(wrong, ShapeError, f"shares memory with {key}")


@with_out
def test_out_is_an_input_that_is_still_read(name):
    one, outs = results_of(name)
    allowed = IN_PLACE.get(one.op, ()) if name != "swiglu packed" else ()
    for i, out in enumerate(outs):
        for key, x in one.inputs.items():
            fits = (x.shape, x.dtype) == (out.shape, out.dtype)
            if fits and (key not in allowed or allowed.index(key) != i):
                refused(with_result(one, outs, i, x), ShapeError, f"shares memory with {key}")


@pytest.mark.parametrize("name", [n for n in WITH_OUT if n.split()[0] in IN_PLACE and n not in OPTIONAL])
def test_in_place_is_the_same_elements_in_the_same_order(name):
    one, outs = results_of(name)
    keys = [key for key in IN_PLACE[one.op] if key in one.arrays]
    for i, key in enumerate(keys):
        x = one.arrays[key]
        memory = np.concatenate([x, x[:1]])
        shifted = with_result(one.having(**{key: memory[:-1]}), outs, i, memory[1:])
        refused(shifted, ShapeError, "shares memory with")
        if x.ndim in (2, 4):  # the rows of others have to follow each other
            refused(with_result(one, outs, i, x[::-1]), ShapeError, "shares memory with")


@with_out
def test_results_share_memory_with_each_other(name):
    one, outs = results_of(name)
    for i in range(1, len(outs)):
        if (outs[i].shape, outs[i].dtype) == (outs[i - 1].shape, outs[i - 1].dtype):
            twice = with_result(one, outs, i, outs[i - 1])
            refused(twice, ShapeError, "shares memory with")
        first, second = sharing(outs[i - 1], outs[i])
        refused(
            with_result(with_result(one, outs, i - 1, first), [*outs[: i - 1], first, *outs[i:]], i, second),
            ShapeError,
            "shares memory with",
        )


@with_out
def test_out_overlaps_itself(name):
    """Rows that share elements, as a broadcast array's do: only the last one written would remain."""
    one, outs = results_of(name)
    rows = [i for i, x in enumerate(outs) if x.ndim > 1]
    for i in rows:
        shared = as_strided(outs[i], outs[i].shape, (0, *outs[i].strides[1:]))
        refused(with_result(one, outs, i, shared), ShapeError, "share memory with each other")


@with_out
def test_out_is_read_only_unaligned_or_of_another_kind(name):
    one, outs = results_of(name)
    for i, out in enumerate(outs):
        other = np.float16 if out.dtype == np.float64 else np.float64
        for wrong, error, message in (
            (read_only(out), ShapeError, "is read-only"),
            (unaligned(out), ShapeError, "is not aligned"),
            (
                every_other(out) if out.ndim else read_only(out),
                ShapeError,
                "contiguous" if out.ndim else "is read",
            ),
            (filled(out[:-1]) if out.ndim else filled(out[None]), ShapeError, "has shape"),
            (out[None], ShapeError, "has shape"),
            (np.zeros(out.shape, other), DTypeError, f"is {np.dtype(other)}"),
        ):
            if out.itemsize == 1 and message == "is not aligned":
                continue
            refused(with_result(one, outs, i, wrong), error, message)


OF_ROWS = {
    "cross_entropy": {"reduction": "none", "return_lse": True},
    "layernorm": {"return_stats": True},
    "rmsnorm": {"return_rstd": True},
    "rmsnorm_quant_int8": {},
}


@pytest.mark.parametrize("op", OF_ROWS)
def test_places_for_numbers_of_rows_have_gaps(op):
    """Kernels write them one after the other."""
    arrays = {"cross_entropy": ((2, 3, 8), None), "layernorm": ((2, 3, 8), (8,), (8,))}
    shapes = arrays.get(op, ((2, 3, 8), (8,)))
    given = [np.zeros((2, 3), np.int64) if s is None else np.ones(s, np.float32) for s in shapes]
    one = Call(op, dict(zip("abc", given, strict=False)), OF_ROWS[op])
    outs = [np.empty_like(x) for x in one()]
    for i, x in enumerate(outs):
        if x.ndim == 2:
            gaps = np.zeros((2, 6), x.dtype)[:, :3]
            refused(one.having(out=(*outs[:i], gaps, *outs[i + 1 :])), ShapeError, "must be C-contiguous")


@with_out
def test_out_is_no_array(name):
    one, outs = results_of(name)
    keyword, _ = OUT[one.op]
    for mistake in (3, "out", 2.5, object()):
        if takes_one(one):
            refused(one.having(**{keyword: mistake}), DTypeError, "not an array")
        else:
            refused(one.having(**{keyword: mistake}), OptionError, f"{keyword} must be")
            refused(one.having(**{keyword: (mistake,) * len(outs)}), DTypeError, "not an array")
    if not takes_one(one):
        refused(one.having(**{keyword: outs[0]}), OptionError, "; got ndarray")
        refused(one.having(**{keyword: tuple(outs[:-1])}), OptionError, f"got tuple of {len(outs) - 1}")
        refused(one.having(**{keyword: (*outs[:-1], None)}), OptionError, f"{keyword} must be")


@pytest.mark.parametrize("name", [*sorted(WRITTEN), *(f"{op} added" for op in ADDED)])
def test_arguments_that_are_written_are_checked_like_out(name):
    one = law_call(name)
    for key, x in one.written.items():
        for wrong, message in (
            (read_only(x), f"{key} is read-only"),
            (unaligned(x), "aligned"),
            (x[:-1], "shape"),
        ):
            refused(one.having(**{key: wrong}), ShapeError, message)
    for (first, x), (second, y) in itertools.combinations(one.written.items(), 2):
        if x.shape == y.shape:
            for changed in ({first: y}, {second: x}):
                refused(one.having(**changed), ShapeError, f"{second} shares memory with {first}")
    for key, x in one.written.items():
        for source, given in one.inputs.items():
            if given.dtype != x.dtype:
                continue  # integers that say where tokens go are not compared with the caches
            moved, overlapping = sharing(given, x)
            refused(one.having(**{source: moved, key: overlapping}), ShapeError, "shares memory with")


# ---- inputs ------------------------------------------------------------------------------------------------------


FLOATS = [
    (op, name) for op in OPS for name, x in call(op).arrays.items() if getattr(x, "dtype", None) == np.float32
]


# One float array alone sets the dtype; lse is float64 where that is asked for.
SEVERAL = [(op, name) for op, name in FLOATS if len([n for o, n in FLOATS if o == op]) > 1 and name != "lse"]


@pytest.mark.parametrize(("op", "name"), SEVERAL)
def test_any_array_of_another_float_dtype(op, name):
    """No silent promotion, whichever argument is the odd one out."""
    one = law_call(op)
    odd = np.dtype(np.float16 if name.startswith("lse") else np.float64)  # lse may be float64 beside anything
    refused(one.having(**{name: one.arrays[name].astype(odd)}), DTypeError, f"{name} is {odd}")


@pytest.mark.parametrize(("op", "name"), [one for one in FLOATS if one[0] != "global_norm"])
def test_any_array_with_an_axis_too_many(op, name):
    """An extra axis is never broadcast away; where leading axes are free, ``out`` must have them too."""
    one = call(op)
    if op in OUT:
        one = one.having(**given_out(one, outs_like(one, outcome(one), filled)))
    refused(one.having(**{name: one.arrays[name][None, None]}), ShapeError, "shape")


PARAMETERS = {op: inspect.signature(getattr(gpu_ops, op)).parameters for op in OPS}
FLOAT_OPTIONS = {
    op: {p.name for p in PARAMETERS[op].values() if p.annotation in ("float", "float | None")} for op in OPS
}
EXTREMES = (1e39, -1e39, 1e-50, 1e-40, float("nan"), float("inf"))


def numbers_of(one):
    """The options of a call that may be a number between integers, with one that is allowed."""
    arrays = {name for name, x in one.arrays.items() if not isinstance(x, (float, np.ndarray)) or np.ndim(x)}
    arrays |= {"workspace", *WRITTEN.get(one.op, ()), *ADDED.get(one.op, ())}
    for option in PARAMETERS[one.op]:
        if option in arrays:
            continue
        for number in (0.5, 1.5):
            with contextlib.suppress(errors.GpuOpsError):
                outcome(one.having(**{option: number}))
                yield option, number
                break


def check_extreme(one, option, number, value):
    """It is refused by name, in a second call as in a first, or the result is that of the reference."""
    extreme = one.having(**{option: value})
    forget_calls()
    first = judged(extreme)
    outcome(one.having(**{option: number}))
    assert judged(extreme) == first
    if isinstance(first, str):
        assert option in first
        return
    assert np.isfinite(value), option
    if "out" in one.arrays:
        return  # of attention with another value of the option: there is no right gradient
    for x, want in zip(outcome(extreme), outcome(extreme.having(backend="reference")), strict=True):
        x, want = x.astype(np.float64), want.astype(np.float64)
        assert not np.isnan(want).any(), (option, value)
        size = np.abs(want[np.isfinite(want)]).max(initial=0)
        tolerance = 1e-5 * size + 1e-42  # below float32's normal numbers
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=tolerance, err_msg=f"{option}={value}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_numbers_that_the_computing_dtype_cannot_hold(op, dtype):
    """Every option that may be a float, found by trying, is refused by name or gives the reference's result."""
    options = set()
    for name in (n for n in NAMES if n.split()[0] == op):
        one = law_call(name, dtype)
        if "seed" in PARAMETERS[op]:
            one = one.having(seed=3)
        for option, number in numbers_of(one):
            if option not in options:
                options.add(option)
                for value in EXTREMES:
                    check_extreme(one, option, number, value)
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
    """As a TypeError, which Python raises for such calls, and as an OptionError."""
    text = refused(call(op).having(wether=True), UnknownOptionError, "unknown argument 'wether'; options: ")
    parameters = inspect.signature(getattr(gpu_ops, op)).parameters
    assert all(n in text for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY)
    refused(call(op).having(bakend="cpu"), UnknownOptionError, "did you mean 'backend'?")
    assert issubclass(UnknownOptionError, OptionError)
    assert issubclass(UnknownOptionError, TypeError)
    with pytest.raises(UnknownOptionError, match="did you mean 'backend'"):
        gpu_ops.explain(op, *call(op).arrays.values(), bakend="cpu")


FOREIGN = [
    ("attention", "mask", "here it is 'bias' or 'block_mask'"),
    ("attention", "attn_mask", "here it is 'bias' or 'block_mask'"),
    ("attention", "is_causal", "here it is 'causal'"),
    ("attention", "scale", "here it is 'softmax_scale'"),
    ("attention", "dropout", "here it is 'dropout_p'"),
    ("attention", "enable_gqa", "omit it: heads share keys"),
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
    for keyword, ours in foreign._EQUIVALENTS.items():
        assert any(set(ours) & set(names) and keyword not in names for names in parameters.values()), keyword


def test_packed_weights_in_place_of_an_array_are_told_how_to_unpack():
    w = gpu_ops.ternary_quantize(np.eye(4, dtype=np.float32))
    for given in ((w,), (w, (4, 4), "w2")):
        with pytest.raises(DTypeError, match=r"packed is TernaryMatrix.*w\.dequantize\(\), w\.trits\(\)"):
            gpu_ops.ternary_unpack(*given)
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


def test_the_table_of_outs_is_complete():
    options = {
        op: [
            n
            for n, p in inspect.signature(getattr(gpu_ops, op)).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        ]
        for op in OPS
    }
    takes_out = {op for op, names in options.items() if {"out", "grads"} & set(names)}
    assert takes_out == set(OUT)


FLAGGED = [(name, option) for name in FIRST_OF_OPS for option in flags_of(name)]


@pytest.mark.parametrize(("name", "option"), FLAGGED, ids=[" ".join(pair) for pair in FLAGGED])
def test_a_bool_of_numpy_is_a_bool(name, option):
    """Right or wrong, in a first call and in a repeated one."""
    one = law_call(name)
    for value in (True, False):
        for form in (bool, np.bool_, bool):
            found = judged(one.having(**{option: form(value)}))
            if form is bool:
                want = found
            assert found == want
