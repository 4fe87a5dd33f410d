"""The Llama of gpu_ops.models in torch: the peer of a training step."""

from __future__ import annotations

from typing import Any

from gpu_ops.models import LlamaConfig

__all__ = ["torch_loss"]


def torch_loss(p: Any, config: LlamaConfig, ids: Any, targets: Any) -> Any:
    """The mean cross-entropy. ``p``: weights by the names of ``LlamaConfig.shapes``."""
    import torch

    f, d = torch.nn.functional, config.head_dim
    x = p["embed"][ids]
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
        return f.rms_norm(t, t.shape[-1:], p[name], config.eps)

    for i, own in enumerate(config.by_layer):

        def project(t: Any, part: str, at: str = f"layers.{i}.") -> Any:
            return f.linear(t, p[at + part], p.get(f"{at}{part}_bias"))

        qkv = project(norm(x, f"layers.{i}.attn_norm"), "qkv").view(batch, seqlen, -1, d)
        q, k, v = (qkv[:, :, heads] for heads in config.head_slices)
        if config.qk_norm:
            q, k = norm(q, f"layers.{i}.q_norm"), norm(k, f"layers.{i}.k_norm")
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, own.theta), rotated(k, own.theta), v))
        seen = {"is_causal": True}
        if own.window >= 0:
            seen = {"attn_mask": (distance >= 0) & (distance <= own.window)}
        a = f.scaled_dot_product_attention(q, k, v, enable_gqa=True, **seen)
        x = x + project(a.transpose(1, 2).reshape(batch, seqlen, -1), "o")
        gate, up = project(norm(x, f"layers.{i}.mlp_norm"), "gate_up").chunk(2, -1)
        x = x + project(f.silu(gate) * up, "down")
    z = (norm(x, "norm") @ p["embed" if config.tied else "lm_head"].T).flatten(0, 1)
    return f.cross_entropy(z if z.dtype == torch.float64 else z.float(), targets.flatten())
