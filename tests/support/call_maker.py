"""Calls as values: an op with its arrays and options by name, and arrays made from the names of their axes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import gpu_ops

Array = np.ndarray[Any, Any]
Made = tuple[dict[str, Any], dict[str, Any]]  # arrays, options

# Arguments that an op changes in place, in the order in which it checks them.
WRITTEN = {
    "adamw_step": ("params", "m", "v", "master"),
    "rope_append_kv": ("k_cache", "v_cache", "k_scale", "v_scale"),
}
# Options to which gradients are added, if they are given.
ADDED = {
    "embedding_backward": ("dweight",),
    "layernorm_backward": ("dweight", "dbias"),
    "linear_backward": ("dweight", "dbias"),
    "rmsnorm_backward": ("dweight",),
    "swiglu_mlp_backward": ("dw_gate", "dw_up", "dw_down"),
}

SIZES = {
    "batch": 2,
    "seqlen": 5,
    "seqlen_q": 5,
    "seqlen_k": 7,
    "seqlen_new": 3,
    "nheads": 4,
    "nheads_kv": 2,
    "head_dim": 8,
    "head_dim_v": 8,
    "max_seqlen": 16,
    "page_size": 4,
    "total": 12,
    "rows": 3,
    "cols": 16,
    "width": 16,
    "hidden": 16,
    "hidden_out": 16,
    "ffn": 24,
    "N": 8,
    "K": 256,
}


@dataclass(frozen=True)
class OpCall:
    """An op, its positional arrays by name, its options, and the names of the axes of arrays."""

    op: str
    arrays: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __call__(self, **more: Any) -> Any:
        return getattr(gpu_ops, self.op)(*self.arrays.values(), **{**self.options, **more})

    def having(self, **changes: Any) -> OpCall:
        """Copy of the call with arrays or options replaced by name."""
        arrays = {name: changes.pop(name, x) for name, x in self.arrays.items()}
        return replace(self, arrays=arrays, options={**self.options, **changes})

    @property
    def written(self) -> dict[str, Array]:
        """Arguments that the op changes in place."""
        named = {**self.arrays, **self.options}
        changed = {name: named[name] for name in WRITTEN.get(self.op, ()) if named.get(name) is not None}
        return changed | {name: self.options[name] for name in self.added}

    @property
    def added(self) -> tuple[str, ...]:
        """Options to which gradients are added."""
        return tuple(name for name in ADDED.get(self.op, ()) if name in self.options)

    @property
    def inputs(self) -> dict[str, Array]:
        """NumPy arrays among arguments and options that the op only reads."""
        named = {**self.arrays, **self.options}
        return {n: x for n, x in named.items() if isinstance(x, np.ndarray) and n not in self.written}


class Maker:
    """Maker of arrays of standard normal numbers or integers whose axes are given by name."""

    def __init__(self, dtype: Any, seed: int, sizes: dict[str, int]) -> None:
        self.dtype = np.dtype(dtype)
        self.rng = np.random.default_rng(seed)
        self.sizes = {**SIZES, **sizes}
        self.axes: dict[str, tuple[str, ...]] = {}

    @property
    def wide(self) -> Any:
        """Dtype of sums over tokens."""
        return np.float64 if self.dtype == np.float64 else np.float32

    def _shapes(self, axes: dict[str, str]) -> dict[str, tuple[int, ...]]:
        self.axes |= {name: tuple(named.split()) for name, named in axes.items()}
        return {
            name: tuple(int(a) if a.isdigit() else self.sizes[a] for a in self.axes[name]) for name in axes
        }

    def normal(self, dtype: Any = None, /, **axes: str) -> dict[str, Array]:
        """Arrays by name, of the call's dtype unless another is given."""
        shapes = self._shapes(axes)
        return {n: self.rng.standard_normal(s).astype(dtype or self.dtype) for n, s in shapes.items()}

    def integers(self, low: int, high: int, dtype: Any, /, **axes: str) -> dict[str, Array]:
        """Integers in [low, high)."""
        return {n: self.rng.integers(low, high, s).astype(dtype) for n, s in self._shapes(axes).items()}
