"""How each backend runs cross-entropy: the loss of rows, their sum, and the gradient.

The factor of the gradient and the sum of class weights take a launch of their own before the gradient's, the mean one
after the losses: no value is read on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower import arguments
from gpu_ops.kernels.lower.arguments import DTYPES, KINDS, as_line, as_rows, float32, rows_of
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["variants"]

_TWIN_THREADS, _TOTAL_THREADS = 256, 512
_VECS = 4  # vectors of a row for a thread, before a row gets more threads
# As structs in cuda/cross_entropy.cu.
_OPTIONS = np.dtype(
    [("ignore_index", "i8"), ("wide", "i4"), ("weighted", "i4")]
    + [(name, "f4") for name in ("own", "others", "z_loss", "softcap")]
)
_NUMBER = np.dtype([("value", "f8"), ("kind", "i4"), ("unused", "i4")])
_COUNT, _ROWS = 5, 6  # further kinds: the sum of the targets' weights, the sum of the rows' losses


# ---- CPU ---------------------------------------------------------------------------------------------------------


@lowers("cross_entropy", "cpu")
def forward_cpu(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import cross_entropy

    shape, options_of, reduction = rows_of(spec, "logits").shape, _cpu_options(spec), spec["reduction"]

    def run(views: Mapping[str, Any]) -> None:
        loss, targets = views["loss"], as_line(views["targets"]).astype(np.int64, copy=False)
        weight, options = options_of(views)
        rows = as_line(loss) if reduction == "none" else np.empty(len(targets), loss.dtype)
        lse = as_line(views["lse"]) if "lse" in views else np.empty(len(targets), loss.dtype)
        if rows.size:
            cross_entropy.forward(as_rows(views["logits"]), targets, weight, rows, lse, options)
        if reduction != "none":
            loss[...] = np.sum(rows, dtype=np.float64) * _cpu_factor(spec, views, targets)

    on.call(run, cross_entropy.config(*shape))


@lowers("cross_entropy_backward", "cpu")
def backward_cpu(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import cross_entropy

    shape, options_of, reduction = rows_of(spec, "logits").shape, _cpu_options(spec), spec["reduction"]
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
            factor = float(dloss) * _cpu_factor(spec, views, targets)
            dloss = np.broadcast_to(np.asarray(factor, lse.dtype), lse.shape)
        rows = (as_rows(views["logits"]), targets, lse, weight, as_rows(views["dlogits"]))
        cross_entropy.backward(dloss, *rows, options)

    on.call(run, cross_entropy.config(*shape))


def _cpu_options(spec: Spec) -> Callable[[Mapping[str, Any]], tuple[Any, Any]]:
    """From a call's arrays to class weights, or one number in their place, and the numbers of the kernels."""
    from gpu_ops.kernels.numba_cpu.cross_entropy import Options

    x, weighted = spec.tensor("logits"), spec.get("class_weight") is not None
    numbers = (*_shares(spec), float(x.shape[-1]), spec["z_loss"], spec["softcap"])
    options = Options(spec["ignore_index"], weighted, *numbers)
    stand_in = np.ones(1, np.float64 if x.dtype == np.float64 else np.float32)

    def find(views: Mapping[str, Any]) -> tuple[Any, Any]:
        if not weighted:
            return stand_in, options
        weight = views["class_weight"]
        return weight, options._replace(weight_sum=float(np.sum(weight, dtype=np.float64)))

    return find


def _cpu_factor(spec: Spec, views: Mapping[str, Any], targets: Any) -> float:
    """What the sum over rows is multiplied by."""
    if spec["reduction"] != "mean":
        return 1.0
    count = views.get("denominator", spec["denominator"])
    if count is None:
        kept, weight = targets != spec["ignore_index"], views.get("class_weight")
        count = np.count_nonzero(kept) if weight is None else np.sum(weight[targets[kept]], dtype=np.float64)
    return 1.0 / float(count) if count else 0.0


# ---- GPUs --------------------------------------------------------------------------------------------------------


@lowers("cross_entropy", "raw")
def forward_raw(spec: Spec, on: Builder) -> None:
    x, (loss, lse) = rows_of(spec, "logits"), _row_results(spec, on)
    if len(x):
        plain = not spec["softcap"] and not spec["label_smoothing"]
        arrays = (*_targets(spec), x, loss, lse, np.int32(lse is not loss), _raw_options(spec))
        _launch_rows(on, "forward", (x,), arrays, plain)
    if spec["reduction"] != "none":
        _launch_total_raw(spec, on, _Total.of(spec, loss, _ROWS), spec.tensor("loss"))


