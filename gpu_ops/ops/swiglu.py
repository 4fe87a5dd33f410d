"""Gated activations, SwiGLU and GeGLU, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast, get_args

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays, as_rows
from gpu_ops.core.device import Device, host_function
from gpu_ops.core.dispatch import Choice, Plan, choose, op
from gpu_ops.errors import ShapeError
from gpu_ops.reference.swiglu import Activation

__all__ = ["swiglu", "swiglu_backward"]


@op(cuda=True)
def swiglu(
    gate: Any,
    up: Any = None,
    *,
    activation: str = "silu",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gated activation ``y = act(gate) * up``.

    Parameters
    ----------
    gate : array (..., d), or (..., 2 * d) without ``up``
        float16, bfloat16, float32 or float64. Packed form: gate in the first half of the last axis, up in the second.
    up : array like gate, optional
    activation : {"silu", "gelu", "gelu_tanh"}
        ``silu`` (SwiGLU): ``g / (1 + exp(-g))``. ``gelu`` (GeGLU): ``g * (1 + erf(g / sqrt(2))) / 2``.
        ``gelu_tanh``: ``g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) / 2``.
    out : array (..., d), optional
        Receives y. ``out=gate`` works in place in the split form.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    array (..., d), rounded once from float32 (float64 for float64).

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Notes
    -----
    Shazeer, "GLU Variants Improve Transformer", 2020, equation 5. Moves 3 * d elements per row.
    ``act(-inf)`` is -0 and ``act(inf)`` is inf.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> gate, up = np.array([0.0, 1.0, -2.0]), np.array([1.0, 2.0, 3.0])
    >>> gpu_ops.swiglu(gate, up).round(4)
    array([ 0.    ,  1.4621, -0.7152])
    >>> gpu_ops.swiglu(np.concatenate([gate, up])).round(4)
    array([ 0.    ,  1.4621, -0.7152])
    """
    name = "swiglu"
    arrays = Arrays(name)
    gate_, up_ = arrays.read("gate", gate), None if up is None else arrays.read("up", up)
    dtype = checks.float_dtype(name, gate=gate_, up=up_)
    g, u = _split(name, gate_, up_)
    act = cast(Activation, checks.one_of(name, "activation", activation, get_args(Activation)))
    out_ = arrays.write("out", out, g.shape, g.dtype, in_place=None if up is None else "gate", rows=True)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))

    def compute(on: Device | None) -> Array:
        if choice.backend == "reference":
            from gpu_ops.reference import swiglu as reference

            y: Array = reference.swiglu(gate_, up_, activation=act)
            if out_ is not None:
                out_[...] = y
            return y
        y = arrays.new(g.shape, g.dtype, "y") if out_ is None else out_
        host_function("swiglu.forward", on, choice.backend)(
            as_rows(g), as_rows(u), as_rows(y), activation=act
        )
        return y

    def run() -> Any:
        with arrays.on(choice) as on:
            y = compute(on)
            return arrays.give(y) if out is None else out

    def again() -> Callable[..., Any]:
        from gpu_ops.kernels.numba_cpu import swiglu as kernels

        new = Arrays(name).new

        def swiglu(gate: Array, up: Array | None = None, *, out: Array | None = None, **_: Any) -> Array:
            g, u = _split(name, gate, up)
            y = new(g.shape, g.dtype, "y") if out is None else out
            kernels.forward(as_rows(g), as_rows(u), as_rows(y), activation=act)
            return y

        return swiglu

    return Plan(
        name,
        choice,
        lambda: _problem(g, dtype, act),
        lambda: _config(choice, g, arrays, compute),
        run,
        again=again if choice.compiled else None,
    )


