"""RMSNorm on the GPU: one of the two norms of ``norm.py``."""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.lower import norm

__all__ = ["backward", "forward"]


def forward(
    device: Any,
    backend: str,
    x: Any,
    weight: Any,
    residual: Any | None,
    y: Any,
    s: Any | None,
    rstd: Any,
    *,
    eps: float,
    weight_offset: float,
    casting: str,
) -> None:
    """Fills ``y``, ``rstd`` and, with ``residual``, ``s = x + residual``. ``y`` may be ``x``."""
    arrays = (x, weight, None, residual, y, s, None, rstd)
    options: dict[str, Any] = {"weight_offset": weight_offset, "llama": casting == "llama"}
    norm.forward(device, backend, "rmsnorm", *arrays, eps=eps, **options)


def backward(
    device: Any,
    backend: str,
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    dresidual: Any | None,
    dx: Any,
    dweight: Any,
    *,
    weight_offset: float,
    casting: str,
) -> None:
    """Fills ``dx``, which may be ``dy``, and ``dweight``; with no rows nothing runs, and the caller fills it."""
    arrays = (dy, x, weight, None, rstd, dresidual, dx, dweight, None)
    options: dict[str, Any] = {"weight_offset": weight_offset, "llama": casting == "llama"}
    norm.backward(device, backend, "rmsnorm", *arrays, **options)
