"""Arguments of a GEMM: operand views and epilogue.

A GEMM is ``C = A B^T`` with m rows of A, n rows of B, and k columns of both. Sums are float32, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpu_ops.kernels.program import Tensor

__all__ = [
    "Epilogue",
    "Gemm",
    "Operand",
    "Pairs",
    "aligned",
    "gated",
    "gated_backward",
    "linear",
    "product",
    "stride",
    "sum_of_products",
    "two_products",
]

Pairs = Literal["kOne", "kTwo", "kSum"]
Epilogue = Literal["kStore", "kAdd", "kLinear", "kGate", "kGateKeep", "kGateBackward"]

_ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """A matrix of ``rows`` x ``k``; ``across``: its memory is (k, rows). The last axis of memory is contiguous."""

    array: Tensor
    across: bool = False

    @property
    def rows(self) -> int:
        return self.array.shape[1 if self.across else 0]

    @property
    def k(self) -> int:
        return self.array.shape[0 if self.across else 1]


@dataclass(frozen=True)
class Gemm:
    """One or two pairs of operands of equal shape, and an epilogue. ``a`` has equal strides too.

    With kGateBackward the second pair is gate and up, of the results' shape and with equal strides.

    The names of pairs and epilogues are those of ``gemm_sm80.cu``.
    """

    a: tuple[Operand, ...]
    b: tuple[Operand, ...]
    out: tuple[Tensor, ...]
    """c, c1, h: those that the epilogue writes. If there are several, the last two have equal strides."""
    pairs: Pairs = "kOne"
    epilogue: Epilogue = "kStore"
    activation: str = "silu"
    total: Tensor | None = None
    residual: Tensor | None = None
    """Array of the shape of c."""
    bias: Tensor | None = None
    """One row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.a[0].array.dtype

    @property
    def is_aligned(self) -> bool:
        more = [x for x in (self.total, self.residual, self.bias) if x is not None]
        return aligned([*(o.array for o in (*self.a, *self.b)), *self.out, *more])


def product(a: Operand, b: Operand, out: Tensor, *, total: Tensor | None = None) -> Gemm:
    """``out = a b^T``, plus ``total`` (float32, float64 for float64), which may be ``out`` itself."""
    return Gemm((a,), (b,), (out,), epilogue=_adding(total), total=total)


def linear(x: Operand, w: Operand, y: Tensor, *, residual: Tensor | None, bias: Tensor | None) -> Gemm:
    """``y = x w^T``, plus the residual (like y) and the bias (one row) if there are any."""
    if residual is None and bias is None:
        return product(x, w, y)
    return Gemm((x,), (w,), (y,), epilogue="kLinear", residual=residual, bias=bias)


def two_products(a: tuple[Operand, ...], b: tuple[Operand, ...], out: tuple[Tensor, ...]) -> Gemm:
    """``out[i] = a[i] b[i]^T`` for i = 0, 1, of equal shapes, in one launch."""
    return Gemm(a, b, out, "kTwo")


def sum_of_products(
    a: tuple[Operand, ...], b: tuple[Operand, ...], out: Tensor, *, total: Tensor | None = None
) -> Gemm:
    """``out = a[0] b[0]^T + a[1] b[1]^T``, plus ``total``, summed before it is rounded."""
    return Gemm(a, b, (out,), "kSum", _adding(total), total=total)


def gated(
    x: Operand, w_gate: Operand, w_up: Operand, h: Tensor, *, activation: str, kept: tuple[Tensor, ...] = ()
) -> Gemm:
    """``h = act(x w_gate^T) * (x w_up^T)``. Gate and up are not stored, or stored in ``kept`` with equal strides."""
    epilogue: Epilogue = "kGateKeep" if kept else "kGate"
    return Gemm((x,), (w_gate, w_up), (h, *kept), epilogue=epilogue, activation=activation)


def gated_backward(
    dy: Operand, w_down: Operand, kept: tuple[Tensor, Tensor], out: tuple[Tensor, ...], *, activation: str
) -> Gemm:
    """dgate, dup and ``h = act(gate) * up`` from ``kept`` gate and up, and ``dh = dy w_down^T``, which is not stored.

    ``out``: dgate and dup, which may be gate and up, and h.
    """
    gate, up = map(Operand, kept)
    return Gemm((dy, gate), (w_down, up), out, epilogue="kGateBackward", activation=activation)


def _adding(total: Tensor | None) -> Epilogue:
    return "kStore" if total is None else "kAdd"


def aligned(arrays: Iterable[Tensor], to: int = _ALIGNMENT) -> bool:
    """Whether addresses, row strides and lengths of rows are all multiples of ``to`` bytes."""
    return all(
        math.gcd(to, x.address, x.shape[1] * x.itemsize, x.strides[0] if x.shape[0] > 1 else to) == to
        for x in arrays
    )


def stride(array: Tensor) -> int:
    """Elements from one row to the next, of the last two axes."""
    return array.strides[-2] // array.itemsize
