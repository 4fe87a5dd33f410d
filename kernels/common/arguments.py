"""Properties of arrays that decide vector accesses, and forms in which arrays are passed to kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.program import Dynamic, Spec, Tensor

__all__ = [
    "ACTIVATIONS",
    "CODES",
    "DTYPES",
    "KINDS",
    "ROW_THREADS",
    "address",
    "alignment",
    "as_line",
    "as_rows",
    "codes_of",
    "float32",
    "four_axes",
    "heads_alignment",
    "power_of_two",
    "row_stride",
    "row_threads",
    "rows_of",
    "same_memory",
    "seed_argument",
    "seed_on_host",
    "side_by_side",
    "strides_of",
]

# For macros of the CUDA C++ kernels: the types of dtype.cuh (without float64) and those of activation.cuh.
DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
CODES = {"int8": "s8", "uint8": "e4m3"}  # of quantized pages, after codes_of: the types of codes.cuh
ACTIVATIONS = {"silu": "kSilu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh", "relu2": "kRelu2"}

# Sources of numbers that kernels read, as in number.cuh: by value, or from an array of this dtype.
KINDS = {"": 0, "int32": 1, "int64": 2, "float32": 3, "float64": 4}

ROW_THREADS = 512  # limit for one row
_BLOCK = 128  # threads of a block that has several rows


def codes_of(pages: Tensor) -> Tensor:
    """Pages of float8_e4m3fn as uint8 bits, which kernels take; other pages unchanged."""
    return pages.view(np.uint8) if pages.dtype.name == "float8_e4m3fn" else pages


def address(array: Tensor) -> int:
    return array.address


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two views start at the same element of the same array."""
    return a.name == b.name and a.offset == b.offset


def alignment(arrays: Sequence[Any], rows: int) -> int:
    """Bytes, at most 16, that divide the address of each of ``rows`` rows."""
    strides = [a.strides[0] for a in arrays] if rows > 1 else []
    return math.gcd(16, *map(address, arrays), *strides)


def heads_alignment(arrays: Iterable[Any]) -> int:
    """Bytes, at most 16, that divide the address of every head of (batch, seqlen, heads, head_dim) arrays."""
    divisor = 16
    for x in arrays:
        if 0 not in x.shape:
            strides = (stride for n, stride in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1)
            divisor = math.gcd(divisor, address(x), *strides)
    return divisor


def strides_of(array: Any) -> tuple[int, ...]:
    """Strides in elements; 0 where an axis has one entry."""
    pairs = zip(array.shape, array.strides, strict=True)
    return tuple(stride // array.dtype.itemsize if n > 1 else 0 for n, stride in pairs)


def four_axes(x: Tensor) -> Tensor:
    """``x`` with axes of length 1 in front, such as batch and heads."""
    return x[(None,) * (4 - x.ndim)]


def row_stride(array: Any) -> np.int64:
    """Elements from one row to the next."""
    return np.int64(array.strides[0] // array.dtype.itemsize)


def power_of_two(n: int) -> int:
    """Least power of two that is not below ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def row_threads(cols: int, each: int) -> tuple[int, int]:
    """Threads of a row, and rows of a block. A row is part of a warp, or a block.

    ``each``: columns of a thread, in rows that are not too long for a block.
    """
    threads = min(max(power_of_two(-(-cols // each)), 4), ROW_THREADS)
    return threads, _BLOCK // threads if threads <= 32 else 1


def rows_of(spec: Spec, name: str) -> Tensor:
    """View of an array as (rows, last axis)."""
    x = spec.tensor(name)
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_rows(x: Any) -> Any:
    """View of a CPU call's array as (rows, last axis), which its layout allows."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_line(x: Any) -> Any:
    """View of a CPU call's contiguous array with one axis."""
    return x if x.ndim == 1 else x.reshape(-1)


def side_by_side(arrays: Sequence[Any]) -> bool:
    """Whether the rows of these (rows, cols) arrays are contiguous, so that they form one long row."""
    return all(a.shape[0] == 1 or a.strides[0] == a.shape[1] * a.dtype.itemsize for a in arrays)


def seed_argument(seed: Tensor | None) -> Tensor | Dynamic:
    """Seed as GPU kernels take it: an array of one element, or the number of each call."""
    return Dynamic("seed", np.dtype(np.uint64)) if seed is None else seed.reshape(1).view(np.uint64)


def seed_on_host(seed: Any) -> Any:
    """Seed of a CPU call, an array or a number, as an array of one uint64."""
    return np.asarray(seed).reshape(1).astype(np.uint64)


def float32(value: float) -> np.float32:
    """``value`` rounded to float32; larger values become the largest float32."""
    largest = float(np.finfo(np.float32).max)
    return np.float32(min(max(value, -largest), largest))


def epsilon(eps: float) -> np.float32:
    """``eps`` rounded, but at least the smallest float32: with 1 / sqrt(0) a row of zeros would be NaN."""
    return float32(max(eps, 2.0**-149))
