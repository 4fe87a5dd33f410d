"""The gated MLP of Llama-like models, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, get_args

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays, as_rows
from gpu_ops.core.checks import Axes
from gpu_ops.core.device import Device, host_function
from gpu_ops.core.dispatch import Choice, Plan, choose, op
from gpu_ops.errors import ShapeError
from gpu_ops.reference.swiglu import Activation

__all__ = ["swiglu_mlp", "swiglu_mlp_backward"]


@op(cuda=True)
def swiglu_mlp(
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str = "silu",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gated MLP ``y = (act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T``.

    Parameters
    ----------
    x : array (..., hidden)
        float16, bfloat16, float32 or float64; the weights in the same dtype.
    w_gate, w_up : array (ffn, hidden)
    w_down : array (hidden_out, ffn)
        Weights are (out_features, in_features), as checkpoints store them.
    activation : {"silu", "gelu", "gelu_tanh"}
        As in :func:`swiglu`.
    out : array (..., hidden_out), optional
        Receives y; may not share memory with an input.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    array (..., hidden_out), rounded once from float32 (float64 for float64).

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Notes
    -----
    6 * tokens * hidden * ffn flops. gate and up exist only as tiles, in the cache of a CPU and in the registers of a
    GPU, and their product as blocks of tokens (and of ffn, on the CPU): the scratch stays the same size whatever the
    number of tokens, and no (tokens, ffn) array exists. Up to 16 tokens on a GPU, each weight is read once. Tensor
    cores, and CPUs that multiply bfloat16, take act(gate) * up in x's dtype: there it is rounded once too.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[1.0, 2.0]]), np.eye(2)
    >>> gpu_ops.swiglu_mlp(x, w, w, w).round(4)
    array([[0.7311, 3.5232]])
    """
    name = "swiglu_mlp"
    arrays = Arrays(name)
    x_ = arrays.read("x", x)
    weights = [arrays.read(n, w) for n, w in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down))]
    dtype, axes = _validate(name, x_, weights)
    act = cast(Activation, checks.one_of(name, "activation", activation, get_args(Activation)))
    shape = (*x_.shape[:-1], axes["hidden_out"])
    out_ = arrays.write("out", out, shape, x_.dtype, rows=True)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))

    def compute(on: Device | None) -> Array:
        y: Array
        if choice.backend == "reference":
            from gpu_ops.reference import swiglu as reference

            y = reference.swiglu_mlp(x_, *weights, activation=act)
            if out_ is not None:
                out_[...] = y
            return y
        y = arrays.new(shape, x_.dtype, "y") if out_ is None else out_
        if _is_empty(x_, axes):
            return y
        forward = host_function("swiglu_mlp.forward", on, choice.backend)
        forward(as_rows(x_), weights, as_rows(y), activation=act)
        return y

    def run() -> Any:
        with arrays.on(choice) as on:
            y = compute(on)
            if _is_empty(x_, axes):  # no kernel has run
                y.fill(0)
            return arrays.give(y) if out is None else out

    def again() -> Callable[..., Any]:
        from gpu_ops.kernels.numba_cpu import swiglu_mlp as cpu

        new = Arrays(name).new

        def mlp(
            x: Array, w_gate: Array, w_up: Array, w_down: Array, *, out: Array | None = None, **_: Any
        ) -> Array:
            y = new(shape, x.dtype, "y") if out is None else out
            cpu.forward(as_rows(x), (w_gate, w_up, w_down), as_rows(y), activation=act)
            return y

        return mlp

    made = _plan(name, choice, x_, axes, dtype, act, arrays, compute, run)
    alone = choice.compiled and not _is_empty(x_, axes)
    return replace(made, again=again) if alone else made


