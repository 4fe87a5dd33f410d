"""RMSNorm with an optional fused residual add, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast, get_args

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays, New, as_rows
from gpu_ops.core.device import Device, host_function
from gpu_ops.core.dispatch import Plan, choose, op
from gpu_ops.ops import norm_checks as norm
from gpu_ops.reference.rmsnorm import Casting

__all__ = ["rmsnorm", "rmsnorm_backward"]


@op(cuda=True)
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
) -> Plan:
    """Root mean square layer norm over the last axis: ``y = s * rstd * (weight_offset + weight)``.

    ``s = x`` or ``x + residual`` rounded to x's dtype; ``rstd = 1 / sqrt(mean(s**2) + eps)``.

    Parameters
    ----------
    x : array (..., cols)
        float16, bfloat16, float32 or float64.
    weight : array (cols,)
        Same dtype as ``x``.
    eps : float
        Added to the mean square; > 0.
    residual : array like x, optional
        Added to ``x`` first; the sum is returned too, for the next residual add.
    return_sum : bool
        False: with ``residual``, neither write nor return the sum. For the last norm of a model, which no residual
        add follows; the backward needs the sum.
    weight_offset : float
        0 for Llama-like models, 1 for Gemma.
    casting : {"fp32", "llama", "gemma"}
        Where rounding to x's dtype happens. ``fp32`` and ``gemma``: once, at the end. ``llama``:
        ``s * rstd`` is rounded before it is multiplied with the weight, as in Hugging Face's Llama.
    return_rstd : bool
        Also return ``rstd`` (shape of x without its last axis; float32, float64 for float64).
    out : array like x, optional
        Receives y. ``out=x`` works in place.
    residual_out : array like x, optional
        Receives s, with ``residual``. ``residual_out=residual`` works in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    y, or (y, s) with ``residual`` and ``return_sum``; ``rstd`` comes last with ``return_rstd=True``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

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
    name = "rmsnorm"
    arrays = Arrays(name)
    x_, weight_ = arrays.read("x", x), arrays.read("weight", weight)
    residual_ = None if residual is None else arrays.read("residual", residual)
    dtype = norm.validate(name, x_, weight_, residual=residual_)
    statistics = checks.computing_dtype(dtype)
    eps = checks.number(name, "eps", eps, above=0.0)
    weight_offset = checks.number(name, "weight_offset", weight_offset)
    mode = cast(Casting, checks.one_of(name, "casting", casting, get_args(Casting)))
    return_rstd = checks.flag(name, "return_rstd", return_rstd)
    has_sum = checks.flag(name, "return_sum", return_sum) and residual_ is not None
    out_, residual_out_ = norm.outs(name, arrays, x_, has_sum, out, residual_out)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))
    rows, cols = math.prod(x_.shape[:-1]), x_.shape[-1]

    def normalise(
        on: Device | None,
        new: New,
        x: Array,
        weight: Array,
        residual: Array | None,
        y: Array | None,
        s: Array | None,
    ) -> tuple[Array, Array | None, Array]:
        y = new(x.shape, x.dtype, "y") if y is None else y
        s = new(x.shape, x.dtype, "s") if has_sum and s is None else s
        rstd = new(x.shape[:-1], statistics, "rstd")
        host_function("rmsnorm.forward", on, choice.backend)(
            as_rows(x),
            weight,
            None if residual is None else as_rows(residual),
            as_rows(y),
            None if s is None else as_rows(s),
            rstd.reshape(-1),
            eps=eps,
            weight_offset=weight_offset,
            casting=mode,
        )
        return y, s, rstd

    def compute(on: Device | None) -> tuple[Array, Array | None, Array]:
        if choice.backend == "reference":
            from gpu_ops.reference import rmsnorm as reference

            y, *rest = reference.rmsnorm(
                x_,
                weight_,
                eps=eps,
                residual=residual_,
                weight_offset=weight_offset,
                casting=mode,
                return_sum=has_sum,
                return_rstd=True,
            )
            s = rest[0] if has_sum else None
            for target, value in ((out_, y), (residual_out_, s)):
                if target is not None:
                    target[...] = value
            return y, s, rest[-1]
        return normalise(on, arrays.new, x_, weight_, residual_, out_, residual_out_)

    def run() -> Any:
        with arrays.on(choice) as on:
            y, s, rstd = compute(on)
            return norm.returned(
                arrays.give(y) if out is None else out,
                arrays.give(s) if s is not None and residual_out is None else residual_out,
                arrays.give(rstd) if return_rstd else None,
            )

    def again() -> Callable[..., Any]:
        new = Arrays(name).new

        def rmsnorm(
            x: Array,
            weight: Array,
            *,
            residual: Array | None = None,
            out: Array | None = None,
            residual_out: Array | None = None,
            **_: Any,
        ) -> Any:
            y, s, rstd = normalise(None, new, x, weight, residual, out, residual_out)
            return norm.returned(y, s, rstd if return_rstd else None)

        return rmsnorm

    return Plan(
        name,
        choice,
        lambda: f"{rows} rows of {cols} {dtype}, casting {mode}",
        lambda: norm.config(choice, rows, cols, arrays, compute),
        run,
        again=again if choice.compiled else None,
    )


