"""Cost of a remembered call in Python: the number of our functions that it calls; memory ranges in call keys.

No time is measured. Kernels and their callers on the CPU are not counted. A new check in every call shows here as a
larger number.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import gpu_ops
from gpu_ops.core.call_key import extent
from gpu_ops.core.dispatch import has_cuda_kernels
from gpu_ops.core.op import forget_calls
from tests.support.calls import OPS, call
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

PACKAGE = Path(gpu_ops.__file__).parent
COUNTED = (PACKAGE, PACKAGE.parent / "kernels")
NOT_COUNTED = {"cpu", "emulator"}
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")  # functions until Python 3.11 only

# Maximum number of calls of our functions: (on the CPU, on a GPU), two above the count.
MOST = {
    "adamw_step": (35, 47),  # checks step, lr and grad_scale each time
    "attention": (18, 22),
    "attention_backward": (17, 38),
    "attention_decode": (18, 24),
    "attention_merge": (28, 26),
    "attention_varlen": (23, 26),
    "attention_varlen_backward": (26, 107),
    "cross_entropy": (21, 22),
    "cross_entropy_backward": (21, 27),
    "dropout": (24, 27),
    "dropout_backward": (24, 27),
    "embedding": (18, 20),
    "embedding_backward": (19, 27),
    "global_norm": (18, 24),
    "layernorm": (20, 26),
    "layernorm_backward": (21, 34),
    "linear": (16, 20),
    "linear_backward": (26, 39),
    "linear_cross_entropy": (30, 49),
    "rmsnorm": (18, 23),
    "rmsnorm_backward": (19, 30),
    "rmsnorm_quant_int8": (20, 24),
    "rope": (24, 23),
    "rope_append_kv": (22, 37),
    "rope_backward": (24, 28),  # dynamic scaling: reads positions
    "sample": (56, 65),  # checks seven options, seed and step each time,
    "softmax": (17, 18),
    "softmax_backward": (18, 20),
    "swiglu": (17, 20),
    "swiglu_backward": (20, 24),
    "swiglu_mlp": (16, 28),
    "swiglu_mlp_backward": (20, 41),
    "ternary_matmul": (28, 30),
    "ternary_matmul_backward": (30, 39),
    "ternary_pack": (28, 39),
    "ternary_quantize": (21, 32),
    "ternary_unpack": (30, 41),
}


class NoKernel:
    """Replacement for a compiled kernel, whose launch does nothing."""

    def __init__(self, kernel):
        pass

    def arguments(self, args):
        return list(args)

    def __call__(self, grid, block, args, shared):
        pass


def is_ours(code):
    file = Path(code.co_filename)
    return (
        code.co_name not in COMPREHENSIONS
        and any(file.is_relative_to(folder) for folder in COUNTED)
        and not NOT_COUNTED.intersection(file.parts)
    )


def functions_called(run):
    """Names of our functions, once for each call."""
    names = []

    def note(frame, event, argument):
        if event == "call" and is_ours(frame.f_code):
            names.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return names


def check(run, most):
    for _ in range(2):
        run()
    names = functions_called(run)
    assert "PreparedCall.__call__" in names  # the call was remembered
    assert "Call.bind" not in names
    assert len(names) <= most, names


@pytest.mark.parametrize("op", OPS)
def test_on_the_cpu(op, monkeypatch):
    for name in ("GPU_OPS_DEVICE", "GPU_OPS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    forget_calls()
    check(call(op), MOST[op][0])


@needs_nvrtc
@pytest.mark.parametrize("op", [op for op in OPS if has_cuda_kernels(op)])
def test_on_a_gpu(op, cupy, monkeypatch):
    monkeypatch.setattr("gpu_ops.kernels.compiler.jit.load", NoKernel)
    case = call(op)
    arrays = {n: x for n, x in {**case.arrays, **case.options}.items() if isinstance(x, np.ndarray)}
    check(case.having(**{n: FakeArray(x) for n, x in arrays.items()}), MOST[op][1])


# Memory ranges of arrays in call keys: from the first byte to the last, for any strides.

X = np.zeros((4, 6, 8), np.float32)
VIEWS = {
    "whole": X,
    "slice": X[1:3, 2:, 3:7],
    "steps": X[::2, ::3, ::2],
    "reversed": X[::-1, :, ::-1],
    "reversed steps": X[3:0:-2, 1:, 6::-3],
    "transposed": X.T,
    "broadcast": np.broadcast_to(X[:, :1], X.shape),
    "0-d": X[1, 2, 3, ...],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_extent_is_from_the_first_byte_to_the_last(view):
    assert extent(view) == np.lib.array_utils.byte_bounds(view)


def test_an_empty_array_has_no_bytes():
    start, end = extent(X[1:1])
    assert start == end
