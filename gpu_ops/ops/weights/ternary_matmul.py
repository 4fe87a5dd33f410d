"""Multiply by packed ternary weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.weights.ternary_planes import bind_product, take_matrix

__all__ = ["ternary_matmul"]

Activations = Literal["int8", "native"]


@op(cuda=True, kernels="weights.ternary")
def ternary_matmul(
    x: Any,
    w: TernaryMatrix,
    *,
    x_scale: Any = None,
    activations: str = "int8",
    out_dtype: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """``y = x @ W.T`` with packed ternary weights ``W = scale * t``.

    ``activations="int8"``: each token is quantised, ``s = 127 / max(max|x|, 1e-5)``,
    ``q = round_half_even(x * s)``; then ``y[n] = scale[n] / s * sum_k t[n, k] * q[k]`` with an exact
    integer sum (W1.58A8, as in the training of BitNet b1.58). ``"native"``: x is not quantised, sums are float32 or
    wider. An int8 x is quantised already: ``y[n] = scale[n] * x_scale * sum_k t[n, k] * x[k]``, with the same exact
    sum.

    Parameters
    ----------
    x : array (..., K), or TernaryMatrix (M, K)
        float16, bfloat16, float32 or float64; or int8, with ``x_scale``. A ternary x ignores ``activations``: the
        sums are of trits, by popcount on bit planes. Scales of both must then be per tensor or row. Neither argument
        is on a device, so ``device`` or ``out`` determines where it runs.
    w : TernaryMatrix (N, K)
        Any format; formats other than w2 are converted at the first call and the result is kept on ``w``. The
        first call on a CUDA device copies the codes there, and ``w`` keeps the copy as long as it lives:
        make that call before capturing a graph.
    x_scale : array (...), (..., 1) or (), optional
        Required for an int8 x: the value of one step of its codes, per token or one for all. float32 or float64.
        ``q, scale, _ = rmsnorm_quant_int8(...)`` returns both.
    activations : {"int8", "native"}
        Form in which a float x is multiplied.
    out_dtype : dtype, optional
        Dtype of y for an int8 x: any float dtype; default that of ``x_scale``. For other x only the default is
        allowed.
    out : array (..., N), optional
        y's dtype; may not overlap x, x_scale or w.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    y : array (..., N)
        x's dtype (float32 for a ternary x, ``out_dtype`` for an int8 one). In int8 mode a token with a NaN or an
        infinity, or whose x_scale is NaN, gives NaN.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Reads N * K / 4 bytes of weights, an eighth of float16's. In the packed layout the unsigned codes
    ``t + 1`` are operands of 4 x int8 dot products; the offset is subtracted once per token.
    With a ternary x, chunks of 128 weights of w that are all zero are skipped if at most a quarter of the chunks have
    a nonzero; ``explain`` reports it. With float activations a GPU skips nothing: a warp reads 2048 neighbours of a
    row at a time, all of which are zero only if whole rows are. A GPU's popcount rate is lower than the int8 rate of
    its tensor cores (a sixteenth on an H200, by its data sheet): for many rows and a w that is not sparse,
    ``x.dequantize()`` is faster there.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> w = gpu_ops.TernaryMatrix.from_trits(np.array([[1, -1, 0], [0, 1, 1]]), 0.5)
    >>> gpu_ops.ternary_matmul(np.array([[127.0, 27.0, 1.0]], np.float32), w)
    array([[50., 14.]], dtype=float32)
    >>> gpu_ops.ternary_matmul(np.array([[127, 27, 1]], np.int8), w, x_scale=np.array([2.0], np.float32))
    array([[100.,  28.]], dtype=float32)
    >>> gpu_ops.ternary_matmul(w, w)
    array([[ 0.5 , -0.25],
           [-0.25,  0.5 ]], dtype=float32)
    """
    call = Call("ternary_matmul", device, backend, workspace)
    if not isinstance(w, TernaryMatrix):
        raise DTypeError(
            f"{call.op}: w is {type(w).__name__}, not a TernaryMatrix; make one with ternary_quantize(w) or "
            "TernaryMatrix(codes, scale, shape, format)"
        )
    mode = checks.one_of(call.op, "activations", activations, get_args(Activations))
    if isinstance(x, TernaryMatrix):
        _without_scale(call.op, "a TernaryMatrix, which has its own", x_scale)
        checks.result_dtype(call.op, "out_dtype", out_dtype, np.dtype(np.float32))
        return bind_product(call, x, w, out)
    x_ = call.read("x", x, rows=True)
    n, k = w.shape
    if x_.ndim == 0 or x_.shape[-1] != k:
        raise ShapeError(f"{call.op}: x has shape {x_.shape}, expected (..., K={k}) for w of shape {w.shape}")
    if x_.dtype == np.int8:
        dtype, result_dtype = _given(call, x_, x_scale, mode, out_dtype)
    else:
        dtype = checks.float_dtype(call.op, x=x_)
        _without_scale(call.op, f"{dtype} and quantised in the call; omit it, or pass int8 codes", x_scale)
        result_dtype = checks.result_dtype(call.op, "out_dtype", out_dtype, x_.dtype)
    take_matrix(call, "w", w)
    call.write("y", (*x_.shape[:-1], n), result_dtype, out, rows=True)
    tokens, groups = math.prod(x_.shape[:-1]), w.scale.shape[1] if w.scale.ndim == 2 else 1
    call.option(k=k, activations=mode)
    types = f"int8 to {result_dtype}" if x_.dtype == np.int8 else f"{dtype}, activations {mode}"
    return call.bind(
        problem=f"{tokens} tokens x ({n} x {k}) {w.format}, {types}",
        unsupported=_unsupported(dtype, mode, k, groups),
        flops=2.0 * tokens * n * k,
    )


def _given(call: Call, x: Array, x_scale: Any, mode: str, out_dtype: Any) -> tuple[str, np.dtype[Any]]:
    """Check an int8 x and its scale; return the dtype that selects the backends, and the dtype of y."""
    if x_scale is None:
        raise OptionError(
            f"{call.op}: x is int8, so x_scale is needed: what one step stands for, per token, as rmsnorm_quant_int8 "
            "returns it; for plain integers pass np.ones((), np.float32)"
        )
    if mode != "int8":
        raise OptionError(f"{call.op}: activations={mode!r} is for float x; this x is int8, so omit it")
    scale = call.read("x_scale", x_scale, contiguous=True)
    scale_dtype = checks.float_dtype(call.op, x_scale=scale)
    if scale_dtype not in ("float32", "float64"):
        raise DTypeError(
            f"{call.op}: x_scale is {scale_dtype}, expected float32 or float64; cast it: x_scale.astype('f4')"
        )
    tokens = x.shape[:-1]
    if scale.shape not in (tokens, (*tokens, 1), ()):
        raise ShapeError(
            f"{call.op}: x_scale has shape {scale.shape}, expected one per token of x, {tokens} or {(*tokens, 1)}, "
            "or one for all, ()"
        )
    result_dtype = checks.result_dtype(
        call.op, "out_dtype", out_dtype, scale.dtype, *checks.FLOAT_DTYPES.values()
    )
    return "float64" if np.float64 in (scale.dtype, result_dtype) else "float32", result_dtype


def _without_scale(op: str, given: str, x_scale: Any) -> None:
    if x_scale is not None:
        raise OptionError(f"{op}: x_scale is for int8 x, and this x is {given}")


def _unsupported(dtype: str, mode: str, k: int, groups: int) -> dict[str, str]:
    """Reasons by backend, found without importing the kernels, so that validation stays cheap."""
    reasons = {}
    if dtype == "float64":
        reasons["raw"] = "float64 has Numba kernels only"
    elif mode == "int8" and k > 1 << 23:
        reasons["raw"] = f"K={k}: int32 sums hold 2^23 products of a code and an int8"
    elif groups > 1 and (k // groups) % 64:
        reasons["raw"] = f"group_size {k // groups} is not a multiple of 64"
    if groups > 1 and (k // groups) % 4:
        reasons["numba"] = f"group_size {k // groups} is not a multiple of 4"
    return reasons


@lowers("ternary_matmul", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.weights.ternary import ternary_matmul

    def run(views: Mapping[str, Any]) -> None:
        w2 = views["w"].to("w2")
        options = {
            "activations": spec["activations"],
            "x_scale": views.get("x_scale"),
            "out_dtype": views["y"].dtype,
        }
        store(views, ("y",), ternary_matmul(views["x"], w2.trits(), w2.scale, **options))

    builder.call(run, "NumPy, exact integers" if spec["activations"] == "int8" else "NumPy, float64")
