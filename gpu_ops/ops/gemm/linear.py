"""A linear layer, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call, Finish
from gpu_ops.core.op import op
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.packed_matrix import PackedMatrix, check_activations
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.gradients import write_gradients
from gpu_ops.ops.weights.packed import cpu_only, read_weight

__all__ = ["linear", "linear_backward", "read_shape"]


@op(cuda=True, kernels="gemm.linear")
def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    residual: Any = None,
    activations: str | None = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Linear layer ``y = x @ weight.T + bias + residual``.

    Parameters
    ----------
    x : array (..., in_features)
        float16, bfloat16, float32 or float64; the other arrays in the same dtype.
    weight : array or PackedMatrix (out_features, in_features)
        In the layout of checkpoints. Packed weights stay packed. On a GPU, products of more than 16 tokens with
        native activations unpack them to a workspace.
    bias : array (out_features,), optional
    residual : array (..., out_features), optional
        Added before the result is rounded.
    activations : {"native", "int8"}, optional
        For a packed weight; default: its own :attr:`PackedMatrix.activations`. "native": the bits of
        ``linear(x, weight.dequantize(x.dtype))``. "int8": x is quantised per block of the format, 32 to 256,
        ``s = absmax / 127``, ``q = rint(x / s)``, and the integer sums of a block are exact: 1.5 to 3 times as fast,
        with an error of about 0.6 % of a result's size. A token's bits do not depend on other tokens in either.
    out : array (..., out_features), optional
        Receives y. ``out=residual`` works in place; it may not share memory with another input.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    array (..., out_features) in x's dtype, rounded once from float32 (float64 for float64).

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    2 * tokens * in_features * out_features flops. Up to 16 tokens on a GPU, the weight is read once. cuBLAS
    multiplies matrices of 128 rows and more on the cards where it is faster: see :func:`explain`.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, weight = np.array([[1.0, 2.0]]), np.array([[1.0, 1.0], [0.0, 3.0], [2.0, 0.0]])
    >>> gpu_ops.linear(x, weight, np.array([0.0, 0.5, 0.0]))
    array([[3. , 6.5, 2. ]])
    """
    call = Call("linear", device, backend, workspace)
    x_, weight_ = call.read("x", x, rows=True), read_weight(call, "weight", weight)
    added: dict[str, Array] = {}
    if bias is not None:
        added["bias"] = call.read("bias", bias)
    if residual is not None:
        added["residual"] = call.read("residual", residual, rows=True)
    shape, dtype = read_shape(call, x_, weight_, **added)
    for name, array in added.items():
        checks.exactly(call.op, name, array, shape[-1:] if name == "bias" else shape)
    call.write("y", shape, x_.dtype, out, in_place="residual", rows=True)
    if isinstance(weight_, PackedMatrix):
        mode = weight_.activations if activations is None else activations
        return _bind_packed(call, x_, weight_, dtype, check_activations(call.op, mode, weight_))
    if activations is not None:
        raise OptionError(f"{call.op}: activations= is for a PackedMatrix; this weight is an array, omit it")
    return _bind(call, x_, dtype, ", ".join(added), 2.0)


