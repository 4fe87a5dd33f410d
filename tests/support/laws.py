"""Helpers of the laws in test_laws*.py and test_replay*.py: sizes, views, comparison of results, places for out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.core.dispatch import has_cuda_kernels
from gpu_ops.errors import GpuOpsError
from tests.support.calls import DTYPES, OUT, VARIANTS, OpCall, call, refusal, results

NAMES = tuple(VARIANTS)
WITH_OUT = tuple(name for name in NAMES if name.split()[0] in OUT)
FIRST_OF_OPS = tuple(name for name in NAMES if " " not in name)

# Not multiples of a vector or a tile, but of 8 where CUDA C++ kernels require that.
SIZES = {
    "seqlen": 9,
    "seqlen_q": 21,
    "seqlen_k": 37,
    "head_dim": 24,
    "head_dim_v": 16,
    "max_seqlen": 20,
    "total": 30,
    "rows": 5,
    "cols": 131,
    "width": 136,
    "hidden": 40,
    "hidden_out": 24,
    "ffn": 72,
    "N": 19,
    "K": 320,
}
SENTINEL = 7


def law_call(name: str, dtype: Any = np.float32, seed: int = 7, **sizes: int) -> OpCall:
    return call(name, dtype, seed, **{**SIZES, **sizes})


def runs(given: dict[str, Any]) -> bool:
    """True if the op of a test has kernels for the test's device; the CPU packs ternary codes in NumPy."""
    op = given["name"].split()[0]
    if given["backend"]["device"] == "cpu":
        return given["backend"]["backend"] == "reference" or op not in ("ternary_pack", "ternary_unpack")
    return has_cuda_kernels(op) and not _refusal(given["name"], given["backend"]["backend"])


@cache
def _refusal(name: str, backend: str) -> str:
    return refusal(law_call(name), backend)


def is_slow(given: dict[str, Any]) -> bool:
    """True for slow tests. By default the CPU runs every op in all dtypes, and variants and the reference in one."""
    if given["backend"]["device"] != "cpu":
        return False
    of_its_own = DTYPES[NAMES.index(given["name"]) % len(DTYPES)]
    compiled = given["backend"]["backend"] == "numba" and given["name"] in FIRST_OF_OPS
    return not compiled and given["dtype"] != of_its_own


def quick(raw: bool) -> dict[str, Any]:
    """Default tests: on the emulator one dtype per backend; for Numba, which compiles slowly, one call per op."""
    return {"dtype": [DTYPES[1]]} if raw else {"dtype": [DTYPES[0]], "name": FIRST_OF_OPS}


