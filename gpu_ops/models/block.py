"""A decoder block, forward and backward, as two functions that keep as much between them as a policy says.

::

    h1 = rmsnorm(x)                 qkv = h1 @ w_qkv^T, q and k rotated in place (qk_norm: normalised first, apart)
    x2 = x + attention(q, k, v) @ w_o^T
    h2 = rmsnorm(x2)                gate_up = h2 @ w_gate_up^T
    y = x2 + (act(gate) * up) @ w_down^T

The forward call keeps what the policy names in a :class:`Saved`. The backward call makes the rest again, with the
functions that made it: the same kernels, so the gradients have the same bits under every policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from gpu_ops.core.allocator import empty_like
from gpu_ops.core.checks import one_of
from gpu_ops.errors import OptionError
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.offload import fetched, offloaded
from gpu_ops.models.projection import copied, project, project_backward
from gpu_ops.models.weights import Block
from gpu_ops.ops.attention import attention, attention_backward
from gpu_ops.ops.attention_varlen import attention_varlen, attention_varlen_backward
from gpu_ops.ops.rmsnorm import rmsnorm, rmsnorm_backward
from gpu_ops.ops.rope import rope, rope_backward
from gpu_ops.ops.swiglu import swiglu, swiglu_backward

__all__ = ["POLICIES", "Saved", "Sequences", "block_backward", "block_forward"]


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of a batch stand."""

    positions: Any = None
    """int32 (batch, seqlen) or (tokens,). None: 0, 1, ... along seqlen. Packed sequences need them."""
    cu_seqlens: Any = None
    """int32 (sequences + 1,) for packed sequences: x is then (tokens, hidden)."""
    max_seqlen: int | None = None
    """The longest sequence; a CUDA graph needs it."""


_ALL = frozenset(
    {"h1", "rstd1", "qkv", "q", "k", "rstd_q", "rstd_k", "attn", "lse", "x2", "h2", "rstd2", "gate_up"}
)
# What a policy keeps besides the block's input. Bytes per token, the input included, in units of hidden * itemsize,
# for Llama-3-8B: none 13.5, mlp 6.5, norms 4.5, attention 2, layer 1. q and k are fields of their own with qk_norm.
POLICIES: dict[str, frozenset[str]] = {
    "none": _ALL,
    "mlp": _ALL - {"gate_up"},
    "norms": frozenset({"qkv", "attn", "lse", "x2"}),
    "attention": frozenset({"x2"}),
    "layer": frozenset(),
    "offload": frozenset(),  # and its input goes to the host
}


@dataclass
class Saved:
    """What a forward call keeps for its backward call; a field that is None is made again."""

    x: Any
    h1: Any = None
    rstd1: Any = None
    qkv: Any = None
    q: Any = None
    k: Any = None
    rstd_q: Any = None
    rstd_k: Any = None
    attn: Any = None
    lse: Any = None
    x2: Any = None
    h2: Any = None
    rstd2: Any = None
    gate_up: Any = None

    def drop(self, *names: str) -> None:
        for name in names:
            setattr(self, name, None)

    @property
    def nbytes(self) -> int:
        return sum(int(x.nbytes) for x in (getattr(self, f.name) for f in fields(self)) if x is not None)


def block_forward(
    x: Any, weights: Block, config: LlamaConfig, *, policy: str = "none", sequences: Sequences | None = None
) -> tuple[Any, Saved]:
    """The output of a block, like x, and what :func:`block_backward` takes.

    Parameters
    ----------
    x : array (batch, seqlen, hidden), or (tokens, hidden) with ``sequences.cu_seqlens``
    weights : Block
        In x's dtype.
    policy : str
        ``none`` recomputes nothing; ``mlp`` gate and up; ``norms`` the normalised inputs too; ``attention`` attention
        and its projections too; ``layer`` everything. ``offload`` is ``layer`` with the block's input in pinned host
        memory; arrays on the host stay where they are.

    Returns
    -------
    y : array like x
    saved : Saved
    """
    keep = kept_by(policy)
    run = _Run(Saved(x), weights, config, sequences or Sequences())
    for field, done in _FORWARD:
        run.need(field)
        run.saved.drop(*(name for name in done if name not in keep))
    act = swiglu(run.saved.gate_up, activation=config.activation)
    if "gate_up" not in keep:
        run.saved.drop("gate_up")
    y = project(act, weights.down, weights.down_bias, run.saved.x2)
    if "x2" not in keep:
        run.saved.drop("x2")
    if policy == "offload":
        run.saved.x = offloaded(x)
    return y, run.saved


