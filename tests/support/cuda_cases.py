"""Calls with arrays on a CUDA device, for tests on fakes: one of every op with kernels, and its fuller forms."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core.dispatch import has_cuda_kernels
from tests.support.calls import OPS, call, refusal

# Results that are no arrays, or go through the host: calls with these cannot be captured.
NO_CAPTURE = ("ternary_quantize", "ternary_pack", "ternary_unpack")
# Forms of an op with more results or workspaces.
FORMS = {
    "cross_entropy": [{"reduction": "mean"}],
    "cross_entropy_backward": [{"dloss": 2.0, "reduction": "mean"}],
    "linear_cross_entropy": [{"reduction": "mean", "dloss": 2.0}],
    "rmsnorm": [{"return_rstd": True}],
    "layernorm": [{"return_stats": True}],
    "swiglu_mlp": [{"keep": "gate_up"}],
    "attention": [{"return_lse": True}],
    "attention_varlen": [{"return_lse": True}],
    "attention_decode": [{"return_lse": True}, {"num_splits": 3}],
}
CASES = [
    (op, form, kernels)
    for op in OPS
    if has_cuda_kernels(op)
    for kernels in ("raw", "numba")
    if not refusal(call(op), kernels)
    for form in ({}, *FORMS.get(op, []))
]
CAPTURED = [case for case in CASES if case[0] not in NO_CAPTURE]


def case_id(case: tuple[str, dict[str, object], str]) -> str:
    op, form, kernels = case
    return f"{op}{'-' * bool(form)}{''.join(form)}-{kernels}"


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_cupy(x: Any) -> Any:
    """Copy a NumPy array to the GPU."""
    import cupy

    return cupy.asarray(x.view(np.uint16)).view(BFLOAT16) if x.dtype == BFLOAT16 else cupy.asarray(x)


def to_numpy(x: Any) -> Any:
    """Copy a CuPy array to host memory."""
    import cupy

    return cupy.asnumpy(x.view(np.uint16)).view(BFLOAT16) if x.dtype == BFLOAT16 else cupy.asnumpy(x)
