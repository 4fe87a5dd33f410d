"""Replay: a later call of the same shapes, dtypes and options is computed and judged as the first one was.

Every test has different sizes, so that its first call is the first of the process.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import gpu_ops
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from tests.support.calls import DTYPES, call
from tests.support.laws import (
    FIRST_OF_OPS,
    NAMES,
    WITH_OUT,
    apart,
    assert_same,
    filled,
    given_out,
    outcome,
    outs_like,
    python_calls,
    quick,
    read_only,
    refused,
    runs,  # noqa: F401 - conftest.py calls it
    sharing,
    unaligned,
    viewed,
    with_result,
)

DEVICES = ("cpu", "emulator", "cuda")
each_name = pytest.mark.parametrize("name", NAMES)
AXES = ("batch", "seqlen", "seqlen_q", "seqlen_new", "total", "rows", "cols", "N")


def is_slow(given):
    """True for slow tests. On the CPU each call of the table runs in one dtype by default."""
    of_its_own = DTYPES[NAMES.index(given["name"]) % len(DTYPES)]
    return given["backend"]["device"] == "cpu" and given["dtype"] != of_its_own


def quick_on_emulator(raw):
    return {"test_computes_what_a_first_call_does": {**quick(raw), "name": FIRST_OF_OPS}}


def sized(name, n, dtype=np.float32, seed=7):
    """Call with size ``n`` for every axis that may have any size."""
    return call(name, dtype, seed, **dict.fromkeys(AXES, n), max_seqlen=28)


def same_memory_order(actual, expected):
    return [x.strides for x in actual] == [x.strides for x in expected]


@each_name
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_computes_what_a_first_call_does(name, dtype, backend, monkeypatch):
    """Results agree with the same numbers, with others, and through a view."""
    case, other = sized(name, 13, dtype), sized(name, 13, dtype, seed=8)
    first = outcome(case, **backend)
    later = outcome(other, **backend)
    again = outcome(case, **backend)
    assert_same(again, first)
    assert same_memory_order(again, first)
    moved = (
        [outcome(viewed(x, apart), **backend) for x in (case, other)] if backend["backend"] != "raw" else []
    )
    for name_, value in backend.items():  # with another choice, a call is again a first one
        monkeypatch.setenv(f"GPU_OPS_{name_.upper()}", value)
    fresh = outcome(other)
    assert_same(later, fresh)
    assert same_memory_order(later, fresh)
    for actual, expected in zip(moved, (first, fresh), strict=False):
        assert_same(actual, expected, "behind a view")


@each_name
def test_a_later_call_does_less(name):
    """Validation and planning are not repeated. The minimum counts, as an import or a collection may interfere."""
    sized(name, 6)()  # imports and compiles
    case = sized(name, 17)
    forget_calls()  # two names can be one call in float32
    first = python_calls(case)
    later = min(python_calls(case) for _ in range(3))
    assert later <= 0.7 * first


@each_name
def test_arrays_are_let_go(name):
    case = sized(name, 18)
    arrays = (*case.inputs.values(), *case.written.values())
    alive = [weakref.ref(x) for x in arrays]
    case()
    case()
    del case, arrays
    if any(x() is not None for x in alive):  # in a cycle, perhaps: a collection takes a second here
        gc.collect()
    assert not [x for x in alive if x() is not None]


# ---- mistakes -------------------------------------------------------------------------------------------------


def with_value(index, value):
    def change(x):
        x = x.copy()
        x[index] = value
        return x

    return change


def two_alike(x):
    x = x.copy()
    x[2] = x[5] = 3
    return x


VALUES = [
    ("attention_decode", "seqused_k", with_value(0, 29), OptionError),
    ("attention_decode", "seqused_k", with_value(-1, -1), OptionError),
    ("attention_decode paged", "seqused_k", with_value(0, 29), OptionError),
    ("attention_decode paged", "block_table", lambda x: np.full_like(x, -1), OptionError),
    ("attention_decode paged", "block_table", lambda x: np.full_like(x, 999), OptionError),
    ("attention_varlen", "cu_seqlens_q", with_value(0, 1), OptionError),
    ("attention_varlen lse", "cu_seqlens_q", with_value(1, 15), OptionError),
    ("attention_varlen", "cu_seqlens_k", with_value(-1, 13), OptionError),
    ("attention_varlen_backward", "cu_seqlens_k", with_value(-1, 15), OptionError),
    ("attention_varlen used", "seqused_k", with_value(-1, 99), OptionError),
    ("attention_varlen pages", "seqused_k", with_value(0, 29), OptionError),
    ("attention_varlen pages", "block_table", lambda x: np.full_like(x, -1), OptionError),
    ("attention_varlen pages", "block_table", lambda x: np.full_like(x, 999), OptionError),
    ("rope positions", "positions", with_value((0, 0), 2**60), OptionError),
    ("rope packed yarn", "positions", with_value(0, -(2**60)), OptionError),
    ("rope_append_kv", "seqused_k", with_value(0, 28), OptionError),
    ("rope_append_kv", "seqused_k", with_value(0, -1), OptionError),
    ("rope_append_kv pages", "block_table", lambda x: np.full_like(x, -1), OptionError),
    ("rope_append_kv slots", "slot_mapping", with_value(1, 9999), OptionError),
    ("rope_append_kv slots", "slot_mapping", two_alike, OptionError),
    ("ternary_quantize", "w", with_value((0, 0), np.nan), OptionError),
    ("ternary_pack", "trits", with_value((0, 0), 2), gpu_ops.errors.FormatError),
    ("ternary_unpack", "packed", with_value((0, 0), 255), gpu_ops.errors.FormatError),
]


@pytest.mark.parametrize(
    ("name", "key", "change", "error"), VALUES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_values_are_judged_every_time(name, key, change, error):
    case = sized(name, 14)
    argument = case.arrays.get(key, case.options.get(key))
    wrong = case.having(**{key: change(argument)})
    first = refused(wrong, error, key if key.endswith(("k", "q")) else "")
    for _ in range(2):
        case()
        assert refused(wrong, error, "") == first


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_is_judged_every_time(name):
    """A mistake, a valid call, and the mistake again: the error is the same."""
    case = sized(name, 15)
    outs = outs_like(case, outcome(sized(name, 15), backend="reference"), filled)
    wrongs = [(with_result(case, outs, 0, read_only(outs[0])), ShapeError)]
    if outs[0].itemsize > 1:
        wrongs.append((with_result(case, outs, 0, unaligned(outs[0])), ShapeError))
    wrongs.append((with_result(case, outs, 0, outs[0].astype(np.uint32)), DTypeError))
    for key, x in case.written.items():
        others = [y for other, y in case.written.items() if other != key]
        taken = [y for y in others if (y.dtype, y.shape) == (x.dtype, x.shape)]
        for bad in (read_only(x), *taken, *(y[::-1] for y in taken)):
            wrongs.append((case.having(**{key: bad}), ShapeError))
    for key, x in case.inputs.items():
        moved, overlapping = sharing(x, outs[0])
        wrongs.append((with_result(case.having(**{key: moved}), outs, 0, overlapping), ShapeError))
    for wrong, error in wrongs:
        first = refused(wrong, error, "")
        for _ in range(2):
            case.having(**given_out(case, outs))()
            assert refused(wrong, error, "") == first
