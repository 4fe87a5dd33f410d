"""Mistakes: each is answered by the right type of error, in words that help, before anything is written."""

from __future__ import annotations

import inspect

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
from tests.bad_input_cases import CASES, F32, F64, On, ones
from tests.calls import OPS, call, results

SENTINEL = 7

# How many results ``out=`` takes, for the ops that have it.
OUTS = {
    "layernorm": 1, "layernorm_backward": 1,
    "attention": 1, "attention_varlen": 1, "attention_decode": 1, "rope": 2, "rope_backward": 2, "rmsnorm": 1,
    "rmsnorm_backward": 1, "rmsnorm_quant_int8": 3, "rope_append_kv": 1, "swiglu": 1, "swiglu_backward": 2,
    "swiglu_mlp": 1, "swiglu_mlp_backward": 4, "ternary_matmul": 1,
    "ternary_matmul_backward": 2,
}  # fmt: skip


def sentinel_out(op):
    """Writable arrays for ``out=``, filled with a number no op computes; a pair where it takes one."""
    made = [np.full_like(r, SENTINEL) for r in results(call(op)())[: OUTS[op]]]
    return made[0] if len(made) == 1 else tuple(made)


def snapshot(one):
    arrays = {n: x for n, x in {**one.arrays, **one.options}.items() if isinstance(x, np.ndarray)}
    return {name: (x, x.copy()) for name, x in arrays.items()}


def refused(one, error, message):
    """The call raises exactly this type and changes no array it was given, nor the ``out`` it might write."""
    if one.op in OUTS and "out" not in one.options and "out" not in one.arrays:
        one = one.having(out=sentinel_out(one.op))
    before = snapshot(one)
    with pytest.raises(error) as caught:
        one()
    assert error is GpuOpsError or type(caught.value) is error
    text = str(caught.value)
    assert message in text, text
    assert text.startswith(f"{one.op}: "), f"which op? {text}"
    for name, (now, then) in before.items():
        assert np.array_equal(now, then, equal_nan=now.dtype.kind == "f"), f"{name} was written to"
    for out in results(one.options.get("out", ())):
        if isinstance(out, np.ndarray) and "out" not in before:
            assert (out == SENTINEL).all(), "out was written to"


@pytest.mark.parametrize(
    ("op", "error", "message", "changes"),
    [pytest.param(op, e, m, c, id=f"{op}: {what}") for op, what, e, m, c in CASES],
)
def test_mistake(op, error, message, changes):
    one = call(op)
    made = {n: c.change(one.arrays[n]) if isinstance(c, On) else c for n, c in changes.items()}
    if isinstance(made.get("out"), str):  # a view into another argument
        made["out"] = one.arrays[made["out"]][None]
    refused(one.having(**made), error, message)


def test_there_are_enough_cases_and_every_op_has_some():
    assert len(CASES) >= 60
    assert {op for op, *_ in CASES} == set(OPS)


FLOATS = [(op, name) for op in OPS for name, x in call(op).arrays.items() if getattr(x, "dtype", None) == F32]


@pytest.mark.parametrize(("op", "name"), FLOATS)
def test_any_array_of_another_float_dtype(op, name):
    """No silent promotion, whichever argument is the odd one out."""
    one = call(op)
    if len([n for o, n in FLOATS if o == op]) == 1:
        pytest.skip("one float array alone sets the dtype")
    refused(one.having(**{name: one.arrays[name].astype(F64)}), DTypeError, "float64")


@pytest.mark.parametrize(("op", "name"), FLOATS)
def test_any_array_with_an_axis_too_many(op, name):
    """An extra axis is never broadcast away; where leading axes are free, ``out`` must have them too."""
    one = call(op)
    refused(one.having(**{name: one.arrays[name][None, None]}), ShapeError, "shape")


@pytest.mark.parametrize("op", OPS)
def test_unknown_devices_and_backends(op):
    refused(call(op).having(device="tpu"), OptionError, "device='tpu'")
    refused(call(op).having(backend="nmba"), OptionError, "did you mean 'numba'")


@pytest.mark.parametrize("op", OPS)
def test_a_misspelt_option_is_pythons_own_error(op):
    with pytest.raises(TypeError, match="unexpected keyword argument 'wether'"):
        call(op)(wether=True)


@pytest.mark.parametrize("op", sorted(OUTS))
def test_out_is_written_when_nothing_is_wrong(op):
    """The counterpart of every "out is untouched" above."""
    out = sentinel_out(op)
    returned = call(op)(out=out)
    for r, o, e in zip(results(returned), results(out), results(call(op)()), strict=False):
        assert r is o
        assert np.array_equal(o, e)


@pytest.mark.parametrize("mistake", [3, "out", 2.5, object()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("op", sorted(OUTS))
def test_out_is_no_array(op, mistake):
    one = call(op)
    error = (DTypeError, "not an array") if OUTS[op] == 1 else (OptionError, "arrays")
    refused(one.having(out=mistake), *error)
    if OUTS[op] > 1:
        refused(one.having(out=(mistake,) * OUTS[op]), DTypeError, "not an array")


@pytest.mark.parametrize("op", sorted(OUTS))
def test_out_overlaps_itself(op):
    """Rows that share elements, as a broadcast array's do: the last one written would be all that is left."""
    made = [np.full_like(r, SENTINEL) for r in results(call(op)())[: OUTS[op]]]
    rows = [x for x in made if x.ndim > 1 and len(x) > 1]
    assert rows
    for x in rows:
        shared = as_strided(x, x.shape, (0, *x.strides[1:]))
        out = tuple(shared if y is x else y for y in made)
        refused(
            call(op).having(out=out if OUTS[op] > 1 else shared), ShapeError, "share memory with each other"
        )


@pytest.mark.parametrize("op", ["attention_backward", "attention_varlen_backward"])
def test_grads_is_the_out_of_a_backward_that_takes_an_out(op):
    expected = call(op)()
    grads = tuple(np.full_like(g, SENTINEL) for g in expected)
    returned = call(op)(grads=grads)
    for r, g, e in zip(returned, grads, expected, strict=True):
        assert r is g
        assert np.array_equal(g, e)
    with pytest.raises(OptionError, match=r"grads must be three arrays, \(dq, dk, dv\); got tuple of 2"):
        call(op)(grads=grads[:2])
    with pytest.raises(OptionError, match="grads must be three arrays"):
        call(op)(grads=3)
    dq, dk, dv = grads
    memory = np.zeros(dq.size + dk.size, dq.dtype)
    overlapping = (memory[: dq.size].reshape(dq.shape), memory[dq.size - 1 : -1].reshape(dk.shape), dv)
    with pytest.raises(ShapeError, match="grads dk shares memory with grads dq"):
        call(op)(grads=overlapping)


def test_the_table_of_outs_is_complete():
    takes_out = {op for op in OPS if "out" in inspect.signature(getattr(gpu_ops, op)).parameters}
    backward = {"attention_backward", "attention_varlen_backward"}  # their out is the forward's result
    assert takes_out - backward == set(OUTS)


def test_errors_are_also_the_standard_ones():
    for error, standard in ((ShapeError, ValueError), (DTypeError, TypeError), (OptionError, ValueError),
                            (DeviceError, RuntimeError), (FormatError, ValueError)):  # fmt: skip
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
