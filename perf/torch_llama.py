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
    inv_freq = config.theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device=ids.device) / d)
    angles = torch.arange(seqlen, dtype=torch.float64, device=ids.device)[:, None] * inv_freq
    cos, sin = (torch.cat([g(angles)] * 2, -1).to(x.dtype)[:, None] for g in (torch.cos, torch.sin))

    def rotated(t: Any) -> Any:
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat([-second, first], -1) * sin

    def norm(t: Any, name: str) -> Any:
        return f.rms_norm(t, (config.hidden,), p[name], config.eps)

    for i in range(config.nlayers):
        at = f"layers.{i}."
        qkv = (norm(x, at + "attn_norm") @ p[at + "qkv"].T).view(batch, seqlen, -1, d)
        q, k, v = (qkv[:, :, heads] for heads in config.head_slices)
        q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
        a = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + a.transpose(1, 2).reshape(batch, seqlen, -1) @ p[at + "o"].T
        gate, up = (norm(x, at + "mlp_norm") @ p[at + "gate_up"].T).chunk(2, -1)
        x = x + (f.silu(gate) * up) @ p[at + "down"].T
    z = (norm(x, "norm") @ p["lm_head"].T).flatten(0, 1)
    return f.cross_entropy(z if z.dtype == torch.float64 else z.float(), targets.flatten())