@op(cuda=True)
def swiglu_backward(
    dy: Any,
    gate: Any,
    up: Any = None,
    *,
    activation: str = "silu",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gradients of :func:`swiglu`: ``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``.

    Parameters
    ----------
    dy : array (..., d)
        Gradient of y.
    gate, up, activation
        As in the forward call.
    out : pair of arrays like (gate, up), or one array like the packed gate, optional
        Receives the gradients. ``out=(gate, up)``, or packed ``out=gate``, works in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    (dgate, dup), or one packed array (..., 2 * d) when ``gate`` was packed; in gate's dtype.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> dgate, dup = gpu_ops.swiglu_backward(np.ones(2), np.array([0.0, 1.0]), np.array([2.0, 2.0]))
    >>> dgate.round(4), dup.round(4)
    (array([1.    , 1.8553]), array([0.    , 0.7311]))
    """
    name = "swiglu_backward"
    arrays = Arrays(name)
    dy_, gate_ = arrays.read("dy", dy), arrays.read("gate", gate)
    up_ = None if up is None else arrays.read("up", up)
    dtype = checks.float_dtype(name, gate=gate_, up=up_, dy=dy_)
    g, u = _split(name, gate_, up_)
    checks.exactly(name, "dy", dy_, g.shape)
    act = cast(Activation, checks.one_of(name, "activation", activation, get_args(Activation)))
    outs = _outs(arrays, gate_, up_, out)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))

    def compute(on: Device | None) -> list[Array]:
        if choice.backend == "reference":
            from gpu_ops.reference import swiglu as reference

            computed = reference.swiglu_backward(dy_, gate_, up_, activation=act)
            results = list(computed) if isinstance(computed, tuple) else [computed]
            for target, x in zip(outs or [], results, strict=bool(outs)):
                target[...] = x
            return results
        like = {"dgate": gate_} if up_ is None else {"dgate": gate_, "dup": up_}
        results = outs or [arrays.new(x.shape, x.dtype, label) for label, x in like.items()]
        gradients = _split(name, results[0], None if up_ is None else results[1])
        host_function("swiglu.backward", on, choice.backend)(
            *map(as_rows, (dy_, g, u, *gradients)), activation=act
        )
        return results

    def run() -> Any:
        with arrays.on(choice) as on:
            results = compute(on)
            if out is not None:
                return out
            given = tuple(map(arrays.give, results))
            return given[0] if up_ is None else given

    def again() -> Callable[..., Any]:
        from gpu_ops.kernels.numba_cpu import swiglu as kernels

        new = Arrays(name).new

        def swiglu_backward(
            dy: Array, gate: Array, up: Array | None = None, *, out: Any = None, **_: Any
        ) -> Any:
            if out is None:
                out = new(gate.shape, gate.dtype)
                out = out if up is None else (out, new(up.shape, up.dtype))
            gradients = _split(name, out, None) if up is None else out
            kernels.backward(*map(as_rows, (dy, *_split(name, gate, up), *gradients)), activation=act)
            return out

        return swiglu_backward

    return Plan(
        name,
        choice,
        lambda: _problem(g, dtype, act),
        lambda: _config(choice, g, arrays, compute),
        run,
        again=again if choice.compiled else None,
    )


def _split(name: str, gate: Array, up: Array | None) -> tuple[Array, Array]:
    """gate and up as arrays of one shape; views of the halves of a packed array."""
    if gate.ndim == 0:
        raise ShapeError(f"{name}: gate has no axes; expected (..., d), or packed (..., 2 * d) without up")
    if up is not None:
        checks.exactly(name, "up", up, gate.shape)
        return gate, up
    if gate.shape[-1] % 2:
        raise ShapeError(
            f"{name}: packed gate has shape {gate.shape}; without up its last axis holds gate and up and must be "
            "even. Pass up= for the split form"
        )
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _outs(arrays: Arrays, gate: Array, up: Array | None, out: Any) -> list[Array]:
    """Writable views of ``out``: none, one packed, or dgate and dup."""
    if up is None:
        view = arrays.write("out", out, gate.shape, gate.dtype, in_place="gate", rows=True)
        return [] if view is None else [view]
    like = {"dgate": (gate.shape, gate.dtype), "dup": (up.shape, up.dtype)}
    return arrays.write_each("out", out, like, in_place={"dgate": "gate", "dup": "up"}, rows=True)


def _problem(g: Array, dtype: str, activation: str) -> str:
    return f"{math.prod(g.shape[:-1])} rows of {g.shape[-1]} {dtype}, {activation}"


def _config(choice: Choice, g: Array, arrays: Arrays, compute: Callable[[Device | None], Any]) -> str:
    if choice.device != "cpu":
        return arrays.launches(choice, compute)
    if choice.backend == "reference":
        return "NumPy, float64"
    from gpu_ops.kernels.numba_cpu import swiglu as kernels

    return kernels.config(math.prod(g.shape[:-1]), g.shape[-1])
