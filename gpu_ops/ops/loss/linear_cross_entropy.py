"""Cross-entropy of a linear layer, without storing all its logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import OptionError
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.gemm.linear import read_shape
from gpu_ops.ops.gradients import named_results
from gpu_ops.ops.loss.cross_entropy import LossOptions, as_loss, is_number, of_reference
from gpu_ops.ops.weights.packed import cpu_only, read_weight

__all__ = ["linear_cross_entropy"]


@op(cuda=True, kernels="loss.linear_cross_entropy", written=("dweight", "dbias"))
def linear_cross_entropy(
    x: Any,
    weight: Any,
    targets: Any,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    class_weight: Any = None,
    reduction: str = "mean",
    denominator: Any = None,
    chunk: int = 0,
    return_lse: bool = False,
    grads: bool = False,
    only: str | None = None,
    dloss: Any = 1.0,
    dweight: Any = None,
    dbias: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Cross-entropy of the logits ``x @ weight.T + bias``, and its gradients in the same call.

    The logits exist for ``chunk`` rows at a time, in float32 (float64 for float64). Each chunk gives its losses and,
    with ``grads``, dlogits, dx and its share of dweight. Losses are those of :func:`cross_entropy`;
    ``dx = dlogits @ weight``, ``dweight = dlogits.T @ x``, ``dbias = dlogits.sum(0)``.

    Parameters
    ----------
    x : array (..., hidden)
        float16, bfloat16, float32 or float64; weight and bias in the same dtype.
    weight : array or PackedMatrix (vocab, hidden)
        In the layout of checkpoints. A packed weight is unpacked by pieces, and frozen: with ``grads``, pass
        ``only="dx"``.
    targets : int32 or int64 array (...)
        The class of each row, in [0, vocab), or ``ignore_index``.
    bias : array (vocab,), optional
    ignore_index, label_smoothing, z_loss, softcap, class_weight, reduction, denominator
        Same as in :func:`cross_entropy`.
    chunk : int
        Number of rows whose logits exist at a time, at least 1/256 of all rows. 0: chosen for the device, at least 64
        on the CPU and 1024 on a GPU.
    return_lse : bool
        Also return lse.
    grads : bool
        Also return the gradients.
    only : {"dx"}, optional
        With ``grads``, compute neither dweight nor dbias (frozen weight).
    dloss : number, or float32 array like the loss (float64 for float64)
        With ``grads``, the gradient of the loss: 1, or the loss scale, which float16 needs. With ``"none"``, an array
        has one per row; a number is for all rows.
    dweight : float32 array like weight (float64 for float64), optional
        With ``grads``; the gradient is added to it, to accumulate over parts of a batch.
    dbias : float32 array (vocab,) (float64 for float64), optional
        With ``grads`` and a bias; the gradient is added to it.
    out : array, or (loss, dx, dweight, dbias, lse) without those that are given or not requested, optional
        Receives the results; none may share memory with an input.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    loss : array () or, with ``"none"``, (...), float32 (float64 for float64)
    dx : array like x, only with ``grads``
    dweight : float32 array like weight (float64 for float64), only with ``grads``, not with ``only``
    dbias : float32 array (vocab,) (float64 for float64), under the same conditions and only with a bias
    lse : array (...), float32 (float64 for float64), only with ``return_lse``; -inf in ignored rows

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. For targets on a GPU see :func:`cross_entropy`.

    Notes
    -----
    2 * rows * hidden * vocab flops, with ``grads`` three times as many, with ``only`` twice. Scratch on the CPU: the
    logits of a chunk, by default at most 16 MiB or 64 rows, 4 * chunk * hidden bytes and 1 MiB (twice that for
    float64). On a GPU the logits of a chunk, and the parts of dx where its sum over the vocabulary is divided among
    blocks. A packed weight is unpacked 8192 rows at a time, on a GPU 16384, for each chunk anew: on the CPU chunks
    of it have at least 512 rows.

    For 16-bit dtypes dlogits are rounded to x's dtype for the two products, after the factor dloss / denominator.
    dweight and dbias are summed in float32, in a fixed order: the same bits for any number of threads. On the CPU
    losses and dx have the same bits for every ``chunk``. Ignored rows have zero dlogits, but x is multiplied by them:
    NaN in such a row reaches dweight.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x, weight = np.array([[0.0, 1.0], [2.0, 0.0]]), np.log(np.array([[2.0, 1.0], [2.0, 3.0]]))
    >>> loss, dx, dweight = gpu_ops.linear_cross_entropy(x, weight, np.array([1, -100]), grads=True)
    >>> round(float(loss), 4)
    0.2877
    >>> dweight
    array([[ 0.  ,  0.25],
           [ 0.  , -0.25]])
    """
    options = LossOptions(
        ignore_index, label_smoothing, z_loss, softcap, class_weight, reduction, denominator
    )
    call = Call("linear_cross_entropy", device, backend, workspace)
    x_ = call.read("x", x, rows=True)
    weight_ = read_weight(call, "weight", weight)
    is_packed = isinstance(weight_, PackedMatrix)
    bias_ = call.optional("bias", bias)
    biases = {} if bias_ is None else {"bias": bias_}
    (*lead, vocab), dtype = read_shape(call, x_, weight_, **biases)
    rows, tokens, acc_dtype = tuple(lead), math.prod(lead), checks.computing_dtype(dtype)
    if bias_ is not None:
        checks.exactly(call.op, "bias", bias_, (vocab,))
    options.read(call, targets, rows, vocab, "x")
    call.option(chunk=checks.integer(call.op, "chunk", chunk, low=0))
    like_loss = rows if reduction == "none" else ()
    results = {"loss": (like_loss, acc_dtype)}
    differentiates = checks.flag(call.op, "grads", grads)
    added = {name: array for name, array in (("dweight", dweight), ("dbias", dbias)) if array is not None}
    if differentiates:
        _read_dloss(call, dloss, like_loss)
        results["dx"] = (x_.shape, x_.dtype)
        if only is None and is_packed:
            raise OptionError(f"{call.op}: a packed weight is frozen and has no gradient; pass only='dx'")
        if only is None:
            results["dweight"] = (weight_.shape, acc_dtype)
            results |= {"dbias": ((vocab,), acc_dtype)} if bias_ is not None else {}
        elif checks.one_of(call.op, "only", only, ("dx",)) and added:
            raise OptionError(f"{call.op}: only='dx' computes neither dweight nor dbias; omit them")
    elif added or only is not None or not is_number(dloss) or dloss != 1.0:
        missing = next(iter(added), "dloss" if only is None else "only")
        raise OptionError(f"{call.op}: {missing}= needs grads=True")
    if "dbias" in added and bias_ is None:
        raise OptionError(f"{call.op}: dbias= needs bias=")
    if checks.flag(call.op, "return_lse", return_lse):
        results["lse"] = (rows, acc_dtype)
    fresh = {name: layout for name, layout in results.items() if name not in added}
    if len(fresh) > 1:
        places = call.write_each(fresh, out, rows=True)
    else:
        place = call.write("loss", *fresh["loss"], out)
        places = [] if place is None else [place]
    for name, place in zip(fresh, places, strict=False):
        if name in ("loss", "lse"):
            checks.contiguous(call.op, name, place)
    for name, array in added.items():
        call.write(name, *results[name], array, argument=name, rows=True, added=True)
    call.option(added=tuple(added), rows=vocab, cols=x_.shape[-1])
    return call.bind(
        problem=lambda: (
            f"{tokens} rows, hidden {x_.shape[-1]}, vocab {vocab}, {dtype}, reduction {reduction}"
            + (", with gradients" if "dweight" in results else ", with dx" if differentiates else "")
        ),
        unsupported=checks.unsupported(dtype) | cpu_only(weight_),
        finish=named_results(*results) if added else None,
        check_values=options.check_values(call, vocab, "x"),
        flops=(2.0 + 2.0 * ("dx" in results) + 2.0 * ("dweight" in results)) * x_.size * vocab,
    )


def _read_dloss(call: Call, dloss: Any, shape: tuple[int, ...]) -> None:
    number = None
    if is_number(dloss):
        number = checks.computable(call.op, "dloss", dloss, call.views["x"].dtype.name)
    else:
        as_loss(call, "dloss", call.read("dloss", dloss, contiguous=True), shape, "x")
    call.option(dloss=number)


@lowers("linear_cross_entropy", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.loss.linear_cross_entropy import linear_cross_entropy

    names = [n for n in ("loss", "dx", "dweight", "dbias", "lse") if spec.get(n) is not None]

    def run(views: Mapping[str, Any]) -> None:
        options = of_reference(spec, views) | {"bias": views.get("bias"), "return_lse": "lse" in names}
        if "dx" in names:
            options |= {"grads": True, "dloss": views.get("dloss", spec["dloss"])}
            options["only"] = None if "dweight" in names else "dx"
            options |= {name: views[name] for name in spec["added"]}
        weight = views["weight"].dequantize(views["x"].dtype) if spec["packed_weight"] else views["weight"]
        arrays = views["x"], weight, views["targets"]
        store(views, names, linear_cross_entropy(*arrays, **options))

    builder.call(run, "NumPy, float64")
