"""LayerNorm with an optional fused residual add, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays, New, as_rows
from gpu_ops.core.device import Device, host_function
from gpu_ops.core.dispatch import Plan, choose, op
from gpu_ops.ops import norm_checks as norm

__all__ = ["layernorm", "layernorm_backward"]


@op(cuda=True)
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
) -> Plan:
    """Layer norm over the last axis: ``y = (s - mean) * rstd * weight + bias``.

    ``s = x`` or ``x + residual`` rounded to x's dtype; ``mean`` and ``rstd = 1 / sqrt(variance + eps)`` are those of
    a row of s, with the variance that divides by the number of columns. The result is rounded once, at the end.

    Parameters
    ----------
    x : array (..., cols)
        float16, bfloat16, float32 or float64.
    weight : array (cols,)
        Same dtype as ``x``.
    bias : array (cols,), optional
        Same dtype as ``x``.
    eps : float
        Added to the variance; > 0. PyTorch's default; BERT and MiniLM have 1e-12.
    residual : array like x, optional
        Added to ``x`` first; the sum is returned too, for the next residual add.
    return_sum : bool
        False: with ``residual``, neither write nor return the sum. For the last norm of a model, which no residual
        add follows; the backward needs the sum.
    return_stats : bool
        Also return ``mean`` and ``rstd``, which the backward needs (shape of x without its last axis; float32,
        float64 for float64).
    out : array like x, optional
        Receives y. ``out=x`` works in place.
    residual_out : array like x, optional
        Receives s, with ``residual``. ``residual_out=residual`` works in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    y, or (y, s) with ``residual`` and ``return_sum``; ``mean`` and ``rstd`` come last with ``return_stats=True``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Notes
    -----
    Ba, Kiros and Hinton, "Layer Normalization", 2016. Moves each element once: 2 * rows * cols elements (4 with
    residual, 3 of them without the sum). Squares are summed around the mean, never as ``mean(s**2) - mean**2``: a
    large common offset costs no digits of the variance. A NaN or an infinity makes its row NaN.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.array([[1.0, 3.0]], np.float32)
    >>> gpu_ops.layernorm(x, np.ones(2, np.float32), np.array([0.5, 0.0], np.float32)).round(4)
    array([[-0.5,  1. ]], dtype=float32)
    """
    name = "layernorm"
    arrays = Arrays(name)
    x_, weight_ = arrays.read("x", x), arrays.read("weight", weight)
    bias_ = None if bias is None else arrays.read("bias", bias)
    residual_ = None if residual is None else arrays.read("residual", residual)
    dtype = norm.validate(name, x_, weight_, bias_, residual=residual_)
    statistics = checks.computing_dtype(dtype)
    eps = checks.number(name, "eps", eps, above=0.0)
    return_stats = checks.flag(name, "return_stats", return_stats)
    has_sum = checks.flag(name, "return_sum", return_sum) and residual_ is not None
    out_, residual_out_ = norm.outs(name, arrays, x_, has_sum, out, residual_out)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))
    rows, cols = math.prod(x_.shape[:-1]), x_.shape[-1]

    def normalise(
        on: Device | None,
        new: New,
        x: Array,
        weight: Array,
        bias: Array | None,
        residual: Array | None,
        y: Array | None,
        s: Array | None,
    ) -> tuple[Array, Array | None, Array, Array]:
        y = new(x.shape, x.dtype, "y") if y is None else y
        s = new(x.shape, x.dtype, "s") if has_sum and s is None else s
        mean, rstd = (new(x.shape[:-1], statistics, what) for what in ("mean", "rstd"))
        host_function("layernorm.forward", on, choice.backend)(
            as_rows(x),
            weight,
            bias,
            None if residual is None else as_rows(residual),
            as_rows(y),
            None if s is None else as_rows(s),
            mean.reshape(-1),
            rstd.reshape(-1),
            eps=eps,
        )
        return y, s, mean, rstd

    def compute(on: Device | None) -> tuple[Array, Array | None, Array, Array]:
        if choice.backend == "reference":
            from gpu_ops.reference import layernorm as reference

            y, *rest = reference.layernorm(
                x_, weight_, bias_, eps=eps, residual=residual_, return_sum=has_sum, return_stats=True
            )
            s = rest[0] if has_sum else None
            for target, value in ((out_, y), (residual_out_, s)):
                if target is not None:
                    target[...] = value
            return y, s, rest[-2], rest[-1]
        return normalise(on, arrays.new, x_, weight_, bias_, residual_, out_, residual_out_)

    def run() -> Any:
        with arrays.on(choice) as on:
            y, s, *stats = compute(on)
            return norm.returned(
                arrays.give(y) if out is None else out,
                arrays.give(s) if s is not None and residual_out is None else residual_out,
                *(map(arrays.give, stats) if return_stats else ()),
            )

    def again() -> Callable[..., Any]:
        new = Arrays(name).new

        def layernorm(
            x: Array,
            weight: Array,
            bias: Array | None = None,
            *,
            residual: Array | None = None,
            out: Array | None = None,
            residual_out: Array | None = None,
            **_: Any,
        ) -> Any:
            y, s, *stats = normalise(None, new, x, weight, bias, residual, out, residual_out)
            return norm.returned(y, s, *(stats if return_stats else ()))

        return layernorm

    return Plan(
        name,
        choice,
        lambda: f"{rows} rows of {cols} {dtype}",
        lambda: norm.config(choice, rows, cols, arrays, compute),
        run,
        again=again if choice.compiled else None,
    )


@op(cuda=True)
def layernorm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    dresidual: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gradients of :func:`layernorm`.

    With ``n = (x - mean) * rstd`` and ``m = dy * weight``:
    ``dx = rstd * (m - mean(m) - n * mean(m * n)) + dresidual``,
    ``dweight = sum over rows of dy * n`` and ``dbias = sum over rows of dy``.

    Parameters
    ----------
    dy : array (..., cols)
        Gradient of y.
    x : array like dy
        What was normalised: the input, or ``s`` when the forward call had a residual.
    weight : array (cols,)
    mean, rstd : array (...)
        As returned by the forward call with ``return_stats=True``.
    dresidual : array like dy, optional
        Gradient of ``s`` from the residual stream, added to dx. The sum is the gradient of both x and residual.
    out : array like dy, optional
        Receives dx. ``out=dy`` works in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    dx : array like x
    dweight, dbias : array (cols,), float32 (float64 for float64)
        Added up in a fixed order: the same bits every time. dbias comes whether or not the forward call had a bias;
        it costs no memory traffic.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, w = np.array([[1.0, 2.0, 6.0]]), np.ones(3)
    >>> y, mean, rstd = gpu_ops.layernorm(x, w, return_stats=True)
    >>> dx, dw, db = gpu_ops.layernorm_backward(np.array([[1.0, 2.0, 3.0]]), x, w, mean, rstd)
    >>> dw.round(3), db
    (array([-0.926, -0.926,  4.166]), array([1., 2., 3.]))
    """
    name = "layernorm_backward"
    arrays = Arrays(name)
    dy_, x_, weight_ = (arrays.read(n, a) for n, a in (("dy", dy), ("x", x), ("weight", weight)))
    mean_, rstd_ = arrays.read("mean", mean), arrays.read("rstd", rstd)
    dresidual_ = None if dresidual is None else arrays.read("dresidual", dresidual)
    dtype = norm.validate(name, x_, weight_, dy=dy_, dresidual=dresidual_)
    statistics = checks.computing_dtype(dtype)
    for what, statistic in (("mean", mean_), ("rstd", rstd_)):
        checks.exactly(name, what, statistic, x_.shape[:-1], statistics)
    out_ = arrays.write("out", out, x_.shape, x_.dtype, in_place="dy", rows=True)
    choice = choose(name, device, backend, arrays, cannot=checks.cannot(dtype))
    rows, cols = math.prod(x_.shape[:-1]), x_.shape[-1]

    def differentiate(
        on: Device | None,
        new: New,
        dy: Array,
        x: Array,
        weight: Array,
        mean: Array,
        rstd: Array,
        dresidual: Array | None,
        dx: Array | None,
    ) -> tuple[Array, Array, Array]:
        dx = new(x.shape, x.dtype, "dx") if dx is None else dx
        dweight, dbias = (new(weight.shape, statistics, what) for what in ("dweight", "dbias"))
        host_function("layernorm.backward", on, choice.backend)(
            as_rows(dy),
            as_rows(x),
            weight,
            mean.ravel(),
            rstd.ravel(),
            None if dresidual is None else as_rows(dresidual),
            as_rows(dx),
            dweight,
            dbias,
        )
        return dx, dweight, dbias

    def compute(on: Device | None) -> tuple[Array, Array, Array]:
        if choice.backend == "reference":
            from gpu_ops.reference import layernorm as reference

            gradients = reference.layernorm_backward(dy_, x_, weight_, mean_, rstd_, dresidual=dresidual_)
            if out_ is not None:
                out_[...] = gradients[0]
            return gradients
        return differentiate(on, arrays.new, dy_, x_, weight_, mean_, rstd_, dresidual_, out_)

    def run() -> Any:
        with arrays.on(choice) as on:
            dx, *sums = compute(on)
            for total in sums if not rows else ():  # no kernel has run
                total.fill(0)
            return (arrays.give(dx) if out is None else out), *map(arrays.give, sums)

    def again() -> Callable[..., Any]:
        new = Arrays(name).new
        return lambda dy, x, weight, mean, rstd, *, dresidual=None, out=None, **_: differentiate(
            None, new, dy, x, weight, mean, rstd, dresidual, out
        )

    return Plan(
        name,
        choice,
        lambda: f"{rows} rows of {cols} {dtype}",
        lambda: norm.config(choice, rows, cols, arrays, compute),
        run,
        again=again if choice.compiled and rows else None,
    )
