"""Gated activations, SwiGLU and GeGLU, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.reference.gemm.swiglu import Activation

__all__ = ["swiglu", "swiglu_backward"]


@op(cuda=True, kernels="gemm.swiglu")
def swiglu(
    gate: Any,
    up: Any = None,
    *,
    activation: str = "silu",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gated activation ``y = act(gate) * up``.

    Parameters
    ----------
    gate : array (..., d), or (..., 2 * d) without ``up``
        float16, bfloat16, float32 or float64. Packed form: gate in the first half of the last axis, up in the second.
    up : array like gate, optional
    activation : {"silu", "gelu", "gelu_tanh", "relu2"}
        ``silu`` (SwiGLU): ``g / (1 + exp(-g))``. ``gelu`` (GeGLU): ``g * (1 + erf(g / sqrt(2))) / 2``.
        ``gelu_tanh``: ``g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) / 2``. ``relu2``: ``max(g, 0)**2``.
    out : array (..., d), optional
        Receives y. ``out=gate`` works in place in the split form.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    array (..., d), rounded once from float32 (float64 for float64).

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Shazeer, "GLU Variants Improve Transformer", 2020, equation 5. Moves 3 * d elements per row.
    ``act(-inf)`` is -0 (relu2: 0) and ``act(inf)`` is inf.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> gate, up = np.array([0.0, 1.0, -2.0]), np.array([1.0, 2.0, 3.0])
    >>> gpu_ops.swiglu(gate, up).round(4)
    array([ 0.    ,  1.4621, -0.7152])
    >>> gpu_ops.swiglu(np.concatenate([gate, up])).round(4)
    array([ 0.    ,  1.4621, -0.7152])
    """
    call = Call("swiglu", device, backend, workspace)
    gate_, up_ = call.read("gate", gate, rows=True), call.optional("up", up, rows=True)
    dtype = checks.float_dtype(call.op, gate=gate_, up=up_)
    shape = _shape(call.op, gate_, up_)
    call.option(activation=checks.one_of(call.op, "activation", activation, get_args(Activation)))
    call.write("y", shape, gate_.dtype, out, in_place=None if up is None else "gate", rows=True)
    return _bind(call, shape, dtype, activation, flops=10.0)


@op(cuda=True, kernels="gemm.swiglu")
def swiglu_backward(
    dy: Any,
    gate: Any,
    up: Any = None,
    *,
    activation: str = "silu",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradients of :func:`swiglu`: ``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``.

    Parameters
    ----------
    dy : array (..., d)
        Gradient of y.
    gate, up, activation
        Same as in the forward call.
    out : pair of arrays like (gate, up), or one array like the packed gate, optional
        Receives the gradients. ``out=(gate, up)``, or packed ``out=gate``, works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    (dgate, dup), or one packed array (..., 2 * d) when ``gate`` was packed; in gate's dtype.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> dgate, dup = gpu_ops.swiglu_backward(np.ones(2), np.array([0.0, 1.0]), np.array([2.0, 2.0]))
    >>> dgate.round(4), dup.round(4)
    (array([1.    , 1.8553]), array([0.    , 0.7311]))
    """
    call = Call("swiglu_backward", device, backend, workspace)
    dy_, gate_ = call.read("dy", dy, rows=True), call.read("gate", gate, rows=True)
    up_ = call.optional("up", up, rows=True)
    dtype = checks.float_dtype(call.op, gate=gate_, up=up_, dy=dy_)
    shape = _shape(call.op, gate_, up_)
    checks.exactly(call.op, "dy", dy_, shape)
    call.option(activation=checks.one_of(call.op, "activation", activation, get_args(Activation)))
    if up_ is None:
        call.write("dgate", gate_.shape, gate_.dtype, out, in_place="gate", rows=True)
    else:
        results = {"dgate": (shape, gate_.dtype), "dup": (shape, gate_.dtype)}
        call.write_each(results, out, in_place={"dgate": "gate", "dup": "up"}, rows=True)
    return _bind(call, shape, dtype, activation, flops=20.0)


def _shape(name: str, gate: Array, up: Array | None) -> tuple[int, ...]:
    """Shape of the result, half as wide as a packed ``gate``."""
    if gate.ndim == 0:
        raise ShapeError(f"{name}: gate has no axes; expected (..., d), or packed (..., 2 * d) without up")
    if up is not None:
        checks.exactly(name, "up", up, gate.shape)
        return gate.shape
    if gate.shape[-1] % 2:
        raise ShapeError(
            f"{name}: packed gate has shape {gate.shape}; without up its last axis holds gate and up and must be "
            "even. Pass up= for the split form"
        )
    return (*gate.shape[:-1], gate.shape[-1] // 2)


def _bind(call: Call, shape: tuple[int, ...], dtype: str, activation: str, flops: float) -> Bound:
    """Bind the call. ``flops``: per element of the result."""
    return call.bind(
        problem=lambda: f"{math.prod(shape[:-1])} rows of {shape[-1]} {dtype}, {activation}",
        unsupported=checks.unsupported(dtype),
        flops=flops * math.prod(shape),
    )


@lowers("swiglu", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.swiglu import swiglu

    def run(views: Mapping[str, Any]) -> None:
        store(views, ("y",), swiglu(views["gate"], views.get("up"), activation=spec["activation"]))

    builder.call(run, "NumPy, float64")


@lowers("swiglu_backward", "reference")
def _reference_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.swiglu import swiglu_backward

    def run(views: Mapping[str, Any]) -> None:
        up = views.get("up")
        gradients = swiglu_backward(views["dy"], views["gate"], up, activation=spec["activation"])
        store(views, ("dgate",) if up is None else ("dgate", "dup"), gradients)

    builder.call(run, "NumPy, float64")
