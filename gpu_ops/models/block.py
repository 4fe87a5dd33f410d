"""A decoder block, forward and backward, as two functions; a policy selects what is kept between them.

::

    h1 = rmsnorm(x)                 qkv = h1 @ w_qkv^T, q and k rotated in place (qk_norm: normalised copies)
    x2 = x + attention(q, k, v) @ w_o^T
    h2 = rmsnorm(x2)                gate_up = h2 @ w_gate_up^T
    y = x2 + (act(gate) * up) @ w_down^T

    sub_norms:  attention and act(gate) * up are normalised before they are projected
    post_norms: the projections, called o and down, are normalised before they are added

The forward call keeps the fields that the policy names in a :class:`Saved`. The backward call recomputes the rest
by the same steps, so the gradients have the same bits under every policy.
"""

from __future__ import annotations

from gpu_ops.core.arrays import ArrayT
from gpu_ops.core.checks import one_of
from gpu_ops.models.block_steps import FIELDS, Saved, Sequences, TrainingRun, training_steps
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.offload import fetched, offloaded
from gpu_ops.models.weights import Block

__all__ = ["POLICIES", "Saved", "Sequences", "block_backward", "block_forward"]

_PROJECTED = frozenset({"o", "rstd_o", "down", "rstd_down"})  # with post_norms
_ALL = FIELDS - {"x"}
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
    run = TrainingRun(Saved(x), weights, config, sequences or Sequences())
    y = run.forward(kept_by(policy))
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
    run = TrainingRun(saved, weights, config, sequences or Sequences())
    run.dresidual = dy
    for step, _ in reversed(run.steps):
        dy = step.backward(run, dy, grads)
        saved.drop(*step.makes)
    return dy


def kept_by(policy: str) -> frozenset[str]:
    """Fields of :class:`Saved` that a policy keeps."""
    return POLICIES[one_of("block_forward", "policy", policy, POLICIES)]


def recomputed_flops(policy: str, config: LlamaConfig, seqlen: int) -> float:
    """Flops per token that the backward call recomputes under a policy."""
    recomputed = _ALL - kept_by(policy)
    steps = (step for step, _ in training_steps(config) if step.makes[0] in recomputed)
    return sum(step.flops(config, seqlen) for step in steps)