def block_backward(
    dy: Any,
    weights: Block,
    saved: Saved,
    config: LlamaConfig,
    *,
    grads: Block,
    sequences: Sequences | None = None,
) -> Any:
    """The gradient for x; those of the weights are added to ``grads``. Uses up ``saved``.

    Parameters
    ----------
    dy : array like y
    saved : Saved
        Of the forward call.
    grads : Block
        float32 (float64 for float64).

    Returns
    -------
    dx : array like x
    """
    saved.x = fetched(saved.x)
    run = _Run(saved, weights, config, sequences or Sequences())
    gate_up = run.need("gate_up")
    act = swiglu(gate_up, activation=config.activation)
    dact = project_backward(dy, act, weights.down, grads.down, grads.down_bias)
    del act
    dgate_up = swiglu_backward(dact, gate_up, activation=config.activation, out=gate_up)
    del dact, gate_up
    saved.drop("gate_up")
    dh = project_backward(dgate_up, run.need("h2"), weights.gate_up, grads.gate_up, grads.gate_up_bias)
    del dgate_up
    rstd = run.need("rstd2")
    dx2, _ = rmsnorm_backward(
        dh, run.need("x2"), weights.mlp_norm, rstd, dresidual=dy, dweight=grads.mlp_norm
    )
    del dh
    saved.drop("h2", "rstd2", "x2")
    dqkv = _attention_backward(run, dx2, grads)
    dh = project_backward(dqkv, run.need("h1"), weights.qkv, grads.qkv, grads.qkv_bias)
    del dqkv
    dx, _ = rmsnorm_backward(
        dh, saved.x, weights.attn_norm, run.need("rstd1"), dresidual=dx2, dweight=grads.attn_norm
    )
    saved.drop("h1", "rstd1", "x")
    return dx


def kept_by(policy: str) -> frozenset[str]:
    """The fields of :class:`Saved` that a policy keeps."""
    return POLICIES[one_of("block_forward", "policy", policy, POLICIES)]


def recomputed_flops(policy: str, config: LlamaConfig, seqlen: int) -> float:
    """What the backward call makes again under a policy, in flops per token. A norm counts as the 40 multiply-adds
    per element that pass while its bytes do."""
    c, heads = config, config.nheads * config.head_dim
    flops = {
        "h1": 80.0 * c.hidden,
        "qkv": 2.0 * c.hidden * (c.nheads + 2 * c.nheads_kv) * c.head_dim,
        "q": 80.0 * (c.nheads + c.nheads_kv) * c.head_dim * c.qk_norm,
        "attn": 2.0 * heads * (seqlen if c.window < 0 else min(seqlen, 2 * c.window)),
        "x2": 2.0 * c.hidden * heads,
        "h2": 80.0 * c.hidden,
        "gate_up": 4.0 * c.hidden * c.ffn,
    }
    return sum(n for field, n in flops.items() if field not in kept_by(policy))


