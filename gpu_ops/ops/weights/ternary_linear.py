"""A linear layer with packed ternary weights, and the gradients that train its latent weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, cast, get_args

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, as_rows, give, host_view, on_cuda, overlap, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import DeviceError, DTypeError, OptionError, ShapeError
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.weights.ternary import ternary_quantize
from gpu_ops.ops.weights.ternary_matmul import Activations, ternary_matmul
from gpu_ops.ops.weights.ternary_planes import take_matrix

__all__ = ["TernaryLinear", "ternary_matmul_backward"]


@op(cuda=True, kernels="weights.ternary_backward")
def ternary_matmul_backward(
    dy: Any,
    x: Any,
    w: TernaryMatrix,
    *,
    activations: str = "int8",
    only: str | None = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Straight-through gradients of :func:`ternary_matmul`: ``dx = dy @ W`` and ``dw = dy.T @ xq``.

    Rounding counts as the identity, as in the training of BitNet: ``dw`` is the gradient for the latent weights that
    ``w`` was quantised from, and is not masked where quantisation clipped them. ``xq`` is the factor of the forward:
    x quantised to int8 and scaled back, or x itself with ``activations="native"``.

    Parameters
    ----------
    dy : array (..., N)
        Gradient of y, in x's dtype.
    x, w, activations
        Same as in the forward call.
    only : {"dx", "dw"}, optional
        Compute only dx (frozen weights), or only dw (deferred).
    out : (dx, dw), or the one requested array, optional
        Receives the gradients; none may share memory with an input.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dx : array (..., K), not with ``only="dw"``
        x's dtype.
    dw : array (N, K), not with ``only="dx"``
        float32, float64 for float64, like the optimiser's weights.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    4 * tokens * N * K flops, half of them with ``only``; sums in float32 (float64 for float64). On the CPU W is dense
    only in tiles; on a GPU it stays packed until it is in registers. On a GPU, and where a CPU multiplies bfloat16, W
    times its scales (on the CPU: if there is one per row or group) and xq are rounded to x's dtype.
    Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013; Ma et al., 2024.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> w = gpu_ops.TernaryMatrix.from_trits(np.array([[1, -1, 0], [0, 1, 1]]), 0.5)
    >>> dx, dw = gpu_ops.ternary_matmul_backward(np.ones((1, 2)), np.array([[127.0, 27.0, 1.0]]), w)
    >>> dx
    array([[0.5, 0. , 0.5]])
    >>> dw
    array([[127.,  27.,   1.],
           [127.,  27.,   1.]])
    """
    call = Call("ternary_matmul_backward", device, backend, workspace)
    if not isinstance(w, TernaryMatrix):
        raise DTypeError(f"{call.op}: w is {type(w).__name__}, not the TernaryMatrix of the forward call")
    dy_, x_ = call.read("dy", dy, rows=True), call.read("x", x, rows=True)
    n, k = w.shape
    if x_.ndim == 0 or x_.shape[-1] != k:
        raise ShapeError(f"{call.op}: x has shape {x_.shape}, expected (..., K={k}) for w of shape {w.shape}")
    dtype = checks.float_dtype(call.op, x=x_, dy=dy_)
    checks.exactly(call.op, "dy", dy_, (*x_.shape[:-1], n))
    mode = checks.one_of(call.op, "activations", activations, get_args(Activations))
    take_matrix(call, "w", w)
    layouts = {"dx": (x_.shape, x_.dtype), "dw": ((n, k), checks.computing_dtype(dtype))}
    if only is None:
        call.write_each(layouts, out, rows=True)
    else:
        part = checks.one_of(call.op, "only", only, ("dx", "dw"))
        call.write(part, *layouts[part], out, rows=True)
    tokens, groups = math.prod(x_.shape[:-1]), w.scale.shape[1] if w.scale.ndim == 2 else 1
    call.option(activations=mode)
    return call.bind(
        problem=f"{tokens} tokens x ({n} x {k}), {dtype}, activations {mode}"
        + (f", only {only}" if only else ""),
        unsupported=_unsupported(dtype, k, groups),
        check_values=_unit if dtype == "float16" else None,
        flops=(4.0 if only is None else 2.0) * tokens * n * k,
    )


