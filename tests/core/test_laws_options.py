"""Laws of options: numbers no kernel can hold, names of other libraries, flags; each raises a helpful typed error."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest

import gpu_ops
from gpu_ops import errors
from gpu_ops.core import op as foreign
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DTypeError, OptionError, UnknownOptionError
from tests.support.calls import ADDED, OPS, WRITTEN, call
from tests.support.laws import FIRST_OF_OPS, NAMES, law_call, outcome, refused


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
    for keyword, ours in foreign._EQUIVALENTS.items():
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
