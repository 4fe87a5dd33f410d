"""What RMSNorm and LayerNorm check and say alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.device import Device
from gpu_ops.core.dispatch import Choice
from gpu_ops.errors import OptionError, ShapeError

__all__ = ["config", "outs", "returned", "validate"]


def validate(name: str, x: Array, weight: Array, bias: Array | None = None, **like_x: Array | None) -> str:
    """Shapes and dtypes; the dtype's name."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ShapeError(f"{name}: x has shape {x.shape}; the last axis is normalised and must not be empty")
    checks.exactly(name, "weight", weight, x.shape[-1:])
    if bias is not None:
        checks.exactly(name, "bias", bias, x.shape[-1:])
    for other, array in like_x.items():
        if array is not None:
            checks.exactly(name, other, array, x.shape)
    return checks.float_dtype(name, x=x, weight=weight, bias=bias, **like_x)


def outs(
    name: str, arrays: Arrays, x: Array, has_sum: bool, out: Any, residual_out: Any
) -> tuple[Array | None, Array | None]:
    """Writable views of ``out``, which may be x, and of ``residual_out``, which may be residual."""
    if residual_out is not None and not has_sum:
        raise OptionError(
            f"{name}: residual_out receives x + residual; pass residual= too, and return_sum=True, or omit it"
        )
    return (
        arrays.write("out", out, x.shape, x.dtype, in_place="x", rows=True),
        arrays.write("residual_out", residual_out, x.shape, x.dtype, in_place="residual", rows=True),
    )


def returned(*results: Any) -> Any:
    """Those that are not None: one alone, or a tuple."""
    given = tuple(x for x in results if x is not None)
    return given[0] if len(given) == 1 else given


def config(
    choice: Choice, rows: int, cols: int, arrays: Arrays, compute: Callable[[Device | None], Any]
) -> str:
    """What :func:`gpu_ops.explain` says of how it runs."""
    if choice.device != "cpu":
        return arrays.launches(choice, compute)
    if choice.backend == "reference":
        return "NumPy, float64"
    from gpu_ops.kernels.numba_cpu import rmsnorm as kernels

    return kernels.config(rows, cols)
