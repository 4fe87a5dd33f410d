"""Steps of a decoder block, in the order that the forward call, the backward call and decoding run them in.

A step names the arrays that it reads and makes: so a backward call makes again what was not kept, and an array is
freed after the last step that reads it. Decoding replaces rotation and attention.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

from gpu_ops.core.allocator import empty_like
from gpu_ops.errors import OptionError
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import added, copied
from gpu_ops.models.projection import project, project_backward
from gpu_ops.models.weights import Block
from gpu_ops.ops.attention.dense import attention, attention_backward
from gpu_ops.ops.attention.varlen import attention_varlen, attention_varlen_backward
from gpu_ops.ops.gemm.swiglu import swiglu, swiglu_backward
from gpu_ops.ops.norm.rmsnorm import rmsnorm, rmsnorm_backward
from gpu_ops.ops.rope.rope import rope, rope_backward

__all__ = [
    *("FIELDS", "BlockStep", "Projection", "Run", "Saved", "Sequences", "TrainingRun", "block_steps"),
    "training_steps",
]


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
        options |= {"max_seqlen_q": self.max_seqlen, "max_seqlen_k": self.max_seqlen}
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
            options |= {"max_seqlen_q": self.max_seqlen, "max_seqlen_k": self.max_seqlen}
            attention_varlen_backward(dout, q, k, v, out, lse, starts, starts, **options, grads=grads)


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


FIELDS = frozenset(field.name for field in fields(Saved))


class Run:
    """Call over a block. ``arrays``: by the names in ``reads`` and ``makes`` of the steps; None if freed."""

    arrays: dict[str, Any]
    weights: Block
    config: LlamaConfig
    steps: BlockSteps

    def forward(self, keep: Collection[str] = ()) -> Any:
        """Return the output of the block. Of the other arrays, its input and those of ``keep`` remain."""
        arrays = self.arrays
        for step, last_read in self.steps:
            inputs = map(arrays.__getitem__, step.reads)
            arrays.update(zip(step.makes, step.forward(self, *inputs), strict=True))
            for name in last_read:
                if name not in keep:
                    arrays[name] = None
        return arrays.pop("y")

    def norm(self, x: Any, weight: Any, eps: float, into: Any = None, *, out: Any = None) -> tuple[Any, Any]:
        """RMS norm and its rstd. ``into``: weight of the projection that reads it."""
        offset = self.config.weight_offset
        y, rstd = rmsnorm(x, weight, eps=eps, weight_offset=offset, return_rstd=True, out=out)
        return y, rstd

    def split(self, qkv: Any) -> tuple[Any, Any, Any]:
        """q, k and v of the packed projection, (..., heads, head_dim) each, as views."""
        c = self.config
        heads = qkv.reshape(*qkv.shape[:-1], c.nheads + 2 * c.nheads_kv, c.head_dim)
        q, k, v = c.head_slices
        return heads[..., q, :], heads[..., k, :], heads[..., v, :]


class TrainingRun(Run):
    """Forward call that keeps arrays, or the backward call that needs them, and makes the others again."""

    def __init__(self, saved: Saved, weights: Block, config: LlamaConfig, sequences: Sequences) -> None:
        weights.check(config)
        self.arrays, self.weights, self.config = vars(saved), weights, config
        self.steps, self.saved, self.sequences = training_steps(config), saved, sequences
        self.dresidual: Any = None  # gradient for the residual stream
        if sequences.cu_seqlens is not None and sequences.positions is None:
            raise OptionError(
                "block_forward: packed sequences need positions, which begin again in each of them"
            )

    def need(self, name: str) -> Any:
        """Return an array, made if it is None."""
        if self.arrays.get(name) is None:
            step = next(step for step, _ in self.steps if name in step.makes)
            inputs = map(self.need, step.reads)
            self.arrays.update(zip(step.makes, step.forward(self, *inputs), strict=True))
            if name in FIELDS:
                self.saved.drop(*self.arrays.keys() - FIELDS)
        return self.arrays[name]

    def norm_backward(self, dy: Any, x: Any, weight: Any, rstd: Any, dweight: Any, **more: Any) -> Any:
        offset = self.config.weight_offset
        return rmsnorm_backward(dy, x, weight, rstd, weight_offset=offset, dweight=dweight, **more)[0]

    def rope(self, function: Callable[..., Any], q: Any, k: Any) -> None:
        """Rotate in place. Packed sequences are one long sequence with explicit positions."""
        c, s = self.config, self.sequences
        if c.theta is not None:
            q, k = (x[None] if x.ndim == 3 else x for x in (q, k))
            options = {"positions": s.positions, "theta": c.theta, "scaling": c.scaling, "seqlen": s.seqlen}
            function(q, k, **options, out=(q, k))


@dataclass(frozen=True, eq=False)
class BlockStep(ABC):
    """Step of a block. ``reads`` and ``makes``: names of the arrays that ``forward`` takes and returns. Steps for
    decoding alone have no ``backward``."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    weight: str = ""

    @abstractmethod
    def forward(self, run: Any, *arrays: Any, **_: Any) -> tuple[Any, ...]: ...

    def backward(self, run: Any, dy: Any, grads: Block) -> Any:
        """Return the gradient for the first array of ``reads`` from that for the first of ``makes``, and add those of
        weights to ``grads``."""
        raise NotImplementedError

    def flops(self, config: LlamaConfig, seqlen: int) -> float:
        """Flops of ``forward`` per token. A norm counts as 40 multiply-adds per element, which take the same time as
        its memory traffic."""
        shape = config.block_shapes()[self.weight]
        return (80.0 if len(shape) == 1 else 2.0) * math.prod(shape)


