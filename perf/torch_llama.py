"""Llama of gpu_ops.models in torch: the peer of a training step."""

from __future__ import annotations

from typing import Any

from gpu_ops.models import LlamaConfig

__all__ = ["torch_loss"]


def torch_loss(p: Any, config: LlamaConfig, ids: Any, targets: Any) -> Any:
    """Mean cross-entropy. ``p``: weights by the names of ``LlamaConfig.shapes``."""
    import torch

    f, d = torch.nn.functional, config.head_dim

    def times(t: Any, factor: Any) -> Any:  # free of cost without a factor
        return t if isinstance(factor, float) and factor == 1.0 else t * factor

    scale = config.embedding_scale
    if scale is None:
        scale = torch.tensor(config.hidden**0.5, dtype=p["embed"].dtype, device=ids.device)
    x = times(p["embed"][ids], scale)
    batch, seqlen = ids.shape
    at = torch.arange(seqlen, dtype=torch.float64, device=ids.device)
    distance = at[:, None] - at

    def rotated(t: Any, theta: float | None) -> Any:
        if theta is None:
            return t
        inv_freq = theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device=ids.device) / d)
        angles = at[:, None] * inv_freq
        cos, sin = (torch.cat([g(angles)] * 2, -1).to(x.dtype)[:, None] for g in (torch.cos, torch.sin))
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat([-second, first], -1) * sin

    def norm(t: Any, name: str) -> Any:
        weight = p[name] + config.weight_offset if config.weight_offset else p[name]
        return f.rms_norm(t, t.shape[-1:], weight, config.eps)

    def capped(t: Any, cap: float) -> Any:
        return cap * torch.tanh(t / cap) if cap else t

    def attention(q: Any, k: Any, v: Any, window: int) -> Any:
        options = {"scale": config.softmax_scale, "enable_gqa": True}
        seen = distance >= 0 if window < 0 else (distance >= 0) & (distance <= window)
        if not config.softcap:
            mask = {"is_causal": True} if window < 0 else {"attn_mask": seen}
            return f.scaled_dot_product_attention(q, k, v, **mask, **options)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        z = q @ k.transpose(-1, -2) * (config.softmax_scale or d**-0.5)
        return capped(z, config.softcap).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    act = {
        "silu": f.silu,
        "gelu": f.gelu,
        "gelu_tanh": lambda t: f.gelu(t, approximate="tanh"),
        "relu2": lambda t: f.relu(t).square(),
    }[config.activation]

    for i, layer in enumerate(config.by_layer):

        def project(t: Any, part: str, at: str = f"layers.{i}.") -> Any:
            return f.linear(t, p[at + part], p.get(f"{at}{part}_bias"))

        def add(x: Any, t: Any, part: str, norms: str, at: str = f"layers.{i}.") -> Any:
            before, after = norms.split()
            t = project(norm(t, at + before) if config.sub_norms else t, part)
            return x + times(norm(t, at + after) if config.post_norms else t, config.residual_scale)

        qkv = project(norm(x, f"layers.{i}.attn_norm"), "qkv").view(batch, seqlen, -1, d)
        q, k, v = (qkv[:, :, heads] for heads in config.head_slices)
        if config.qk_norm:
            q, k = norm(q, f"layers.{i}.q_norm"), norm(k, f"layers.{i}.k_norm")
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, layer.theta), rotated(k, layer.theta), v))
        a = attention(q, k, v, layer.window).transpose(1, 2).reshape(batch, seqlen, -1)
        x = add(x, a, "o", "attn_sub_norm attn_post_norm")
        gate, up = project(norm(x, f"layers.{i}.mlp_norm"), "gate_up").chunk(2, -1)
        x = add(x, act(gate) * up, "down", "ffn_sub_norm mlp_post_norm")
    z = (norm(x, "norm") @ p["embed" if config.tied else "lm_head"].T).flatten(0, 1)
    z = capped(times(z, 1 / config.logits_scaling), config.logits_softcap)
    return f.cross_entropy(z if z.dtype == torch.float64 else z.float(), targets.flatten())
