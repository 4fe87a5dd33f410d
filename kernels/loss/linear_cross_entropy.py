"""Launch of the cross-entropy of a linear layer on each backend: a chunk of rows at a time, in its logits' memory.

logits     x weight^T + bias                 float32, by the products of :mod:`gpu_ops.kernels.gemm.gemm`
losses     and dlogits, over the logits      by :mod:`.cross_entropy`: rounded to the dtype of the products
dx         dlogits weight
dweight    (+)= dlogits^T x                  float32, in place; dbias likewise
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import as_line, as_rows, rows_of
from gpu_ops.kernels.gemm.args import Operand, linear, product
from gpu_ops.kernels.gemm.gemm import launch_numba, launch_raw
from gpu_ops.kernels.gemm.linear import Multiply, SumRows, sum_rows_numba, sum_rows_raw
from gpu_ops.kernels.loss import cross_entropy as losses
from gpu_ops.kernels.loss.cross_entropy import LossRows, Total
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers
from gpu_ops.kernels.weights.packed import ROWS, packed_weight, pieces, weight_array

__all__ = ["chunks"]

# Logits: on the CPU as much as its last cache holds, on a GPU a size that fits in addition to a model.
_CPU_BYTES, _GPU_BYTES = 16 << 20, 128 << 20
# Rows: with fewer the products, which read the weight once per chunk, wait for memory; 1024 rows fill a GPU.
_CPU_ROWS, _GPU_ROWS = (64, 1024), (1024, 1 << 31)
_PACKED_ROWS = 512, 1024  # on the CPU, where each chunk unpacks the weight anew
_STEP = 64  # rows
_MOST_CHUNKS = 256  # a program for a GPU holds the launches of each


def chunks(spec: Spec, nbytes: int, least: int, most: int) -> Iterator[slice]:
    """Rows of each chunk; by default chunks have about equal length, and their logits take up to ``nbytes``."""
    rows, chunk = rows_of(spec, "x").shape[0], spec["chunk"]
    if not chunk:
        row_bytes = max(spec["vocab"], 1) * spec.tensor("loss").itemsize
        by_bytes = max(nbytes // row_bytes // _STEP * _STEP, least)
        parts = max(1, -(-rows // min(by_bytes, most)))
        chunk = -(-rows // (parts * _STEP)) * _STEP
    chunk = max(chunk, -(-rows // _MOST_CHUNKS), 1)
    for start in range(0, rows, chunk):
        yield slice(start, min(start + chunk, rows))


def _has_logits(spec: Spec, builder: Builder) -> bool:
    """Whether there are logits. Otherwise gradients are zero, and gradients that are added to stay unchanged."""
    if rows_of(spec, "x").shape[0] and spec["vocab"]:
        return True
    for name in ("dx", "dweight", "dbias"):
        if spec.get(name) is not None and name not in spec["added"]:
            builder.zero(spec.tensor(name))
    return False


# ---- CPU ---------------------------------------------------------------------------------------------------


@lowers("linear_cross_entropy", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.common.cpu.dtype import aligned_empty
    from gpu_ops.kernels.gemm.cpu import linear as sums
    from gpu_ops.kernels.loss.cpu.linear_cross_entropy import PIECE, Chunks, PackedWeights, scratch_bytes

    is_packed = spec["packed_weight"] is not None
    limits = _PACKED_ROWS if is_packed and spec["vocab"] > PIECE else _CPU_ROWS
    parts, options_of = list(chunks(spec, _CPU_BYTES, *limits)), losses.options_cpu(spec)
    reduction = spec["reduction"]
    longest = max((c.stop - c.start for c in parts), default=0)
    sum_dtype, grads, added = spec.tensor("loss").dtype, spec.get("dx") is not None, spec["added"]
    has_logits = _has_logits(spec, builder)

    def run(views: Mapping[str, Any]) -> None:
        x, targets = as_rows(views["x"]), as_line(views["targets"]).astype(np.int64, copy=False)
        loss = as_line(views["loss"]) if reduction == "none" else np.empty(len(x), sum_dtype)
        lse = as_line(views["lse"]) if "lse" in views else np.empty(len(x), sum_dtype)
        factor = losses.factor_cpu(spec, views, targets)
        logits = aligned_empty((longest, spec["vocab"]), sum_dtype)
        weights: Iterable[tuple[slice, Any]] = [(slice(0, spec["vocab"]), views["weight"])]
        if is_packed:
            weights = PackedWeights(views["weight"], spec["vocab"], x.dtype)
        of = Chunks(weights, views.get("bias"), logits, options_of(views))
        dloss = _dloss_of_rows(spec, views, factor, lse) if grads else None
        for c in parts:
            if dloss is None or not has_logits:
                of.forward(x[c], targets[c], loss[c], lse[c])
                continue
            dlogits = of.forward_backward(dloss[c], x[c], targets[c], loss[c], lse[c])
            of.backward_input(dlogits, as_rows(views["dx"])[c])
            if "dweight" in views:
                sums.backward_weight(dlogits, x[c], views["dweight"], add=c.start > 0 or "dweight" in added)
            if "dbias" in views:
                sums.sum_rows(dlogits, views["dbias"], add=c.start > 0 or "dbias" in added)
        if reduction != "none":
            views["loss"][...] = np.sum(loss, dtype=np.float64) * factor

    kinds: dict[str, Any] = {"dtype": spec.tensor("x").dtype, "wide": sum_dtype, "grads": grads}
    scratch = scratch_bytes(longest, spec["rows"], spec["cols"], **kinds)
    if packed := spec["packed_weight"]:
        scratch += (
            min(spec["rows"], PIECE) * spec["cols"] * spec.tensor("x").itemsize * (1 + packed.reordered)
        )
    builder.call(run, f"{len(parts)} x {longest} rows", scratch + losses.row_scratch(spec))


def _dloss_of_rows(spec: Spec, views: Mapping[str, Any], factor: float, like: Any) -> Any:
    dloss = views.get("dloss", spec["dloss"])
    if np.ndim(dloss):
        return as_line(dloss)
    return np.broadcast_to(np.asarray(float(dloss) * factor, like.dtype), like.shape)


# ---- GPUs --------------------------------------------------------------------------------------------------


Weights = Callable[[], Iterable[tuple[slice, Tensor]]]
"""Rows of the vocabulary and their weights, all of them in order. A piece is valid until the next one."""


@dataclass(frozen=True)
class _Backend:
    name: str
    losses: losses.Kernels
    multiply: Multiply
    sum_rows: SumRows


def _gpu(spec: Spec, builder: Builder, by: _Backend) -> None:
    x, loss, lse, grads = rows_of(spec, "x"), spec.tensor("loss"), spec.get("lse"), spec.get("dx") is not None
    of_rows = loss if spec["reduction"] == "none" else builder.empty(x.shape[:1], loss.dtype, "row losses")
    if lse is None:
        lse = builder.empty(x.shape[:1], loss.dtype, "lse of rows") if grads else of_rows
    all_rows = LossRows(x, spec.tensor("targets").ravel(), of_rows.ravel(), lse.ravel())
    parts = list(chunks(spec, _GPU_BYTES, *_GPU_ROWS))
    if _has_logits(spec, builder):
        _launch_chunks(spec, builder, by, all_rows, parts)
    elif len(x):
        by.losses.forward(spec, builder, replace(all_rows, logits=x[:, :0]))
    if spec["reduction"] != "none":
        by.losses.total(spec, builder, Total.of_losses(spec, all_rows.loss), loss)


def _launch_chunks(spec: Spec, builder: Builder, by: _Backend, rows: LossRows, parts: list[slice]) -> None:
    bias, dx, dbias = (spec.get(name) for name in ("bias", "dx", "dbias"))
    x, sum_dtype, added = rows.logits, rows.loss.dtype, spec["added"]
    weights = _weights(spec, builder, by, x.dtype)
    bias_row = row = None if bias is None else bias[None]
    if bias_row is not None and bias_row.dtype != sum_dtype:  # the sum of one row
        row = builder.empty(bias_row.shape, sum_dtype, "wide bias")
        by.sum_rows(builder, bias_row, row, False)
    logits = builder.empty((max(c.stop - c.start for c in parts), spec["vocab"]), sum_dtype, "logits")
    dloss, shared = losses.factors(spec, builder, by.losses) if dx is not None else (rows.loss, rows.loss)
    for c in parts:
        loss, z = rows.loss[c], logits[: c.stop - c.start]
        part = LossRows(z, rows.targets[c], loss, loss if rows.lse is rows.loss else rows.lse[c])
        for v, weight in weights():
            bias_part = None if row is None else row[:, v]
            by.multiply(
                builder, linear(Operand(x[c]), Operand(weight), z[:, v], residual=None, bias=bias_part)
            )
        by.losses.forward(spec, builder, part)
        if dx is None:
            continue
        dz = z if z.dtype == x.dtype else z.view(x.dtype)[:, : spec["vocab"]]
        by.losses.backward(spec, builder, part, dz, dloss if dloss is shared else dloss[c], shared)
        dweight, later = spec.get("dweight"), c.start > 0
        _launch_dx(builder, by, weights, dz, rows_of(spec, "dx")[c])
        if dweight is not None:
            total = dweight if later or "dweight" in added else None
            by.multiply(builder, product(Operand(dz, True), Operand(x[c], True), dweight, total=total))
        if dbias is not None:
            by.sum_rows(builder, dz, dbias[None], later or "dbias" in added)


def _launch_dx(builder: Builder, by: _Backend, weights: Weights, dz: Tensor, dx: Tensor) -> None:
    """dx = dz weight, added up over pieces in float32."""
    total = dx
    for v, weight in weights():
        is_last = v.stop == dz.shape[1]
        if dx.itemsize == 2 and not (is_last and v.start == 0):
            total = builder.scratch(dx.shape, np.float32, "dx in float32")
        g = product(
            Operand(dz[:, v]),
            Operand(weight, True),
            dx if is_last else total,
            total=total if v.start else None,
        )
        by.multiply(builder, g)


def _weights(spec: Spec, builder: Builder, by: _Backend, dtype: np.dtype[Any]) -> Weights:
    """The weights of an array, or of a packed matrix: unpacked once, or by pieces each time."""
    packed = packed_weight(spec, "weight")
    if packed is None or spec["vocab"] <= ROWS:
        weight = weight_array(spec, "weight", builder, by.name, dtype)
        return lambda: [(slice(0, spec["vocab"]), weight)]

    def unpack() -> Iterator[tuple[slice, Tensor]]:
        for first, rows, weight in pieces(packed, builder, by.name, dtype, packed.columns):
            yield slice(first, first + rows), weight

    return unpack


for _name, _backend in (
    ("raw", _Backend("raw", losses.RAW, launch_raw, sum_rows_raw)),
    ("numba", _Backend("numba", losses.NUMBA, launch_numba, sum_rows_numba)),
):
    lowers("linear_cross_entropy", _name)(partial(_gpu, by=_backend))