@op(cuda=True)
def rmsnorm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    *,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gradients of :func:`rmsnorm`.

    With ``n = x * rstd`` and ``m = dy * (weight_offset + weight)``:
    ``dx = rstd * (m - n * mean(m * n)) + dresidual`` and ``dweight = sum over rows of dy * n``.

    Parameters
    ----------
    dy : array (..., cols)
        Gradient of y.
    x : array like dy
        What was normalised: the input, or ``s`` when the forward call had a residual.
    weight : array (cols,)
    rstd : array (...)
        As returned by the forward call with ``return_rstd=True``.
    dresidual : array like dy, optional
        Gradient of ``s`` from the residual stream, added to dx. The sum is the
        gradient of both x and residual.
    weight_offset, casting
        As in the forward call.
    out : array like dy, optional
        Receives dx. ``out=dy`` works in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    dx : array like x
    dweight : array (cols,), float32 (float64 for float64)
        Added up in a fixed order: the same bits every time.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[3.0, 4.0]]), np.ones(2)
    >>> y, rstd = gpu_ops.rmsnorm(x, w, return_rstd=True)
    >>> dx, dw = gpu_ops.rmsnorm_backward(np.ones((1, 2)), x, w, rstd)
    >>> dw.round(4)
    array([0.8485, 1.1314])
    """
    name = "rmsnorm_backward"
    arrays = Arrays(name)
    dy_, x_ = arrays.read("dy", dy), arrays.read("x", x)
    weight_, rstd_ = arrays.read("weight", weight), arrays.read("rstd", rstd)
    dresidual_ = None if dresidual is None else arrays.read("dresidual", dresidual)
    dtype = norm.validate(name, x_, weight_, dy=dy_, dresidual=dresidual_)
    statistics = checks.computing_dtype(dtype)
    checks.exactly(name, "rstd", rstd_, x_.shape[:-1], statistics)
    weight_offset = checks.number(name, "weight_offset", weight_offset)
    mode = cast(Casting, checks.one_of(name, "casting", casting, get_args(Casting)))
    out_ = arrays.write("out", out, x_.shape, x_.dtype, in_place="dy", rows=True)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))
    rows, cols = math.prod(x_.shape[:-1]), x_.shape[-1]

    def differentiate(
        on: Device | None,
        new: New,
        dy: Array,
        x: Array,
        weight: Array,
        rstd: Array,
        dresidual: Array | None,
        dx: Array | None,
    ) -> tuple[Array, Array]:
        dx = new(x.shape, x.dtype, "dx") if dx is None else dx
        dweight = new(weight.shape, statistics, "dweight")
        host_function("rmsnorm.backward", on, choice.backend)(
            as_rows(dy),
            as_rows(x),
            weight,
            rstd.ravel(),
            None if dresidual is None else as_rows(dresidual),
            as_rows(dx),
            dweight,
            weight_offset=weight_offset,
            casting=mode,
        )
        return dx, dweight

    def compute(on: Device | None) -> tuple[Array, Array]:
        if choice.backend == "reference":
            from gpu_ops.reference import rmsnorm as reference

            dx, dweight = reference.rmsnorm_backward(
                dy_, x_, weight_, rstd_, dresidual=dresidual_, weight_offset=weight_offset, casting=mode
            )
            if out_ is not None:
                out_[...] = dx
            return dx, dweight
        return differentiate(on, arrays.new, dy_, x_, weight_, rstd_, dresidual_, out_)

    def run() -> Any:
        with arrays.on(choice) as on:
            dx, dweight = compute(on)
            if not rows:  # no kernel has run
                dweight.fill(0)
            return (arrays.give(dx) if out is None else out), arrays.give(dweight)

    def again() -> Callable[..., Any]:
        new = Arrays(name).new
        return lambda dy, x, weight, rstd, *, dresidual=None, out=None, **_: differentiate(
            None, new, dy, x, weight, rstd, dresidual, out
        )

    return Plan(
        name,
        choice,
        lambda: f"{rows} rows of {cols} {dtype}, casting {mode}",
        lambda: norm.config(choice, rows, cols, arrays, compute),
        run,
        again=again if choice.compiled and rows else None,
    )
