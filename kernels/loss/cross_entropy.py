"""Launch of cross-entropy on each backend: the loss of rows, their sum, and the gradient.

The factor of the gradient and the sum of class weights take a launch before the gradient's; the mean takes one
after the losses: no value is read on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gpu_ops.kernels.common import arguments
from gpu_ops.kernels.common.arguments import DTYPES, KINDS, as_line, as_rows, float32, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["NUMBA", "RAW", "Kernels", "LossRows", "Total", "factor_cpu", "factors", "options_cpu", "variants"]

_TWIN_THREADS, _TOTAL_THREADS = 256, 512
_VECS = 4  # vectors of a row for a thread, before a row gets more threads
# Layouts of structs in cross_entropy.cu.
_OPTIONS = np.dtype(
    [("ignore_index", "i8"), ("wide", "i4"), ("weighted", "i4")]
    + [(name, "f4") for name in ("own", "others", "z_loss", "softcap")]
)
_NUMBER = np.dtype([("value", "f8"), ("kind", "i4"), ("unused", "i4")])
_COUNT, _ROWS = 5, 6  # further kinds: the sum of the targets' weights, the sum of the rows' losses


# ---- CPU ---------------------------------------------------------------------------------------------------


@lowers("cross_entropy", "cpu")
def forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.loss.cpu import cross_entropy

    shape, options_of, reduction = rows_of(spec, "logits").shape, options_cpu(spec), spec["reduction"]

    def run(views: Mapping[str, Any]) -> None:
        loss, targets = views["loss"], as_line(views["targets"]).astype(np.int64, copy=False)
        weight, options = options_of(views)
        rows = as_line(loss) if reduction == "none" else np.empty(len(targets), loss.dtype)
        lse = as_line(views["lse"]) if "lse" in views else np.empty(len(targets), loss.dtype)
        if rows.size:
            cross_entropy.forward(as_rows(views["logits"]), targets, weight, rows, lse, options)
        if reduction != "none":
            loss[...] = np.sum(rows, dtype=np.float64) * factor_cpu(spec, views, targets)

    builder.call(run, cross_entropy.config(*shape), row_scratch(spec) + factor_scratch(spec))


@lowers("cross_entropy_backward", "cpu")
def backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.loss.cpu import cross_entropy

    shape, options_of, reduction = rows_of(spec, "logits").shape, options_cpu(spec), spec["reduction"]
    number = spec["dloss"]

    def run(views: Mapping[str, Any]) -> None:
        if not views["logits"].size:
            return
        lse, targets = as_line(views["lse"]), as_line(views["targets"]).astype(np.int64, copy=False)
        weight, options = options_of(views)
        dloss = views["dloss"] if number is None else number
        if reduction == "none":
            dloss = as_line(dloss)
        else:
            factor = float(dloss) * factor_cpu(spec, views, targets)
            dloss = np.broadcast_to(np.asarray(factor, lse.dtype), lse.shape)
        rows = (as_rows(views["logits"]), targets, lse, weight, as_rows(views["dlogits"]))
        cross_entropy.backward(dloss, *rows, options)

    builder.call(run, cross_entropy.config(*shape), target_scratch(spec) + factor_scratch(spec))


def row_scratch(spec: Spec) -> int:
    """Bytes that the CPU keeps per row during a call: its target as int64; its loss and lse, if not requested."""
    numbers = int(spec["reduction"] != "none") + int(spec.get("lse") is None)
    return target_scratch(spec) + spec.tensor("targets").size * _like_loss(spec).itemsize * numbers


def target_scratch(spec: Spec) -> int:
    targets = spec.tensor("targets")
    return 0 if targets.dtype == np.int64 else 8 * targets.size


def factor_scratch(spec: Spec) -> int:
    """Bytes that :func:`factor_cpu` allocates while it runs."""
    if spec["reduction"] != "mean" or spec.get("denominator") is not None or spec["denominator"] is not None:
        return 0
    weight = spec.get("class_weight")
    return spec.tensor("targets").size * (1 if weight is None else 1 + 8 + weight.itemsize)


def options_cpu(spec: Spec) -> Callable[[Mapping[str, Any]], tuple[Any, Any]]:
    """Function from a call's arrays to class weights, or one number instead, and the numbers of the kernels."""
    from gpu_ops.kernels.loss.cpu.cross_entropy import Options

    weighted = spec.get("class_weight") is not None
    numbers = (*_shares(spec), float(spec["vocab"]), spec["z_loss"], spec["softcap"])
    options = Options(spec["ignore_index"], weighted, *numbers)
    stand_in = np.ones(1, _like_loss(spec).dtype)

    def find(views: Mapping[str, Any]) -> tuple[Any, Any]:
        if not weighted:
            return stand_in, options
        weight = views["class_weight"]
        return weight, options._replace(weight_sum=float(np.sum(weight, dtype=np.float64)))

    return find