class _Run:
    """One call over a block: makes the fields of :class:`Saved` that it needs."""

    def __init__(self, saved: Saved, weights: Block, config: LlamaConfig, sequences: Sequences) -> None:
        weights.check(config)
        self.saved, self.weights, self.config, self.sequences = saved, weights, config, sequences
        if sequences.cu_seqlens is not None and sequences.positions is None:
            raise OptionError(
                "block_forward: packed sequences need positions, which begin again in each of them"
            )
        longest = sequences.max_seqlen
        packed = sequences.cu_seqlens is not None
        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest} if packed else {}
        self.attention_options: dict[str, Any] = {
            "causal": True,
            "window_size": config.window_size,
            **lengths,
        }
        self.rope_options = {
            "positions": sequences.positions,
            "theta": config.theta,
            "scaling": config.scaling,
        }

    def need(self, field: str) -> Any:
        """A field, made if it is not there."""
        if getattr(self.saved, field) is None:
            _MAKERS[field](self)
        return getattr(self.saved, field)

    def split(self, qkv: Any) -> tuple[Any, Any, Any]:
        """q, k and v of the packed projection, (..., heads, head_dim) each, as views."""
        c = self.config
        heads = qkv.reshape(*qkv.shape[:-1], c.nheads + 2 * c.nheads_kv, c.head_dim)
        q, k, v = (heads[..., part, :] for part in c.head_slices)
        return q, k, v

    def rope(self, function: Callable[..., Any], q: Any, k: Any) -> None:
        """Rotate in place. Packed sequences are one long sequence with positions of their own."""
        if self.config.theta is None:
            return
        q, k = (x[None] if x.ndim == 3 else x for x in (q, k))
        function(q, k, **self.rope_options, out=(q, k))

    def norm1(self) -> None:
        s, w = self.saved, self.weights.attn_norm
        s.h1, s.rstd1 = rmsnorm(s.x, w, eps=self.config.eps, return_rstd=True)

    def project(self) -> None:
        qkv = project(self.need("h1"), self.weights.qkv, self.weights.qkv_bias)
        if not self.config.qk_norm:
            self.rope(rope, *self.split(qkv)[:2])
        self.saved.qkv = qkv

    def norm_qk(self) -> None:
        s, w = self.saved, self.weights
        q, k, _ = self.split(self.need("qkv"))
        s.q, s.rstd_q = self.norm_heads(q, w.q_norm)
        s.k, s.rstd_k = self.norm_heads(k, w.k_norm)
        self.rope(rope, s.q, s.k)

    def norm_heads(self, x: Any, weight: Any) -> tuple[Any, Any]:
        """Of heads among those of ``qkv``."""
        y = copied(x)
        y, rstd = rmsnorm(y, weight, eps=self.config.eps, return_rstd=True, out=y)
        return y, rstd

    def heads(self) -> tuple[Any, Any, Any]:
        """q, k and v as attention takes them."""
        q, k, v = self.split(self.need("qkv"))
        return (self.need("q"), self.need("k"), v) if self.config.qk_norm else (q, k, v)

    def attend(self) -> None:
        q, k, v = self.heads()
        starts = self.sequences.cu_seqlens
        options = {**self.attention_options, "return_lse": True}
        if starts is None:
            out, lse = attention(q, k, v, **options)
        else:
            out, lse = attention_varlen(q, k, v, starts, starts, **options)
        self.saved.attn, self.saved.lse = out.reshape(*out.shape[:-2], -1), lse

    def add_attention(self) -> None:
        self.saved.x2 = project(self.need("attn"), self.weights.o, self.weights.o_bias, self.saved.x)

    def norm2(self) -> None:
        s, w = self.saved, self.weights.mlp_norm
        s.h2, s.rstd2 = rmsnorm(self.need("x2"), w, eps=self.config.eps, return_rstd=True)

    def gate_up(self) -> None:
        self.saved.gate_up = project(self.need("h2"), self.weights.gate_up, self.weights.gate_up_bias)


_MAKERS: dict[str, Callable[[_Run], None]] = {
    "h1": _Run.norm1,
    "rstd1": _Run.norm1,
    "qkv": _Run.project,
    **dict.fromkeys(("q", "k", "rstd_q", "rstd_k"), _Run.norm_qk),
    "attn": _Run.attend,
    "lse": _Run.attend,
    "x2": _Run.add_attention,
    "h2": _Run.norm2,
    "rstd2": _Run.norm2,
    "gate_up": _Run.gate_up,
}
# What the forward call makes in order, and what no later step of it reads.
_FORWARD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("h1", ("rstd1",)),
    ("qkv", ("h1",)),
    ("attn", ("qkv", "q", "k", "rstd_q", "rstd_k", "lse")),
    ("x2", ("attn",)),
    ("h2", ("rstd2",)),
    ("gate_up", ("h2",)),
)


def _attention_backward(run: _Run, dx2: Any, grads: Block) -> Any:
    """Through the output projection, attention, rotation and norms: the gradient of the packed q, k and v."""
    saved, options = run.saved, run.attention_options
    attn = run.need("attn")
    dattn = project_backward(dx2, attn, run.weights.o, grads.o, grads.o_bias)
    (q, k, v), lse = run.heads(), run.need("lse")
    dqkv = empty_like(saved.qkv, "dqkv")
    parts = run.split(dqkv)
    heads = q.shape
    if run.sequences.cu_seqlens is None:
        attention_backward(dattn.reshape(heads), q, k, v, attn.reshape(heads), lse, **options, grads=parts)
    else:
        starts = (run.sequences.cu_seqlens,) * 2
        attention_varlen_backward(
            dattn.reshape(heads), q, k, v, attn.reshape(heads), lse, *starts, **options, grads=parts
        )
    del q, k, v, attn, dattn, lse
    saved.drop("q", "k", "attn", "lse")
    run.rope(rope_backward, *parts[:2])
    if run.config.qk_norm:
        x = run.split(saved.qkv)
        _norm_heads_backward(parts[0], x[0], run.weights.q_norm, saved.rstd_q, grads.q_norm)
        _norm_heads_backward(parts[1], x[1], run.weights.k_norm, saved.rstd_k, grads.k_norm)
        del x
    saved.drop("qkv", "rstd_q", "rstd_k")
    return dqkv


def _norm_heads_backward(dy: Any, x: Any, weight: Any, rstd: Any, dweight: Any) -> None:
    """In place of ``dy``, a part of ``dqkv``."""
    dx = copied(dy)
    rmsnorm_backward(dx, copied(x), weight, rstd, dweight=dweight, out=dx)
    copied(dx, to=dy)
