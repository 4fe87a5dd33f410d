"""LayerNorm with an optional fused residual add, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.norm.checks import bound, validate, write_gradients, write_outputs

__all__ = ["layernorm", "layernorm_backward"]


@op(cuda=True, kernels="norm.layernorm")
def layernorm(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    residual: Any = None,
    return_sum: bool = True,
    return_stats: bool = False,
    out: Any = None,
    residual_out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Layer norm over the last axis: ``y = (s - mean) * rstd * weight + bias``.

    ``s = x`` or ``x + residual`` rounded to x's dtype; ``mean`` and ``rstd = 1 / sqrt(variance + eps)`` are those of
    a row of s, with the variance divided by the number of columns. The result is rounded once, at the end.

    Parameters
    ----------
    x : array (..., cols)
        float16, bfloat16, float32 or float64.
    weight : array (cols,)
        Same dtype as ``x``.
    bias : array (cols,), optional
        Same dtype as ``x``.
    eps : float
        Added to the variance; >= 0. The default is PyTorch's; BERT and MiniLM use 1e-12. Raised to at least 2^-149,
        the smallest float32 (float64: 2^-1074), so that a row of equal numbers gives the bias.
    residual : array like x, optional
        Added to ``x`` first; the sum is returned too, for the next residual add.
    return_sum : bool
        False: with ``residual``, neither write nor return the sum, for the last norm of a model, after which there is
        no residual add. The backward needs the sum.
    return_stats : bool
        Also return ``mean`` and ``rstd``, which the backward needs (shape of x without its last axis; float32,
        float64 for float64).
    out : array like x, optional
        Receives y. ``out=x`` works in place. With ``return_stats`` also a tuple, (y, mean, rstd).
    residual_out : array like x, optional
        Receives s, with ``residual``. ``residual_out=residual`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    y, or (y, s) with ``residual`` and ``return_sum``; ``mean`` and ``rstd`` come last with ``return_stats=True``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Ba, Kiros and Hinton, "Layer Normalization", 2016. Moves each element once: 2 * rows * cols elements (4 with
    residual, 3 of them without the sum). Squares are summed around the mean, never as ``mean(s**2) - mean**2``, so
    a large common offset loses no digits of the variance. A NaN or an infinity makes its row NaN.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.array([[1.0, 3.0]], np.float32)
    >>> gpu_ops.layernorm(x, np.ones(2, np.float32), np.array([0.5, 0.0], np.float32)).round(4)
    array([[-0.5,  1. ]], dtype=float32)
    """
    call = Call("layernorm", device, backend, workspace)
    x_, weight_ = call.read("x", x, rows=True), call.read("weight", weight)
    bias_ = call.optional("bias", bias)
    residual_ = call.optional("residual", residual, rows=True)
    dtype = validate(call.op, x_, weight_, bias_, residual=residual_)
    call.option(eps=checks.epsilon(call.op, eps, dtype))
    return_stats = checks.flag(call.op, "return_stats", return_stats)
    has_sum = checks.flag(call.op, "return_sum", return_sum) and residual_ is not None
    write_outputs(call, x_, has_sum, out, residual_out, ("mean", "rstd"), return_statistics=return_stats)
    return bound(call, x_, flops=8.0)


@op(cuda=True, kernels="norm.layernorm", written=("dweight", "dbias"))
def layernorm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    dresidual: Any = None,
    dweight: Any = None,
    dbias: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradients of :func:`layernorm`.

    With ``n = (x - mean) * rstd`` and ``m = dy * weight``:
    ``dx = rstd * (m - mean(m) - n * mean(m * n)) + dresidual``,
    ``dweight = sum over rows of dy * n`` and ``dbias = sum over rows of dy``.

    Parameters
    ----------
    dy : array (..., cols)
        Gradient of y.
    x : array like dy
        The normalised array: the input, or ``s`` when the forward call had a residual.
    weight : array (cols,)
    mean, rstd : array (...)
        Results of the forward call with ``return_stats=True``.
    dresidual : array like dy, optional
        Gradient of ``s`` from the residual stream, added to dx. The sum is the gradient of both x and residual.
    dweight, dbias : float32 arrays (cols,) (float64 for float64), optional
        The gradient is added to the given array, to accumulate over parts of a batch.
    out : array like dy, optional
        Receives dx. ``out=dy`` works in place. Also a tuple, (dx, dweight, dbias) without those that are given.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dx : array like x
    dweight, dbias : array (cols,), float32 (float64 for float64)
        Summed in a fixed order: the same bits every time. dbias is returned whether or not the forward call had a
        bias; it costs no memory traffic.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[1.0, 2.0, 6.0]]), np.ones(3)
    >>> y, mean, rstd = gpu_ops.layernorm(x, w, return_stats=True)
    >>> dx, dw, db = gpu_ops.layernorm_backward(np.array([[1.0, 2.0, 3.0]]), x, w, mean, rstd)
    >>> dw.round(3), db
    (array([-0.926, -0.926,  4.166]), array([1., 2., 3.]))
    """
    call = Call("layernorm_backward", device, backend, workspace)
    dy_, x_ = call.read("dy", dy, rows=True), call.read("x", x, rows=True)
    weight_ = call.read("weight", weight)
    statistics = {name: call.read(name, s, contiguous=True) for name, s in (("mean", mean), ("rstd", rstd))}
    dresidual_ = call.optional("dresidual", dresidual, rows=True)
    dtype = validate(call.op, x_, weight_, dy=dy_, dresidual=dresidual_)
    stats_dtype = checks.computing_dtype(dtype)
    for name, statistic in statistics.items():
        checks.exactly(call.op, name, statistic, x_.shape[:-1], stats_dtype)
    write_gradients(call, x_, {"dweight": dweight, "dbias": dbias}, stats_dtype, out)
    return bound(call, x_, flops=12.0)


@lowers("layernorm", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.norm.layernorm import layernorm

    def run(views: Mapping[str, Any]) -> None:
        results = layernorm(
            views["x"],
            views["weight"],
            views.get("bias"),
            residual=views.get("residual"),
            return_sum="s" in views,
            return_stats=True,
            **dict(spec.options),
        )
        store(views, ("y", "s", "mean", "rstd") if "s" in views else ("y", "mean", "rstd"), results)

    builder.call(run, "NumPy, float64")


@lowers("layernorm_backward", "reference")
def _reference_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.norm.layernorm import layernorm_backward

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("dy", "x", "weight", "mean", "rstd")]
        added = {name: views[name] for name in spec["added"]}
        gradients = layernorm_backward(*arrays, dresidual=views.get("dresidual"), **added)
        store(views, ("dx", "dweight", "dbias"), gradients)

    builder.call(run, "NumPy, float64")
