"""Pipeline parallelism: ranks have different layers of a model, and microbatches pass from rank to rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.data_parallel import DataParallel
from gpu_ops.distributed.engine import Pending
from gpu_ops.distributed.schedules import ScheduleStep, schedule
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.models.config import PROJECTIONS, LlamaConfig
from gpu_ops.models.llama import Part, Parts, Pass, check_loss_options
from gpu_ops.models.projection import Deferred

__all__ = ["Pipeline"]

Array = npt.NDArray[Any]

_OP = "Pipeline"
_FORWARD, _BACKWARD = 0, 1
Queue = list[Callable[[], None]]


class Pipeline:
    """Division of a model's layers among ranks, and the order in which they work on microbatches.

    Parameters
    ----------
    config : LlamaConfig
        Must not be ``tied``: the table would be on both the first and the last rank.
    comm : Comm
        The ranks, such as ``mesh.pp``; all of them make the same calls.
    schedule : {"1f1b", "gpipe", "interleaved", "zb-h1"}
        See :func:`gpu_ops.distributed.schedule`.
    chunks : int
        Stages of each rank, for interleaved. Rank r has stages r, r + p, ..., with about the same number of layers
        each.

    Attributes
    ----------
    parts : tuple
        Parts of the model that this rank has, for :class:`DataParallel`.
    stages : dict
        Layers of each stage of this rank.

    Raises
    ------
    OptionError, ShapeError

    Notes
    -----
    Each stage adds up the gradients of microbatches in their order: gradients have the bits of one rank that
    processes one microbatch after the other. Stages send N bytes per microbatch forward and N back, where N is the
    size of its hidden states.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> mesh = distributed.Mesh(pp=1, dp=1)
    >>> pipeline = distributed.Pipeline(config, mesh.pp, schedule="1f1b")
    >>> parallel = distributed.DataParallel(config, mesh.dp, stage=1, parts=pipeline.parts)
    >>> parallel.assign(models.initial_weights(config))  # takes this rank's parts
    >>> ids = np.arange(64).reshape(4, 16)
    >>> loss = pipeline.loss_and_grads(ids, ids, parallel, microbatches=4)
    >>> norm = parallel.grad_norm(also=mesh.pp)
    >>> parallel.step(lr=1e-3)
    """

    def __init__(self, config: LlamaConfig, comm: Comm, *, schedule: str = "1f1b", chunks: int = 1) -> None:
        checks.instance(_OP, "config", config, LlamaConfig)
        checks.instance(_OP, "comm", comm, Comm)
        self.comm, self.schedule = comm, schedule
        self.chunks = checks.integer(_OP, "chunks", chunks, low=1)
        self.rows(self.comm.size)  # raises an error if there is no such schedule
        count = comm.size * self.chunks
        if config.nlayers < count:
            raise OptionError(f"{_OP}: {config.nlayers} layers are fewer than {count} stages")
        if config.tied and comm.size > 1:
            raise OptionError(
                f"{_OP}: the embedding and the output layer of a tied model are on different ranks; use a config "
                'with tied=False, and a copy of "embed" as "lm_head"'
            )
        self._last = count - 1
        self.stages = {
            s: range(config.nlayers * s // count, config.nlayers * (s + 1) // count)
            for s in range(comm.rank, count, comm.size)
        }
        parts: list[Part] = [i for layers in self.stages.values() for i in layers]
        embed: list[Part] = ["embed"] if 0 in self.stages else []
        head: list[Part] = ["head"] if self._last in self.stages else []
        self.parts: tuple[Part, ...] = (*embed, *parts, *head)

    def rows(self, microbatches: int) -> list[list[ScheduleStep]]:
        """Schedule of all ranks."""
        return schedule(self.schedule, self.comm.size, microbatches, self.chunks)

    def loss_and_grads(
        self,
        ids: Any,
        targets: Any,
        parallel: DataParallel,
        *,
        microbatches: int,
        mean: bool = True,
        policy: str | Sequence[str] = "none",
        dloss: Any = 1.0,
        **options: Any,
    ) -> Any:
        """Loss of a batch, on every rank; gradients are added to those of ``parallel``.

        Parameters
        ----------
        ids, targets : integer arrays (batch, seqlen)
            The same on all ranks.
        parallel : DataParallel
            Must have ``parts`` of this pipeline and a stage of at most 1: gradients and weights stay allocated for
            the whole batch.
        microbatches : int
            Number of microbatches, with equal numbers of rows.
        mean : bool
            Return the mean of the microbatches' losses. False: their sum, for a ``denominator`` of the whole batch.
        policy, dloss, options
            As in :func:`gpu_ops.models.loss_and_grads`.
        """
        op = f"{_OP}.loss_and_grads"
        rows = self.rows(microbatches)[self.comm.rank]
        check_loss_options(options)
        checks.instance(op, "parallel", parallel, DataParallel)
        checks.scalar(op, "dloss", dloss, parallel.flat.buffers["params"].dtype.name)
        if tuple(parallel.parts) != self.parts or parallel.stage > 1:
            raise OptionError(
                f"{op}: parallel has stage={parallel.stage} and parts={parallel.parts}; expected stage 0 or 1, and "
                f"parts={self.parts}"
            )
        views = [self.comm.movable(op, x, name)[0] for name, x in (("ids", ids), ("targets", targets))]
        checks.exactly(op, "targets", views[1], views[0].shape)
        if views[0].ndim != 2 or views[0].shape[0] % microbatches:
            raise ShapeError(
                f"{op}: ids has shape {views[0].shape}, which {microbatches} microbatches of (rows, seqlen) do not "
                "divide evenly"
            )
        factor = 1 / microbatches if checks.flag(op, "mean", mean) else 1.0
        self.comm.begin(
            op, *views, f"schedule={self.schedule!r}, microbatches={microbatches}, policy={policy!r}"
        )
        parallel.begin(last=False)
        batch = [np.split(x, microbatches) for x in views]
        run = _Run(self, parallel, batch, policy, {"dloss": dloss * factor, "options": options})
        for row in rows:
            run.act(row)
        return run.finish(factor)

    def place(self, stage: int) -> tuple[int, int]:
        """Rank that has a stage, and the stage's number among those of the rank."""
        chunk, rank = divmod(stage, self.comm.size)
        return rank, chunk


