"""Cases that RMSNorm and LayerNorm share: forward, forward with a residual, backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from perf.build import backends, calls, made_by, normal, sample_rows, to_float32, torch_gradient, torch_view
from perf.case import DTYPES, Call, Case, Inputs

HIDDEN = 4096  # Llama-3-8B
SMALL = (37, 512)
SAMPLED = 32

Shape = tuple[int, int]
"""rows, hidden"""


@dataclass(frozen=True)
class Norm:
    op: str
    parameters: tuple[str, ...]
    """Inputs after x: weight, and bias for LayerNorm."""
    eps: float
    centred: bool
    """Whether the mean is subtracted."""
    functions: tuple[Callable[..., Any], Callable[..., Any]]
    """Forward and backward of gpu_ops."""
    definitions: tuple[Callable[..., Any], Callable[..., Any]]
    """The same of gpu_ops.reference."""
    return_stats: str
    """The option that returns what backward needs."""
    torch_name: str
    flops: tuple[float, float]
    """Per element, forward and backward."""

    def torch(self) -> Callable[..., Any]:
        """torch's own norm, ``(rows, *parameters) -> y``."""
        from torch.nn import functional

        function, eps = getattr(functional, self.torch_name), self.eps
        return lambda rows, weight, *bias: function(rows, weight.shape, weight, *bias, eps=eps)


def forward(norm: Norm, shape: Shape, dtype: str, residual: bool = False) -> Case:
    named = ("residual",) if residual else ()
    names = ("x", *norm.parameters)
    return Case(
        op=norm.op,
        name="forward + residual" if residual else "forward",
        shape="{} x {}".format(*shape),
        dtype=dtype,
        flops=(norm.flops[0] + residual) * shape[0] * shape[1],
        bytes=traffic(shape, dtype, matrices=4 if residual else 2),
        **made_by(data, shape, SMALL, DTYPES[dtype], names + named),
        **calls(norm.functions[0], norm.definitions[0], names, named, eps=norm.eps),
        naive=functools.partial(naive_call, norm),
        torch=functools.partial(torch_call, norm),
        sample=functools.partial(sample_rows, SAMPLED, norm.parameters),
    )


def backward(norm: Norm, shape: Shape, dtype: str) -> Case:
    def gradient(functions: Any, x: Inputs, **options: Any) -> Call:
        with_stats = {"eps": norm.eps, norm.return_stats: True}
        _, *stats = functions[0](x["x"], x["weight"], **with_stats, **options)
        return functools.partial(functions[1], x["dy"], x["x"], x["weight"], *stats, **options)

    def naive(x: Inputs) -> Call:
        mean, rstd = statistics(norm, x["x"].astype(np.float32, copy=False))
        return functools.partial(naive_backward, x["dy"], x["x"], x["weight"], mean, rstd)

    names = ("x", *norm.parameters)
    return Case(
        op=norm.op,
        name="backward",
        shape="{} x {}".format(*shape),
        dtype=dtype,
        flops=norm.flops[1] * shape[0] * shape[1],
        bytes=traffic(shape, dtype, matrices=3),
        **made_by(data, shape, SMALL, DTYPES[dtype], (*names, "dy")),
        **backends(functools.partial(gradient, norm.functions)),
        reference=lambda x, precision: gradient(norm.definitions, x, precision=precision)(),
        naive=naive,
        torch=lambda x: torch_gradient(norm.torch(), x, names),
        backward=True,
    )


def traffic(shape: Shape, dtype: str, *, matrices: int) -> float:
    """Bytes of all (rows, hidden) matrices read or written, and of the weight."""
    rows, hidden = shape
    return DTYPES[dtype].itemsize * float(matrices * rows * hidden + hidden)


def data(
    rng: np.random.Generator, rows: int, hidden: int, dtype: np.dtype[Any], names: tuple[str, ...]
) -> Inputs:
    return {
        name: normal(rng, (hidden,) if name in ("weight", "bias") else (rows, hidden), dtype)
        for name in names
    }


def naive_call(norm: Norm, x: Inputs, out: np.ndarray | None = None) -> Call:
    def call() -> Any:
        total = x["x"] + x["residual"] if "residual" in x else x["x"]
        y = naive_forward(norm, total, *(x[name] for name in norm.parameters), out=out)
        return (y, total) if "residual" in x else y

    return call


def naive_forward(norm: Norm, x: np.ndarray, *parameters: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    dtype, original = x.dtype, x
    x, weight, *bias = to_float32(x, *parameters)
    into = out if x is original else None
    if norm.centred:
        x = into = x - x.mean(axis=-1, keepdims=True)
    mean_square = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[-1])
    y = np.multiply(x, 1 / np.sqrt(mean_square + np.float32(norm.eps)), out=into)
    y *= weight
    if bias:
        y += bias[0]
    if out is not None and out is not y:
        out[...] = y
        return out
    return y.astype(dtype, copy=False)


def statistics(norm: Norm, x: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Mean, None where it is not subtracted, and rstd."""
    if norm.centred:
        return x.mean(axis=-1), 1 / np.sqrt(x.var(axis=-1) + np.float32(norm.eps))
    return None, 1 / np.sqrt(np.einsum("ij,ij->i", x, x) / np.float32(x.shape[-1]) + np.float32(norm.eps))


def naive_backward(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, mean: np.ndarray | None, rstd: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Gradients: dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat)), the first mean for LayerNorm only;
    dweight = sum over rows of dy xhat; dbias, for LayerNorm only, = sum over rows of dy."""
    dtype = x.dtype
    dy, x, weight = to_float32(dy, x, weight)
    xhat = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    sums = [np.einsum("ij,ij->j", dy, xhat), *([] if mean is None else [dy.sum(axis=0)])]
    wdy = dy * weight
    xhat *= np.einsum("ij,ij->i", wdy, xhat)[:, None] / np.float32(x.shape[-1])
    if mean is not None:
        wdy -= wdy.mean(axis=-1, keepdims=True)
    wdy -= xhat
    wdy *= rstd[:, None]
    return wdy.astype(dtype, copy=False), *sums


def torch_call(norm: Norm, x: Inputs) -> Call:
    tensors = {name: torch_view(array) for name, array in x.items()}
    function, rows, residual = norm.torch(), tensors["x"], tensors.get("residual")
    parameters = [tensors[name] for name in norm.parameters]

    def call() -> Any:
        total = rows if residual is None else rows + residual
        y = function(total, *parameters)
        return y if residual is None else (y, total)

    return call