def factor_cpu(spec: Spec, views: Mapping[str, Any], targets: Any) -> float:
    """Factor of the sum over rows."""
    if spec["reduction"] != "mean":
        return 1.0
    count = views.get("denominator", spec["denominator"])
    if count is None:
        kept, weight = targets != spec["ignore_index"], views.get("class_weight")
        count = np.count_nonzero(kept) if weight is None else np.sum(weight[targets[kept]], dtype=np.float64)
    return 1.0 / float(count) if count else 0.0


# ---- GPUs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossRows:
    """Logits (rows, vocab), and arrays per row. ``loss`` and ``lse`` are one array if lse is not requested."""

    logits: Tensor
    targets: Tensor
    loss: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Total:
    """Operands that ``cross_entropy_total`` divides: arrays or stand-ins, numbers, and which of the two count."""

    above: Tensor
    below: Tensor
    above_value: float
    below_value: float
    above_kind: int
    below_kind: int

    @classmethod
    def of(cls, spec: Spec, above: Tensor, above_kind: int, above_value: float = 0.0) -> Total:
        array, value, below_kind = spec.get("denominator"), 1.0, KINDS[""]
        if array is not None:
            below_kind = KINDS[array.dtype.name]
        elif spec["reduction"] == "mean":
            denominator = spec["denominator"]
            value, below_kind = (0.0, _COUNT) if denominator is None else (denominator, below_kind)
        return cls(above, above if array is None else array, above_value, value, above_kind, below_kind)

    @classmethod
    def of_losses(cls, spec: Spec, losses: Tensor) -> Total:
        return cls.of(spec, losses, _ROWS)

    @classmethod
    def of_gradient(cls, spec: Spec, stand_in: Tensor) -> Total:
        dloss = spec.get("dloss")
        if dloss is None or spec["reduction"] == "none":
            return cls.of(spec, stand_in, KINDS[""], spec["dloss"] or 0.0)
        return cls.of(spec, dloss, KINDS[dloss.dtype.name])


@dataclass(frozen=True)
class Kernels:
    """Launchers of a backend's kernels. ``backward`` takes rows, dlogits, dloss of each and the shared factors."""

    forward: Callable[[Spec, Builder, LossRows], None]
    backward: Callable[[Spec, Builder, LossRows, Tensor, Tensor, Tensor], None]
    total: Callable[[Spec, Builder, Total, Tensor], None]


