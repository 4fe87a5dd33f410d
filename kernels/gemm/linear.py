"""Launch of a linear layer on each backend, as matrix products (:mod:`.gemm`).

forward     y = x weight^T + bias + residual      one product; the sum is rounded once
backward    dx = dy weight
            dweight (+)= dy^T x                   float32, in place
            dbias (+)= the rows of dy, added up   in chunks of a size that follows from the shape: the same bits on
                                                  every device
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, as_rows, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.gemm.args import Gemm, Operand, aligned, linear, product, stride
from gpu_ops.kernels.gemm.gemm import launch_numba, launch_raw
from gpu_ops.kernels.gemm.sum import add_up
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["Multiply", "SumRows", "sum_rows_numba", "sum_rows_raw", "variants"]

Multiply: TypeAlias = "Callable[[Builder, Gemm], None]"
SumRows: TypeAlias = "Callable[[Builder, Tensor, Tensor, bool], None]"

_THREADS = 256
# Rows that one thread adds up, and limit of the parts of a column: both sums stay short.
_ROWS, _PARTS = 64, 256


@lowers("linear", "cpu")
def _forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.gemm.cpu import linear as kernels

    if _without_terms(spec, builder):
        return

    def run(views: Mapping[str, Any]) -> None:
        residual = views.get("residual")
        kernels.forward(
            as_rows(views["x"]),
            views["weight"],
            views.get("bias"),
            None if residual is None else as_rows(residual),
            as_rows(views["y"]),
        )

    builder.call(run, "one matrix product", kernels.scratch_bytes(*_sizes(spec))[0])


@lowers("linear_backward", "cpu")
def _backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.gemm.cpu import linear as kernels

    added = spec["added"]

    def multiply(views: Mapping[str, Any]) -> None:
        dy = as_rows(views["dy"])
        if "dx" in views:
            kernels.backward_input(dy, views["weight"], as_rows(views["dx"]))
        if "dweight" in views:
            kernels.backward_weight(dy, as_rows(views["x"]), views["dweight"], add="dweight" in added)

    def sum_rows(views: Mapping[str, Any]) -> None:
        kernels.sum_rows(as_rows(views["dy"]), views["dbias"], add="dbias" in added)

    if _has_products(spec, builder):
        both = spec.get("dx") is not None and spec.get("dweight") is not None
        text, wanted = "two matrix products" if both else "one matrix product", ("dx", "dweight")
        sizes = zip(wanted, kernels.scratch_bytes(*_sizes(spec))[1:], strict=True)
        builder.call(multiply, text, max(n for name, n in sizes if spec.get(name) is not None))
    if _has_rows(spec, builder):
        builder.call(sum_rows, "the sum of the rows of dy")


def _sizes(spec: Spec) -> tuple[int, int, int, str]:
    """Tokens, the weight's rows and columns, dtype."""
    x, (rows, cols) = rows_of(spec, "x"), spec.tensor("weight").shape
    return len(x), rows, cols, x.dtype.name


def _forward(spec: Spec, builder: Builder, multiply: Multiply) -> None:
    if _without_terms(spec, builder):
        return
    bias, residual = spec.get("bias"), spec.get("residual")
    multiply(
        builder,
        linear(
            Operand(rows_of(spec, "x")),
            Operand(spec.tensor("weight")),
            rows_of(spec, "y"),
            residual=None if residual is None else rows_of(spec, "residual"),
            bias=None if bias is None else bias[None],
        ),
    )


def _backward(spec: Spec, builder: Builder, multiply: Multiply, sum_rows: SumRows) -> None:
    dy, x, weight = rows_of(spec, "dy"), rows_of(spec, "x"), spec.tensor("weight")
    added, has_products = spec["added"], _has_products(spec, builder)
    if has_products and spec.get("dx") is not None:
        multiply(builder, product(Operand(dy), Operand(weight, True), rows_of(spec, "dx")))
    if has_products and (dweight := spec.get("dweight")) is not None:
        total = dweight if "dweight" in added else None
        multiply(builder, product(Operand(dy, True), Operand(x, True), dweight, total=total))
    if _has_rows(spec, builder):
        sum_rows(builder, dy, spec.tensor("dbias")[None], "dbias" in added)


def sum_rows_raw(builder: Builder, x: Tensor, total: Tensor, add: bool) -> None:
    """Store the sum of the rows of x in ``total`` (1, columns). ``add``: add to its contents."""
    rows, cols = x.shape
    each = max(_ROWS, -(-rows // _PARTS))
    parts = builder.scratch((-(-rows // each), 1, cols), np.float32, "parts of sums")
    width = 4 if aligned([x], 4 * x.itemsize) else 1
    args = (x, parts, np.int64(stride(x)), np.int32(rows), np.int32(cols), np.int32(each))
    grid = (-(-cols // (width * _THREADS)), len(parts), 1)
    builder.launch(_sums_kernel(x.dtype.name, width), grid, (_THREADS, 1, 1), args)
    add_up(builder, parts, total, residual=total if add else None)


def sum_rows_numba(builder: Builder, x: Tensor, total: Tensor, add: bool) -> None:
    from gpu_ops.kernels.gemm.numba_cuda import column_sums as twin

    grid = (-(-x.shape[1] // twin.THREADS), 1, 1)
    builder.launch(twin.kernel(x.dtype.name, add), grid, (twin.THREADS, 1, 1), (x, total))


lowers("linear", "raw")(partial(_forward, multiply=launch_raw))
lowers("linear", "numba")(partial(_forward, multiply=launch_numba))
lowers("linear_backward", "raw")(partial(_backward, multiply=launch_raw, sum_rows=sum_rows_raw))
lowers("linear_backward", "numba")(partial(_backward, multiply=launch_numba, sum_rows=sum_rows_numba))


def _without_terms(spec: Spec, builder: Builder) -> bool:
    """Whether y is empty, or all zeros because sums have no terms and nothing is added."""
    if spec.tensor("y").size == 0:
        return True
    if spec.tensor("x").size or spec.get("bias") is not None or spec.get("residual") is not None:
        return False
    builder.zero(spec.tensor("y"))
    return True


def _has_products(spec: Spec, builder: Builder) -> bool:
    """Whether no axis is empty. The gradients are zero otherwise, and gradients that are added to stay unchanged."""
    if all(spec.tensor(name).size for name in ("dy", "x", "weight")):
        return True
    for name in ("dx", "dweight"):
        grad = spec.get(name)
        if grad is not None and name not in spec["added"]:
            builder.zero(grad)
    return False


def _has_rows(spec: Spec, builder: Builder) -> bool:
    """Whether there is a dbias to compute."""
    if spec.get("dbias") is None or spec.tensor("dy").size:
        return spec.get("dbias") is not None
    if "dbias" not in spec["added"]:
        builder.zero(spec.tensor("dbias"))
    return False


def _sums_kernel(dtype: str, width: int) -> CudaKernel:
    return CudaKernel("gemm/column_sums", "column_sums", (("DTYPE", DTYPES[dtype]), ("WIDTH", width)))


def variants(arch: str) -> Iterator[Variant]:
    """Sums of rows; the products are those of :mod:`.gemm`."""
    for dtype in DTYPES:
        for width in (1, 4):
            if dtype != "bfloat16" or int(arch[3:].rstrip("af")) >= 80:
                yield Variant(_sums_kernel(dtype, width), _THREADS)
