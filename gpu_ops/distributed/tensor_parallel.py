"""Tensor parallelism: each rank holds some heads and channels of every layer, and some rows of the vocabulary.

A block of a rank is a block of a smaller config. The weights themselves exchange data: a :class:`ColumnParallel`
sums the gradient of its input over ranks, a :class:`RowParallel` its output. The functions of :mod:`gpu_ops.models`
and :mod:`gpu_ops.inference` take such weights like any others.
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
from gpu_ops.distributed.comm import Comm, SingleProcess
from gpu_ops.distributed.stream import Stream
from gpu_ops.distributed.vocabulary import VocabularyRows, rows_of_rank
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import added
from gpu_ops.models.projection import Projection, project, project_backward, weight_backward
from gpu_ops.models.weights import Block, Llama

__all__ = ["ReplicatedWeights", "TensorParallel", "squares"]

Array = npt.NDArray[Any]

_OP = "TensorParallel"
_STREAM_NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "norm")
_HEAD_NORMS = ("q_norm", "k_norm")
_WHOLE = (*_STREAM_NORMS, *_HEAD_NORMS, "o_bias", "down_bias")
_TABLES = ("embed", "lm_head")


@dataclass(frozen=True)
class _Divided(Projection):
    """Base class of projections that ranks divide. ``part``: this rank's rows or columns of a weight (out, in)."""

    part: Any
    stream: Stream

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.part.shape)

    @property
    def dtype(self) -> Any:
        return self.part.dtype


class ColumnParallel(_Divided):
    """Rows of a weight: some channels of its output."""

    def project(self, x: Any, bias: Any, residual: Any) -> Any:
        return project(self.stream.whole(x), self.part, bias, residual)

    def project_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> Any:
        return self.stream.summed(project_backward(dy, self.stream.whole(x), self.part, grad, dbias))

    def weight_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> None:
        weight_backward(dy, self.stream.whole(x), self.part, grad, dbias)


class RowParallel(_Divided):
    """Columns of a weight: some channels of its input. Bias and residual are added to the sum."""

    def project(self, x: Any, bias: Any, residual: Any) -> Any:
        return added(added(self.stream.summed(project(x, self.part)), bias), residual)

    def project_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> Any:
        return project_backward(self.stream.whole(dy), x, self.part, grad, dbias)

    def weight_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> None:
        weight_backward(self.stream.whole(dy), x, self.part, grad, dbias)


