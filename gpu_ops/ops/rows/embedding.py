"""Rows of a table by index, and the gradient of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.indices import check_indices, read_indices
from gpu_ops.ops.weights.packed import cpu_only, read_weight

__all__ = ["embedding", "embedding_backward"]


@op(cuda=True, kernels="rows.embedding")
def embedding(
    ids: Any,
    weight: Any,
    *,
    scale: float = 1.0,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Rows of a table by index: ``scale * weight[ids]``.

    Parameters
    ----------
    ids : int32 or int64 array (...)
        In [0, num_embeddings).
    weight : array or PackedMatrix (num_embeddings, dim)
        float16, bfloat16, float32 or float64. Rows of packed weights have the dtype of the matrix.
    scale : float
        Factor of the rows, such as sqrt(dim) in Gemma.
    out : array (..., dim) in weight's dtype, optional
        Receives the result.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    array (..., dim) in weight's dtype, rounded once

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. Indices in host memory are checked. On a GPU they are not, since that would
        wait for them: the row of an index outside the table is NaN.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> gpu_ops.embedding(np.array([2, 0]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    array([[5., 6.],
           [1., 2.]])
    """
    call = Call("embedding", device, backend, workspace)
    ids_ = read_indices(call, "ids", ids)
    table = read_weight(call, "weight", weight, "num_embeddings dim")
    dtype = checks.float_dtype(call.op, weight=table)
    call.option(scale=checks.computable(call.op, "scale", scale, dtype))
    call.write("x", (*ids_.shape, table.shape[1]), table.dtype, out, rows=True)
    if isinstance(table, PackedMatrix):
        if table.columns is not None:
            raise OptionError(
                f"{call.op}: the table stores its columns in another order; pass weight.dequantize()"
            )
        return _bind(call, dtype, table.shape, "packed_embedding", cpu_only(table))
    return _bind(call, dtype, table.shape)


@op(cuda=True, kernels="rows.embedding", written=("dweight",))
def embedding_backward(
    dx: Any,
    ids: Any,
    num_embeddings: int,
    *,
    scale: float = 1.0,
    dweight: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Gradient of :func:`embedding` for weight: row v is the sum of the rows of ``scale * dx`` whose index is v.

    Parameters
    ----------
    dx : array (..., dim)
        Gradient of the result.
    ids : int32 or int64 array (...)
        Same as in the forward call.
    num_embeddings : int
        Number of rows of the table, less than 2**31.
    scale : float
        Same as in the forward call.
    dweight : array (num_embeddings, dim), float32 (float64 for float64), optional
        The gradient is added to it, and it is returned: for micro-batches, or a tied output layer.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dweight : array (num_embeddings, dim), float32 (float64 for float64)

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. Indices in host memory are checked; on a GPU, rows whose index is outside
        the table are skipped.

    Notes
    -----
    Sums are float32 (float64) in an order that depends only on the indices: the same bits for any number of threads
    and in every run. A GPU sorts the indices and adds rows of the same index in tiles of 32, without atomics.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> dx = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> gpu_ops.embedding_backward(dx, np.array([1, 0, 1]), 3)
    array([[3., 4.],
           [6., 8.],
           [0., 0.]])
    """
    call = Call("embedding_backward", device, backend, workspace)
    x = call.read("dx", dx, rows=True)
    dtype = checks.float_dtype(call.op, dx=x)
    if x.ndim == 0:
        raise ShapeError(f"{call.op}: dx has no axes; expected (..., dim)")
    read_indices(call, "ids", ids, x.shape[:-1])
    shape = (checks.integer(call.op, "num_embeddings", num_embeddings, low=0, high=2**31 - 1), x.shape[-1])
    call.option(scale=checks.computable(call.op, "scale", scale, dtype), adds=dweight is not None)
    acc_dtype = checks.computing_dtype(dtype)
    call.write("dweight", shape, acc_dtype, dweight, argument="dweight", added=dweight is not None)
    return _bind(call, dtype, shape)


def _bind(
    call: Call,
    dtype: str,
    table: tuple[int, ...],
    lowered_as: str = "",
    unsupported: Mapping[str, str] | None = None,
) -> Bound:
    ids: Array = call.views["ids"]
    return call.bind(
        lowered_as=lowered_as,
        problem=lambda: f"{ids.size} rows of {table[0]} x {table[1]} {dtype}",
        unsupported={**checks.unsupported(dtype), **(unsupported or {})},
        check_values=None if call.on_cuda else check_indices(call.op, "ids", table[0]),
        flops=float(ids.size * table[1]),
    )


@lowers("embedding", "reference")
@lowers("embedding_backward", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rows import embedding as reference

    def run(views: Mapping[str, Any]) -> None:
        ids, scale = views["ids"], spec["scale"]
        if "x" in views:
            store(views, ("x",), reference.embedding(ids, views["weight"], scale=scale))
            return
        dweight = views["dweight"] if spec["adds"] else None
        rows = spec.tensor("dweight").shape[0]
        gradient = reference.embedding_backward(views["dx"], ids, rows, scale=scale, dweight=dweight)
        store(views, ("dweight",), gradient)

    builder.call(run, "NumPy, float64")
