"""Table of calls: every public op, with variants of its options, for any dtype, sizes and seed.

``call("attention")`` is a small valid call; ``call("attention mask", np.float64, seed=1, seqlen_q=40)`` another. The
laws of test_laws*.py hold for every row of the table.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import gpu_ops
from gpu_ops import TernaryMatrix
from gpu_ops.core.device import compiler_missing
from gpu_ops.errors import DeviceError
from tests.support import calls_attention, calls_rows
from tests.support.call_maker import ADDED, WRITTEN, Maker, OpCall

__all__ = [
    "ADDED",
    "DTYPES",
    "IN_PLACE",
    "OPS",
    "OUT",
    "VARIANTS",
    "WRITTEN",
    "OpCall",
    "call",
    "refusal",
    "results",
]

NO_OPS = (
    "__version__",
    "autotune",
    "errors",
    "explain",
    "quantize",
    "quantize_model",
    "read_bitnet",
    "read_gguf",
    "workspace_size",
    "write_gguf",
)
OPS = tuple(name for name in gpu_ops.__all__ if name.islower() and name not in NO_OPS)
DTYPES = tuple(np.dtype(x) for x in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))
VARIANTS = {
    **calls_attention.VARIANTS,
    **calls_rows.LOSS_VARIANTS,
    **calls_rows.VARIANTS,
    **calls_rows.TERNARY_VARIANTS,
    **calls_rows.PACKED_VARIANTS,
    **calls_rows.TRAINING_VARIANTS,
}

# The argument that receives results, and its number of arrays.
OUT = {
    "attention": ("out", 1),
    "attention_backward": ("grads", 3),
    "attention_decode": ("out", 1),
    "attention_merge": ("out", 2),
    "attention_varlen": ("out", 1),
    "attention_varlen_backward": ("grads", 3),
    "cross_entropy": ("out", 1),
    "cross_entropy_backward": ("out", 1),
    "dropout": ("out", 1),
    "dropout_backward": ("out", 1),
    "embedding": ("out", 1),
    "global_norm": ("out", 2),
    "layernorm": ("out", 1),
    "layernorm_backward": ("out", 1),
    "linear": ("out", 1),
    "linear_backward": ("out", 3),
    "linear_cross_entropy": ("out", 5),
    "rmsnorm": ("out", 1),
    "rmsnorm_backward": ("out", 1),
    "rmsnorm_quant_int8": ("out", 3),
    "rope": ("out", 2),
    "rope_append_kv": ("out", 1),
    "rope_backward": ("out", 2),
    "sample": ("out", 1),
    "softmax": ("out", 1),
    "softmax_backward": ("out", 1),
    "swiglu": ("out", 1),
    "swiglu_backward": ("out", 2),
    "swiglu_mlp": ("out", 1),
    "swiglu_mlp_backward": ("out", 4),
    "ternary_matmul": ("out", 1),
    "ternary_matmul_backward": ("out", 2),
}

# Arguments that the results may overwrite, in the order of the results.
IN_PLACE = {
    "attention_merge": ("out1", "lse1"),
    "cross_entropy_backward": ("logits",),
    "dropout": ("x",),
    "dropout_backward": ("dy",),
    "layernorm": ("x",),
    "layernorm_backward": ("dy",),
    "linear": ("residual",),
    "rmsnorm": ("x",),
    "rmsnorm_backward": ("dy",),
    "rope": ("q", "k"),
    "rope_append_kv": ("q",),
    "rope_backward": ("dq", "dk"),
    "softmax": ("x",),
    "softmax_backward": ("dy",),
    "swiglu": ("gate",),
    "swiglu_backward": ("gate", "up"),
}

# Calls without such an argument: it is packed, or an option.
OPTIONAL = ("swiglu packed", "linear", "linear bias", "linear packed")


def call(name: str, dtype: Any = np.float32, seed: int = 7, **sizes: int) -> OpCall:
    """Call ``name`` of the table with arrays of ``dtype``; the same numbers for the same seed and sizes."""
    new = Maker(dtype, seed, sizes)
    arrays, options = VARIANTS[name](new)
    return OpCall(name.split()[0], arrays, options, new.axes)


def refusal(one: OpCall, backend: str) -> str:
    """Reason why a GPU backend does not run a call; empty if it does."""
    if compiler_missing(backend):
        return ""  # tests are skipped, and say which package they need
    try:
        gpu_ops.explain(one.op, *one.arrays.values(), **one.options, device="emulator", backend=backend)
    except DeviceError as error:
        return str(error)
    return ""


def results(value: Any) -> tuple[Any, ...]:
    """Arrays that an op returned; those of a dict of further gradients come last."""
    if isinstance(value, TernaryMatrix):
        return (value.codes, value.scale)
    arrays = value if isinstance(value, tuple) else () if value is None else (value,)
    return (*arrays[:-1], *arrays[-1].values()) if arrays and isinstance(arrays[-1], dict) else arrays
