"""A decoder block, forward and backward, as two functions; a policy selects what is kept between them.

::

    h1 = rmsnorm(x)                 qkv = h1 @ w_qkv^T, q and k rotated in place (qk_norm: normalised copies)
    x2 = x + attention(q, k, v) @ w_o^T
    h2 = rmsnorm(x2)                gate_up = h2 @ w_gate_up^T
    y = x2 + (act(gate) * up) @ w_down^T

    sub_norms:  attention and act(gate) * up are normalised before they are projected
    post_norms: the projections, called o and down, are normalised before they are added

The forward call keeps the fields that the policy names in a :class:`Saved`. The backward call recomputes the rest
with the same functions and kernels, so the gradients have the same bits under every policy.
"""

from __future__ import annotations

from typing import Any

from gpu_ops.core.allocator import empty_like
from gpu_ops.core.array_types import ArrayT
from gpu_ops.core.checks import one_of
from gpu_ops.models.block_steps import Run, Saved, Sequences
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import added, copied
from gpu_ops.models.offload import fetched, offloaded
from gpu_ops.models.projection import project, project_backward
from gpu_ops.models.weights import Block
from gpu_ops.ops.gemm.swiglu import swiglu, swiglu_backward
from gpu_ops.ops.rope.rope import rope_backward

__all__ = ["POLICIES", "Saved", "Sequences", "block_backward", "block_forward"]

_PROJECTED = frozenset({"o", "rstd_o", "down", "rstd_down"})  # with post_norms
_ALL = _PROJECTED | {
    *("h1", "rstd1", "qkv", "q", "k", "rstd_q", "rstd_k", "attn", "lse", "x2", "h2", "rstd2", "gate_up")
}
# Fields that a policy keeps in addition to the block's input. Bytes per token, including the input, in units of
# hidden * itemsize, for Llama-3-8B: none 13.5, mlp 6.5, norms 4.5, attention 2, layer 1. With qk_norm, q and k are
# separate fields.
POLICIES: dict[str, frozenset[str]] = {
    "none": _ALL,
    "mlp": _ALL - {"gate_up"},
    "norms": _PROJECTED | {"qkv", "attn", "lse", "x2"},
    "attention": frozenset({"x2"}),
    "layer": frozenset(),
    "offload": frozenset(),  # and the block's input goes to the host
}


def block_forward(
    x: ArrayT,
    weights: Block,
    config: LlamaConfig,
    *,
    policy: str = "none",
    sequences: Sequences | None = None,
) -> tuple[ArrayT, Saved]:
    """Return the output of a block, like x, and the state that :func:`block_backward` needs.

    Parameters
    ----------
    x : array (batch, seqlen, hidden), or (tokens, hidden) with ``sequences.cu_seqlens``
    weights : Block
        In x's dtype.
    policy : str
        Selects what the backward recomputes: ``none`` nothing; ``mlp`` gate and up; ``norms`` also the normalised
        inputs; ``attention`` also attention and its projections; ``layer`` everything. ``offload`` is ``layer`` with
        the block's input in pinned host memory; arrays on the host are not moved.

    Returns
    -------
    y : array like x
    saved : Saved
    """
    keep = kept_by(policy)
    run = Run(Saved(x), weights, config, sequences or Sequences())
    for field, done in _FORWARD:
        run.need(field)
        run.saved.drop(*(name for name in done if name not in keep))
    act = run.act()
    if "gate_up" not in keep:
        run.saved.drop("gate_up")
    if config.post_norms:
        run.saved.down = project(act, weights.down, weights.down_bias)
        del act
        y = added(run.norm_down(), run.saved.x2)
    else:
        y = project(act, weights.down, weights.down_bias, run.saved.x2)
    run.saved.drop(*({"x2", "down", "rstd_down"} - keep))
    if policy == "offload":
        run.saved.x = offloaded(x)
    return y, run.saved


def block_backward(
    dy: ArrayT,
    weights: Block,
    saved: Saved,
    config: LlamaConfig,
    *,
    grads: Block,
    sequences: Sequences | None = None,
) -> ArrayT:
    """Return the gradient for x; gradients of the weights are added to ``grads``. Consumes ``saved``.

    Parameters
    ----------
    dy : array like y
    saved : Saved
        Result of the forward call.
    grads : Block
        float32 (float64 for float64).

    Returns
    -------
    dx : array like x
    """
    saved.x = fetched(saved.x)
    run = Run(saved, weights, config, sequences or Sequences())
    dh = project_backward(
        _mlp_backward(run, dy, grads), run.need("h2"), weights.gate_up, grads.gate_up, grads.gate_up_bias
    )
    rstd = run.need("rstd2")
    dx2 = run.norm_backward(dh, run.need("x2"), weights.mlp_norm, rstd, grads.mlp_norm, dresidual=dy)
    del dh
    saved.drop("h2", "rstd2", "x2")
    dqkv = _attention_backward(run, dx2, grads)
    dh = project_backward(dqkv, run.need("h1"), weights.qkv, grads.qkv, grads.qkv_bias)
    del dqkv
    rstd = run.need("rstd1")
    dx: ArrayT = run.norm_backward(dh, saved.x, weights.attn_norm, rstd, grads.attn_norm, dresidual=dx2)
    saved.drop("h1", "rstd1", "x")
    return dx


