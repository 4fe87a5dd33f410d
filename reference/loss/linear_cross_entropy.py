"""Cross-entropy of ``x @ weight.T + bias``, and its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.reference.gemm.linear import linear, linear_backward
from gpu_ops.reference.loss.cross_entropy import LossOptions, cross_entropy, cross_entropy_backward
from gpu_ops.reference.options import takes
from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["linear_cross_entropy"]


@takes(LossOptions)
def linear_cross_entropy(
    x: Array,
    weight: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    return_lse: bool = False,
    grads: bool = False,
    only: str | None = None,
    dloss: Any = 1.0,
    dweight: Array | None = None,
    dbias: Array | None = None,
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """Loss, with ``grads`` dx, dweight and, with a bias, dbias (``only="dx"``: dx), with ``return_lse`` also lse.

    Options and losses as in :func:`cross_entropy` of the logits ``x @ weight.T + bias``; sums and losses are float32
    (float64 for float64). dweight and dbias start from those given.
    """
    p = steps(precision, x.dtype)
    between: Precision = "naive" if precision == "naive" else "float64"
    logits = linear(x, weight, bias, precision=between)
    loss, lse = cross_entropy(logits, targets, return_lse=True, precision=between, **options)
    results = [p.store(loss, np.float32)]
    if grads:
        dlogits = cross_entropy_backward(
            np.asarray(dloss), logits, targets, lse, precision=between, **options
        )
        sums: dict[str, Any] = {"has_bias": bias is not None, "dweight": dweight, "dbias": dbias}
        gradients = linear_backward(dlogits, x, weight, **sums, precision=precision)
        results += gradients[:1] if only else gradients
    if return_lse:
        results.append(p.store(lse, np.float32))
    return tuple(results) if len(results) > 1 else results[0]
