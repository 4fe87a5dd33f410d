"""Distributed computing, on one machine or many: communicators, and computations that divide arrays among ranks.

Start a program by ``scripts/launch.sh N python program.py``, or any MPI's mpiexec; it also runs without a launcher::

    mesh = distributed.Mesh(dp=distributed.world().size)  # and tp=, pp=, cp=
    parallel = distributed.DataParallel(config, mesh.dp, stage=2)  # ZeRO-2
    parallel.assign(models.initial_weights(config))
    batches = training.Batches(tokens, 4, 1024, rank=mesh.dp.rank, world=mesh.dp.size)
    for ids, targets in batches:
        loss = parallel.loss_and_grads(ids, targets)
        parallel.step(lr=3e-4, grad_scale=training.clip_coefficient(parallel.grad_norm(), 1.0))

==================================================== ======================================================
divided among ranks                                  by
==================================================== ======================================================
the batch; states, gradients and weights (ZeRO)      :class:`DataParallel`
heads, channels and rows of the vocabulary           :class:`TensorParallel`, instead of ``config`` above
layers                                               :class:`Pipeline`, instead of ``parallel.loss_and_grads``
the sequence                                         :class:`ContextParallel`, as ``sequences=`` of a model;
                                                     :func:`ring_attention`, :func:`ulysses_attention`
saved states                                         :class:`ShardedCheckpoints`
==================================================== ======================================================
"""

from gpu_ops.core.declared import publish
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.context_parallel import ContextParallel
from gpu_ops.distributed.data_parallel import DataParallel
from gpu_ops.distributed.engine import Pending
from gpu_ops.distributed.gathered import gathered_attention_varlen, gathered_attention_varlen_backward
from gpu_ops.distributed.mesh import Mesh, world
from gpu_ops.distributed.pipeline import Pipeline
from gpu_ops.distributed.ring import ring_attention, ring_attention_backward
from gpu_ops.distributed.schedules import ScheduleStep, bubble, schedule
from gpu_ops.distributed.sequence import sequence_positions
from gpu_ops.distributed.sharded_checkpoints import ShardedCheckpoints
from gpu_ops.distributed.tensor_parallel import TensorParallel
from gpu_ops.distributed.ulysses import (
    UlyssesSaved,
    ulysses_attention,
    ulysses_attention_backward,
)
from gpu_ops.distributed.vocabulary import VocabularyRows

__all__ = [
    "Comm",
    "ContextParallel",
    "DataParallel",
    "Mesh",
    "Pending",
    "Pipeline",
    "ScheduleStep",
    "ShardedCheckpoints",
    "TensorParallel",
    "UlyssesSaved",
    "VocabularyRows",
    "bubble",
    "gathered_attention_varlen",
    "gathered_attention_varlen_backward",
    "ring_attention",
    "ring_attention_backward",
    "schedule",
    "sequence_positions",
    "ulysses_attention",
    "ulysses_attention_backward",
    "world",
]

publish(globals(), renamed={"Row": "ScheduleStep"})
