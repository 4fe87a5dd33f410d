"""Euclidean norm over all elements of arrays, such as the gradients of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.kernels.program import Builder, Spec, lowers

__all__ = ["global_norm"]


@op(cuda=True, kernels="rows.global_norm")
def global_norm(
    arrays: Any,
    *,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Euclidean norm over all elements of arrays, ``sqrt(sum of x**2)``, and whether an element is not finite.

    Both results stay on the device of the arrays, for a step that clips by the norm or is skipped: see
    :func:`gpu_ops.training.clip_coefficient` and :class:`gpu_ops.training.GradScaler`.

    Parameters
    ----------
    arrays : array, or list or tuple of arrays
        Arrays of any shapes; float16, bfloat16, float32 or float64, which may differ.
    out : tuple of two arrays, (norm, found_inf), optional
        Receives the results.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    norm : array (), float32; float64 if one of the arrays is
        0 without elements. NaN if an element is NaN, else inf if one is infinite or the norm exceeds its dtype.
    found_inf : array (), float32
        1 if an element is NaN or infinite, else 0.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Squares are rounded to float32 (float64 for float64); their sums are compensated. The relative error is below
    1e-7 for any number of elements, 2**-24 of it from rounding the norm itself. If squares exceed the range, they are
    summed again after scaling.

    The order of additions depends only on the index: blocks of 16384 elements, then the blocks in float64. Results
    have the same bits for any number of threads, on every GPU and on the CPU. A GPU needs one launch per array and
    one for the total.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> norm, found_inf = gpu_ops.global_norm([np.array([3.0, 0.0]), np.array([[4.0]])])
    >>> float(norm), float(found_inf)
    (5.0, 0.0)
    """
    call = Call("global_norm", device, backend, workspace)
    several = isinstance(arrays, (list, tuple))
    dtypes = {"float32"}
    for i, x in enumerate(arrays if several else [arrays]):
        name = f"arrays[{i}]" if several else "arrays"
        dtypes.add(checks.float_dtype(call.op, **{name: call.read(name, x, contiguous=True)}))
    names = tuple(call.views)
    call.option(arrays=names)
    widest = "float64" if "float64" in dtypes else "float32"
    call.write_each({"norm": ((), widest), "found_inf": ((), np.float32)}, out)
    size = sum(x.size for x in call.views.values())
    return call.bind(
        problem=lambda: f"{size} elements in {len(names)} arrays, {widest} norm",
        unsupported=checks.unsupported(widest),
        flops=2.0 * size,
    )


@lowers("global_norm", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rows import global_norm as reference

    def run(views: Mapping[str, Any]) -> None:
        results = reference.global_norm([views[name] for name in spec["arrays"]])
        store(views, ("norm", "found_inf"), results)

    builder.call(run, "NumPy, float64")