def kept_by(policy: str) -> frozenset[str]:
    """Fields of :class:`Saved` that a policy keeps."""
    return POLICIES[one_of("block_forward", "policy", policy, POLICIES)]


def recomputed_flops(policy: str, config: LlamaConfig, seqlen: int) -> float:
    """Flops per token that the backward call recomputes under a policy. A norm counts as 40 multiply-adds per
    element, the number that take the same time as its memory traffic."""
    c, heads, norm = config, config.nheads * config.head_dim, 80.0 * config.hidden
    o = 2.0 * c.hidden * heads
    flops = {
        "h1": norm,
        "qkv": 2.0 * c.hidden * (c.nheads + 2 * c.nheads_kv) * c.head_dim,
        "q": 80.0 * (c.nheads + c.nheads_kv) * c.head_dim * c.qk_norm,
        "attn": 2.0 * heads * (seqlen if c.window < 0 else min(seqlen, 2 * c.window)),
        "o": o * c.post_norms,
        "x2": norm if c.post_norms else o,
        "h2": norm,
        "gate_up": 4.0 * c.hidden * c.ffn,
        "down": 2.0 * c.hidden * c.ffn * c.post_norms,
    }
    return sum(n for field, n in flops.items() if field not in kept_by(policy))


# Fields that the forward call computes, in order, and the fields that no later step of it reads.
_FORWARD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("h1", ("rstd1",)),
    ("qkv", ("h1",)),
    ("attn", ("qkv", "q", "k", "rstd_q", "rstd_k", "lse")),
    ("x2", ("attn", "o", "rstd_o")),
    ("h2", ("rstd2",)),
    ("gate_up", ("h2",)),
)


def _mlp_backward(run: Run, dy: Any, grads: Block) -> Any:
    """Backward through the down projection, its norms and the activation: gradient of the packed gate and up."""
    saved, weights, config = run.saved, run.weights, run.config
    if config.post_norms:
        down, rstd = run.need("down"), run.need("rstd_down")
        dy = run.norm_backward(dy, down, weights.mlp_post_norm, rstd, grads.mlp_post_norm)
        del down
        saved.drop("down", "rstd_down")
    gate_up = run.need("gate_up")
    act = swiglu(gate_up, activation=config.activation)
    if config.sub_norms:
        h, rstd = run.norm(act, weights.ffn_sub_norm)
        dact = project_backward(dy, h, weights.down, grads.down, grads.down_bias)
        del h
        run.norm_backward(dact, act, weights.ffn_sub_norm, rstd, grads.ffn_sub_norm, out=dact)
    else:
        dact = project_backward(dy, act, weights.down, grads.down, grads.down_bias)
    del act
    saved.drop("gate_up")
    return swiglu_backward(dact, gate_up, activation=config.activation, out=gate_up)


def _attention_backward(run: Run, dx2: Any, grads: Block) -> Any:
    """Backward through the output projection, attention, rotation and norms: gradient of the packed q, k and v."""
    saved, weights = run.saved, run.weights
    do = dx2
    if run.config.post_norms:
        o, rstd = run.need("o"), run.need("rstd_o")
        do = run.norm_backward(dx2, o, weights.attn_post_norm, rstd, grads.attn_post_norm)
        del o
        saved.drop("o", "rstd_o", "x2")
    attn = run.need("attn")
    if run.config.sub_norms:
        h, rstd = run.norm(attn, weights.attn_sub_norm)
        dattn = project_backward(do, h, weights.o, grads.o, grads.o_bias)
        del h
        run.norm_backward(dattn, attn, weights.attn_sub_norm, rstd, grads.attn_sub_norm, out=dattn)
    else:
        dattn = project_backward(do, attn, weights.o, grads.o, grads.o_bias)
    del do
    (q, k, v), lse = run.heads(), run.need("lse")
    dqkv = empty_like(saved.qkv, "dqkv")
    parts = run.split(dqkv)
    dout, out = (x.reshape(q.shape) for x in (dattn, attn))
    options = run.config.attention_options
    run.sequences.attention_backward(dout, q, k, v, out, lse, grads=parts, **options)
    del q, k, v, attn, dattn, lse, dout, out
    saved.drop("q", "k", "attn", "lse")
    run.rope(rope_backward, *parts[:2])
    if run.config.qk_norm:
        x = run.split(saved.qkv)
        _norm_heads_backward(run, parts[0], x[0], weights.q_norm, saved.rstd_q, grads.q_norm)
        _norm_heads_backward(run, parts[1], x[1], weights.k_norm, saved.rstd_k, grads.k_norm)
        del x
    saved.drop("qkv", "rstd_q", "rstd_k")
    return dqkv


def _norm_heads_backward(run: Run, dy: Any, x: Any, weight: Any, rstd: Any, dweight: Any) -> None:
    """Backward of the norm of heads, in place of ``dy``, a part of ``dqkv``."""
    dx = copied(dy)
    run.norm_backward(dx, copied(x), weight, rstd, dweight, out=dx)
    copied(dx, to=dy)
