"""Several processes, on one machine or many: communicators, and computations that divide their arrays among ranks.

Start a program by ``scripts/launch.sh N python program.py``, or any MPI's mpiexec; the same program runs without.
"""

from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.data_parallel import DataParallel
from gpu_ops.distributed.engine import Pending
from gpu_ops.distributed.gathered import gathered_attention_varlen, gathered_attention_varlen_backward
from gpu_ops.distributed.mesh import Mesh, world
from gpu_ops.distributed.ring import ring_attention, ring_attention_backward
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
    "DataParallel",
    "Mesh",
    "Pending",
    "ShardedCheckpoints",
    "TensorParallel",
    "UlyssesSaved",
    "VocabularyRows",
    "gathered_attention_varlen",
    "gathered_attention_varlen_backward",
    "ring_attention",
    "ring_attention_backward",
    "sequence_positions",
    "ulysses_attention",
    "ulysses_attention_backward",
    "world",
]
