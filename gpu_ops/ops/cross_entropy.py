"""Cross-entropy of logits with target classes, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.indices import look_at, read_indices

__all__ = ["cross_entropy", "cross_entropy_backward"]

_NUMBERS = tuple(map(np.dtype, (np.int32, np.int64, np.float32, np.float64)))


@op(cuda=True, kernels="cross_entropy")
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
    """Cross-entropy of logits with target classes, a row's loss being ``lse - logits[target]``.

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
        Rows with this target are not read, and count for nothing.
    label_smoothing : float
        In [0, 1].
    z_loss : float
        Weight of lse^2, at least 0.
    softcap : float
        0: no cap.
    class_weight : array (vocab,), optional
        float32 (float64 for float64).
    reduction : str
        ``"mean"``: the sum over rows, divided by that of w_y. ``"sum"``. ``"none"``: the loss of each row.
    denominator : number or array without axes, optional
        What ``"mean"`` divides by instead, such as the count of targets of a whole accumulated batch. An array may be
        int32, int64, float32 or float64; on a GPU no call waits for it. 0 gives a loss of 0.
    return_lse : bool
        Also return lse, which :func:`cross_entropy_backward` takes.
    out : array, or (loss, lse), optional
        Receives the results.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    loss : array () or, with ``"none"``, (...), float32 (float64 for float64)
    lse : array (...), likewise, only with ``return_lse``; -inf in ignored rows

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written. Targets in host memory are checked. On a GPU the check would have to wait for
        them: there a row whose target is no class has the loss NaN.

    Notes
    -----
    A mean over no rows is 0 (in torch NaN). All else is as in torch.nn.functional.cross_entropy, class weights and
    label smoothing together included. Sums have a fixed order, and the mean is summed in float64. Reads each logit
    once.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> logits = np.log(np.array([[1.0, 3.0], [1.0, 1.0], [5.0, 5.0]]))
    >>> gpu_ops.cross_entropy(logits, np.array([1, 0, -100]), reduction="none").round(4)
    array([0.2877, 0.6931, 0.    ])
    >>> round(float(gpu_ops.cross_entropy(logits, np.array([1, 0, -100]))), 4)
    0.4904
    """
    options = _Options(ignore_index, label_smoothing, z_loss, softcap, class_weight, reduction, denominator)
    call = Call("cross_entropy", device, backend, workspace)
    rows, dtype = options.read(call, logits, targets)
    kind = checks.computing_dtype(dtype)
    results = {"loss": rows if reduction == "none" else ()}
    if checks.flag(call.op, "return_lse", return_lse):
        results["lse"] = rows
    for item, (name, shape) in enumerate(results.items()):
        checks.contiguous(call.op, name, call.write(name, shape, kind, out, item=item))
    return options.bind(call, rows, dtype)


@op(cuda=True, kernels="cross_entropy")
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
    """Gradient of :func:`cross_entropy` for logits, 0 in rows that are ignored.

    With p = exp(u - lse), before the derivative of the cap and the factor dloss (/ denominator)::

        du = p * ((1 - label_smoothing) * w_y + label_smoothing / vocab * sum(w) + 2 * z_loss * lse)
             - label_smoothing / vocab * w - (1 - label_smoothing) * w_y * (class == y)

    Parameters
    ----------
    dloss : array like the loss, or a number for a loss without axes
        Gradient of the loss: float32 (float64 for float64).
    logits, targets, and every option
        As in the forward call.
    lse : array (...)
        As returned by ``cross_entropy(..., return_lse=True)``.
    out : array like logits, optional
        Receives the gradient. ``out=logits`` works in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    array like logits, rounded once from float32 (float64 for float64)

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written; for targets on a GPU see :func:`cross_entropy`.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> logits, targets = np.log(np.array([[1.0, 3.0], [5.0, 5.0]])), np.array([1, -100])
    >>> loss, lse = gpu_ops.cross_entropy(logits, targets, return_lse=True)
    >>> gpu_ops.cross_entropy_backward(1.0, logits, targets, lse)
    array([[ 0.25, -0.25],
           [ 0.  ,  0.  ]])
    """
    options = _Options(ignore_index, label_smoothing, z_loss, softcap, class_weight, reduction, denominator)
    call = Call("cross_entropy_backward", device, backend, workspace)
    is_number = isinstance(dloss, (int, float, np.number)) and reduction != "none"
    given = None if is_number else call.read("dloss", dloss, contiguous=True)
    rows, dtype = options.read(call, logits, targets)
    if given is not None:
        _as_loss(call, "dloss", given, rows if reduction == "none" else (), dtype)
    call.option(dloss=checks.number(call.op, "dloss", dloss) if is_number else None)
    _as_loss(call, "lse", call.read("lse", lse, contiguous=True), rows, dtype)
    x = call.views["logits"]
    call.write("dlogits", x.shape, x.dtype, out, in_place="logits", rows=True)
    return options.bind(call, rows, dtype)


def _as_loss(call: Call, name: str, x: Array, shape: tuple[int, ...], dtype: str) -> None:
    """``x`` has this shape, and the dtype of losses."""
    checks.exactly(call.op, name, x, shape)
    kind = checks.computing_dtype(dtype)
    if x.dtype != kind:
        raise DTypeError(
            f"{call.op}: {name} is {x.dtype}, expected {kind}, as logits is {dtype}; "
            f"cast one of them, for example {name}.astype('{kind}')"
        )


@dataclass(frozen=True)
class _Options:
    """Options of both functions, as given."""

    ignore_index: Any
    label_smoothing: Any
    z_loss: Any
    softcap: Any
    class_weight: Any
    reduction: Any
    denominator: Any

    def read(self, call: Call, logits: Any, targets: Any) -> tuple[tuple[int, ...], str]:
        """Checks logits, targets and options; the shape of the rows, and the dtype."""
        op, x = call.op, call.read("logits", logits, rows=True)
        dtype = checks.float_dtype(op, logits=x)
        if x.ndim == 0:
            raise ShapeError(f"{op}: logits has no axes; expected (..., vocab)")
        rows = x.shape[:-1]
        read_indices(call, "targets", targets, rows)
        smoothing = checks.number(op, "label_smoothing", self.label_smoothing, low=0.0)
        if smoothing > 1.0:
            raise OptionError(f"{op}: label_smoothing must lie in [0, 1], got {self.label_smoothing!r}")
        call.option(
            ignore_index=checks.integer(op, "ignore_index", self.ignore_index, low=-(2**63), high=2**63 - 1),
            label_smoothing=smoothing,
            z_loss=checks.number(op, "z_loss", self.z_loss, low=0.0),
            softcap=checks.number(op, "softcap", self.softcap, low=0.0),
            reduction=checks.one_of(op, "reduction", self.reduction, ("mean", "sum", "none")),
        )
        weight = call.optional("class_weight", self.class_weight)
        if weight is not None:
            _as_loss(call, "class_weight", weight, x.shape[-1:], dtype)
        self._read_denominator(call)
        return rows, dtype

    def _read_denominator(self, call: Call) -> None:
        given = self.denominator
        if given is not None and self.reduction != "mean":
            raise OptionError(
                f"{call.op}: denominator is what reduction='mean' divides by, and reduction is {self.reduction!r}"
            )
        if given is None or isinstance(given, (int, float, np.number)):
            number = given if given is None else checks.number(call.op, "denominator", given, low=0.0)
            call.option(denominator=number)
            return
        array = call.read("denominator", given)
        if array.dtype not in _NUMBERS:
            names = ", ".join(map(str, _NUMBERS))
            raise DTypeError(
                f"{call.op}: denominator is {array.dtype}; allowed: a number, or an array of {names}"
            )
        checks.exactly(call.op, "denominator", array, ())
        call.option(denominator=None)

    def bind(self, call: Call, rows: tuple[int, ...], dtype: str) -> Bound:
        x: Array = call.views["logits"]
        vocab, ignored = x.shape[-1], int(self.ignore_index)
        return call.bind(
            problem=lambda: f"{math.prod(rows)} rows of {vocab} {dtype}, reduction {self.reduction}",
            unsupported=checks.unsupported(dtype),
            look=None if call.on_cuda else look_at(call.op, "targets", vocab, ignored),
            flops=5.0 * x.size,
        )


@lowers("cross_entropy", "reference")
@lowers("cross_entropy_backward", "reference")
def _reference(spec: Spec, on: Builder) -> None:
    from gpu_ops.reference import cross_entropy as reference

    names = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction")
    options: dict[str, Any] = {name: spec[name] for name in names}

    def run(views: Mapping[str, Any]) -> None:
        x, y, lse = views["logits"], views["targets"], views.get("lse")
        more = options | {
            "class_weight": views.get("class_weight"),
            "denominator": views.get("denominator", spec["denominator"]),
        }
        if "dlogits" in views:
            dloss = views.get("dloss", spec["dloss"])
            store(views, ("dlogits",), reference.cross_entropy_backward(dloss, x, y, views["lse"], **more))
        else:
            results = ("loss",) if lse is None else ("loss", "lse")
            store(views, results, reference.cross_entropy(x, y, **more, return_lse=lse is not None))

    on.call(run, "NumPy, float64")