@lowers("cross_entropy_backward", "raw")
def backward_raw(spec: Spec, on: Builder) -> None:
    x, dx = rows_of(spec, "logits"), rows_of(spec, "dlogits")
    if not x.size:
        return
    dloss, factors = _factors(spec, on)
    if factors.size:
        _launch_total_raw(spec, on, _Total.of_gradient(spec, factors), factors)
    step = np.int64(dloss is not factors)
    plain = not spec["softcap"] and not (spec["label_smoothing"] and spec.get("class_weight") is not None)
    arrays = (*_targets(spec), dloss, factors[1:], spec.tensor("lse"), x, dx, step, _raw_options(spec))
    _launch_rows(on, "backward", (x, dx), arrays, plain)


@lowers("cross_entropy", "numba")
def forward_numba(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cuda import cross_entropy as twins

    x, (loss, lse) = rows_of(spec, "logits"), _row_results(spec, on)
    targets, weight = _targets(spec)
    if len(x):
        arrays = (targets, weight, x, loss.ravel(), lse.ravel(), np.int32(lse is not loss))
        kernel = twins.forward(x.dtype.name, targets.dtype.name)
        on.launch(kernel, (len(x), 1, 1), (_TWIN_THREADS, 1, 1), (*arrays, *_numba_options(spec)))
    if spec["reduction"] != "none":
        _launch_total_numba(spec, on, _Total.of(spec, loss, _ROWS), spec.tensor("loss"))


@lowers("cross_entropy_backward", "numba")
def backward_numba(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cuda import cross_entropy as twins

    x, dx = rows_of(spec, "logits"), rows_of(spec, "dlogits")
    if not x.size:
        return
    dloss, factors = _factors(spec, on)
    if factors.size:
        _launch_total_numba(spec, on, _Total.of_gradient(spec, factors), factors)
    targets, weight = _targets(spec)
    lse, step = spec.tensor("lse"), np.int32(dloss is not factors)
    arrays = (targets, weight, dloss.ravel(), factors, lse.ravel(), x, dx, step)
    kernel = twins.backward(x.dtype.name, targets.dtype.name)
    on.launch(kernel, (len(x), 1, 1), (_TWIN_THREADS, 1, 1), (*arrays, *_numba_options(spec)))


def _targets(spec: Spec) -> tuple[Tensor, Tensor]:
    """Targets and class weights, or a stand-in that is not read."""
    lse = spec.get("lse")
    stand_in = spec.tensor("loss") if lse is None else lse
    weight = spec.get("class_weight")
    return spec.tensor("targets").ravel(), stand_in.ravel() if weight is None else weight


def _row_results(spec: Spec, on: Builder) -> tuple[Tensor, Tensor]:
    """The loss of each row, and lse; the loss again in its place if nobody asked for it."""
    x, loss, lse = rows_of(spec, "logits"), spec.tensor("loss"), spec.get("lse")
    rows = loss if spec["reduction"] == "none" else on.empty((len(x),), loss.dtype, "row losses")
    return rows, rows if lse is None else lse


def _factors(spec: Spec, on: Builder) -> tuple[Tensor, Tensor]:
    """What the gradients of rows are multiplied by: dloss of each row, or the first of ``factors`` for all.

    ``factors``, where a launch has to find them: that, and the sum of the class weights.
    """
    weighted, each = spec.get("class_weight") is not None, spec["reduction"] == "none"
    needed = not each or (weighted and spec["label_smoothing"])
    factors = on.empty((2 if needed else 0,), spec.tensor("lse").dtype, "factors")
    return spec.tensor("dloss") if each else factors, factors


@dataclass(frozen=True)
class _Total:
    """What ``cross_entropy_total`` divides: arrays, or stand-ins for them; numbers, and the kinds of what counts."""

    above: Tensor
    below: Tensor
    above_value: float
    below_value: float
    above_kind: int
    below_kind: int

    @classmethod
    def of(cls, spec: Spec, above: Tensor, above_kind: int, above_value: float = 0.0) -> _Total:
        array, value, kind = spec.get("denominator"), 1.0, KINDS[""]
        if array is not None:
            kind = KINDS[array.dtype.name]
        elif spec["reduction"] == "mean":
            given = spec["denominator"]
            value, kind = (0.0, _COUNT) if given is None else (given, kind)
        return cls(above, above if array is None else array, above_value, value, above_kind, kind)

    @classmethod
    def of_gradient(cls, spec: Spec, stand_in: Tensor) -> _Total:
        dloss = spec.get("dloss")
        if dloss is None or spec["reduction"] == "none":
            return cls.of(spec, stand_in, KINDS[""], spec["dloss"] or 0.0)
        return cls.of(spec, dloss, KINDS[dloss.dtype.name])


def _launch_total_raw(spec: Spec, on: Builder, t: _Total, result: Tensor) -> None:
    rows, cols = rows_of(spec, "logits").shape
    numbers = (
        np.array((value, kind, 0), _NUMBER)[()]
        for value, kind in ((t.above_value, t.above_kind), (t.below_value, t.below_kind))
    )
    sums_weights = np.int32(result.size > 1 and spec.get("class_weight") is not None)
    args = (*_targets(spec), t.above, t.below, result, *numbers, sums_weights, _raw_options(spec))
    on.launch(_TOTAL, (1, 1, 1), (_TOTAL_THREADS, 1, 1), (*args, np.int64(rows), np.int64(cols)))


def _launch_total_numba(spec: Spec, on: Builder, t: _Total, result: Tensor) -> None:
    from gpu_ops.kernels.numba_cuda import cross_entropy as twins

    targets, weight = _targets(spec)
    kernel = twins.total(result.dtype.name, targets.dtype.name, t.below.dtype.name)
    numbers = (
        np.float64(t.above_value),
        np.float64(t.below_value),
        np.int32(t.above_kind),
        np.int32(t.below_kind),
    )
    arrays = (targets, weight, t.above.ravel(), t.below.ravel(), result.ravel())
    weighted = spec.get("class_weight") is not None
    options = np.int64(spec["ignore_index"]), np.int32(weighted), np.int64(spec.tensor("logits").shape[-1])
    on.launch(kernel, (1, 1, 1), (_TWIN_THREADS, 1, 1), (*arrays, *numbers, *options))


def _raw_options(spec: Spec) -> Any:
    wide, weighted = spec.tensor("targets").itemsize == 8, spec.get("class_weight") is not None
    numbers = map(float32, (*_shares(spec), spec["z_loss"], spec["softcap"]))
    return np.array((spec["ignore_index"], wide, weighted, *numbers), _OPTIONS)[()]


def _numba_options(spec: Spec) -> tuple[Any, ...]:
    numbers = map(np.float64, (*_shares(spec), spec["z_loss"], spec["softcap"]))
    return np.int64(spec["ignore_index"]), np.int32(spec.get("class_weight") is not None), *numbers


def _shares(spec: Spec) -> tuple[float, float]:
    """Of the target's class, and of every class."""
    smoothing = spec["label_smoothing"]
    return 1.0 - smoothing, smoothing / max(spec.tensor("logits").shape[-1], 1)


def _launch_rows(
    on: Builder, which: str, arrays: tuple[Tensor, ...], args: tuple[Any, ...], plain: bool
) -> None:
    """``arrays``: those of ``args`` that are (rows, cols)."""
    (rows, cols), dtype = arrays[0].shape, arrays[0].dtype
    vec = 16 // dtype.itemsize
    threads, rows_per_block = arguments.row_threads(cols, vec * _VECS)
    access = vec if arguments.alignment(arrays, rows) == 16 and cols % vec == 0 else 1
    kernel = _kernel(which, dtype.name, access, plain)
    args = (*args, np.int64(rows), np.int64(cols), *map(arguments.row_stride, arrays))
    on.launch(kernel, (-(-rows // rows_per_block), 1, 1), (threads, rows_per_block, 1), args)


def _kernel(which: str, dtype: str, access: int, plain: bool) -> CudaKernel:
    defines = (("DTYPE", DTYPES[dtype]), ("ACCESS", access), ("PLAIN", int(plain)))
    return CudaKernel("cross_entropy", f"cross_entropy_{which}", defines)


_TOTAL = _kernel("total", "float32", 1, True)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    yield Variant(_TOTAL, _TOTAL_THREADS)
    for dtype, aligned, plain in itertools.product(DTYPES, (True, False), (True, False)):
        access = (4 if dtype == "float32" else 8) if aligned else 1
        for which in ("forward", "backward"):
            yield Variant(_kernel(which, dtype, access, plain), arguments.ROW_THREADS)
