"""Cross-entropy of logits with target classes, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call, CheckValues
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.indices import check_indices, read_indices

__all__ = ["LossOptions", "as_loss", "cross_entropy", "cross_entropy_backward", "is_number", "of_reference"]


@op(cuda=True, kernels="loss.cross_entropy")
def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    class_weight: Any = None,
    reduction: str = "mean",
    denominator: Any = None,
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Cross-entropy of logits with target classes: the loss of a row is ``lse - logits[target]``.

    With u = softcap * tanh(logits / softcap), or the logits, and class weights w, a row with target y has::

        lse  = log(sum(exp(u)))
        loss = (1 - label_smoothing) * w_y * (lse - u_y) + label_smoothing / vocab * sum(w * (lse - u))
               + z_loss * lse^2

    Parameters
    ----------
    logits : array (..., vocab)
        float16, bfloat16, float32 or float64.
    targets : int32 or int64 array (...)
        The class of each row, in [0, vocab), or ``ignore_index``.
    ignore_index : int
        Rows with this target are not read and do not count.
    label_smoothing : float
        In [0, 1].
    z_loss : float
        Weight of lse^2, at least 0.
    softcap : float
        0: no cap.
    class_weight : array (vocab,), optional
        float32 (float64 for float64).
    reduction : str
        ``"mean"``: the sum over rows, divided by the sum of w_y. ``"sum"``. ``"none"``: the loss of each row.
    denominator : number or array without axes, optional
        Divisor of ``"mean"`` instead, such as the number of targets in a whole accumulated batch. An array may be
        int32, int64, float32 or float64; on a GPU no call waits for it. 0 gives a loss of 0.
    return_lse : bool
        Also return lse, which :func:`cross_entropy_backward` takes.
    out : array, or (loss, lse), optional
        Receives the results.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    loss : array () or, with ``"none"``, (...), float32 (float64 for float64)
    lse : array (...), float32 (float64 for float64), only with ``return_lse``; -inf in ignored rows

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. Targets in host memory are checked. Targets on a GPU are not, since that
        would wait for them: a row whose target is not a class has loss NaN.

    Notes
    -----
    A mean over no rows is 0 (in torch NaN). Otherwise the results are those of torch.nn.functional.cross_entropy,
    including class weights with label smoothing. Sums have a fixed order, and the mean is summed in float64. Each
    logit is read once.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> logits = np.log(np.array([[1.0, 3.0], [1.0, 1.0], [5.0, 5.0]]))
    >>> gpu_ops.cross_entropy(logits, np.array([1, 0, -100]), reduction="none").round(4)
    array([0.2877, 0.6931, 0.    ])
    >>> round(float(gpu_ops.cross_entropy(logits, np.array([1, 0, -100]))), 4)
    0.4904
    """
    options = LossOptions(
        ignore_index, label_smoothing, z_loss, softcap, class_weight, reduction, denominator
    )
    call = Call("cross_entropy", device, backend, workspace)
    x = _read_logits(call, logits)
    rows, loss_dtype = x.shape[:-1], checks.computing_dtype(x.dtype.name)
    options.read(call, targets, rows, x.shape[-1], "logits")
    results = {"loss": rows if reduction == "none" else ()}
    if checks.flag(call.op, "return_lse", return_lse):
        results["lse"] = rows
    for item, (name, shape) in enumerate(results.items()):
        checks.contiguous(call.op, name, call.write(name, shape, loss_dtype, out, item=item))
    return _bind(call, options)