class TensorParallel:
    """Division of a model's weights among p ranks, and the gradients that the ranks add up.

    Parameters
    ----------
    config : LlamaConfig
        Config of the whole model. p divides ``nheads`` and ``ffn``. If p does not divide ``nheads_kv``, each rank
        holds the heads of keys and values that its heads of queries use, so several ranks may hold the same.
    comm : Comm
        The p ranks; all of them make the same calls.
    sequence_parallel : bool
        For training: between the projections each rank holds an equal run of the tokens of each sequence, or of all
        packed tokens. p divides their number.

    Attributes
    ----------
    config : LlamaConfig
        Config to use with :meth:`model`: that of this rank's blocks, with ``vocab`` of the whole model.
    replicas : int
        Number of ranks that hold each head of keys and values.

    Raises
    ------
    OptionError, ShapeError
        The model cannot be divided, or arrays do not fit it.

    Notes
    -----
    ``qkv`` and ``gate_up`` are divided by rows, ``o`` and ``down`` by columns, that is by heads and channels;
    ``embed`` and ``lm_head`` by rows. Norms and the biases of ``o`` and ``down`` are on every rank. Arrays are in
    host memory; weights of projections may also be CuPy arrays, those of the vocabulary may not.

    For N bytes of hidden states, forward and backward of a layer send 8 N (p - 1) / p bytes, and with
    ``sequence_parallel`` 10 N (p - 1) / p: the backward gathers arrays again that the forward did not keep. Arrays
    that all ranks hold have the same bits on all of them.

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
        group, nheads = config.nheads // config.nheads_kv, config.nheads // p
        each = math.gcd(group, nheads)  # heads of queries for one of keys and values, on every rank
        self.replicas = group // each
        self.config = replace(
            config,
            nheads=nheads,
            nheads_kv=nheads // each,
            head_dim=config.head_dim,
            ffn=config.ffn // p,
        )
        for name in config.shapes():
            self.pieces(name)
        name = f"{comm.name} with the same keys"
        self._same_kv = comm if self.replicas == 1 else comm.split(comm.rank // self.replicas, name=name)

    def pieces(self, name: str, rank: int | None = None) -> tuple[int, tuple[slice, ...]]:
        """Slices of a model's array that a rank (default: this one) holds.

        Returns
        -------
        axis : int
        pieces : tuple of slices
            Slices along that axis, end to end in the rank's array. Empty: the rank has the whole array.
        """
        whole, part, r = self.whole, self.config, self.comm.rank if rank is None else rank
        field = name.rpartition(".")[2]
        if field in _WHOLE:
            return 0, ()
        if field in _TABLES:
            return 0, (rows_of_rank(whole.vocab, self.comm, r),)
        heads, channels = _run(r, part.nheads * part.head_dim), _run(r, part.ffn)
        if field in ("qkv", "qkv_bias"):
            first = r * part.nheads_kv
            kv = [i // self.replicas for i in range(first, first + part.nheads_kv)]
            parts = [_run(s.start + i, part.head_dim) for s in whole.head_slices[1:] for i in kv]
            return 0, (heads, *parts)
        if field in ("gate_up", "gate_up_bias"):
            return 0, (channels, _run(r, part.ffn, whole.ffn))
        if field in ("o", "down"):
            return 1, (heads if field == "o" else channels,)
        raise OptionError(f"{_OP}: {name} cannot be divided among ranks")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this rank's arrays, by the names of the whole model."""
        return self._plain(self.comm.rank).shapes()

    def room(self) -> dict[str, int]:
        """Number of elements of each array, on the rank that has the most."""
        largest = replace(self.config, vocab=-(-self.whole.vocab // self.comm.size))
        return {name: math.prod(shape) for name, shape in largest.shapes().items()}

    def shard_weights(self, weights: Llama | Mapping[str, Any]) -> dict[str, Any]:
        """Copy this rank's part of a whole model to new NumPy arrays, by name."""
        arrays = Llama.of(self._arrays("shard_weights", weights), self.whole).arrays()
        sharded = {}
        for name, x in arrays.items():
            axis, pieces = self.pieces(name)
            parts = [_along(x, axis, piece) for piece in pieces or (slice(None),)]
            sharded[name] = np.concatenate(parts, axis)
        return sharded

    def gather_weights(self, weights: Llama | Mapping[str, Any]) -> dict[str, Any]:
        """Gather the whole model on every rank: new arrays by name. Gradients: after :meth:`sum_shared_grads`."""
        arrays = self._plain_model("gather_weights", weights).arrays()
        of_ranks = [self._plain(r).shapes() for r in range(self.comm.size)]
        gathered = {}
        for name, x in arrays.items():
            if not self.pieces(name)[1]:
                gathered[name] = x.copy()
                continue
            sizes = [math.prod(shapes[name]) for shapes in of_ranks]
            padded = np.zeros((1, max(sizes)), x.dtype)
            padded[0, : x.size] = x.reshape(-1)
            whole = gathered[name] = np.empty(self.whole.shapes()[name], x.dtype)
            for r, row in enumerate(self.comm.all_gather(padded)):
                (axis, pieces), part = self.pieces(name, r), row[: sizes[r]].reshape(of_ranks[r][name])
                ends = np.cumsum([piece.stop - piece.start for piece in pieces])
                for piece, values in zip(pieces, np.split(part, ends[:-1], axis), strict=True):
                    _along(whole, axis, piece)[...] = values
        return gathered

    def model(self, weights: Llama | Mapping[str, Any]) -> Llama:
        """Weights for :mod:`gpu_ops.models` and :mod:`gpu_ops.inference`, over this rank's arrays."""
        plain = self._plain_model("model", weights)
        layers = [replace(layer, **self._projections(layer)) for layer in plain.layers]
        embed = self._table(plain.embed)
        return Llama(embed, layers, plain.norm, embed if self.whole.tied else self._table(plain.lm_head))

    def part(self, plain: Block | Llama) -> Block | Llama:
        """Weights of a part of the model, over this rank's arrays: see ``gpu_ops.models.llama``."""
        if isinstance(plain, Block):
            return replace(plain, **self._projections(plain))
        return replace(plain, embed=self._table(plain.embed), lm_head=self._table(plain.lm_head))

    def states_shape(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this rank's hidden states, for ids of this shape."""
        if not ids:
            raise ShapeError("TensorParallel.states_shape: ids have no axis; expected (..., tokens)")
        tokens = ids[-1] // self.comm.size if self.stream.divided else ids[-1]
        return (*ids[:-1], tokens, self.config.hidden)

    def _projections(self, layer: Block) -> dict[str, Projection]:
        columns = {name: ColumnParallel(getattr(layer, name), self.stream) for name in ("qkv", "gate_up")}
        return {**columns, **{name: RowParallel(getattr(layer, name), self.stream) for name in ("o", "down")}}

    def _table(self, part: Any) -> VocabularyRows | None:
        if part is None:
            return None
        return VocabularyRows(self.comm, part, self.whole.vocab, sequence_parallel=self.stream.divided)

    def grads(self, grads: Llama | Mapping[str, Any]) -> Llama:
        """This rank's arrays as ``grads`` of :func:`gpu_ops.models.loss_and_grads`."""
        return self._plain_model("grads", grads)

    def sum_shared_grads(self, grads: Llama | Mapping[str, Any]) -> None:
        """Add up, in place, the gradients of which each rank has a share.

        These are ``q_norm`` and ``k_norm``, the heads of keys and values that several ranks hold and, with
        ``sequence_parallel``, the other norms. Call it once per step, after all parts of the batch have been added
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
        """Add up heads over ``replicas`` ranks; each holds ``nheads_kv`` of the copies of ``nheads_kv`` heads."""
        kv, comm = self.config.nheads_kv, self._same_kv
        heads = (comm.rank * kv + np.arange(kv)) // self.replicas
        heads = np.concatenate([heads, kv + heads])  # heads of keys, then of values
        totals = []
        for x in rows:
            totals.append(np.zeros((2 * kv, x.size // (2 * kv)), x.dtype))
            np.add.at(totals[-1], heads, x.reshape(2 * kv, -1))
        _sum_in_place(comm, totals)
        for x, total in zip(rows, totals, strict=True):
            x[...] = total[heads].reshape(x.shape)

    def grad_norm(self, grads: Llama | Mapping[str, Any]) -> float:
        """Euclidean norm of the whole model's gradients, on every rank, after :meth:`sum_shared_grads`."""
        total = 0.0
        for name, x in self._arrays("grad_norm", grads).items():
            total += sum(holds * squares(x.reshape(-1)[at]) for at, holds in self.holds(name))
        return math.sqrt(self.comm.all_reduce(np.array([total]))[0])

    def holds(self, name: str) -> list[tuple[slice, float]]:
        """Elements of a flattened array of this rank, and 1 over the number of ranks that hold the same elements."""
        whole = not self.pieces(name)[1]
        shape = self.shapes()[name]
        if whole:
            return [(slice(0, math.prod(shape)), 1 / self.comm.size)]
        of_q = self.config.nheads * self.config.head_dim
        rows = of_q if name.rpartition(".")[2] in ("qkv", "qkv_bias") else shape[0]
        first = rows * math.prod(shape[1:])
        return [(slice(0, first), 1.0), (slice(first, math.prod(shape)), 1 / self.replicas)]

    def _plain(self, rank: int) -> LlamaConfig:
        """Config of a rank's arrays, including the vocabulary."""
        rows = rows_of_rank(self.whole.vocab, self.comm, rank)
        return replace(self.config, vocab=rows.stop - rows.start)

    def _plain_model(self, op: str, arrays: Llama | Mapping[str, Any]) -> Llama:
        return Llama.of(self._arrays(op, arrays), self._plain(self.comm.rank))

    def _arrays(self, op: str, weights: Llama | Mapping[str, Any]) -> dict[str, Array]:
        """Arrays by name, without frozen ones."""
        arrays = weights.arrays() if isinstance(weights, Llama) else weights
        present = {name: x for name, x in arrays.items() if x is not None}
        return {name: self.comm.movable(f"{_OP}.{op}: {name}", x)[0] for name, x in present.items()}

    def _kv_rows(self, name: str, x: Array) -> Array:
        """View of the rows of keys and values; empty for other arrays."""
        has_any = name.rpartition(".")[2] in ("qkv", "qkv_bias")
        return x[self.config.nheads * self.config.head_dim if has_any else len(x) :]


def _run(number: int, length: int, start: int = 0) -> slice:
    """Run number ``number`` of the runs of this length that follow ``start``."""
    return slice(start + number * length, start + (number + 1) * length)


def _along(x: Array, axis: int, piece: slice) -> Array:
    return x[(slice(None),) * axis + (piece,)]


def squares(x: Array) -> float:
    """Sum of the squares, in float64."""
    return float(np.sum(np.square(x, dtype=np.float64)))


def _sum_in_place(comm: Comm, arrays: Sequence[Array]) -> None:
    """Sum arrays over the ranks in place, with one message."""
    if not arrays:
        return
    total = comm.all_reduce(np.concatenate([x.reshape(-1) for x in arrays]))
    ends = np.cumsum([x.size for x in arrays])
    for x, part in zip(arrays, np.split(total, ends[:-1]), strict=True):
        x[...] = part.reshape(x.shape)


class ReplicatedWeights:
    """Model whose weights are not divided."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = self.whole = config
        self.comm: Comm = SingleProcess("tp")
        self._shapes = config.shapes()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def room(self) -> dict[str, int]:
        return {name: math.prod(shape) for name, shape in self._shapes.items()}

    def pieces(self, name: str, rank: int | None = None) -> tuple[int, tuple[slice, ...]]:
        return 0, ()

    def model(self, weights: Mapping[str, Any]) -> Llama:
        return Llama.of(weights, self.config)

    def part(self, plain: Block | Llama) -> Block | Llama:
        return plain

    def states_shape(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return (*ids, self.config.hidden)

    def sum_shared_grads(self, grads: Mapping[str, Any]) -> None:
        """Do nothing: there are no shared gradients."""

    def holds(self, name: str) -> list[tuple[slice, float]]:
        return [(slice(0, math.prod(self._shapes[name])), 1.0)]