@op(cuda=True)
def swiglu_mlp_backward(
    dy: Any,
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str = "silu",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gradients of :func:`swiglu_mlp`. Gate and up are computed again from x, so that nothing need be kept.

    With ``h = act(gate) * up`` and ``dh = dy @ w_down``:
    ``dgate = dh * up * act'(gate)``, ``dup = dh * act(gate)``, ``dx = dgate @ w_gate + dup @ w_up``,
    ``dw_gate = dgate.T @ x``, ``dw_up = dup.T @ x``, ``dw_down = dy.T @ h``.

    Parameters
    ----------
    dy : array (..., hidden_out)
        Gradient of y.
    x, w_gate, w_up, w_down, activation
        As in the forward call.
    out : (dx, dw_gate, dw_up, dw_down), optional
        Arrays that receive the gradients; none may share memory with an input.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    dx, dw_gate, dw_up, dw_down
        Each like its tensor. Sums over tokens are float32 (float64 for float64) and rounded once.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Notes
    -----
    16 * tokens * hidden * ffn flops. Scratch: on the CPU as in the forward call, on a GPU three blocks of all tokens
    by a part of ffn; for 16-bit dtypes dx in float32 as well. dgate, dup and h are rounded
    to x's dtype in these blocks on a GPU, and where a CPU multiplies bfloat16.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[1.0, 2.0]]), np.eye(2)
    >>> dx, dw_gate, dw_up, dw_down = gpu_ops.swiglu_mlp_backward(np.ones((1, 2)), x, w, w, w)
    >>> dx.round(4)
    array([[1.6587, 3.9432]])
    """
    name = "swiglu_mlp_backward"
    arrays = Arrays(name)
    dy_, x_ = arrays.read("dy", dy), arrays.read("x", x)
    weights = [arrays.read(n, w) for n, w in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down))]
    dtype, axes = _validate(name, x_, weights, dy=dy_)
    checks.exactly(name, "dy", dy_, (*x_.shape[:-1], axes["hidden_out"]))
    act = cast(Activation, checks.one_of(name, "activation", activation, get_args(Activation)))
    labels = ("dx", "dw_gate", "dw_up", "dw_down")
    like = {n: (a.shape, a.dtype) for n, a in zip(labels, (x_, *weights), strict=True)}
    outs = arrays.write_each("out", out, like, rows=True)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))

    def compute(on: Device | None) -> list[Array]:
        if choice.backend == "reference":
            from gpu_ops.reference import swiglu as reference

            results = list(reference.swiglu_mlp_backward(dy_, x_, *weights, activation=act))
            for target, gradient in zip(outs, results, strict=bool(outs)):
                target[...] = gradient
            return results
        results = outs or [arrays.new(*of, label) for label, of in like.items()]
        if _is_empty(x_, axes):
            return results
        backward = host_function("swiglu_mlp.backward", on, choice.backend)
        backward(as_rows(dy_), as_rows(x_), weights, as_rows(results[0]), results[1:], activation=act)
        return results

    def run() -> Any:
        with arrays.on(choice) as on:
            results = compute(on)
            if _is_empty(x_, axes):
                for gradient in results:
                    gradient.fill(0)
            return tuple(arrays.give(r) for r in results) if out is None else out

    def again() -> Callable[..., Any]:
        from gpu_ops.kernels.numba_cpu import swiglu_mlp as cpu

        new = Arrays(name).new

        def mlp_backward(
            dy: Array, x: Array, w_gate: Array, w_up: Array, w_down: Array, *, out: Any = None, **_: Any
        ) -> Any:
            results = tuple([new(*of, label) for label, of in like.items()]) if out is None else out
            rows = as_rows(dy), as_rows(x), (w_gate, w_up, w_down), as_rows(results[0]), results[1:]
            cpu.backward(*rows, activation=act)
            return results

        return mlp_backward

    made = _plan(name, choice, x_, axes, dtype, act, arrays, compute, run)
    alone = choice.compiled and not _is_empty(x_, axes)
    return replace(made, again=again) if alone else made


def _validate(name: str, x: Array, weights: list[Array], **more: Array) -> tuple[str, Axes]:
    """The dtype's name and the axis lengths."""
    w_gate, w_up, w_down = weights
    dtype = checks.float_dtype(name, x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, **more)
    axes = Axes(name)
    axes.bind("w_gate", w_gate, "ffn hidden")
    axes.bind("w_up", w_up, "ffn hidden")
    axes.bind("w_down", w_down, "hidden_out ffn")
    if x.ndim == 0 or x.shape[-1] != axes["hidden"]:
        raise ShapeError(
            f"{name}: x has shape {x.shape}, expected (..., hidden={axes['hidden']}): weights are "
            f"(out_features, in_features) and w_gate is {w_gate.shape}"
        )
    return dtype, axes


def _is_empty(x: Array, axes: Axes) -> bool:
    return not x.size or not axes["ffn"] or not axes["hidden_out"]


def _plan(
    name: str,
    choice: Choice,
    x: Array,
    axes: Axes,
    dtype: str,
    activation: str,
    arrays: Arrays,
    compute: Callable[[Device | None], Any],
    run: Callable[[], Any],
) -> Plan:
    tokens = math.prod(x.shape[:-1])

    def config() -> str:
        if choice.device != "cpu":
            return arrays.launches(choice, compute)
        if choice.backend == "reference":
            return "NumPy, float64"
        from gpu_ops.kernels.numba_cpu import swiglu_mlp as kernels

        gradients = name.endswith("backward")
        widest = max(axes["hidden"], axes["hidden_out"]) if gradients else axes["hidden"]
        return kernels.config(tokens, widest, axes["ffn"], x.dtype, gradients=gradients)

    problem = (
        f"{tokens} tokens, hidden {axes['hidden']}, ffn {axes['ffn']}, hidden_out {axes['hidden_out']}, "
        f"{dtype}, {activation}"
    )
    return Plan(name, choice, problem, config, run)
