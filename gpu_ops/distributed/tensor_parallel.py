"""Tensor parallelism: each rank holds some heads and channels of every layer, and some rows of the vocabulary.

A block of a rank is a block of a smaller config. What ranks exchange belongs to the weights: a :class:`Column` sums
the gradient for its input, a :class:`Row` its output. The functions of :mod:`gpu_ops.models` and
:mod:`gpu_ops.inference` take such weights as any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import check_writable
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.stream import Stream
from gpu_ops.distributed.vocabulary import VocabularyRows, rows_of_rank
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import added
from gpu_ops.models.projection import Projection, project, project_backward, weight_backward
from gpu_ops.models.weights import Block, Llama

__all__ = ["TensorParallel", "squares"]

Array = npt.NDArray[Any]

_OP = "TensorParallel"
_STREAM_NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "norm")
_HEAD_NORMS = ("q_norm", "k_norm")
_WHOLE = (*_STREAM_NORMS, *_HEAD_NORMS, "o_bias", "down_bias")
_TABLES = ("embed", "lm_head")


@dataclass(frozen=True)
class _Divided(Projection):
    """``part``: this rank's rows or columns of a weight (out, in)."""

    part: Any
    stream: Stream

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.part.shape)

    @property
    def dtype(self) -> Any:
        return self.part.dtype


class Column(_Divided):
    """Rows of a weight: some channels of its output."""

    def project(self, x: Any, bias: Any, residual: Any) -> Any:
        return project(self.stream.whole(x), self.part, bias, residual)

    def project_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> Any:
        return self.stream.summed(project_backward(dy, self.stream.whole(x), self.part, grad, dbias))

    def weight_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> None:
        weight_backward(dy, self.stream.whole(x), self.part, grad, dbias)


class Row(_Divided):
    """Columns of a weight: some channels of its input. Bias and residual are added to the sum."""

    def project(self, x: Any, bias: Any, residual: Any) -> Any:
        return added(added(self.stream.summed(project(x, self.part)), bias), residual)

    def project_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> Any:
        return project_backward(self.stream.whole(dy), x, self.part, grad, dbias)

    def weight_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> None:
        weight_backward(self.stream.whole(dy), x, self.part, grad, dbias)


