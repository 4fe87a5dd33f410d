"""The gated MLP of Llama-like models, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call, Finish
from gpu_ops.core.op import op
from gpu_ops.errors import ShapeError
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.gradients import write_gradients
from gpu_ops.ops.weights.packed import cpu_only, read_weight
from gpu_ops.reference.gemm.swiglu import Activation

__all__ = ["swiglu_mlp", "swiglu_mlp_backward"]


@op(cuda=True, kernels="gemm.swiglu_mlp")
def swiglu_mlp(
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str = "silu",
    keep: str | None = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gated MLP ``y = (act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T``.

    Parameters
    ----------
    x : array (..., hidden)
        float16, bfloat16, float32 or float64; the weights in the same dtype.
    w_gate, w_up : array or PackedMatrix (ffn, hidden)
    w_down : array or PackedMatrix (hidden_out, ffn)
        Weights are (out_features, in_features), the layout of checkpoints. Packed ones are unpacked to a workspace;
        :func:`linear` and :func:`swiglu` read them packed.
    activation : {"silu", "gelu", "gelu_tanh", "relu2"}
        Same as in :func:`swiglu`.
    keep : {"gate_up"}, optional
        Also return ``x @ w_gate.T`` and ``x @ w_up.T``, so that the backward need not recompute them.
    out : array (..., hidden_out), optional
        Receives y; may not share memory with an input. With ``keep`` also a pair, (y, gate_up).
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    y : array (..., hidden_out), rounded once from float32 (float64 for float64)
    gate_up : array (..., 2 * ffn) in x's dtype, only with ``keep``
        Gate in the first half, the packed form of :func:`swiglu`. y has the same bits with and without ``keep``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    6 * tokens * hidden * ffn flops. gate and up exist only as tiles, in the cache of a CPU or the registers of a
    GPU. Their product exists as blocks of tokens (and of ffn, on the CPU), so the scratch size does not depend on the
    number of tokens, and without ``keep`` there is no (tokens, ffn) array. Up to 16 tokens on a GPU, each weight is
    read once (w_gate and w_up twice with ``keep``). Tensor cores, and CPUs that multiply bfloat16, take
    act(gate) * up in x's dtype, so it is rounded once there too.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[1.0, 2.0]]), np.eye(2)
    >>> gpu_ops.swiglu_mlp(x, w, w, w).round(4)
    array([[0.7311, 3.5232]])
    """
    call = Call("swiglu_mlp", device, backend, workspace)
    x_ = call.read("x", x, rows=True)
    matrices = zip(_WEIGHTS, (w_gate, w_up, w_down), strict=True)
    weights = {name: read_weight(call, name, w) for name, w in matrices}
    dtype = _validate(call, x_, weights)
    call.option(activation=checks.one_of(call.op, "activation", activation, get_args(Activation)))
    call.write("y", (*x_.shape[:-1], call.axes["hidden_out"]), x_.dtype, out, rows=True, item=0)
    if keep is not None:
        checks.one_of(call.op, "keep", keep, ("gate_up",))
        call.write("gate_up", (*x_.shape[:-1], 2 * call.axes["ffn"]), x_.dtype, out, rows=True, item=1)
    return _bind(call, x_, dtype, activation, weights, flops=2.0)


