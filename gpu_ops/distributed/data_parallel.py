"""Data parallelism: ranks take parts of a batch, add up gradients, and may divide states, gradients and weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.distributed.buckets import Gradients, Shard, Weights, buckets_of
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.tensor_parallel import ReplicatedWeights, TensorParallel, squares
from gpu_ops.errors import OptionError, ShapeError, StateError
from gpu_ops.models.block import Sequences
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.llama import Part, Parts, Pass, check_loss_options, names_of, part_of, parts_of
from gpu_ops.models.weights import Llama
from gpu_ops.training.flat import FlatParams

__all__ = ["DataParallel"]

Array = npt.NDArray[Any]

_OP = "DataParallel"
_MB = 1 << 20


class DataParallel(Parts):
    """Weights, gradients and AdamW states of a model that several ranks train, each on its part of a batch.

    ===== ======================================= =========================================
    stage what each of p ranks has 1 / p of       sent per step, for N gradients and weights
    ===== ======================================= =========================================
    0     nothing                                 2 N (p - 1) / p
    1     states (ZeRO-1)                         2 N (p - 1) / p
    2     and gradients (ZeRO-2)                  2 N (p - 1) / p, with k microbatches (k + 1) N (p - 1) / p
    3     and weights (ZeRO-3)                    3 N (p - 1) / p for each microbatch
    ===== ======================================= =========================================

    Parameters
    ----------
    model : LlamaConfig or TensorParallel
    comm : Comm
        The p ranks, such as ``mesh.dp``; all of them make the same calls.
    stage : int
        Stage 0 to 3 of the table.
    parts : sequence, optional
        Parts of the model that this rank has, such as ``Pipeline.parts``; default: all.
    bucket_mb : float
        Minimum size in MiB of the buckets of whole layers in which gradients are sent, during the backward pass of
        the layers before. Stage 3 has one bucket for each layer.
    mean : bool
        A step takes the mean of the ranks' gradients, which is the gradient of the mean loss if all ranks have the
        same number of targets. False: their sum, for a ``denominator`` that counts all ranks' targets.
    decay : names, optional
        Parameters that decay; default: those with two or more axes.
    **options
        Options ``dtype`` (default: float32), ``master``, ``moment_bits`` and ``device`` of
        :meth:`gpu_ops.training.FlatParams.from_shapes`. ``device="cuda"``, in stages 0 to 2: CuPy arrays.

    Attributes
    ----------
    parts : tuple
        Parts of the model that this rank has.
    flat : FlatParams
        This rank's share: parameters, summed gradients and states.
    config : LlamaConfig

    Raises
    ------
    OptionError, ShapeError, StateError
    CommError
        Ranks of ``comm`` differ in parts, stage or options. All must agree, since each has a share of every array.

    Notes
    -----
    Sums are computed in rank order: all ranks have the same weights to the bit, equal to those of one rank that adds
    the gradients of the same parts in this order. With microbatches, stages 0 and 1 first add each rank's own
    gradients; stages 2 and 3 add those of all ranks for each microbatch. Stochastic rounding and the last bits of the
    norm depend on the division. Arrays are in host memory, or CuPy's with ``device="cuda"``; no GPU has run these
    yet.

    Sources: Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed, models, training
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> comm = distributed.world()
    >>> parallel = distributed.DataParallel(config, comm, stage=2)
    >>> parallel.assign(models.initial_weights(config))
    >>> batches = training.Batches(np.arange(4096) % 256, 4, 32, rank=comm.rank, world=comm.size)
    >>> for ids, targets in map(batches.at, range(3)):
    ...     loss = parallel.loss_and_grads(ids, targets)
    ...     parallel.step(lr=3e-3, grad_scale=training.clip_coefficient(parallel.grad_norm(), 1.0))
    """

    def __init__(
        self,
        model: LlamaConfig | TensorParallel,
        comm: Comm,
        *,
        stage: int = 0,
        parts: Sequence[Part] | None = None,
        bucket_mb: float = 25.0,
        mean: bool = True,
        decay: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        checks.instance(_OP, "model", model, LlamaConfig, TensorParallel)
        checks.instance(_OP, "comm", comm, Comm)
        self.division = model if isinstance(model, TensorParallel) else ReplicatedWeights(model)
        self.config, self.comm = self.division.config, comm
        self.stage = checks.integer(_OP, "stage", stage, low=0, high=3)
        least = checks.number(_OP, "bucket_mb", bucket_mb, low=0.0) * _MB
        for name in options:
            checks.one_of(_OP, "option", name, ("dtype", "master", "moment_bits", "device"))
        if options.get("device") == "cuda" and self.stage == 3:
            raise OptionError(
                f"{_OP}: stage=3 keeps arrays in host memory; take stage 0 to 2 with device='cuda'"
            )
        self._factor = 1 / comm.size if checks.flag(_OP, "mean", mean) else 1.0
        of_model = parts_of(self.config)
        if missing := [part for part in (() if parts is None else parts) if part not in of_model]:
            raise OptionError(f"{_OP}: parts={missing!r}: the model has {of_model!r}")
        self.parts = tuple(part for part in of_model if parts is None or part in parts)
        shapes = self.division.shapes()
        mine = {p: {n: shapes[n] for n in names_of(self.config, p)} for p in reversed(self.parts)}
        matrices = [name for name, shape in shapes.items() if len(shape) >= 2]
        decay = matrices if decay is None else [checks.one_of(_OP, "decay", n, shapes) for n in decay]
        shards = 1 if self.stage == 0 else comm.size
        least = 0 if self.stage == 3 else least / 4  # a gradient has 4 bytes, or 8
        self._buckets, self._bucket_of = buckets_of(
            mine, decay, comm.size, shards, least, self.division.room()
        )
        lengths = {n: (size,) for bucket in self._buckets for n, size in bucket.lengths(comm.rank).items()}
        decay = [bucket.pieces[0] for bucket in self._buckets]
        self.flat = FlatParams.from_shapes(lengths, decay=decay, **{"dtype": "float32"} | options)
        dtypes = {name: x.dtype.name for name, x in self.flat.buffers.items()}
        layout = f"stage={self.stage}", f"parts={self.parts}", f"mean={mean}", f"{dtypes}", f"{self._buckets}"
        comm.agree(_OP, *layout)
        self._weights = Weights(comm, self._buckets, self.flat, self.stage)
        self._grads = Gradients(comm, self._buckets, self.flat, self.stage, self.division.sum_shared_grads)
        self._summed = False
        self.begin(last=True)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Set parameters and masters from this rank's whole part of the model, by name, in host memory."""
        shapes = {name: shape for bucket in self._buckets for name, shape in bucket.shapes.items()}
        for name, shape in shapes.items():
            if name not in values or tuple(values[name].shape) != shape:
                problem = f"has shape {tuple(values[name].shape)}" if name in values else "is missing"
                raise ShapeError(f"{_OP}.assign: {name} {problem}, expected {shape}")
        pieces = {name: np.zeros(x.shape, np.float64) for name, x in self.flat.params.items()}
        for name, elements, piece, here in self.owned():
            pieces[piece][here] = np.asarray(values[name]).reshape(-1)[elements]
        self.flat.assign(pieces)
        self.publish()

    def owned(self) -> Iterator[Shard]:
        """Elements of each array that this rank has in ``flat``."""
        for bucket in self._buckets:
            yield from bucket.owned(self.comm.rank)

    def publish(self) -> None:
        """Give all ranks the weights that each of them has changed in ``flat``; :meth:`step` does so too."""
        self._weights.publish()

    def gather_weights(self) -> dict[str, Array]:
        """Copies of this rank's part of the model, by name, on every rank."""
        copies: dict[str, Array] = {}
        for bucket in self._buckets:
            self._weights.gather(bucket.number)
            copies |= {name: self._weights.arrays[name].copy() for name in bucket.shapes}
            self._weights.free(bucket.number)
        return copies

    def model(self) -> Llama:
        """Weights for the other functions of :mod:`gpu_ops.models`; in stage 3 copies of all of them."""
        return self.division.model(self._weights.arrays if self.stage < 3 else self.gather_weights())

    # A step

    def loss_and_grads(
        self,
        ids: Any,
        targets: Any,
        *,
        last: bool = True,
        policy: str | Sequence[str] = "none",
        sequences: Sequences | None = None,
        dloss: Any = 1.0,
        **options: Any,
    ) -> Any:
        """Loss of this rank's part of the batch, with the options of :func:`gpu_ops.models.loss_and_grads`.

        Gradients are added to those of earlier calls. ``last=False``: more microbatches follow before the step, and
        stages 0 and 1 send no data. Pass ``dloss=1 / k`` for the mean of k microbatches.
        """
        check_loss_options(options)
        checks.scalar(f"{_OP}.loss_and_grads", "dloss", dloss, self.flat.buffers["params"].dtype.name)
        model_pass = Pass(self, self.config, policy=policy, sequences=sequences)
        self.begin(last=last)
        value = model_pass.run(ids, targets, dloss=dloss, options=options)
        if last:
            self.finish()
        return value

    def begin(self, *, last: bool) -> None:
        """Prepare a pass over the parts. ``last``: each bucket is sent as soon as its gradients are complete."""
        if self._summed:
            raise StateError(f"{_OP}: the gradients of all ranks have been added up; call step()")
        self._weights.free_all()
        self._last = last
        self._left = Counter(self._bucket_of.values())
        self._started: set[int] = set()

    def finish(self) -> None:
        """Wait for the sums of all gradients; :meth:`loss_and_grads` with ``last=True`` does so too."""
        if not self._summed:
            for bucket in self._buckets:
                if self.stage < 2 and bucket.number not in self._started:
                    self._send(bucket.number)
            self._grads.finish()
            self._summed = True

    def grad_norm(self, also: Comm | None = None) -> float:
        """Euclidean norm of the gradient that :meth:`step` takes, over the whole model.

        Squares are added up in float64: first on each rank, then over the ranks in their order. ``also``: ranks that
        have other parts of the model, such as ``mesh.pp``.
        """
        self.finish()
        total = 0.0
        for name, elements, piece, here in self.owned():
            x = self.flat.grads[piece][here]
            for at, holds in self.division.holds(name):
                begin, end = max(at.start, elements.start), min(at.stop, elements.stop)
                total += holds * squares(x[begin - elements.start : max(begin, end) - elements.start])
        total = self._over_ranks(total, "sum", [self.division.comm, also, self.comm if self.stage else None])
        return math.sqrt(total) * self._factor

    def step(
        self,
        *,
        lr: Any,
        grad_scale: Any = 1.0,
        skip: Any = None,
        seed: int = 0,
        also: Comm | None = None,
        **options: Any,
    ) -> None:
        """Call :meth:`gpu_ops.training.FlatParams.step` with the mean gradient, then set gradients to zero.

        ``skip``: if it is true on one rank, all ranks skip the step. ``also``: as in :meth:`grad_norm`.
        """
        self.finish()
        if skip is not None:
            comms = [self.division.comm, also, self.comm]
            options["skip"] = np.array(self._over_ranks(float(np.any(skip)), "max", comms), np.float32)
        if self.stage:
            seed = seed * self.comm.size + self.comm.rank
        scale = grad_scale if self._factor == 1.0 else grad_scale * self._factor
        self.flat.step(lr=lr, grad_scale=scale, seed=seed, **options)
        self.publish()
        self.zero_grad()

    @staticmethod
    def _over_ranks(number: float, op: str, comms: Sequence[Comm | None]) -> float:
        for comm in (c for c in comms if c is not None):
            number = float(comm.all_reduce(np.array([number]), op)[0])
        return number

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        self._grads.clear()
        self._summed = False

    # Weights and gradients of a pass

    @contextmanager
    def forward(self, part: Part) -> Iterator[Any]:
        with self._gathered(part, 1) as weights:
            yield weights

    @contextmanager
    def backward(self, part: Part) -> Iterator[tuple[Any, Any]]:
        for number in self._needed(part):
            self._grads.open(number)
        grads = part_of(self._grads.arrays, self.config, part)
        if part == "embed":  # its gradient needs only the table's shape
            yield self._part(part), grads
        else:
            with self._gathered(part, -1) as weights:
                yield weights, grads
        number = self._bucket_of[part]
        self._left[number] -= 1
        if not self._left[number] and (self._last or self.stage >= 2):
            self._send(number)
        self._grads.poll()

    @contextmanager
    def _gathered(self, part: Part, ahead: int) -> Iterator[Any]:
        """Weights of a part; the transfer of the next part's weights has started."""
        for number in self._needed(part):
            self._weights.gather(number)
        at = self.parts.index(part) + ahead
        if 0 < at < len(self.parts):
            self._weights.start_gather(self._bucket_of[self.parts[at]])
        yield self._part(part)
        for number in self._needed(part):
            self._weights.free(number)

    def _part(self, part: Part) -> Any:
        return self.division.part(part_of(self._weights.arrays, self.config, part))

    def _needed(self, part: Part) -> list[int]:
        """Buckets with arrays that a part uses."""
        shares_table = part == "head" and self.config.tied
        return [self._bucket_of[part], *([self._bucket_of["embed"]] if shares_table else [])]

    def _send(self, number: int) -> None:
        self._started.add(number)
        self._grads.send(number)
