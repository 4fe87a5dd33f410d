"""Building blocks of the benches: fields of a Case, data, and calls of NumPy and torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from perf.case import Call, Inputs

# ---- fields of a Case, to be passed as ``Case(..., **made_by(...), **calls(...))`` -------------------------


def made_by(
    build: Callable[..., Inputs], size: Sequence[Any], small: Sequence[Any], *more: Any
) -> dict[str, Any]:
    """Fields ``make`` and ``make_small``: ``build(rng, *size, *more)`` and ``build(rng, *small, *more)``."""
    return {
        "make": lambda rng: build(rng, *size, *more),
        "make_small": lambda rng: build(rng, *small, *more),
    }


def backends(ours: Callable[..., Call]) -> dict[str, Any]:
    """Fields ``ours`` and ``numba``, where ``ours(inputs, **how)`` passes ``how`` on to the op."""
    return {"ours": ours, "numba": functools.partial(ours, backend="numba")}


def calls(
    function: Callable[..., Any],
    definition: Callable[..., Any],
    names: Sequence[str],
    keywords: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Fields ``ours``, ``numba`` and ``reference`` of an op that takes the inputs ``names`` by position, those of
    ``keywords`` by keyword, and ``options``."""

    def bind(call: Callable[..., Any], x: Inputs, **more: Any) -> Call:
        arrays = {name: x[name] for name in keywords}
        return functools.partial(call, *(x[name] for name in names), **arrays, **options, **more)

    return backends(functools.partial(bind, function)) | {
        "reference": lambda x, precision: bind(definition, x, precision=precision)()
    }


def normal(
    rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any], scale: float = 1.0
) -> np.ndarray:
    """Standard-normal data. Large arrays repeat a block of 4M values, which does not change the timing: drawing
    700 MB of weights would take longer than the measurement."""
    size = int(np.prod(shape))
    block = rng.standard_normal(min(size, 1 << 22), dtype=np.float32)
    if scale != 1.0:
        block *= np.float32(scale)
    return np.resize(block.astype(dtype), shape)


def sample_rows(count: int, whole: Sequence[str], x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """Sample (``Case.sample``) for ops with independent rows: the last rows. The inputs ``whole`` have no rows."""
    rows = slice(-count, None)
    part = {name: array if name in whole else array[rows] for name, array in x.items()}
    return part, tuple(r[rows] for r in result) if isinstance(result, tuple) else result[rows]


def on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def to_float32(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Convert to float32: NumPy has no fast 16-bit arithmetic, so a careful user computes in float32."""
    return tuple(array.astype(np.float32, copy=False) for array in arrays)


def torch_view(array: Any) -> Any:
    """torch tensor on the same memory, without a copy."""
    import torch

    if str(array.dtype) == "bfloat16":  # neither NumPy nor DLPack passes bfloat16 on
        return torch_view(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


def torch_gradient(function: Callable[..., Any], x: Inputs, names: Sequence[str], dy: str = "dy") -> Call:
    """Gradient of ``function(*tensors)`` by autograd; its forward pass is not timed."""
    import torch

    leaves = [torch_view(x[name]).requires_grad_() for name in names]
    y = function(*leaves)
    return functools.partial(torch.autograd.grad, y, leaves, torch_view(x[dy]), retain_graph=True)
