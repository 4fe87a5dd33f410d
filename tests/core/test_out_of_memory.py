"""Lack of memory is an OutOfMemoryError with the requested size, wherever it is requested."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import gpu_ops
from gpu_ops.core.allocator import available_bytes, out_of_memory, typed_memory_errors
from gpu_ops.core.op import forget_calls
from gpu_ops.core.run import Linked
from gpu_ops.errors import OutOfMemoryError
from tests.support.calls import OPS, call
from tests.support.laws import NAMES

HUGE = 1 << 49  # rows: more bytes than the address space, so that every system refuses

# An axis of no array whose values are read.
AXES = ("rows", "nheads", "nheads_kv", "N", "seqlen")


def no_memory():
    """Error that NumPy raises."""
    try:
        np.empty((HUGE, 4), np.float32)
    except MemoryError as error:
        return error
    raise AssertionError("so much memory?")


def enlarged(name):
    """Call with arrays that repeat their first row HUGE times: they take no memory, but results and copies do."""
    case = call(name)
    named = {"lse": (*("batch",) * (case.op == "attention_backward"), "nheads", "seqlen_q"), **case.axes}
    for axis in AXES:
        holders = [n for n, axes in named.items() if axis in axes and n in {**case.arrays, **case.options}]
        arrays = {n: {**case.arrays, **case.options}[n] for n in holders}
        if holders and all(isinstance(x, np.ndarray) and x.dtype.kind in "fV" for x in arrays.values()):
            for n, x in arrays.items():
                i = named[n].index(axis)
                shape = (*x.shape[:i], HUGE, *x.shape[i + 1 :])
                arrays[n] = np.broadcast_to(x.take([0], axis=i), shape)
            return case.having(**arrays)
    return None


# A mask is not enlarged. A larger table of embeddings, and more rows in a weight gradient, need no more memory.
SAME = ("embedding", "embedding_backward added", "linear_backward weights")
LARGE = {n: one for n in NAMES if "mask" not in n and n not in SAME and (one := enlarged(n)) is not None}


@pytest.mark.parametrize("name", LARGE)
def test_results_and_copies_that_do_not_fit(name, backend):
    case = LARGE[name]
    with pytest.raises(OutOfMemoryError, match=rf"^{case.op}: no memory for .*GiB") as caught:
        case(**backend)
    assert caught.value.required >= HUGE
    if sys.platform == "linux":
        assert 0 < caught.value.available < HUGE
        assert "are available" in str(caught.value)


def test_most_ops_have_such_calls():
    assert {name.split()[0] for name in LARGE} >= {
        op
        for op in OPS
        if not op.startswith(("attention_varlen", "ternary_pack", "ternary_unpack", "embedding"))
    } - {
        *("adamw_step", "attention_decode", "cross_entropy", "cross_entropy_backward"),
        *("linear_cross_entropy", "rope_append_kv"),
    }


@pytest.mark.parametrize("op", OPS)
def test_scratch_that_does_not_fit(op, monkeypatch):
    """Scratch memory runs out in the middle of a call, the first and a later one."""
    case = call(op)

    def fails(self, views, workspace=None):
        raise no_memory()

    for first in (True, False):
        forget_calls()
        if not first:
            case()
        with monkeypatch.context() as patched:
            patched.setattr(Linked, "__call__", fails)
            with pytest.raises(OutOfMemoryError, match=rf"^{op}: no memory for scratch") as caught:
                case()
        assert caught.value.required == HUGE * 16
        assert isinstance(caught.value.__cause__, MemoryError)
    case()


def test_a_strided_input_whose_copy_does_not_fit():
    x = np.broadcast_to(np.ones((1, 8), np.float32)[:, ::2], (HUGE, 4))
    with pytest.raises(OutOfMemoryError, match="rmsnorm: no memory for scratch or a copy") as caught:
        gpu_ops.rmsnorm(x, np.ones(4, np.float32))
    assert caught.value.required == HUGE * 16


METHODS = {
    "trits": lambda w: w.trits(),
    "dequantize": lambda w: w.dequantize(),
    "to": lambda w: w.to("base3"),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_a_ternary_matrix(method, monkeypatch):
    w = gpu_ops.ternary_quantize(np.eye(4, dtype=np.float32))

    def fails(*_, **__):
        raise no_memory()

    monkeypatch.setattr("gpu_ops.formats.ternary_matrix.decode", fails)
    with pytest.raises(OutOfMemoryError, match=r"^TernaryMatrix\.") as caught:
        METHODS[method](w)
    assert caught.value.required == HUGE * 16


def test_a_mask_that_does_not_fit_when_expanded():
    mask = gpu_ops.BlockMask(np.ones((1, 1), bool), 1 << 28, 1 << 28)
    with pytest.raises(OutOfMemoryError, match=r"^BlockMask.expand: no memory"):
        mask.expand(1 << 25, 1 << 25)


def test_what_gpus_say():
    """The size comes from CuPy's error, and the free memory from the device."""
    error = out_of_memory("softmax", type("OutOfMemoryError", (MemoryError,), {"_size": 3 << 30})())
    assert error.required == 3 << 30
    assert "3.0 GiB" in str(error)


def test_typed_once():
    with (
        pytest.raises(OutOfMemoryError) as caught,
        typed_memory_errors("outer"),
        typed_memory_errors("inner"),
    ):
        raise MemoryError
    assert str(caught.value).startswith("inner: no memory for scratch")
    assert caught.value.required == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory there is")
def test_available_is_no_more_than_the_process_may_have():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    free = available_bytes()
    assert 0 < free < 1 << 50
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) << 10
    limit = used + (64 << 20)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        assert available_bytes() <= 80 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
