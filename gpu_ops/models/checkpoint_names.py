"""The tensors of Hugging Face checkpoints that the arrays of a model are made of."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gpu_ops.models.config import LlamaConfig

__all__ = ["Part", "plan_of"]

# The tensors of transformers whose rows follow each other in one of ours; ``_bias`` has the same modules.
_MODULES = {
    "embed": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "lm_head": ("lm_head",),
    "attn_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "attn_sub_norm": ("self_attn.attn_sub_norm",),
    "ffn_sub_norm": ("mlp.ffn_sub_norm",),
    "attn_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
# Where the name above is that of another norm.
_WITH_POST_NORMS = {"mlp_norm": ("pre_feedforward_layernorm",)}


@dataclass(frozen=True)
class Part:
    """A tensor of transformers: rows of an array of ours."""

    name: str
    rows: slice
    shape: tuple[int, ...]


def plan_of(config: LlamaConfig) -> dict[str, list[Part]]:
    """The tensors that each array is made of."""
    q, kv = config.nheads * config.head_dim, config.nheads_kv * config.head_dim
    joined = {"qkv": (q, kv, kv), "gate_up": (config.ffn, config.ffn)}
    modules = _MODULES | (_WITH_POST_NORMS if config.post_norms else {})
    plan = {}
    for name, shape in config.shapes().items():
        layer, _, part = name.rpartition(".")
        of, suffix = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
        prefix = f"model.{layer}." if layer else ""
        starts = [0, *itertools.accumulate(joined.get(of, shape[:1]))]
        plan[name] = [
            Part(f"{prefix}{module}.{suffix}", slice(start, end), (end - start, *shape[1:]))
            for module, (start, end) in zip(modules[of], itertools.pairwise(starts), strict=True)
        ]
    return plan