def factors(spec: Spec, builder: Builder, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Factors of the gradients of rows: dloss of each row, or the first entry of the second array for all rows.

    The second array, if a launch has to compute it: this factor, and the sum of the class weights.
    """
    dloss, weighted = spec.get("dloss"), spec.get("class_weight") is not None
    each = spec["reduction"] == "none" and dloss is not None
    needed = not each or (weighted and spec["label_smoothing"])
    result = builder.empty((2 if needed else 0,), _like_loss(spec).dtype, "factors")
    if needed:
        kernels.total(spec, builder, Total.of_gradient(spec, result), result)
    return result if dloss is None or not each else dloss.ravel(), result


def _forward(spec: Spec, builder: Builder, kernels: Kernels) -> None:
    x, loss, lse = rows_of(spec, "logits"), spec.tensor("loss"), spec.get("lse")
    each = (
        loss if spec["reduction"] == "none" else builder.empty((len(x),), loss.dtype, "row losses")
    ).ravel()
    if len(x):
        targets = spec.tensor("targets").ravel()
        kernels.forward(spec, builder, LossRows(x, targets, each, each if lse is None else lse.ravel()))
    if spec["reduction"] != "none":
        kernels.total(spec, builder, Total.of_losses(spec, each), loss)


def _backward(spec: Spec, builder: Builder, kernels: Kernels) -> None:
    x, targets, lse = rows_of(spec, "logits"), spec.tensor("targets").ravel(), spec.tensor("lse").ravel()
    if x.size:
        dloss, shared = factors(spec, builder, kernels)
        kernels.backward(
            spec, builder, LossRows(x, targets, lse, lse), rows_of(spec, "dlogits"), dloss, shared
        )


def _like_loss(spec: Spec) -> Tensor:
    """An array in the dtype of losses."""
    lse = spec.get("lse")
    return spec.tensor("loss") if lse is None else lse


def _weight(spec: Spec) -> Tensor:
    """Class weights, or a stand-in that is not read."""
    weight = spec.get("class_weight")
    return _like_loss(spec).ravel() if weight is None else weight


def _forward_raw(spec: Spec, builder: Builder, rows: LossRows) -> None:
    x, loss, lse = rows.logits, rows.loss, rows.lse
    plain = not spec["softcap"] and not spec["label_smoothing"]
    arrays = (rows.targets, _weight(spec), x, loss, lse, np.int32(lse is not loss), _raw_options(spec))
    _launch_rows(builder, "forward", (x,), arrays, plain)


def _backward_raw(
    spec: Spec, builder: Builder, rows: LossRows, dlogits: Tensor, dloss: Tensor, shared: Tensor
) -> None:
    x, step = rows.logits, np.int64(dloss is not shared)
    plain = not spec["softcap"] and not (spec["label_smoothing"] and spec.get("class_weight") is not None)
    known = rows.targets, _weight(spec), dloss, shared[1:], rows.lse
    _launch_rows(builder, "backward", (x, dlogits), (*known, x, dlogits, step, _raw_options(spec)), plain)


def _total_raw(spec: Spec, builder: Builder, t: Total, result: Tensor) -> None:
    targets = spec.tensor("targets")
    numbers = (
        np.array((value, number_kind, 0), _NUMBER)[()]
        for value, number_kind in ((t.above_value, t.above_kind), (t.below_value, t.below_kind))
    )
    sums_weights = np.int32(result.size > 1 and spec.get("class_weight") is not None)
    args = (targets, _weight(spec), t.above, t.below, result, *numbers, sums_weights, _raw_options(spec))
    sizes = np.int64(targets.size), np.int64(spec["vocab"])
    builder.launch(_TOTAL, (1, 1, 1), (_TOTAL_THREADS, 1, 1), (*args, *sizes))


def _forward_numba(spec: Spec, builder: Builder, rows: LossRows) -> None:
    from gpu_ops.kernels.loss.numba_cuda import cross_entropy as twins

    x, targets, loss, lse = rows.logits, rows.targets, rows.loss, rows.lse
    arrays = (targets, _weight(spec), x, loss, lse, np.int32(lse is not loss))
    kernel = twins.forward(x.dtype.name, targets.dtype.name)
    builder.launch(kernel, (len(x), 1, 1), (_TWIN_THREADS, 1, 1), (*arrays, *_numba_options(spec)))


def _backward_numba(
    spec: Spec, builder: Builder, rows: LossRows, dlogits: Tensor, dloss: Tensor, shared: Tensor
) -> None:
    from gpu_ops.kernels.loss.numba_cuda import cross_entropy as twins

    x, targets, step = rows.logits, rows.targets, np.int32(dloss is not shared)
    arrays = (targets, _weight(spec), dloss, shared, rows.lse, x, dlogits, step)
    kernel = twins.backward(x.dtype.name, targets.dtype.name, dlogits.dtype.name)
    builder.launch(kernel, (len(x), 1, 1), (_TWIN_THREADS, 1, 1), (*arrays, *_numba_options(spec)))


def _total_numba(spec: Spec, builder: Builder, t: Total, result: Tensor) -> None:
    from gpu_ops.kernels.loss.numba_cuda import cross_entropy as twins

    targets = spec.tensor("targets").ravel()
    kernel = twins.total(result.dtype.name, targets.dtype.name, t.below.dtype.name)
    numbers = (
        np.float64(t.above_value),
        np.float64(t.below_value),
        np.int32(t.above_kind),
        np.int32(t.below_kind),
    )
    arrays = (targets, _weight(spec), t.above.ravel(), t.below.ravel(), result.ravel())
    weighted = spec.get("class_weight") is not None
    options = np.int64(spec["ignore_index"]), np.int32(weighted), np.int64(spec["vocab"])
    builder.launch(kernel, (1, 1, 1), (_TWIN_THREADS, 1, 1), (*arrays, *numbers, *options))


RAW = Kernels(_forward_raw, _backward_raw, _total_raw)
NUMBA = Kernels(_forward_numba, _backward_numba, _total_numba)
for _backend, _kernels in (("raw", RAW), ("numba", NUMBA)):
    lowers("cross_entropy", _backend)(partial(_forward, kernels=_kernels))
    lowers("cross_entropy_backward", _backend)(partial(_backward, kernels=_kernels))


def _raw_options(spec: Spec) -> Any:
    int64_targets, weighted = spec.tensor("targets").itemsize == 8, spec.get("class_weight") is not None
    numbers = map(float32, (*_shares(spec), spec["z_loss"], spec["softcap"]))
    return np.array((spec["ignore_index"], int64_targets, weighted, *numbers), _OPTIONS)[()]


def _numba_options(spec: Spec) -> tuple[Any, ...]:
    numbers = map(np.float64, (*_shares(spec), spec["z_loss"], spec["softcap"]))
    return np.int64(spec["ignore_index"]), np.int32(spec.get("class_weight") is not None), *numbers


def _shares(spec: Spec) -> tuple[float, float]:
    """Label-smoothing shares of the target's class and of every class."""
    smoothing = spec["label_smoothing"]
    return 1.0 - smoothing, smoothing / max(spec["vocab"], 1)


def _launch_rows(
    builder: Builder, which: str, arrays: tuple[Tensor, ...], args: tuple[Any, ...], plain: bool
) -> None:
    """Launch a kernel over rows. ``arrays``: the (rows, cols) arrays of ``args``, the logits first."""
    (rows, cols), dtype = arrays[0].shape, arrays[0].dtype
    vec = 16 // dtype.itemsize
    threads, rows_per_block = arguments.row_threads(cols, vec * _VECS)
    access = vec if arguments.alignment(arrays, rows) == 16 and cols % vec == 0 else 1
    kernel = _kernel(which, dtype.name, access, plain, arrays[-1].dtype.name)
    args = (*args, np.int64(rows), np.int64(cols), *map(arguments.row_stride, arrays))
    builder.launch(kernel, (-(-rows // rows_per_block), 1, 1), (threads, rows_per_block, 1), args)


def _kernel(which: str, dtype: str, access: int, plain: bool, gradient: str) -> CudaKernel:
    narrower = (("GRADIENT", DTYPES[gradient]),) if gradient != dtype else ()
    defines = (("DTYPE", DTYPES[dtype]), *narrower, ("ACCESS", access), ("PLAIN", int(plain)))
    return CudaKernel("loss/cross_entropy", f"cross_entropy_{which}", defines)


_TOTAL = _kernel("total", "float32", 1, True, "float32")


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    yield Variant(_TOTAL, _TOTAL_THREADS)
    for dtype, aligned, plain in itertools.product(DTYPES, (True, False), (True, False)):
        access = (4 if dtype == "float32" else 8) if aligned else 1
        yield Variant(_kernel("forward", dtype, access, plain, dtype), arguments.ROW_THREADS)
        for gradient in DTYPES if dtype == "float32" else (dtype,):
            yield Variant(_kernel("backward", dtype, access, plain, gradient), arguments.ROW_THREADS)
