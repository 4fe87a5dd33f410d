"""Weights and gradients of a block and of a model, by name and as dataclasses; functions of embedding tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from gpu_ops.core.checks import instance, integer
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.models.config import LlamaConfig
from gpu_ops.ops.gemm.linear import linear
from gpu_ops.ops.loss.linear_cross_entropy import linear_cross_entropy
from gpu_ops.ops.rows.embedding import embedding, embedding_backward

__all__ = [
    "Block",
    "Llama",
    "Table",
    "check_arrays",
    "check_models",
    "embed",
    "embed_backward",
    "head_logits",
    "head_loss",
    "initial_weights",
]


@dataclass
class Block:
    """Weights of a block, or their gradients (float32; float64 for float64)."""

    attn_norm: Any
    """(hidden,)"""
    qkv: Any
    """((nheads + 2 * nheads_kv) * head_dim, hidden): the rows of q, of k, of v"""
    o: Any
    """(hidden, nheads * head_dim)"""
    mlp_norm: Any
    """(hidden,)"""
    gate_up: Any
    """(2 * ffn, hidden): the rows of gate, of up"""
    down: Any
    """(hidden, ffn)"""
    qkv_bias: Any = None
    o_bias: Any = None
    gate_up_bias: Any = None
    down_bias: Any = None
    q_norm: Any = None
    """(head_dim,)"""
    k_norm: Any = None
    """(head_dim,)"""
    attn_sub_norm: Any = None
    """(nheads * head_dim,)"""
    ffn_sub_norm: Any = None
    """(ffn,)"""
    attn_post_norm: Any = None
    """(hidden,)"""
    mlp_post_norm: Any = None
    """(hidden,)"""

    def check(self, config: LlamaConfig) -> None:
        """Raise an error if the weights, not gradients, have other parts than the config."""
        parts = {f.name for f in fields(Block) if getattr(self, f.name) is not None}
        if parts != config.block_shapes().keys():
            differ = ", ".join(sorted(parts ^ config.block_shapes().keys()))
            raise OptionError(f"block_forward: weights or config lack {differ}, which the other has")


@dataclass
class Llama:
    """All weights of a model, or their gradients."""

    embed: Any
    """(vocab, hidden)"""
    layers: list[Block]
    norm: Any
    """(hidden,)"""
    lm_head: Any
    """(vocab, hidden); the embedding table itself if they are tied"""

    made_by = "models.Llama.of makes one of named arrays"

    @classmethod
    def of(cls, arrays: Mapping[str, Any], config: LlamaConfig) -> Llama:
        """Make a model from arrays by the names of :meth:`LlamaConfig.shapes`, without copies.

        Raises
        ------
        OptionError, ShapeError
            A name is missing, or an array has another shape.
        """
        check_arrays("Llama.of", arrays, config.shapes())
        layers = [
            Block(**{part: arrays[f"layers.{i}.{part}"] for part in config.block_shapes()})
            for i in range(config.nlayers)
        ]
        head = arrays["embed"] if config.tied else arrays["lm_head"]
        return cls(arrays["embed"], layers, arrays["norm"], head)

    def arrays(self) -> dict[str, Any]:
        """Arrays by the names of :meth:`LlamaConfig.shapes`, the input of :meth:`of`."""
        arrays = {"embed": self.embed}
        for i, layer in enumerate(self.layers):
            parts = ((f.name, getattr(layer, f.name)) for f in fields(Block))
            arrays |= {f"layers.{i}.{name}": x for name, x in parts if x is not None}
        arrays["norm"] = self.norm
        return arrays if self.lm_head is self.embed else arrays | {"lm_head": self.lm_head}


def check_arrays(who: str, arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise an error unless there is an array of each name and shape."""
    for name, shape in shapes.items():
        if name not in arrays:
            raise OptionError(f"{who}: there is no array {name!r}, of shape {shape}")
        if tuple(arrays[name].shape) != shape:
            raise ShapeError(f"{who}: {name} has shape {tuple(arrays[name].shape)}, expected {shape}")


def check_models(op: str, config: LlamaConfig, **models: Llama) -> None:
    """Check the types of config and models, and the numbers of layers."""
    instance(op, "config", config, LlamaConfig)
    for what, model in models.items():
        if not isinstance(model, Llama):
            raise OptionError(
                f"{op}: {what} must be a Llama, got {type(model).__name__}; models.Llama.of makes one of named arrays"
            )
        if len(model.layers) != config.nlayers:
            raise OptionError(
                f"{op}: {what} have {len(model.layers)} layers, and the config has {config.nlayers}"
            )


def initial_weights(config: LlamaConfig, *, seed: int = 0, std: float = 0.02) -> dict[str, Any]:
    """Initial float32 weights by name: norms multiply by 1, biases are 0, matrices are normal; those that write to
    the residual stream are divided by sqrt(2 * nlayers) (GPT-2). Reproducible for a seed and a version of NumPy."""
    seed, arrays = integer("initial_weights", "seed", seed, low=0), {}
    for i, (name, shape) in enumerate(config.shapes().items()):
        if len(shape) == 1:
            norm_value = 1.0 - config.weight_offset
            arrays[name] = np.full(shape, 0.0 if name.endswith("_bias") else norm_value, np.float32)
            continue
        size = std / np.sqrt(2 * config.nlayers) if name.endswith((".o", ".down")) else std
        rng = np.random.default_rng((seed, i))
        arrays[name] = rng.standard_normal(shape, np.float32) * np.float32(size)
    return arrays


class Table(ABC):
    """Base class of tables with their own methods, which the functions of this module call."""

    divides_tokens: bool
    """Whether ``embed`` returns only some of the tokens."""

    @abstractmethod
    def embed(self, ids: Any, *, scale: float = 1.0) -> Any: ...

    @abstractmethod
    def embed_backward(self, dx: Any, ids: Any, *, dweight: Any, scale: float = 1.0) -> None: ...

    @abstractmethod
    def logits(self, h: Any) -> Any: ...

    @abstractmethod
    def loss(self, h: Any, targets: Any, **options: Any) -> Any: ...


def embed(ids: Any, table: Any, *, scale: float = 1.0) -> Any:
    """:func:`gpu_ops.embedding` of a table."""
    return table.embed(ids, scale=scale) if isinstance(table, Table) else embedding(ids, table, scale=scale)


def embed_backward(dx: Any, ids: Any, table: Any, *, dweight: Any, scale: float = 1.0) -> None:
    """:func:`gpu_ops.embedding_backward`, added to ``dweight``."""
    if isinstance(table, Table):
        table.embed_backward(dx, ids, dweight=dweight, scale=scale)
    else:
        embedding_backward(dx, ids, table.shape[0], dweight=dweight, scale=scale)


def head_logits(h: Any, table: Any) -> Any:
    """Logits (..., vocab)."""
    return table.logits(h) if isinstance(table, Table) else linear(h, table)


def head_loss(h: Any, table: Any, targets: Any, **options: Any) -> Any:
    """:func:`gpu_ops.linear_cross_entropy` of an output layer."""
    if isinstance(table, Table):
        return table.loss(h, targets, **options)
    return linear_cross_entropy(h, table, targets, **options)