@op(cuda=True, kernels="gemm.linear", written=("dweight", "dbias"))
def linear_backward(
    dy: Any,
    x: Any,
    weight: Any,
    *,
    has_bias: bool = False,
    only: str | None = None,
    dweight: Any = None,
    dbias: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradients of :func:`linear`: ``dx = dy @ weight``, ``dweight = dy.T @ x``, ``dbias = dy.sum(0)``.

    The gradient of the residual is dy.

    Parameters
    ----------
    dy : array (..., out_features)
        Gradient of y.
    x, weight : arrays
        Same as in the forward call. A :class:`PackedMatrix` has no gradient: ``only="dx"``.
    has_bias : bool
        Return dbias too.
    only : {"dx", "weights"}, optional
        Compute only dx (frozen weight), or only dweight and dbias (deferred).
    dweight : float32 array like weight (float64 for float64), optional
        The gradient is added to it, to accumulate over parts of a batch.
    dbias : float32 array (out_features,) (float64 for float64), optional
        With ``has_bias``; the gradient is added to it.
    out : (dx, dweight, dbias) without those that are given, optional
        Arrays that receive the gradients; none may share memory with an input. An array if it is one gradient.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dx : array like x
    dweight : float32 array like weight (float64 for float64)
    dbias : float32 array (out_features,) (float64 for float64), only with ``has_bias``
        One gradient is returned as an array.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    4 * tokens * in_features * out_features flops. Sums over tokens are float32 for every dtype, in a fixed order:
    the same bits for any number of threads.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, weight = np.array([[1.0, 2.0]]), np.array([[1.0, 1.0], [0.0, 3.0]])
    >>> dx, dweight = gpu_ops.linear_backward(np.array([[1.0, 10.0]]), x, weight)
    >>> dx, dweight
    (array([[ 1., 31.]]), array([[ 1.,  2.],
           [10., 20.]]))
    """
    call = Call("linear_backward", device, backend, workspace)
    dy_, x_ = call.read("dy", dy, rows=True), call.read("x", x, rows=True)
    weight_ = read_weight(call, "weight", weight)
    shape, dtype = read_shape(call, x_, weight_, dy=dy_)
    checks.exactly(call.op, "dy", dy_, shape)
    part = None if only is None else checks.one_of(call.op, "only", only, ("dx", "weights"))
    if isinstance(weight_, PackedMatrix) and part != "dx":
        raise OptionError(f"{call.op}: a packed weight is frozen and has no gradient; pass only='dx'")
    sums = {"dweight": (weight_.shape, dweight)}
    has_bias = checks.flag(call.op, "has_bias", has_bias)
    if has_bias:
        sums["dbias"] = (shape[-1:], dbias)
    elif dbias is not None:
        raise OptionError("linear_backward: dbias= needs has_bias=True")
    if part == "dx" and (has_bias or dweight is not None):
        raise OptionError("linear_backward: only='dx' computes neither dweight nor dbias; omit them")
    sums = {} if part == "dx" else sums
    finish = write_gradients(call, x_, sums, checks.computing_dtype(dtype), out, dx=part != "weights")
    if isinstance(weight_, PackedMatrix):
        return _bind_packed(call, x_, weight_, dtype, "native", finish)
    details = ", ".join(["with dbias"] * has_bias + [f"only {part}"] * (part is not None))
    return _bind(call, x_, dtype, details, 4.0 if part is None else 2.0, finish)


def read_shape(call: Call, x: Array, weight: Any, **more: Array) -> tuple[tuple[int, ...], str]:
    """Shape of y, and the dtype's name."""
    packed = isinstance(weight, PackedMatrix)
    dtype = checks.float_dtype(call.op, x=x, **({} if packed else {"weight": weight}), **more)
    call.axes.bind("weight", weight, "out_features in_features")
    if x.ndim == 0 or x.shape[-1] != call.axes["in_features"]:
        raise ShapeError(
            f"{call.op}: x has shape {x.shape}, expected (..., in_features={call.axes['in_features']}): weight is "
            f"(out_features, in_features) = {weight.shape}"
        )
    return (*x.shape[:-1], call.axes["out_features"]), dtype


def _bind(call: Call, x: Array, dtype: str, more: str, flops: float, finish: Finish | None = None) -> Bound:
    """Bind the call. ``flops``: per token and element of the weight."""
    tokens, rows, cols = math.prod(x.shape[:-1]), call.axes["out_features"], call.axes["in_features"]
    return call.bind(
        problem=lambda: f"{tokens} tokens, {cols} to {rows}, {dtype}" + (f", {more}" if more else ""),
        unsupported=checks.unsupported(dtype),
        finish=finish,
        flops=flops * tokens * rows * cols,
    )


def _bind_packed(
    call: Call,
    x: Array,
    weight: PackedMatrix,
    dtype: str,
    mode: str,
    finish: Finish | None = None,
) -> Bound:
    tokens, (rows, cols) = math.prod(x.shape[:-1]), weight.shape
    call.option(activations=mode)
    return call.bind(
        lowered_as=f"packed_{call.op}",
        problem=lambda: f"{tokens} tokens, {cols} to {rows}, {dtype}, weight {weight}, activations {mode}",
        unsupported=checks.unsupported(dtype) | cpu_only(weight),
        finish=finish,
    )


@lowers("linear", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.linear import linear

    def run(views: Mapping[str, Any]) -> None:
        result = linear(views["x"], views["weight"], views.get("bias"), residual=views.get("residual"))
        store(views, ("y",), result)

    builder.call(run, "NumPy, float64")


@lowers("linear_backward", "reference")
def _reference_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.linear import linear_backward

    names = [name for name in ("dx", "dweight", "dbias") if spec.get(name) is not None]
    only = None if "dx" in names and "dweight" in names else "dx" if "dx" in names else "weights"

    def run(views: Mapping[str, Any]) -> None:
        dweight, dbias = (views[name] if name in spec["added"] else None for name in ("dweight", "dbias"))
        arrays = (views[name] for name in ("dy", "x", "weight"))
        gradients = linear_backward(
            *arrays, has_bias="dbias" in names, only=only, dweight=dweight, dbias=dbias
        )
        store(views, names, gradients)

    builder.call(run, "NumPy, float64")
