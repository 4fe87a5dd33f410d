"""One small valid call per public op: what the tests that speak of all ops start from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import gpu_ops

NO_OPS = ("__version__", "autotune", "errors", "explain", "quantize_model", "read_bitnet", "read_gguf")
OPS = tuple(name for name in gpu_ops.__all__ if name.islower() and name not in NO_OPS)

WRITTEN = {"rope_append_kv": ("k_cache", "v_cache")}  # arguments that an op changes in place


@dataclass(frozen=True)
class Call:
    """An op, its positional arrays by name, and its options."""

    op: str
    arrays: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **more: Any) -> Any:
        return getattr(gpu_ops, self.op)(*self.arrays.values(), **{**self.options, **more})

    def having(self, **changes: Any) -> Call:
        """The same call with arrays or options exchanged by name."""
        arrays = {name: changes.pop(name, x) for name, x in self.arrays.items()}
        return replace(self, arrays=arrays, options={**self.options, **changes})


def call(op: str, dtype: Any = np.float32) -> Call:
    """A valid call of ``op`` with arrays of ``dtype``; the same numbers every time."""
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(dtype)

    if op.startswith("attention"):
        return _attention(op, normal)
    if op == "rope_append_kv":
        new = {"q": normal(2, 3, 4, 8), "k": normal(2, 3, 2, 8), "v": normal(2, 3, 2, 8)}
        caches = {"k_cache": normal(2, 16, 2, 8), "v_cache": normal(2, 16, 2, 8)}
        return Call(op, {**new, **caches}, {"seqused_k": np.array([3, 13], np.int32)})
    if op.startswith("rope"):
        q, k = normal(2, 5, 4, 8), normal(2, 5, 2, 8)
        return Call(op, {"q": q, "k": k} if op == "rope" else {"dq": q, "dk": k})
    if op.startswith("rmsnorm"):
        x, weight = normal(3, 16), normal(16)
        if op == "rmsnorm_backward":
            _, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, backend="reference")
            return Call(op, {"dy": normal(3, 16), "x": x, "weight": weight, "rstd": rstd})
        return Call(op, {"x": x, "weight": weight})
    if op.startswith("layernorm"):
        x, weight = normal(3, 16), normal(16)
        if op == "layernorm_backward":
            _, mean, rstd = gpu_ops.layernorm(x, weight, return_stats=True, backend="reference")
            return Call(op, {"dy": normal(3, 16), "x": x, "weight": weight, "mean": mean, "rstd": rstd})
        return Call(op, {"x": x, "weight": weight, "bias": normal(16)})
    if op.startswith("swiglu_mlp"):
        weights = {"w_gate": normal(24, 16), "w_up": normal(24, 16), "w_down": normal(16, 24)}
        gradient = {"dy": normal(3, 16)} if op.endswith("backward") else {}
        return Call(op, {**gradient, "x": normal(3, 16), **weights})
    if op.startswith("swiglu"):
        gradient = {"dy": normal(3, 16)} if op.endswith("backward") else {}
        return Call(op, {**gradient, "gate": normal(3, 16), "up": normal(3, 16)})
    return _ternary(op, normal, rng)


def _attention(op: str, normal: Any) -> Call:
    if op == "attention_decode":
        caches = {"k_cache": normal(2, 16, 2, 8), "v_cache": normal(2, 16, 2, 8)}
        return Call(op, {"q": normal(2, 1, 4, 8), **caches}, {"seqused_k": np.array([3, 16], np.int32)})
    if op.startswith("attention_varlen"):
        inputs = {"q": normal(12, 4, 8), "k": normal(12, 2, 8), "v": normal(12, 2, 8)}
        lengths = {name: np.array([0, 5, 12], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    else:
        inputs = {"q": normal(2, 5, 4, 8), "k": normal(2, 7, 2, 8), "v": normal(2, 7, 2, 8)}
        lengths = {}
    if not op.endswith("backward"):
        return Call(op, {**inputs, **lengths}, {"causal": True})
    forward = getattr(gpu_ops, op.removesuffix("_backward"))
    out, lse = forward(*inputs.values(), *lengths.values(), causal=True, return_lse=True, backend="reference")
    dout = normal(*out.shape)
    return Call(op, {"dout": dout, **inputs, "out": out, "lse": lse, **lengths}, {"causal": True})


def _ternary(op: str, normal: Any, rng: np.random.Generator) -> Call:
    if op == "ternary_quantize":
        return Call(op, {"w": normal(8, 256)})
    if op.startswith("ternary_matmul"):
        w = gpu_ops.ternary_quantize(rng.standard_normal((8, 256), dtype=np.float32))
        gradient = {"dy": normal(3, 8)} if op.endswith("backward") else {}
        return Call(op, {**gradient, "x": normal(3, 256), "w": w})
    trits = rng.integers(-1, 2, (8, 256)).astype(np.int8)
    if op == "ternary_pack":
        return Call(op, {"trits": trits, "format": "base3"})
    packed = gpu_ops.ternary_pack(trits, "base3")
    return Call(op, {"packed": packed, "shape": (8, 256), "format": "base3"})


def results(value: Any) -> tuple[Any, ...]:
    """The arrays an op returned, as a tuple."""
    if isinstance(value, gpu_ops.TernaryMatrix):
        return (value.codes, value.scale)
    return value if isinstance(value, tuple) else (value,)
