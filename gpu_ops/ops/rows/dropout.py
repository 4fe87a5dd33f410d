"""Dropout, forward and backward: both regenerate the mask, which is never stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.seeds import read_seed

__all__ = ["dropout", "dropout_backward"]

_LARGEST_OFFSET = (1 << 63) - 1  # an array has fewer elements, so their numbers fit in 64 bits


@op(cuda=True, kernels="rows.dropout", dynamic=("seed", "offset"))
def dropout(
    x: Any,
    p: float,
    *,
    seed: Any,
    offset: int = 0,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Zero elements at random, scale the rest: ``y = x * kept / (1 - p)``, ``kept`` 0 with probability p, else 1.

    Which elements are kept depends only on the seed and their numbers: element i of x, in C order, has number
    ``offset + i``. It is the same on every device and backend, for every dtype, layout and number of threads.

    Parameters
    ----------
    x : array (..., cols)
        float16, bfloat16, float32 or float64.
    p : float
        At least 0 and less than 1; with 0 y is a copy. An element is drawn with 32 random bits, so p is rounded to a
        multiple of 2**-32, at most 1 - 2**-32.
    seed : int from 0 to 2**64 - 1, or array of one uint64 or int64
        Pass a different seed in every step, and the same seed to the backward. An array is read when the call runs,
        so a CUDA graph drops other elements after the array has changed.
    offset : int from 0 to 2**63 - 1
        Number of the first element. It distinguishes the layers of a step: ``offset = layer * x.size`` if all have
        the same size. For a part of a larger array, pass the index of its first element there: the parts of an array,
        on several devices or one after another, then drop the same elements as the whole. On a GPU multiples of 4 are
        fastest.
    out : array like x, optional
        Receives y. ``out=x`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    array like x, rounded once from float32 (float64 for float64)

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Srivastava et al., "Dropout", 2014. Bits are those of Philox 4x32-10, Salmon et al. 2011, four elements for each
    counter; ``gpu_ops.reference.rows.dropout.dropout_mask`` shows which elements are kept. They are independent of
    those of :func:`attention` for the same seed. Moves 2 elements for each of x.

    A dropped NaN or infinity gives NaN, as 0 * x does, so that faults stay visible.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, step, layer = np.arange(1.0, 9.0), 100, 3
    >>> y = gpu_ops.dropout(x, 0.5, seed=step, offset=layer * x.size)
    >>> y
    array([ 2.,  4.,  6.,  8., 10., 12.,  0.,  0.])
    >>> gpu_ops.dropout_backward(np.ones(8), 0.5, seed=step, offset=layer * x.size)
    array([2., 2., 2., 2., 2., 2., 0., 0.])
    """
    return _bind(Call("dropout", device, backend, workspace), ("x", x), "y", p, seed, offset, out)


@op(cuda=True, kernels="rows.dropout", dynamic=("seed", "offset"))
def dropout_backward(
    dy: Any,
    p: float,
    *,
    seed: Any,
    offset: int = 0,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradient of :func:`dropout` for x: ``dx = dy * kept / (1 - p)``.

    Parameters
    ----------
    dy : array (..., cols)
        Gradient of y.
    p, seed, offset
        Same as in the forward call, so that the mask is the same.
    out : array like dy, optional
        Receives dx. ``out=dy`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    array like dy, rounded once from float32 (float64 for float64)

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> dy = np.array([1.0, 2.0, 3.0])
    >>> gpu_ops.dropout_backward(dy, 0.0, seed=1)
    array([1., 2., 3.])
    """
    return _bind(Call("dropout_backward", device, backend, workspace), ("dy", dy), "dx", p, seed, offset, out)


def _bind(call: Call, given: tuple[str, Any], result: str, p: Any, seed: Any, offset: Any, out: Any) -> Bound:
    name, x = given
    x_ = call.read(name, x, rows=True)
    dtype = checks.float_dtype(call.op, **{name: x_})
    if x_.ndim == 0:
        raise ShapeError(f"{call.op}: {name} has no axes; expected (..., cols)")
    probability = checks.number(call.op, "p", p, low=0.0)
    if probability >= 1:
        raise OptionError(f"{call.op}: p must be at least 0 and less than 1, got {probability:g}")
    call.option(p=probability)
    read_seed(call, seed)
    _offset(call.op, offset, None)
    call.provide("offset", None, "offset", functools.partial(_offset, call.op), 0)
    call.write(result, x_.shape, x_.dtype, out, in_place=name, rows=True)
    return call.bind(
        problem=lambda: f"{math.prod(x_.shape[:-1])} rows of {x_.shape[-1]} {dtype}, p {probability:g}",
        unsupported=checks.unsupported(dtype),
        flops=2.0 * x_.size,
    )


def _offset(op: str, offset: Any, device: Any) -> int:
    """Check the offset. A later call may pass another one."""
    return checks.integer(op, "offset", offset, low=0, high=_LARGEST_OFFSET)


@lowers("dropout", "reference")
@lowers("dropout_backward", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rows.dropout import dropout

    def run(views: Mapping[str, Any]) -> None:
        x, result = ("dy", "dx") if "dx" in views else ("x", "y")
        store(views, (result,), dropout(views[x], spec["p"], seed=views["seed"], offset=views["offset"]))

    builder.call(run, "NumPy, float64")