def outcome(one: OpCall, **more: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """All outputs of a call: its results, and the arrays that it changes in place."""
    one = one.having(**{name: x.copy() for name, x in one.written.items()})
    written = tuple(one.written.values())
    returned = [x for x in results(one(**more)) if not any(x is w for w in written)]
    return (*map(np.asarray, returned), *written)


def assert_same(found: Any, want: Any, what: str = "", ulps: int = 0) -> None:
    """Assert equal dtypes, shapes and values, NaN equal to NaN; or up to ``ulps`` of the largest number."""
    for i, (f, w) in enumerate(zip(found, want, strict=True)):
        assert (f.dtype, f.shape) == (w.dtype, w.shape), f"{what}: result {i}"
        if ulps and f.dtype.kind not in "iu":
            reference = w.astype(np.float64)
            largest = np.abs(reference[np.isfinite(reference)]).max(initial=1)
            close = ulps * float(ml_dtypes.finfo(f.dtype).eps) * largest
            np.testing.assert_allclose(f.astype(np.float64), reference, rtol=0, atol=close, err_msg=what)
        else:
            np.testing.assert_array_equal(f, w, err_msg=f"{what}: result {i}")


# ---- views: the same numbers, elsewhere in memory ----------------------------------------------------------


def apart(x: np.ndarray[Any, Any], before: int = 1, after: int = 3) -> np.ndarray[Any, Any]:
    """Middle columns of an array of other numbers: rows are not adjacent, and start off 16-byte boundaries."""
    if not x.ndim:
        return x
    buffer = np.full((*x.shape[:-1], before + x.shape[-1] + after), SENTINEL, x.dtype)
    buffer[..., before : before + x.shape[-1]] = x
    return buffer[..., before : before + x.shape[-1]]


def beside(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View as one of three arrays side by side along the second axis from the end, like q, k and v."""
    if x.ndim < 2:
        return x
    buffer = np.full((*x.shape[:-2], 3 * x.shape[-2], x.shape[-1]), SENTINEL, x.dtype)
    buffer[..., x.shape[-2] : 2 * x.shape[-2], :] = x
    return buffer[..., x.shape[-2] : 2 * x.shape[-2], :]


def every_other(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = np.full([2 * n for n in x.shape], SENTINEL, x.dtype)[(*(slice(None, None, 2),) * x.ndim, ...)]
    view[...] = x
    return view


def every_other_row(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = np.repeat(x, 2, axis=0)[::2]
    return view if x.ndim > 1 else x


def reversed_axes(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flip = (slice(None, None, -1),) * x.ndim
    return x[flip].copy()[flip]


def reversed_rows(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x[::-1].copy()[::-1] if x.ndim > 1 else x


def turned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View with the first two axes swapped in memory."""
    return x.swapaxes(0, 1).copy().swapaxes(0, 1) if x.ndim > 2 else x


def unaligned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View whose memory starts one byte off."""
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = x.copy()
    x.flags.writeable = False
    return x


class Labelled(np.ndarray):  # type: ignore[type-arg]
    """Subclass of an array, as users define them."""


def subclass(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.view(Labelled)


View = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
ROW_VIEWS: tuple[View, ...] = (apart, beside, every_other_row, reversed_rows, turned)  # rows stay contiguous
VIEWS: tuple[View, ...] = (
    *ROW_VIEWS,
    every_other,
    reversed_axes,
    np.asfortranarray,
    unaligned,
    read_only,
    subclass,
)


def viewed(one: OpCall, view: View) -> OpCall:
    """Call with every array passed as a view; arrays that are written keep contiguous rows."""
    inputs = {name: view(x) if x.ndim else x for name, x in one.inputs.items()}
    written = {name: view(x) if view in ROW_VIEWS else x for name, x in one.written.items()}
    return one.having(**inputs, **written)


# ---- places for results ------------------------------------------------------------------------------------


def given_out(one: OpCall, arrays: Any) -> dict[str, Any]:
    """Keyword argument that receives results: one array, or a tuple of as many as ``arrays``."""
    name, _ = OUT[one.op]
    return {name: arrays[0] if takes_one(one) else tuple(arrays)}


def takes_one(one: OpCall) -> bool:
    """True if ``out`` is an array, not a tuple: rope of q only, gradients packed into one array, or only a loss."""
    count = _out_count(one)
    lacks_second = one.op in ("rope", "rope_backward") and len(one.arrays) == 1
    is_packed = one.op == "swiglu_backward" and "up" not in one.arrays
    is_loss = one.op == "linear_cross_entropy" and "grads" not in one.options
    return count == 1 or lacks_second or is_packed or is_loss


def _out_count(one: OpCall) -> int:
    """Number of arrays of a tuple, without those that are added to others."""
    count = {"dx": 1, "weights": 2}.get(one.options.get("only", ""), OUT[one.op][1])
    return count if count == 1 else count - len(one.added)


def outs_like(
    one: OpCall, found: Any, make: Callable[[Any], Any] = np.empty_like
) -> list[np.ndarray[Any, Any]]:
    """Arrays for the results that ``out`` takes. Scales and row sums of quantisation are contiguous."""
    count = 1 if takes_one(one) else _out_count(one)
    contiguous = 1 if one.op == "rmsnorm_quant_int8" else count
    made = [make(x) if x.ndim else np.empty_like(x) for x in found[:contiguous]]
    return [*made, *map(np.empty_like, found[contiguous:count])]


def filled(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.full_like(x, SENTINEL)


# ---- calls that are refused --------------------------------------------------------------------------------


def refused(one: OpCall, error: type[Exception], message: str) -> str:
    """Assert that the call raises exactly this type, names the op, says ``message``, and changes no argument."""
    named = {**one.arrays, **one.options}
    arrays = [x for value in named.values() for x in (value if isinstance(value, tuple) else (value,))]
    before = [(x, x.tobytes()) for x in arrays if isinstance(x, np.ndarray)]
    with pytest.raises(error) as caught:
        one()
    assert error is GpuOpsError or type(caught.value) is error
    text = str(caught.value)
    assert message in text, text
    assert text.startswith(f"{one.op}: "), f"which op? {text}"
    for x, then in before:
        assert x.tobytes() == then, "an array was written to"
    return text


def with_result(one: OpCall, outs: list[Any], i: int, x: Any) -> OpCall:
    """Call with ``x`` in place of the result ``i``."""
    return one.having(**given_out(one, [*outs[:i], x, *outs[i + 1 :]]))


def sharing(x: Any, out: Any) -> tuple[Any, Any]:
    """Copy two arrays into one block of memory: the last element of x overlaps the first one of out."""
    start = (x.nbytes - 1) // out.itemsize * out.itemsize
    memory = np.zeros(start + out.nbytes, np.uint8)
    moved = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved, memory[start:].view(out.dtype).reshape(out.shape)


# ---- work, counted -----------------------------------------------------------------------------------------


def python_calls(function: Callable[[], Any]) -> int:
    """Number of Python functions that a call enters, the same on every machine."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