class TensorParallel:
    """How the weights of a model lie on p ranks, and which gradients the ranks add up.

    Parameters
    ----------
    config : LlamaConfig
        Of the whole model. p divides ``nheads`` and ``ffn``. Where p does not divide ``nheads_kv``, heads of keys and
        values are held as often as the heads of queries that use them need.
    comm : Comm
        The p ranks; all of them make the same calls.
    sequence_parallel : bool
        For training: between the projections each rank holds an equal run of the tokens of each sequence, or of all
        packed ones. p divides their number.

    Attributes
    ----------
    config : LlamaConfig
        The one to use with :meth:`model`: of this rank's blocks, and with ``vocab`` of the whole model.
    replicas : int
        How often each head of keys and values is held.

    Raises
    ------
    OptionError, ShapeError
        The model cannot be divided, or arrays do not fit it.

    Notes
    -----
    ``qkv`` and ``gate_up`` are divided by rows, ``o`` and ``down`` by columns, that is by heads and channels;
    ``embed`` and ``lm_head`` by rows. Norms and the biases of ``o`` and ``down`` are on every rank. Arrays are in
    host memory; weights of projections may be CuPy arrays, those of the vocabulary not.

    For N bytes of hidden states, forward and backward of a layer send 8 N (p - 1) / p bytes, with
    ``sequence_parallel`` 10 N (p - 1) / p: the backward gathers again what the forward did not keep. What all ranks
    hold has the same bits on all of them.

    Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed, models, training
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> parts = distributed.TensorParallel(config, distributed.world())
    >>> flat = training.FlatParams.from_shapes(parts.shapes(), dtype="float32", device="cpu")
    >>> flat.assign(parts.shard_weights(models.initial_weights(config)))
    >>> weights, grads = parts.model(flat.params), parts.grads(flat.grads)
    >>> ids = np.arange(32).reshape(2, 16)
    >>> loss = models.loss_and_grads(ids, ids, weights, parts.config, grads=grads)
    >>> parts.sum_shared_grads(flat.grads)
    >>> flat.step(lr=1e-3)
    >>> whole = parts.gather_weights(flat.params)  # to save, or to divide otherwise
    """

    def __init__(self, config: LlamaConfig, comm: Comm, *, sequence_parallel: bool = False) -> None:
        checks.instance(_OP, "config", config, LlamaConfig)
        checks.instance(_OP, "comm", comm, Comm)
        p = comm.size
        for name in ("nheads", "ffn"):
            if getattr(config, name) % p:
                raise OptionError(f"{_OP}: {name}={getattr(config, name)} is no multiple of {p} ranks")
        if config.vocab < p:
            raise OptionError(f"{_OP}: vocab={config.vocab} is less than a row for each of {p} ranks")
        self.comm, self.whole = comm, config
        self.stream = Stream(comm, checks.flag(_OP, "sequence_parallel", sequence_parallel))
        group, own = config.nheads // config.nheads_kv, config.nheads // p
        each = math.gcd(group, own)  # heads of queries for one of keys and values, on every rank
        self.replicas = group // each
        self.config = replace(
            config,
            nheads=own,
            nheads_kv=own // each,
            head_dim=config.head_dim,
            ffn=config.ffn // p,
        )
        for name in config.shapes():
            self.pieces(name)
        name = f"{comm.name} with the same keys"
        self._same_kv = comm if self.replicas == 1 else comm.split(comm.rank // self.replicas, name=name)

    def pieces(self, name: str, rank: int | None = None) -> tuple[int, tuple[slice, ...]]:
        """Which slices of a model's array a rank (default: this one) holds.

        Returns
        -------
        axis : int
        pieces : tuple of slices
            Along that axis, end to end in the rank's array. None: the rank has all of it.
        """
        whole, own, r = self.whole, self.config, self.comm.rank if rank is None else rank
        kind = name.rpartition(".")[2]
        if kind in _WHOLE:
            return 0, ()
        if kind in _TABLES:
            return 0, (rows_of_rank(whole.vocab, self.comm, r),)
        heads, channels = _run(r, own.nheads * own.head_dim), _run(r, own.ffn)
        if kind in ("qkv", "qkv_bias"):
            first = r * own.nheads_kv
            kv = [i // self.replicas for i in range(first, first + own.nheads_kv)]
            parts = [_run(s.start + i, own.head_dim) for s in whole.head_slices[1:] for i in kv]
            return 0, (heads, *parts)
        if kind in ("gate_up", "gate_up_bias"):
            return 0, (channels, _run(r, own.ffn, whole.ffn))
        if kind in ("o", "down"):
            return 1, (heads if kind == "o" else channels,)
        raise OptionError(f"{_OP}: {name} cannot be divided among ranks")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of this rank's arrays, by the names of the whole model."""
        return self._plain(self.comm.rank).shapes()

    def room(self) -> dict[str, int]:
        """The elements of each array, on the rank that has the most."""
        most = replace(self.config, vocab=-(-self.whole.vocab // self.comm.size))
        return {name: math.prod(shape) for name, shape in most.shapes().items()}

    def shard_weights(self, weights: Llama | Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole model, by name: new NumPy arrays."""
        arrays = Llama.of(self._arrays("shard_weights", weights), self.whole).arrays()
        found = {}
        for name, x in arrays.items():
            axis, pieces = self.pieces(name)
            parts = [_along(x, axis, piece) for piece in pieces or (slice(None),)]
            found[name] = np.concatenate(parts, axis)
        return found

    def gather_weights(self, weights: Llama | Mapping[str, Any]) -> dict[str, Any]:
        """The whole model on every rank, by name: new arrays. Of gradients, after :meth:`sum_shared_grads`."""
        arrays = self._plain_model("gather_weights", weights).arrays()
        of_ranks = [self._plain(r).shapes() for r in range(self.comm.size)]
        found = {}
        for name, x in arrays.items():
            if not self.pieces(name)[1]:
                found[name] = x.copy()
                continue
            sizes = [math.prod(shapes[name]) for shapes in of_ranks]
            padded = np.zeros((1, max(sizes)), x.dtype)
            padded[0, : x.size] = x.reshape(-1)
            whole = found[name] = np.empty(self.whole.shapes()[name], x.dtype)
            for r, row in enumerate(self.comm.all_gather(padded)):
                (axis, pieces), part = self.pieces(name, r), row[: sizes[r]].reshape(of_ranks[r][name])
                ends = np.cumsum([piece.stop - piece.start for piece in pieces])
                for piece, one in zip(pieces, np.split(part, ends[:-1], axis), strict=True):
                    _along(whole, axis, piece)[...] = one
        return found

    def model(self, weights: Llama | Mapping[str, Any]) -> Llama:
        """The weights for :mod:`gpu_ops.models` and :mod:`gpu_ops.inference`, over this rank's arrays."""
        plain = self._plain_model("model", weights)
        layers = [replace(layer, **self._projections(layer)) for layer in plain.layers]
        embed = self._table(plain.embed)
        return Llama(embed, layers, plain.norm, embed if self.whole.tied else self._table(plain.lm_head))

    def part(self, plain: Block | Llama) -> Block | Llama:
        """The weights of a part of the model, over this rank's arrays: see ``gpu_ops.models.passes``."""
        if isinstance(plain, Block):
            return replace(plain, **self._projections(plain))
        return replace(plain, embed=self._table(plain.embed), lm_head=self._table(plain.lm_head))

    def states_shape(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Of this rank's hidden states, for ids of this shape."""
        if not ids:
            raise ShapeError("TensorParallel.states_shape: ids have no axis; expected (..., tokens)")
        tokens = ids[-1] // self.comm.size if self.stream.divided else ids[-1]
        return (*ids[:-1], tokens, self.config.hidden)

    def _projections(self, layer: Block) -> dict[str, Projection]:
        columns = {name: Column(getattr(layer, name), self.stream) for name in ("qkv", "gate_up")}
        return {**columns, **{name: Row(getattr(layer, name), self.stream) for name in ("o", "down")}}

    def _table(self, part: Any) -> VocabularyRows | None:
        if part is None:
            return None
        return VocabularyRows(self.comm, part, self.whole.vocab, sequence_parallel=self.stream.divided)

    def grads(self, grads: Llama | Mapping[str, Any]) -> Llama:
        """This rank's arrays as ``grads`` of :func:`gpu_ops.models.loss_and_grads`."""
        return self._plain_model("grads", grads)

    def sum_shared_grads(self, grads: Llama | Mapping[str, Any]) -> None:
        """Add up, in place, the gradients of which each rank has a share.

        Those of ``q_norm`` and ``k_norm``; of heads of keys and values that several ranks hold; with
        ``sequence_parallel`` of the other norms. Call it once per step, when all parts of the batch have been added
        and before the gradients are read.
        """
        arrays = self._arrays("sum_shared_grads", grads)
        for name, x in arrays.items():
            check_writable(f"{_OP}.sum_shared_grads", name, x, x, x.dtype, "")
        norms = (*_HEAD_NORMS, *(_STREAM_NORMS if self.stream.divided else ()))
        _sum_in_place(self.comm, [x for name, x in arrays.items() if name.rpartition(".")[2] in norms])
        if self.replicas > 1:
            self._sum_same_kv([rows for name, x in arrays.items() if (rows := self._kv_rows(name, x)).size])

    def _sum_same_kv(self, rows: Sequence[Array]) -> None:
        """Of so many ranks as each head has copies, each has ``nheads_kv`` of the copies of ``nheads_kv`` heads."""
        kv, comm = self.config.nheads_kv, self._same_kv
        heads = (comm.rank * kv + np.arange(kv)) // self.replicas
        heads = np.concatenate([heads, kv + heads])  # of keys, of values
        totals = []
        for x in rows:
            totals.append(np.zeros((2 * kv, x.size // (2 * kv)), x.dtype))
            np.add.at(totals[-1], heads, x.reshape(2 * kv, -1))
        _sum_in_place(comm, totals)
        for x, total in zip(rows, totals, strict=True):
            x[...] = total[heads].reshape(x.shape)

    def grad_norm(self, grads: Llama | Mapping[str, Any]) -> float:
        """The Euclidean norm of the whole model's gradients, on every rank, after :meth:`sum_shared_grads`."""
        total = 0.0
        for name, x in self._arrays("grad_norm", grads).items():
            total += sum(holds * squares(x.reshape(-1)[at]) for at, holds in self.holds(name))
        return math.sqrt(self.comm.all_reduce(np.array([total]))[0])

    def holds(self, name: str) -> list[tuple[slice, float]]:
        """Elements of an array of this rank, flattened, and one over the number of ranks that hold the same."""
        whole = not self.pieces(name)[1]
        shape = self.shapes()[name]
        if whole:
            return [(slice(0, math.prod(shape)), 1 / self.comm.size)]
        of_q = self.config.nheads * self.config.head_dim
        rows = of_q if name.rpartition(".")[2] in ("qkv", "qkv_bias") else shape[0]
        first = rows * math.prod(shape[1:])
        return [(slice(0, first), 1.0), (slice(first, math.prod(shape)), 1 / self.replicas)]

    def _plain(self, rank: int) -> LlamaConfig:
        """Of a rank's arrays, the vocabulary included."""
        rows = rows_of_rank(self.whole.vocab, self.comm, rank)
        return replace(self.config, vocab=rows.stop - rows.start)

    def _plain_model(self, op: str, arrays: Llama | Mapping[str, Any]) -> Llama:
        return Llama.of(self._arrays(op, arrays), self._plain(self.comm.rank))

    def _arrays(self, op: str, weights: Llama | Mapping[str, Any]) -> dict[str, Array]:
        """By name, without frozen ones."""
        arrays = weights.arrays() if isinstance(weights, Llama) else weights
        given = {name: x for name, x in arrays.items() if x is not None}
        return {name: self.comm.movable(f"{_OP}.{op}: {name}", x)[0] for name, x in given.items()}

    def _kv_rows(self, name: str, x: Array) -> Array:
        """A view of the rows of keys and values; of other arrays none."""
        has_any = name.rpartition(".")[2] in ("qkv", "qkv_bias")
        return x[self.config.nheads * self.config.head_dim if has_any else len(x) :]


def _run(number: int, length: int, start: int = 0) -> slice:
    """Of the runs of this length from ``start`` on."""
    return slice(start + number * length, start + (number + 1) * length)


def _along(x: Array, axis: int, piece: slice) -> Array:
    return x[(slice(None),) * axis + (piece,)]


def squares(x: Array) -> float:
    """Their sum, in float64."""
    return float(np.sum(np.square(x, dtype=np.float64)))


def _sum_in_place(comm: Comm, arrays: Sequence[Array]) -> None:
    """As one array."""
    if not arrays:
        return
    total = comm.all_reduce(np.concatenate([x.reshape(-1) for x in arrays]))
    ends = np.cumsum([x.size for x in arrays])
    for x, part in zip(arrays, np.split(total, ends[:-1]), strict=True):
        x[...] = part.reshape(x.shape)