class _Run:
    """State of a rank while it works through its rows."""

    def __init__(
        self,
        pipeline: Pipeline,
        parallel: DataParallel,
        batch: Sequence[Sequence[Array]],
        policy: str | Sequence[str],
        loss: Mapping[str, Any],
    ) -> None:
        self._pipeline, self._parallel, self._batch = pipeline, parallel, batch
        self._policy, self._loss = policy, loss
        self._passes: dict[tuple[int, int], Pass] = {}
        self._queues: dict[tuple[int, int], Queue] = {}
        self._losses: list[Any] = []
        self._sent: deque[Pending] = deque()
        self._kept: dict[tuple[int, int, int], Array] = {}  # between two stages of this rank
        self._shape = parallel.division.states_shape(batch[0][0].shape)
        self._dtype = parallel.flat.buffers["params"].dtype

    def act(self, row: ScheduleStep) -> None:
        stage, microbatch, action = row
        if action == "F":
            self._forward(stage, microbatch)
        elif action == "W":
            queue = self._queues.pop((stage, microbatch))
            while queue:  # each entry releases its arrays, and the last one the pass
                queue.pop(0)()
        else:
            self._backward(stage, microbatch)

    def finish(self, factor: float) -> Any:
        """Wait for this rank's sends; return the loss, which the last stage's rank sends to the others."""
        for pending in self._sent:
            pending.wait()
        dtype = checks.computing_dtype(np.dtype(self._dtype).name)
        total = np.zeros((), dtype)
        for value in self._losses:
            total += dtype.type(value) * dtype.type(factor)
        root, _ = self._pipeline.place(self._pipeline._last)
        return self._pipeline.comm.broadcast(total, root)

    def _forward(self, stage: int, microbatch: int) -> None:
        pipeline, key = self._pipeline, (stage, microbatch)
        parts: Parts = self._parallel
        if pipeline.schedule == "zb-h1":
            self._queues[key] = []
            parts = _Deferring(self._parallel, self._queues[key])
        forward_pass = self._passes[key] = Pass(parts, self._parallel.config, policy=self._policy)
        if stage == 0:
            forward_pass.embed(self._batch[0][microbatch])
        else:
            forward_pass.x = self._receive(stage - 1, microbatch, _FORWARD)
        forward_pass.forward(pipeline.stages[stage])
        if stage != pipeline._last:
            self._send(forward_pass.x, stage, stage + 1, microbatch, _FORWARD)
            forward_pass.x = None

    def _backward(self, stage: int, microbatch: int) -> None:
        pipeline, key = self._pipeline, (stage, microbatch)
        backward_pass = self._passes.pop(key)
        if stage == pipeline._last:
            self._losses.append(backward_pass.head(self._batch[1][microbatch], **self._loss))
        else:
            backward_pass.x = self._receive(stage + 1, microbatch, _BACKWARD)
        backward_pass.backward(pipeline.stages[stage])
        ids = self._batch[0][microbatch]
        if stage:
            self._send(backward_pass.x, stage, stage - 1, microbatch, _BACKWARD)
        elif key in self._queues:
            self._queues[key].append(lambda: backward_pass.embed_backward(ids))
        else:
            backward_pass.embed_backward(ids)

    def _send(self, x: Array, stage: int, to: int, microbatch: int, way: int) -> None:
        rank, _ = self._pipeline.place(to)
        if rank == self._pipeline.comm.rank:
            self._kept[stage, microbatch, way] = x
            return
        while self._sent and self._sent[0].poll():
            self._sent.popleft()
        tag = 2 * self._pipeline.place(stage)[1] + way
        self._sent.append(self._pipeline.comm.send(x, rank, tag=tag))

    def _receive(self, stage: int, microbatch: int, way: int) -> Array:
        """Receive an array from ``stage``; they arrive in the order of microbatches."""
        rank, chunk = self._pipeline.place(stage)
        if rank == self._pipeline.comm.rank:
            return self._kept.pop((stage, microbatch, way))
        states: Array = self._pipeline.comm.recv(self._shape, self._dtype, rank, tag=2 * chunk + way).wait()
        return states


class _Deferring(Parts):
    """Parts whose layers defer the gradients of their projections to a queue."""

    def __init__(self, parts: Parts, queue: Queue) -> None:
        self._parts, self._queue = parts, queue

    def forward(self, part: Part) -> AbstractContextManager[Any]:
        return self._parts.forward(part)

    @contextmanager
    def backward(self, part: Part) -> Iterator[tuple[Any, Any]]:
        with self._parts.backward(part) as (weights, grads):
            if isinstance(part, int):
                later = {name: Deferred(getattr(weights, name), self._queue) for name in PROJECTIONS}
                weights = replace(weights, **later)
            yield weights, grads
