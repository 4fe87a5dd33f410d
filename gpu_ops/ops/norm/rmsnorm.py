"""RMSNorm with an optional fused residual add, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.norm.checks import bound, validate, write_gradients, write_outputs
from gpu_ops.reference.norm.rmsnorm import Casting

__all__ = ["rmsnorm", "rmsnorm_backward"]


@op(cuda=True, kernels="norm.rmsnorm")
def rmsnorm(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    residual: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    return_sum: bool = True,
    return_rstd: bool = False,
    out: Any = None,
    residual_out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Root mean square layer norm over the last axis: ``y = s * rstd * (weight_offset + weight)``.

    ``s = x`` or ``x + residual`` rounded to x's dtype; ``rstd = 1 / sqrt(mean(s**2) + eps)``.

    Parameters
    ----------
    x : array (..., cols)
        float16, bfloat16, float32 or float64.
    weight : array (cols,)
        Same dtype as ``x``.
    eps : float
        Added to the mean square; >= 0. Raised to at least 2^-149, the smallest float32 (float64: 2^-1074), so that a
        row of zeros gives 0.
    residual : array like x, optional
        Added to ``x`` first; the sum is returned too, for the next residual add.
    return_sum : bool
        False: with ``residual``, neither write nor return the sum, for the last norm of a model, after which there is
        no residual add. The backward needs the sum.
    weight_offset : float
        0 for Llama-like models, 1 for Gemma.
    casting : {"fp32", "llama", "gemma"}
        Where values are rounded to x's dtype. ``fp32`` and ``gemma``: once, at the end. ``llama``:
        ``s * rstd`` is rounded before it is multiplied by the weight, as in Hugging Face's Llama.
    return_rstd : bool
        Also return ``rstd`` (shape of x without its last axis; float32, float64 for float64).
    out : array like x, optional
        Receives y. ``out=x`` works in place. With ``return_rstd`` also a pair, (y, rstd).
    residual_out : array like x, optional
        Receives s, with ``residual``. ``residual_out=residual`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    y, or (y, s) with ``residual`` and ``return_sum``; ``rstd`` comes last with ``return_rstd=True``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Moves each element once:
    2 * rows * cols elements (4 with residual, 3 of them without the sum).

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.array([[3.0, 4.0]], np.float32)
    >>> gpu_ops.rmsnorm(x, np.ones(2, np.float32)).round(4)
    array([[0.8485, 1.1314]], dtype=float32)
    """
    call = Call("rmsnorm", device, backend, workspace)
    x_, weight_ = call.read("x", x, rows=True), call.read("weight", weight)
    residual_ = call.optional("residual", residual, rows=True)
    dtype = validate(call.op, x_, weight_, residual=residual_)
    call.option(
        eps=checks.epsilon(call.op, eps, dtype),
        weight_offset=checks.computable(call.op, "weight_offset", weight_offset, dtype),
        casting=checks.one_of(call.op, "casting", casting, get_args(Casting)),
    )
    return_rstd = checks.flag(call.op, "return_rstd", return_rstd)
    has_sum = checks.flag(call.op, "return_sum", return_sum) and residual_ is not None
    write_outputs(call, x_, has_sum, out, residual_out, ("rstd",), return_statistics=return_rstd)
    return bound(call, x_, flops=4.0, details=f", casting {casting}")


@op(cuda=True, kernels="norm.rmsnorm", written=("dweight",))
def rmsnorm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    *,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    dweight: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradients of :func:`rmsnorm`.

    With ``n = x * rstd`` and ``m = dy * (weight_offset + weight)``:
    ``dx = rstd * (m - n * mean(m * n)) + dresidual`` and ``dweight = sum over rows of dy * n``.

    Parameters
    ----------
    dy : array (..., cols)
        Gradient of y.
    x : array like dy
        The normalised array: the input, or ``s`` when the forward call had a residual.
    weight : array (cols,)
    rstd : array (...)
        Results of the forward call with ``return_rstd=True``.
    dresidual : array like dy, optional
        Gradient of ``s`` from the residual stream, added to dx. The sum is the
        gradient of both x and residual.
    weight_offset, casting
        Same as in the forward call.
    dweight : float32 array (cols,) (float64 for float64), optional
        The gradient is added to it, to accumulate over parts of a batch.
    out : array like dy, optional
        Receives dx. ``out=dy`` works in place. Also a pair, (dx, dweight), if dweight is not given.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dx : array like x
    dweight : array (cols,), float32 (float64 for float64)
        Summed in a fixed order: the same bits every time.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[3.0, 4.0]]), np.ones(2)
    >>> y, rstd = gpu_ops.rmsnorm(x, w, return_rstd=True)
    >>> dx, dw = gpu_ops.rmsnorm_backward(np.ones((1, 2)), x, w, rstd)
    >>> dw.round(4)
    array([0.8485, 1.1314])
    """
    call = Call("rmsnorm_backward", device, backend, workspace)
    dy_, x_ = call.read("dy", dy, rows=True), call.read("x", x, rows=True)
    weight_, rstd_ = call.read("weight", weight), call.read("rstd", rstd, contiguous=True)
    dresidual_ = call.optional("dresidual", dresidual, rows=True)
    dtype = validate(call.op, x_, weight_, dy=dy_, dresidual=dresidual_)
    stats_dtype = checks.computing_dtype(dtype)
    checks.exactly(call.op, "rstd", rstd_, x_.shape[:-1], stats_dtype)
    call.option(
        weight_offset=checks.computable(call.op, "weight_offset", weight_offset, dtype),
        casting=checks.one_of(call.op, "casting", casting, get_args(Casting)),
    )
    write_gradients(call, x_, {"dweight": dweight}, stats_dtype, out)
    return bound(call, x_, flops=8.0, details=f", casting {casting}")


@lowers("rmsnorm", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.norm.rmsnorm import rmsnorm

    def run(views: Mapping[str, Any]) -> None:
        results = rmsnorm(
            views["x"], views["weight"], residual=views.get("residual"), return_sum="s" in views,
            return_rstd=True, **dict(spec.options),
        )  # fmt: skip
        store(views, ("y", "s", "rstd") if "s" in views else ("y", "rstd"), results)

    builder.call(run, "NumPy, float64")


@lowers("rmsnorm_backward", "reference")
def _reference_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.norm.rmsnorm import rmsnorm_backward

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("dy", "x", "weight", "rstd")]
        options = {name: value for name, value in spec.options if name != "added"}
        dweight = views["dweight"] if spec["added"] else None
        gradients = rmsnorm_backward(*arrays, dresidual=views.get("dresidual"), dweight=dweight, **options)
        store(views, ("dx", "dweight"), gradients)

    builder.call(run, "NumPy, float64")