@dataclass(frozen=True, eq=False)
class Norm(BlockStep):
    """Norm of the residual stream (``stream``), of an array in a branch, or at the end of a branch, which is added to
    the stream. ``into``: name of the projection that reads it."""

    into: str | None = None
    stream: bool = False

    def forward(self, run: Run, x: Any, residual: Any = None) -> tuple[Any, ...]:
        c, w = run.config, run.weights
        eps, into = c.stream_eps if self.stream else c.eps, self.into and getattr(w, self.into)
        y, rstd = run.norm(x, getattr(w, self.weight), eps, into)
        return y if residual is None else added(y, residual), rstd

    def backward(self, run: TrainingRun, dy: Any, grads: Block) -> Any:
        x, rstd = run.need(self.reads[0]), run.need(self.makes[1])
        arrays = dy, x, getattr(run.weights, self.weight), rstd, getattr(grads, self.weight)
        if self.stream or self.into is None:  # no earlier step reads x in its backward
            run.saved.drop(self.reads[0])
        if not self.stream:
            return run.norm_backward(*arrays, out=dy if dy is not run.dresidual else None)
        run.dresidual = run.norm_backward(*arrays, dresidual=run.dresidual)
        return run.dresidual


@dataclass(frozen=True, eq=False)
class Projection(BlockStep):
    """Projection, plus the residual stream if the step reads it. ``rotates``: q and k, in place."""

    rotates: bool = False

    def forward(self, run: Any, x: Any, residual: Any = None) -> tuple[Any, ...]:
        w = run.weights
        y = project(x, getattr(w, self.weight), getattr(w, f"{self.weight}_bias"), residual)
        if self.rotates:
            run.rope(rope, *run.split(y)[:2])
        return (y,)

    def backward(self, run: TrainingRun, dy: Any, grads: Block) -> Any:
        if self.rotates:
            run.rope(rope_backward, *run.split(dy)[:2])
        x, bias = run.need(self.reads[0]), f"{self.weight}_bias"
        weight, grad = getattr(run.weights, self.weight), getattr(grads, self.weight)
        return project_backward(dy, x, weight, grad, getattr(grads, bias))


class HeadNorms(BlockStep):
    """Norms of each head of q and k, in rotated copies."""

    def forward(self, run: TrainingRun, qkv: Any) -> tuple[Any, ...]:
        w, eps = run.weights, run.config.eps
        q, k = map(copied, run.split(qkv)[:2])
        _, rstd_q = run.norm(q, w.q_norm, eps, out=q)
        _, rstd_k = run.norm(k, w.k_norm, eps, out=k)
        run.rope(rope, q, k)
        return q, k, rstd_q, rstd_k

    def backward(self, run: TrainingRun, dy: Any, grads: Block) -> Any:
        parts = run.split(dy)
        run.rope(rope_backward, *parts[:2])
        for name, x, dx in zip("qk", run.split(run.saved.qkv), parts, strict=False):
            weight, dweight = (getattr(part, f"{name}_norm") for part in (run.weights, grads))
            grad = copied(dx)
            run.norm_backward(grad, copied(x), weight, run.need(f"rstd_{name}"), dweight, out=grad)
            copied(grad, to=dx)
        return dy

    def flops(self, config: LlamaConfig, seqlen: int) -> float:
        return 80.0 * (config.nheads + config.nheads_kv) * config.head_dim