@op(cuda=True, kernels="loss.cross_entropy")
def cross_entropy_backward(
    dloss: Any,
    logits: Any,
    targets: Any,
    lse: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    class_weight: Any = None,
    reduction: str = "mean",
    denominator: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradient of :func:`cross_entropy` for logits, 0 in ignored rows.

    With p = softmax(u), before the derivative of the cap and the factor dloss (/ denominator)::

        du = p * ((1 - label_smoothing) * w_y + label_smoothing / vocab * sum(w) + 2 * z_loss * lse)
             - label_smoothing / vocab * w - (1 - label_smoothing) * w_y * (class == y)

    Parameters
    ----------
    dloss : array like the loss, or a number for a loss without axes
        Gradient of the loss: float32 (float64 for float64).
    logits, targets, and every option
        Same as in the forward call.
    lse : array (...)
        Result of ``cross_entropy(..., return_lse=True)``, over all classes. The softmax is divided by the sum of the
        row's exponentials, not by exp(lse), which is rounded: large logits lose no digits.
    out : array like logits, optional
        Receives the gradient. ``out=logits`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    array like logits, rounded once from float32 (float64 for float64)

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written; for targets on a GPU see :func:`cross_entropy`.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> logits, targets = np.log(np.array([[1.0, 3.0], [5.0, 5.0]])), np.array([1, -100])
    >>> loss, lse = gpu_ops.cross_entropy(logits, targets, return_lse=True)
    >>> gpu_ops.cross_entropy_backward(1.0, logits, targets, lse)
    array([[ 0.25, -0.25],
           [ 0.  ,  0.  ]])
    """
    options = LossOptions(
        ignore_index, label_smoothing, z_loss, softcap, class_weight, reduction, denominator
    )
    call = Call("cross_entropy_backward", device, backend, workspace)
    by_value = is_number(dloss) and reduction != "none"
    dloss_ = None if by_value else call.read("dloss", dloss, contiguous=True)
    x = _read_logits(call, logits)
    rows = x.shape[:-1]
    options.read(call, targets, rows, x.shape[-1], "logits")
    if dloss_ is not None:
        as_loss(call, "dloss", dloss_, rows if reduction == "none" else (), "logits")
    call.option(dloss=checks.computable(call.op, "dloss", dloss, x.dtype.name) if by_value else None)
    as_loss(call, "lse", call.read("lse", lse, contiguous=True), rows, "logits")
    call.write("dlogits", x.shape, x.dtype, out, in_place="logits", rows=True)
    return _bind(call, options)


def _read_logits(call: Call, logits: Any) -> Array:
    x = call.read("logits", logits, rows=True)
    checks.float_dtype(call.op, logits=x)
    if x.ndim == 0:
        raise ShapeError(f"{call.op}: logits has no axes; expected (..., vocab)")
    return x


def _bind(call: Call, options: LossOptions) -> Bound:
    x: Array = call.views["logits"]
    dtype, vocab = x.dtype.name, x.shape[-1]
    return call.bind(
        problem=lambda: f"{math.prod(x.shape[:-1])} rows of {vocab} {dtype}, reduction {options.reduction}",
        unsupported=checks.unsupported(dtype),
        check_values=options.check_values(call, vocab, "logits"),
        flops=5.0 * x.size,
    )


@lowers("cross_entropy", "reference")
@lowers("cross_entropy_backward", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.loss import cross_entropy as reference

    def run(views: Mapping[str, Any]) -> None:
        x, y, lse = views["logits"], views["targets"], views.get("lse")
        options = of_reference(spec, views)
        if "dlogits" in views:
            dloss = views.get("dloss", spec["dloss"])
            store(views, ("dlogits",), reference.cross_entropy_backward(dloss, x, y, views["lse"], **options))
        else:
            results = ("loss",) if lse is None else ("loss", "lse")
            store(views, results, reference.cross_entropy(x, y, **options, return_lse=lse is not None))

    builder.call(run, "NumPy, float64")


_COUNTS = tuple(map(np.dtype, (np.int32, np.int64, np.float32, np.float64)))


def is_number(x: Any) -> bool:
    """Whether ``x`` is a number by value and not an array."""
    return isinstance(x, (int, float, np.number))


def as_loss(call: Call, name: str, x: Array, shape: tuple[int, ...], like: str) -> None:
    """Require that ``x`` has this shape, and the dtype of losses for the array ``like``."""
    checks.exactly(call.op, name, x, shape)
    dtype = call.views[like].dtype
    expected = checks.computing_dtype(dtype.name)
    if x.dtype != expected:
        raise DTypeError(
            f"{call.op}: {name} is {x.dtype}, expected {expected}, as {like} is {dtype}; "
            f"cast one of them, for example {name}.astype('{expected}')"
        )


@dataclass(frozen=True)
class LossOptions:
    """Options of a loss as the caller passed them."""

    ignore_index: Any
    label_smoothing: Any
    z_loss: Any
    softcap: Any
    class_weight: Any
    reduction: Any
    denominator: Any

    def read(self, call: Call, targets: Any, rows: tuple[int, ...], vocab: int, like: str) -> None:
        """Check targets and options. ``like``: name of the array that determines the dtype."""
        op, dtype = call.op, call.views[like].dtype.name
        read_indices(call, "targets", targets, rows)
        smoothing = checks.computable(op, "label_smoothing", self.label_smoothing, dtype, low=0.0)
        if smoothing > 1.0:
            raise OptionError(f"{op}: label_smoothing must lie in [0, 1], got {self.label_smoothing!r}")
        call.option(
            vocab=vocab,
            ignore_index=checks.integer(op, "ignore_index", self.ignore_index, low=-(2**63), high=2**63 - 1),
            label_smoothing=smoothing,
            z_loss=checks.computable(op, "z_loss", self.z_loss, dtype, low=0.0),
            softcap=checks.computable(op, "softcap", self.softcap, dtype, low=0.0, divides=True),
            reduction=checks.one_of(op, "reduction", self.reduction, ("mean", "sum", "none")),
        )
        weight = call.optional("class_weight", self.class_weight)
        if weight is not None:
            as_loss(call, "class_weight", weight, (vocab,), like)
        self._read_denominator(call, dtype)

    def _read_denominator(self, call: Call, dtype: str) -> None:
        value = self.denominator
        if value is not None and self.reduction != "mean":
            raise OptionError(
                f"{call.op}: denominator is what reduction='mean' divides by, and reduction is {self.reduction!r}"
            )
        if value is None or is_number(value):
            if value is not None:
                value = _checked_denominator(call.op, value, dtype)
            call.option(denominator=value)
            return
        array = call.read("denominator", value)
        if array.dtype not in _COUNTS:
            names = ", ".join(map(str, _COUNTS))
            raise DTypeError(
                f"{call.op}: denominator is {array.dtype}; allowed: a number, or an array of {names}"
            )
        checks.exactly(call.op, "denominator", array, ())
        call.option(denominator=None)

    def check_values(self, call: Call, vocab: int, like: str) -> CheckValues | None:
        """The hook that checks targets and a denominator in host memory."""
        if call.on_cuda:
            return None
        op, dtype = call.op, call.views[like].dtype.name
        check_targets = check_indices(op, "targets", vocab, int(self.ignore_index))

        def check_values(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
            if "denominator" in views:
                _checked_denominator(op, views["denominator"][()], dtype)
            return check_targets(views, backend)

        return check_values


def _checked_denominator(op: str, value: Any, dtype: str) -> float:
    return checks.computable(op, "denominator", value, dtype, low=0.0, divides=True)


def of_reference(spec: Spec, views: Mapping[str, Any]) -> dict[str, Any]:
    """The options as keyword arguments of a reference function."""
    names = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction")
    return {name: spec[name] for name in names} | {
        "class_weight": views.get("class_weight"),
        "denominator": views.get("denominator", spec["denominator"]),
    }
