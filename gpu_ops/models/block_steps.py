"""Steps of a decoder block, computed on demand by the forward call, and again by the backward call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from gpu_ops.errors import OptionError
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import added, copied
from gpu_ops.models.projection import project
from gpu_ops.models.weights import Block
from gpu_ops.ops.attention.dense import attention, attention_backward
from gpu_ops.ops.attention.varlen import attention_varlen, attention_varlen_backward
from gpu_ops.ops.gemm.swiglu import swiglu
from gpu_ops.ops.norm.rmsnorm import rmsnorm, rmsnorm_backward
from gpu_ops.ops.rope.rope import rope

__all__ = ["Run", "Saved", "Sequences"]


@dataclass(frozen=True)
class Sequences:
    """Positions and boundaries of the sequences of a batch."""

    positions: Any = None
    """int32 (batch, seqlen) or (tokens,). None: 0, 1, ... along seqlen. Required for packed sequences."""
    cu_seqlens: Any = None
    """int32 (sequences + 1,) for packed sequences: x is then (tokens, hidden)."""
    max_seqlen: int | None = None
    """Length of the longest sequence; required in a CUDA graph."""
    seqlen: int | None = None
    """Length that the dynamic and longrope rotations depend on. None: the largest position + 1."""

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Attention within the sequences, and lse. :class:`gpu_ops.distributed.ContextParallel` overrides it."""
        starts = self.cu_seqlens
        if starts is None:
            return attention(q, k, v, **options, return_lse=True)
        options |= self._longest
        return attention_varlen(q, k, v, starts, starts, **options, return_lse=True)

    def attention_backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        grads: tuple[Any, Any, Any],
        **options: Any,
    ) -> None:
        """Backward of :meth:`attention`. ``grads``: arrays that receive dq, dk and dv."""
        starts = self.cu_seqlens
        if starts is None:
            attention_backward(dout, q, k, v, out, lse, **options, grads=grads)
        else:
            options |= self._longest
            attention_varlen_backward(dout, q, k, v, out, lse, starts, starts, **options, grads=grads)

    @property
    def _longest(self) -> dict[str, Any]:
        return {"max_seqlen_q": self.max_seqlen, "max_seqlen_k": self.max_seqlen}


@dataclass
class Saved:
    """Arrays that a forward call keeps for its backward call; a field that is None is recomputed."""

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
    o: Any = None
    rstd_o: Any = None
    down: Any = None
    rstd_down: Any = None

    def drop(self, *names: str) -> None:
        """Free these arrays."""
        for name in names:
            setattr(self, name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept arrays."""
        return sum(int(x.nbytes) for x in (getattr(self, f.name) for f in fields(self)) if x is not None)


class Run:
    """One call over a block: computes the fields of :class:`Saved` that it needs."""

    def __init__(self, saved: Saved, weights: Block, config: LlamaConfig, sequences: Sequences) -> None:
        weights.check(config)
        self.saved, self.weights, self.config, self.sequences = saved, weights, config, sequences
        if sequences.cu_seqlens is not None and sequences.positions is None:
            raise OptionError(
                "block_forward: packed sequences need positions, which begin again in each of them"
            )
        self.rope_options = {
            "positions": sequences.positions,
            "theta": config.theta,
            "scaling": config.scaling,
            "seqlen": sequences.seqlen,
        }

    def need(self, field: str) -> Any:
        """Return a field, computed if it is None."""
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
        """Rotate in place. Packed sequences are one long sequence with explicit positions."""
        if self.config.theta is None:
            return
        q, k = (x[None] if x.ndim == 3 else x for x in (q, k))
        function(q, k, **self.rope_options, out=(q, k))

    def norm(self, x: Any, weight: Any, *, stream: bool = False, out: Any = None) -> tuple[Any, Any]:
        """RMS norm and its rstd; ``stream``: whether x is the residual stream."""
        eps, offset = self.config.stream_eps if stream else self.config.eps, self.config.weight_offset
        y, rstd = rmsnorm(x, weight, eps=eps, weight_offset=offset, return_rstd=True, out=out)
        return y, rstd

    def norm_backward(self, dy: Any, x: Any, weight: Any, rstd: Any, dweight: Any, **more: Any) -> Any:
        offset = self.config.weight_offset
        return rmsnorm_backward(dy, x, weight, rstd, weight_offset=offset, dweight=dweight, **more)[0]

    def norm1(self) -> None:
        s = self.saved
        s.h1, s.rstd1 = self.norm(s.x, self.weights.attn_norm, stream=True)

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
        """Norm and rstd of some heads of ``qkv``, in a copy."""
        y = copied(x)
        return self.norm(y, weight, out=y)

    def heads(self) -> tuple[Any, Any, Any]:
        """q, k and v, the inputs of attention."""
        q, k, v = self.split(self.need("qkv"))
        return (self.need("q"), self.need("k"), v) if self.config.qk_norm else (q, k, v)

    def attend(self) -> None:
        q, k, v = self.heads()
        out, lse = self.sequences.attention(q, k, v, **self.config.attention_options)
        self.saved.attn, self.saved.lse = out.reshape(*out.shape[:-2], out.shape[-2] * out.shape[-1]), lse

    def project_attention(self) -> Any:
        """Attention through its sub-norm and the output projection, with the residual if no norm follows."""
        w, attn = self.weights, self.need("attn")
        if self.config.sub_norms:
            attn, _ = self.norm(attn, w.attn_sub_norm)
        return project(attn, w.o, w.o_bias, None if self.config.post_norms else self.saved.x)

    def make_o(self) -> None:
        self.saved.o = self.project_attention()

    def add_attention(self) -> None:
        s = self.saved
        if not self.config.post_norms:
            s.x2 = self.project_attention()
            return
        y, s.rstd_o = self.norm(self.need("o"), self.weights.attn_post_norm)
        s.x2 = added(y, s.x)

    def norm2(self) -> None:
        s = self.saved
        s.h2, s.rstd2 = self.norm(self.need("x2"), self.weights.mlp_norm, stream=True)

    def gate_up(self) -> None:
        self.saved.gate_up = project(self.need("h2"), self.weights.gate_up, self.weights.gate_up_bias)

    def act(self) -> Any:
        """Input of the down projection."""
        act = swiglu(self.need("gate_up"), activation=self.config.activation)
        return self.norm(act, self.weights.ffn_sub_norm, out=act)[0] if self.config.sub_norms else act

    def make_down(self) -> None:
        self.saved.down = project(self.act(), self.weights.down, self.weights.down_bias)

    def norm_down(self) -> Any:
        y, self.saved.rstd_down = self.norm(self.need("down"), self.weights.mlp_post_norm)
        return y


_MAKERS: dict[str, Callable[[Run], Any]] = {
    "h1": Run.norm1,
    "rstd1": Run.norm1,
    "qkv": Run.project,
    **dict.fromkeys(("q", "k", "rstd_q", "rstd_k"), Run.norm_qk),
    "attn": Run.attend,
    "lse": Run.attend,
    "o": Run.make_o,
    "x2": Run.add_attention,
    "rstd_o": Run.add_attention,
    "h2": Run.norm2,
    "rstd2": Run.norm2,
    "gate_up": Run.gate_up,
    "down": Run.make_down,
    "rstd_down": Run.norm_down,
}