def _unit(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Option ``unit`` of the GPU kernels, in which they round float16 weights: about the largest scale."""
    return {}, {"unit": _power_of_two(views["w"].to("w2").scale)} if backend == "raw" else {}


@lowers("ternary_matmul_backward", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.weights.ternary import ternary_matmul_backward

    def run(views: Mapping[str, Any]) -> None:
        w2, mode = views["w"].to("w2"), spec["activations"]
        names = [name for name in ("dx", "dw") if name in views]
        only = names[0] if len(names) == 1 else None
        arrays = views["dy"], views["x"], w2.trits(), w2.scale
        store(views, names, ternary_matmul_backward(*arrays, activations=mode, only=only))

    builder.call(run, "NumPy, float64")


def _unsupported(dtype: str, k: int, groups: int) -> dict[str, str]:
    if dtype == "float64":
        return {"raw": "float64 has Numba kernels only"}
    if groups > 1 and (k // groups) % 64:
        return {"raw": f"group_size {k // groups} is not a multiple of 64"}
    return {}


def _power_of_two(scale: Array) -> float:
    """A power of two about as large as the largest scale: the unit of float16 weights."""
    largest = float(np.abs(scale).max(initial=0))
    return 2.0 ** math.frexp(largest)[1] if largest else 1.0


class TernaryLinear:
    """Linear layer ``y = x @ W.T + bias`` with packed ternary ``W = scale * t``.

    Parameters
    ----------
    weight : TernaryMatrix (N, K), or array (N, K)
        Packed weights, or dense ones that are quantised.
    bias : array (N,), optional
        float16, bfloat16, float32 or float64; rounded to x's dtype and added to y.
    activations : {"int8", "native"}
        Same as in :func:`ternary_matmul`.
    **quantize
        Options of :func:`ternary_quantize` (method, group_size, threshold) for dense weights.

    Raises
    ------
    ShapeError, DTypeError, OptionError

    Notes
    -----
    Works wherever :func:`ternary_matmul` does. A training step quantises the latent weights, calls the layer and
    :meth:`backward`, and updates the latent weights with dw::

        layer = TernaryLinear(latent)
        y = layer(x)
        dx, dw = layer.backward(dy, x)
        latent -= rate * dw

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> layer = gpu_ops.TernaryLinear(np.array([[0.5, -0.5, 0.1]], np.float32), np.array([10.0], np.float32))
    >>> layer
    TernaryLinear(3 -> 1, bias, activations='int8', 24 bytes)
    >>> layer(np.array([[127.0, 27.0, 1.0]], np.float32)).round(2)
    array([[46.67]], dtype=float32)
    """

    def __init__(self, weight: Any, bias: Any = None, *, activations: str = "int8", **quantize: Any) -> None:
        name = "TernaryLinear"
        if isinstance(weight, TernaryMatrix):
            if quantize:
                raise OptionError(
                    f"{name}: weight is packed already; {', '.join(quantize)} would change nothing"
                )
            self.weight = weight
        else:
            self.weight = cast(TernaryMatrix, ternary_quantize(weight, **quantize))
        self.activations = checks.one_of(name, "activations", activations, get_args(Activations))
        self.bias: Array | None = None
        if bias is not None:
            self.bias = Call(name).read("bias", bias)
            checks.float_dtype(name, bias=self.bias)
            checks.exactly(name, "bias", self.bias, (self.out_features,))

    @property
    def in_features(self) -> int:
        """Columns of the weight: elements of a row of x."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Rows of the weight: elements of a row of y."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(
        self, x: Any, *, out: Any = None, device: str | None = None, backend: str | None = None
    ) -> Any:
        """Return y for x, a float array or a TernaryMatrix; see :func:`ternary_matmul`."""
        if str(getattr(x, "dtype", None)).removeprefix("torch.") == "int8":
            raise DTypeError(
                "TernaryLinear: x is int8, and a layer takes floats, which it quantises itself; for int8 codes call "
                "ternary_matmul(x, layer.weight, x_scale=scale), for integers pass x.astype(np.float32)"
            )
        self._check_apart(out)
        placement = {"device": device, "backend": backend}
        y = ternary_matmul(x, self.weight, activations=self.activations, out=out, **placement)
        return y if self.bias is None else _add(x, y, self.bias)

    forward = __call__

    def backward(
        self, dy: Any, x: Any, *, device: str | None = None, backend: str | None = None
    ) -> tuple[Any, ...]:
        """Return ``(dx, dw)`` of :func:`ternary_matmul_backward`, and ``dbias`` in dw's dtype if there is a bias."""
        placement = {"device": device, "backend": backend}
        dx, dw = ternary_matmul_backward(dy, x, self.weight, activations=self.activations, **placement)
        return (dx, dw) if self.bias is None else (dx, dw, _sum_of_tokens(dy))

    def _check_apart(self, out: Any) -> None:
        """Refuse an ``out`` that overlaps the bias: the bias is in host memory and read after ``out`` is written."""
        if out is None or self.bias is None or on_cuda(out):
            return
        with contextlib.suppress(DTypeError, DeviceError):  # not an array: the op itself refuses it
            view, _ = host_view("TernaryLinear", "out", out)
            if overlap(view, self.bias):
                raise ShapeError(
                    "TernaryLinear: out shares memory with bias, which would be overwritten before it is read; "
                    "pass a separate array or omit it"
                )

    def __repr__(self) -> str:
        bias = "" if self.bias is None else ", bias"
        sizes = f"{self.in_features} -> {self.out_features}"
        return f"TernaryLinear({sizes}{bias}, activations={self.activations!r}, {self.nbytes:,} bytes)"


def _add(x: Any, y: Any, bias: Array) -> Any:
    """Return ``y + bias``, with bias rounded to y's dtype; in place if y's library allows. Runs on x's stream."""
    if not on_cuda(y):
        view, library = host_view("TernaryLinear", "y", y)
        bias = bias.astype(view.dtype)
        if not view.flags.writeable:  # JAX's arrays are constants
            return give(view + bias, library)
        view += bias
        return y
    import cupy

    from gpu_ops.core.cuda_arrays import CudaArrays, give_cuda

    arrays = CudaArrays("TernaryLinear", "x", x)
    view = arrays.view("y", y)
    with arrays.active():
        bias = bias.astype(view.dtype)
        bits = bias.view(f"u{bias.itemsize}")  # NumPy and CuPy cannot exchange bfloat16
        on_device = cupy.asarray(bits).view(bias.dtype)
        if arrays.library == "jax":
            return give_cuda(view + on_device, "jax")
        view += on_device
    return y


def _sum_of_tokens(dy: Any) -> Any:
    """Sum dy over tokens in float64 and round to dw's dtype; in dy's library, on its stream."""
    if not on_cuda(dy):
        view, library = host_view("TernaryLinear", "dy", dy)
        return give(_column_sums(view), library)
    from gpu_ops.core.cuda_arrays import CudaArrays, give_cuda

    arrays = CudaArrays("TernaryLinear", "dy", dy)
    view = arrays.view("dy", dy)
    with arrays.active():
        sums = _column_sums(view)
        return sums if arrays.library is None else give_cuda(sums, arrays.library)


def _column_sums(dy: Array) -> Array:
    sums: Array = as_rows(dy).sum(axis=0, dtype=np.float64)
    return sums.astype(checks.computing_dtype(dy.dtype.name))
