"""Laws of refused calls: the right type of error, a helpful message, and no array changed."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import gpu_ops
from gpu_ops.errors import (
    DeviceError,
    DTypeError,
    FormatError,
    GpuOpsError,
    OptionError,
    ShapeError,
)
from tests.support.bad_input_cases import CASES, Of, On, ones
from tests.support.calls import ADDED, IN_PLACE, OPS, OPTIONAL, OUT, WRITTEN, OpCall, call
from tests.support.laws import (
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

with_out = pytest.mark.parametrize("name", WITH_OUT)


def results_of(name):
    """Call, and arrays that its results fit into."""
    case = law_call(name)
    return case, outs_like(case, outcome(case), filled)


@with_out
def test_out_shares_memory_with_an_input(name):
    """One shared element of any input and any result is enough. An input is allowed only as ``out`` itself."""
    case, outs = results_of(name)
    for i, out in enumerate(outs):
        for key, x in case.inputs.items():
            moved, overlapping = sharing(x, out)
            wrong = with_result(case.having(**{key: moved}), outs, i, overlapping)
            refused(wrong, ShapeError, f"shares memory with {key}")


@with_out
def test_out_is_an_input_that_is_still_read(name):
    case, outs = results_of(name)
    allowed = IN_PLACE.get(case.op, ()) if name != "swiglu packed" else ()
    for i, out in enumerate(outs):
        for key, x in case.inputs.items():
            fits = (x.shape, x.dtype) == (out.shape, out.dtype)
            if fits and (key not in allowed or allowed.index(key) != i):
                refused(with_result(case, outs, i, x), ShapeError, f"shares memory with {key}")


@pytest.mark.parametrize("name", [n for n in WITH_OUT if n.split()[0] in IN_PLACE and n not in OPTIONAL])
def test_in_place_is_the_same_elements_in_the_same_order(name):
    case, outs = results_of(name)
    keys = [key for key in IN_PLACE[case.op] if key in case.arrays]
    for i, key in enumerate(keys):
        x = case.arrays[key]
        memory = np.concatenate([x, x[:1]])
        shifted = with_result(case.having(**{key: memory[:-1]}), outs, i, memory[1:])
        refused(shifted, ShapeError, "shares memory with")
        if x.ndim in (2, 4):  # the rows of others must be adjacent
            refused(with_result(case, outs, i, x[::-1]), ShapeError, "shares memory with")


@with_out
def test_results_share_memory_with_each_other(name):
    case, outs = results_of(name)
    for i in range(1, len(outs)):
        if (outs[i].shape, outs[i].dtype) == (outs[i - 1].shape, outs[i - 1].dtype):
            twice = with_result(case, outs, i, outs[i - 1])
            refused(twice, ShapeError, "shares memory with")
        first, second = sharing(outs[i - 1], outs[i])
        refused(
            with_result(with_result(case, outs, i - 1, first), [*outs[: i - 1], first, *outs[i:]], i, second),
            ShapeError,
            "shares memory with",
        )


@with_out
def test_out_overlaps_itself(name):
    """Rows share elements, as in a broadcast array: only the last one written would remain."""
    case, outs = results_of(name)
    rows = [i for i, x in enumerate(outs) if x.ndim > 1]
    for i in rows:
        shared = as_strided(outs[i], outs[i].shape, (0, *outs[i].strides[1:]))
        refused(with_result(case, outs, i, shared), ShapeError, "share memory with each other")


@with_out
def test_out_is_read_only_unaligned_or_of_another_kind(name):
    case, outs = results_of(name)
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
            refused(with_result(case, outs, i, wrong), error, message)


OF_ROWS = {
    "cross_entropy": {"reduction": "none", "return_lse": True},
    "layernorm": {"return_stats": True},
    "rmsnorm": {"return_rstd": True},
    "rmsnorm_quant_int8": {},
}


@pytest.mark.parametrize("op", OF_ROWS)
def test_places_for_numbers_of_rows_have_gaps(op):
    """Gaps are refused, because kernels write them contiguously."""
    arrays = {"cross_entropy": ((2, 3, 8), None), "layernorm": ((2, 3, 8), (8,), (8,))}
    shapes = arrays.get(op, ((2, 3, 8), (8,)))
    inputs = [np.zeros((2, 3), np.int64) if s is None else np.ones(s, np.float32) for s in shapes]
    case = OpCall(op, dict(zip("abc", inputs, strict=False)), OF_ROWS[op])
    outs = [np.empty_like(x) for x in case()]
    for i, x in enumerate(outs):
        if x.ndim == 2:
            gaps = np.zeros((2, 6), x.dtype)[:, :3]
            refused(case.having(out=(*outs[:i], gaps, *outs[i + 1 :])), ShapeError, "must be C-contiguous")


@with_out
def test_out_is_no_array(name):
    case, outs = results_of(name)
    keyword, _ = OUT[case.op]
    for mistake in (3, "out", 2.5, object()):
        if takes_one(case):
            refused(case.having(**{keyword: mistake}), DTypeError, "not an array")
        else:
            refused(case.having(**{keyword: mistake}), OptionError, f"{keyword} must be")
            refused(case.having(**{keyword: (mistake,) * len(outs)}), DTypeError, "not an array")
    if not takes_one(case):
        refused(case.having(**{keyword: outs[0]}), OptionError, "; got ndarray")
        refused(case.having(**{keyword: tuple(outs[:-1])}), OptionError, f"got tuple of {len(outs) - 1}")
        refused(case.having(**{keyword: (*outs[:-1], None)}), OptionError, f"{keyword} must be")


@pytest.mark.parametrize("name", [*sorted(WRITTEN), *(f"{op} added" for op in ADDED)])
def test_arguments_that_are_written_are_checked_like_out(name):
    case = law_call(name)
    for key, x in case.written.items():
        for wrong, message in (
            (read_only(x), f"{key} is read-only"),
            (unaligned(x), "aligned"),
            (x[:-1], "shape"),
        ):
            refused(case.having(**{key: wrong}), ShapeError, message)
    for (first, x), (second, y) in itertools.combinations(case.written.items(), 2):
        if x.shape == y.shape:
            for changed in ({first: y}, {second: x}):
                refused(case.having(**changed), ShapeError, f"{second} shares memory with {first}")
    for key, x in case.written.items():
        for source, input_array in case.inputs.items():
            if input_array.dtype != x.dtype:
                continue  # integers that place tokens are not compared with the caches
            moved, overlapping = sharing(input_array, x)
            refused(case.having(**{source: moved, key: overlapping}), ShapeError, "shares memory with")


# ---- inputs ------------------------------------------------------------------------------------------------


FLOATS = [
    (op, name) for op in OPS for name, x in call(op).arrays.items() if getattr(x, "dtype", None) == np.float32
]


# A single float array sets the dtype; lse is float64 where requested.
SEVERAL = [(op, name) for op, name in FLOATS if len([n for o, n in FLOATS if o == op]) > 1 and name != "lse"]


@pytest.mark.parametrize(("op", "name"), SEVERAL)
def test_any_array_of_another_float_dtype(op, name):
    """There is no silent promotion, for any argument of another dtype."""
    case = law_call(op)
    # lse may be float64 with any other dtype
    odd = np.dtype(np.float16 if name.startswith("lse") else np.float64)
    refused(case.having(**{name: case.arrays[name].astype(odd)}), DTypeError, f"{name} is {odd}")


@pytest.mark.parametrize(("op", "name"), [case for case in FLOATS if case[0] != "global_norm"])
def test_any_array_with_an_axis_too_many(op, name):
    """An extra axis is never broadcast away; where leading axes are free, ``out`` must have them too."""
    case = call(op)
    if op in OUT:
        case = case.having(**given_out(case, outs_like(case, outcome(case), filled)))
    refused(case.having(**{name: case.arrays[name][None, None]}), ShapeError, "shape")


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


# Mistakes: each raises the right type of error with a helpful message, before anything is written.


@pytest.mark.parametrize(
    ("op", "error", "message", "changes"),
    [pytest.param(op, e, m, c, id=f"{op}: {what}") for op, what, e, m, c in CASES],
)
def test_mistake(op, error, message, changes):
    case = call(op)
    made = {n: c.change(case.arrays[n]) if isinstance(c, On) else c for n, c in changes.items()}
    made = {n: c.view(case.arrays[c.name]) if isinstance(c, Of) else c for n, c in made.items()}
    keyword, _ = OUT.get(case.op, (None, 0))
    if keyword and keyword not in made:
        made |= given_out(case, outs_like(case, outcome(case), filled))
    refused(case.having(**made), error, message)


def test_there_are_enough_cases_and_every_op_has_some():
    assert len(CASES) >= 60
    assert {op.split()[0] for op, *_ in CASES} == set(OPS)


def test_errors_are_also_the_standard_ones():
    for error, standard in (
        (ShapeError, ValueError),
        (DTypeError, TypeError),
        (OptionError, ValueError),
        (DeviceError, RuntimeError),
        (FormatError, ValueError),
    ):
        assert issubclass(error, standard)
        assert issubclass(error, GpuOpsError)


def test_explain_refuses_what_the_op_refuses():
    with pytest.raises(ShapeError, match="expected exactly"):
        gpu_ops.explain("rmsnorm", ones(3, 16), ones(15))
    with pytest.raises(OptionError, match=r"op='rmsnrom' is unknown.*mean 'rmsnorm'"):
        gpu_ops.explain("rmsnrom", ones(3, 16), ones(16))
    with pytest.raises(OptionError, match="op=<function dot"):
        gpu_ops.explain(np.dot, ones(3, 16), ones(16))


def test_environment_defaults_are_checked_too(monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", "nmba")
    refused(call("rmsnorm").having(out=ones(3, 16)), OptionError, "did you mean 'numba'")
