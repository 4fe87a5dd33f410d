"""Softmax over the last axis, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers

__all__ = ["softmax", "softmax_backward"]


@op(cuda=True, kernels="rows.softmax")
def softmax(
    x: Any,
    *,
    scale: float = 1.0,
    mask: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Softmax over the last axis: ``y = exp(t) / sum(exp(t))`` with ``t = scale * x + mask``.

    Parameters
    ----------
    x : array (..., cols)
        float16, bfloat16, float32 or float64.
    scale : float
        Finite.
    mask : array, optional
        Broadcastable to x's shape. In x's dtype or float32: it is added, and -inf masks an element. bool: False masks
        an element, even a NaN.
    out : array like x, optional
        Receives y. ``out=x`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    array like x, rounded once from float32 (float64 for float64). A row without visible elements is 0.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. Moves 2 * cols elements per row, and
    the mask; a GPU reads rows of more than 32 KiB twice.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.log(np.array([1.0, 3.0, 4.0]))
    >>> gpu_ops.softmax(x).round(4)
    array([0.125, 0.375, 0.5  ])
    >>> gpu_ops.softmax(x, mask=np.array([True, True, False])).round(4)
    array([0.25, 0.75, 0.  ])
    """
    call = Call("softmax", device, backend, workspace)
    x_, mask_ = call.read("x", x, rows=True), call.optional("mask", mask)
    dtype = _dtype(call, scale, x=x_)
    if mask_ is not None:
        _check_mask(call.op, mask_, x_)
    call.write("y", x_.shape, x_.dtype, out, in_place="x", rows=True)
    return _bind(call, x_, dtype, "" if mask_ is None else f", {mask_.dtype} mask {mask_.shape}")


@op(cuda=True, kernels="rows.softmax")
def softmax_backward(
    dy: Any,
    y: Any,
    *,
    scale: float = 1.0,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradient of :func:`softmax` for x: ``dx = scale * y * (dy - sum(dy * y))``.

    Parameters
    ----------
    dy : array (..., cols)
        Gradient of y.
    y : array like dy
        Result of the forward call.
    scale
        Same as in the forward call.
    out : array like dy, optional
        Receives dx. ``out=dy`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    array like y

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> gpu_ops.softmax_backward(np.array([1.0, 0.0]), np.array([0.25, 0.75]))
    array([ 0.1875, -0.1875])
    """
    call = Call("softmax_backward", device, backend, workspace)
    dy_, y_ = call.read("dy", dy, rows=True), call.read("y", y, rows=True)
    dtype = _dtype(call, scale, y=y_, dy=dy_)
    checks.exactly(call.op, "dy", dy_, y_.shape)
    call.write("dx", y_.shape, y_.dtype, out, in_place="dy", rows=True)
    return _bind(call, y_, dtype)


def _dtype(call: Call, scale: float, **arrays: Array) -> str:
    name, x = next(iter(arrays.items()))
    if x.ndim == 0:
        raise ShapeError(f"{call.op}: {name} has no axes; expected (..., cols)")
    dtype = checks.float_dtype(call.op, **arrays)
    call.option(scale=checks.computable(call.op, "scale", scale, dtype))
    return dtype


def _check_mask(op: str, mask: Array, x: Array) -> None:
    if mask.dtype not in (np.bool_, np.float32, x.dtype):
        raise DTypeError(
            f"{op}: mask is {mask.dtype}, expected bool, float32 or {x.dtype}, as x is; "
            "cast it, for example mask.astype(bool)"
        )
    pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.ndim > x.ndim or any(m not in (1, n) for m, n in pairs):
        raise ShapeError(f"{op}: mask has shape {mask.shape}, which does not broadcast to x's, {x.shape}")


def _bind(call: Call, x: Array, dtype: str, more: str = "") -> Bound:
    return call.bind(
        problem=lambda: f"{math.prod(x.shape[:-1])} rows of {x.shape[-1]} {dtype}{more}",
        unsupported=checks.unsupported(dtype),
        flops=5.0 * x.size,
    )


@lowers("softmax", "reference")
@lowers("softmax_backward", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rows import softmax as reference

    def run(views: Mapping[str, Any]) -> None:
        if "dx" in views:
            store(views, ("dx",), reference.softmax_backward(views["dy"], views["y"], scale=spec["scale"]))
        else:
            store(views, ("y",), reference.softmax(views["x"], scale=spec["scale"], mask=views.get("mask")))

    builder.call(run, "NumPy, float64")