class Attention(BlockStep):
    """Attention within sequences. Reads qkv, and the q and k that replace its parts if there are any."""

    def forward(self, run: TrainingRun, qkv: Any, *heads: Any) -> tuple[Any, ...]:
        q, k, v = (*heads, *run.split(qkv)[len(heads) :])
        out, lse = run.sequences.attention(q, k, v, **run.config.attention_options)
        return out.reshape(*out.shape[:-2], out.shape[-2] * out.shape[-1]), lse

    def backward(self, run: TrainingRun, dy: Any, grads: Block) -> Any:
        qkv, *heads = map(run.need, self.reads)
        q, k, v = (*heads, *run.split(qkv)[len(heads) :])
        dout, out = (x.reshape(q.shape) for x in (dy, run.need("attn")))
        dqkv, lse = empty_like(qkv, "dqkv"), run.need("lse")
        options = {"grads": run.split(dqkv), **run.config.attention_options}
        run.sequences.attention_backward(dout, q, k, v, out, lse, **options)
        return dqkv

    def flops(self, config: LlamaConfig, seqlen: int) -> float:
        keys = seqlen if config.window < 0 else min(seqlen, 2 * config.window)
        return 2.0 * config.nheads * config.head_dim * keys


class Activation(BlockStep):
    """Activation of gate, times up."""

    def forward(self, run: Run, gate_up: Any) -> tuple[Any, ...]:
        return (swiglu(gate_up, activation=run.config.activation),)

    def backward(self, run: TrainingRun, dy: Any, grads: Block) -> Any:
        gate_up = run.need("gate_up")
        return swiglu_backward(dy, gate_up, activation=run.config.activation, out=gate_up)


BlockSteps = tuple[tuple[BlockStep, tuple[str, ...]], ...]
"""Steps, and after each the arrays that no later one reads, except for the input and the output of the block."""


@functools.cache
def block_steps(attention: tuple[BlockStep, ...], sub_norms: bool, post_norms: bool) -> BlockSteps:
    """All steps of a block. ``attention``: those from ``h1`` to ``attn``."""

    def output(
        x: str, residual: str, y: str, weight: str, sub_norm: str, post_norm: str
    ) -> Iterator[BlockStep]:
        """Steps from ``x`` to the end of a branch."""
        if sub_norms:
            yield Norm((x,), (f"h_{weight}", f"rstd_h_{weight}"), sub_norm, weight)
            x = f"h_{weight}"
        if post_norms:
            yield Projection((x,), (weight,), weight)
            yield Norm((weight, residual), (y, f"rstd_{weight}"), post_norm)
        else:
            yield Projection((x, residual), (y,), weight)

    steps = (
        Norm(("x",), ("h1", "rstd1"), "attn_norm", "qkv", stream=True),
        *attention,
        *output("attn", "x", "x2", "o", "attn_sub_norm", "attn_post_norm"),
        Norm(("x2",), ("h2", "rstd2"), "mlp_norm", "gate_up", stream=True),
        Projection(("h2",), ("gate_up",), "gate_up"),
        Activation(("gate_up",), ("act",)),
        *output("act", "x2", "y", "down", "ffn_sub_norm", "mlp_post_norm"),
    )
    later = [{"x", "y"}.union(*(step.reads for step in steps[i:])) for i in range(1, len(steps) + 1)]
    return tuple((s, tuple({*s.reads, *s.makes} - names)) for s, names in zip(steps, later, strict=True))


def training_steps(config: LlamaConfig) -> BlockSteps:
    """Steps of the forward and the backward call of a block."""
    return block_steps(_NORMED_HEADS if config.qk_norm else _HEADS, config.sub_norms, config.post_norms)


_HEADS = Projection(("h1",), ("qkv",), "qkv", rotates=True), Attention(("qkv",), ("attn", "lse"))
_NORMED_HEADS = (
    Projection(("h1",), ("qkv",), "qkv"),
    HeadNorms(("qkv",), ("q", "k", "rstd_q", "rstd_k")),
    Attention(("qkv", "q", "k"), ("attn", "lse")),
)
