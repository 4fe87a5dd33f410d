"""What a matrix product is asked for: operands as they lie in memory, and what becomes of their products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpu_ops.kernels.lower.arguments import address

__all__ = ["Epilogue", "Operand", "Pairs", "Work", "aligned", "stride"]

Array = Any  # of the device: numpy.ndarray or cupy.ndarray
Pairs = Literal["kOne", "kTwo", "kSum"]
Epilogue = Literal["kStore", "kAdd", "kGate", "kGateBackward"]

_ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """A matrix of ``rows`` x ``k``; ``across``: its memory is (k, rows). The last axis of memory is contiguous."""

    array: Array
    across: bool = False

    @property
    def rows(self) -> int:
        return int(self.array.shape[1 if self.across else 0])

    @property
    def k(self) -> int:
        return int(self.array.shape[0 if self.across else 1])


@dataclass(frozen=True)
class Work:
    """Pairs of operands alike in shape (``a``: in strides too), and what becomes of the products.

    The names of pairs and epilogues are those of ``cuda/gemm_sm80.cu``.
    """

    a: tuple[Operand, ...]
    b: tuple[Operand, ...]
    out: tuple[Array, ...]  # c, c1, h: those that the epilogue has
    pairs: Pairs = "kOne"
    epilogue: Epilogue = "kStore"
    activation: str = "silu"
    total: Array | None = None

    @property
    def dtype(self) -> Any:
        return self.a[0].array.dtype

    @property
    def is_aligned(self) -> bool:
        more = () if self.total is None else (self.total,)
        return aligned([*(o.array for o in (*self.a, *self.b)), *self.out, *more])


def aligned(arrays: Sequence[Array], to: int = _ALIGNMENT) -> bool:
    """Whether addresses, row strides and lengths of rows are all multiples of so many bytes."""
    return all(
        math.gcd(to, address(x), x.shape[1] * x.dtype.itemsize, x.strides[0] if x.shape[0] > 1 else to) == to
        for x in arrays
    )


def stride(array: Array) -> int:
    """Elements from one row to the next, of the last two axes."""
    return int(array.strides[-2]) // int(array.dtype.itemsize)
