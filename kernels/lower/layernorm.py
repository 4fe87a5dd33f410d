"""LayerNorm on the GPU: one of the two norms of ``norm.py``."""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.lower import norm

__all__ = ["backward", "forward"]


def forward(
    device: Any,
    backend: str,
    x: Any,
    weight: Any,
    bias: Any | None,
    residual: Any | None,
    y: Any,
    s: Any | None,
    mean: Any,
    rstd: Any,
    *,
    eps: float,
) -> None:
    """Fills ``y``, ``mean``, ``rstd`` and, with ``residual``, ``s = x + residual``. ``y`` may be ``x``."""
    norm.forward(device, backend, "layernorm", x, weight, bias, residual, y, s, mean, rstd, eps=eps)


def backward(
    device: Any,
    backend: str,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    dresidual: Any | None,
    dx: Any,
    dweight: Any,
    dbias: Any,
) -> None:
    """Fills ``dx``, which may be ``dy``, ``dweight`` and ``dbias``; with no rows nothing runs."""
    norm.backward(device, backend, "layernorm", dy, x, weight, mean, rstd, dresidual, dx, dweight, dbias)
