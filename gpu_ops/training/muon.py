"""Muon: orthogonalized momentum, for the hidden matrices of a model. Other parameters use AdamW."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import is_read_only, on_cuda, overlap, overlaps_itself
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.ops.gemm.linear import linear

__all__ = ["muon_step", "orthogonalized"]

# Coefficients of x <- a x + (b s + c s^2) x with s = x x^T (Jordan et al. 2024): steep at 0, so that five iterations
# map singular values from 0.01 to 1 to between 0.68 and 1.14.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_TINY = 1e-7
_OP = "muon_step"


def muon_step(
    param: Any,
    grad: Any,
    momentum: Any,
    *,
    lr: float,
    beta: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    iterations: int = 5,
    device: str | None = None,
    backend: str | None = None,
) -> None:
    """Take one step of Muon (Jordan et al. 2024) for a matrix, in place.

    In this order::

        momentum = beta * momentum + (1 - beta) * grad
        update   = beta * momentum + (1 - beta) * grad, or momentum without nesterov
        param    = param - lr * weight_decay * param
        param    = param - lr * sqrt(max(1, rows / cols)) * orthogonalized(update)

    Parameters
    ----------
    param, grad, momentum : arrays (rows, cols), float32
        NumPy or CuPy arrays; param and momentum are changed. The first momentum is zeros.
    lr, weight_decay : float
        At least 0.
    beta : float
        In [0, 1).
    nesterov : bool
    iterations : int
        Number of iterations of ``orthogonalized``.
    device, backend : str, optional
        Device and backend of the products, see :func:`gpu_ops.linear`.

    Notes
    -----
    A step takes ``iterations * (4 m^2 n + 2 m^3)`` operations for the smaller length m and the larger n: many times
    more than AdamW, and little compared with a batch of many more tokens than m.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops.training.muon import muon_step
    >>> param, momentum = np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32)
    >>> muon_step(param, np.eye(2, dtype=np.float32), momentum, lr=0.1)
    >>> bool(abs(param[0, 0] + 0.1) < 0.03), float(param[0, 1])
    (True, 0.0)
    """
    arrays = {"param": param, "grad": grad, "momentum": momentum}
    for name, x in arrays.items():
        if getattr(x, "dtype", None) != np.float32:
            raise DTypeError(
                f"{_OP}: {name} must be a float32 array, got {getattr(x, 'dtype', type(x).__name__)}"
            )
        if x.ndim != 2 or x.shape != param.shape:
            raise ShapeError(
                f"{_OP}: {name} has shape {x.shape}, expected one matrix shape for all of {list(arrays)}"
            )
    for name in ("param", "momentum"):
        x, others = arrays[name], [other for key, other in arrays.items() if key != name]
        if is_read_only(x, x):
            raise ShapeError(f"{_OP}: {name} is read-only; pass a writable array")
        if overlaps_itself(x) or any(overlap(x, other) for other in others):
            raise ShapeError(f"{_OP}: {name} shares memory with itself or with another argument")
    lr = checks.computable(_OP, "lr", lr, "float32", low=0.0)
    beta = checks.number(_OP, "beta", beta, low=0.0)
    if beta >= 1.0:
        raise OptionError(f"{_OP}: beta must be less than 1, got {beta:g}")
    decay = lr * checks.computable(_OP, "weight_decay", weight_decay, "float32", low=0.0)
    looks_ahead = checks.flag(_OP, "nesterov", nesterov)
    new = momentum + (1 - beta) * (grad - momentum)
    update = grad + beta * (new - grad) if looks_ahead else new
    step = orthogonalized(update, iterations=iterations, device=device, backend=backend)
    momentum[...] = new
    rows, cols = param.shape
    if decay:  # 0 * inf would be NaN
        param -= decay * param
    param -= (lr * math.sqrt(max(1.0, rows / max(cols, 1)))) * step


def orthogonalized(
    x: Any, *, iterations: int = 5, device: str | None = None, backend: str | None = None
) -> Any:
    """Return the matrix with the singular vectors of ``x`` and singular values near 1, by Newton-Schulz iterations.

    Five iterations map singular values above 0.01 of the Frobenius norm to between 0.68 and 1.14; zeros stay zeros.
    """
    iterations = checks.integer("orthogonalized", "iterations", iterations, low=0)
    if not x.size:
        return x.copy()
    xp: Any = np
    if on_cuda(x):
        import cupy

        xp = cupy
    tall = x.shape[0] > x.shape[1]
    matrix = x.T if tall else x
    # in float64: a float32 sum of squares may overflow
    norm = xp.sqrt(xp.sum(xp.square(matrix, dtype=np.float64)))
    y = (matrix / (norm + _TINY)).astype(x.dtype)
    placement = {"device": device, "backend": backend}
    for _ in range(iterations):
        square = linear(y, y, **placement)
        polynomial = _B * square + _C * linear(square, square, **placement)  # square is symmetric
        y = linear(polynomial, xp.ascontiguousarray(y.T), residual=_A * y, **placement)
    return xp.ascontiguousarray(y.T) if tall else y