@op(cuda=True, kernels="gemm.swiglu_mlp", written=("dw_gate", "dw_up", "dw_down"))
def swiglu_mlp_backward(
    dy: Any,
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str = "silu",
    gate_up: Any = None,
    dw_gate: Any = None,
    dw_up: Any = None,
    dw_down: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradients of :func:`swiglu_mlp`. Gate and up are recomputed from x unless ``gate_up`` is given.

    With ``h = act(gate) * up`` and ``dh = dy @ w_down``:
    ``dgate = dh * up * act'(gate)``, ``dup = dh * act(gate)``, ``dx = dgate @ w_gate + dup @ w_up``,
    ``dw_gate = dgate.T @ x``, ``dw_up = dup.T @ x``, ``dw_down = dy.T @ h``.

    Parameters
    ----------
    dy : array (..., hidden_out)
        Gradient of y.
    x, w_gate, w_up, w_down, activation
        Same as in the forward call.
    gate_up : array (..., 2 * ffn) in x's dtype, optional
        Result of the forward call with ``keep="gate_up"``. The gradients have the same bits as without it, unless
        cuBLAS multiplies (see :func:`explain`), whose sums depend on the shapes.
    dw_gate, dw_up, dw_down : float32 arrays like their weights (float64 for float64), optional
        The gradient is added to the given array, to accumulate over parts of a batch.
    out : (dx, dw_gate, dw_up, dw_down) without those that are given, optional
        Arrays that receive the gradients; none may share memory with an input. An array if it is dx alone.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dx : array like x
    dw_gate, dw_up, dw_down : float32 arrays like their weights (float64 for float64)

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    16 * tokens * hidden * ffn flops, 12 with ``gate_up``. Scratch: on the CPU as in the forward call, on a GPU three
    blocks of all tokens by a part of ffn; for 16-bit dtypes also dx in float32. Gate and up are rounded to x's
    dtype, kept or not. dgate, dup and h are too on a GPU, and where a CPU multiplies bfloat16. Sums over tokens are
    float32 for every dtype, in a fixed order: the same bits for any number of threads.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[1.0, 2.0]]), np.eye(2)
    >>> dx, dw_gate, dw_up, dw_down = gpu_ops.swiglu_mlp_backward(np.ones((1, 2)), x, w, w, w)
    >>> dx.round(4)
    array([[1.6587, 3.9432]])
    """
    call = Call("swiglu_mlp_backward", device, backend, workspace)
    dy_, x_ = call.read("dy", dy, rows=True), call.read("x", x, rows=True)
    weights = {name: call.read(name, w) for name, w in zip(_WEIGHTS, (w_gate, w_up, w_down), strict=True)}
    dtype = _validate(call, x_, weights, dy=dy_)
    checks.exactly(call.op, "dy", dy_, (*x_.shape[:-1], call.axes["hidden_out"]))
    call.option(activation=checks.one_of(call.op, "activation", activation, get_args(Activation)))
    if gate_up is not None:
        kept = call.read("gate_up", gate_up, rows=True)
        checks.float_dtype(call.op, x=x_, gate_up=kept)
        checks.exactly(call.op, "gate_up", kept, (*x_.shape[:-1], 2 * call.axes["ffn"]))
    arrays = dict(zip(_SUMS, (dw_gate, dw_up, dw_down), strict=True))
    sums = {f"d{name}": (w.shape, arrays[f"d{name}"]) for name, w in weights.items()}
    finish = write_gradients(call, x_, sums, checks.computing_dtype(dtype), out)
    flops = 16 / 3 if gate_up is None else 4.0
    return _bind(call, x_, dtype, activation, weights, flops=flops, finish=finish)


_WEIGHTS = ("w_gate", "w_up", "w_down")
_SUMS = ("dw_gate", "dw_up", "dw_down")


def _validate(call: Call, x: Array, weights: dict[str, Any], **more: Array) -> str:
    """Check shapes and dtypes, bind ``call.axes``, and return the dtype's name."""
    name, axes = call.op, call.axes
    arrays = {key: w for key, w in weights.items() if not isinstance(w, PackedMatrix)}
    dtype = checks.float_dtype(name, x=x, **arrays, **more)
    axes.bind("w_gate", weights["w_gate"], "ffn hidden")
    axes.bind("w_up", weights["w_up"], "ffn hidden")
    axes.bind("w_down", weights["w_down"], "hidden_out ffn")
    if x.ndim == 0 or x.shape[-1] != axes["hidden"]:
        raise ShapeError(
            f"{name}: x has shape {x.shape}, expected (..., hidden={axes['hidden']}): weights are "
            f"(out_features, in_features) and w_gate is {weights['w_gate'].shape}"
        )
    return dtype


def _bind(
    call: Call,
    x: Array,
    dtype: str,
    activation: str,
    weights: dict[str, Any],
    *,
    flops: float,
    finish: Finish | None = None,
) -> Bound:
    """Bind the call. ``flops``: per token and element of the weights."""
    axes, tokens = call.axes, math.prod(x.shape[:-1])
    hidden, ffn, hidden_out = axes["hidden"], axes["ffn"], axes["hidden_out"]
    return call.bind(
        problem=lambda: (
            f"{tokens} tokens, hidden {hidden}, ffn {ffn}, hidden_out {hidden_out}, {dtype}, {activation}"
        ),
        unsupported=checks.unsupported(dtype) | cpu_only(*weights.values()),
        finish=finish,
        flops=flops * tokens * ffn * (2 * hidden + hidden_out),
    )


@lowers("swiglu_mlp", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.swiglu import swiglu_mlp

    keep: Literal["gate_up"] | None = None if spec.get("gate_up") is None else "gate_up"

    def run(views: Mapping[str, Any]) -> None:
        weights = (views[name] for name in _WEIGHTS)
        arrays = [w.dequantize(views["x"].dtype) if isinstance(w, PackedMatrix) else w for w in weights]
        results = swiglu_mlp(views["x"], *arrays, activation=spec["activation"], keep=keep)
        store(views, ("y", keep) if keep else ("y",), results)

    builder.call(run, "NumPy, float64")


@lowers("swiglu_mlp_backward", "reference")
def _reference_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.swiglu import swiglu_mlp_backward

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("dy", "x", *_WEIGHTS)]
        added = {name: views[name] for name in spec["added"]}
        options = {"activation": spec["activation"], "gate_up": views.get("gate_up"), **added}
        store(views, ("dx", *_SUMS), swiglu_mlp_backward(*arrays, **options))

    builder.call(run, "NumPy, float64")
