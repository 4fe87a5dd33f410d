"""Ranks that go wrong, one way per run: ``mpiexec -n 3 python -m tests.ranks.faults raises``. The last rank does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

from gpu_ops import distributed, models
from gpu_ops.distributed import sharded_checkpoints

CONFIG = models.LlamaConfig(vocab=16, hidden=8, ffn=16, nlayers=1, nheads=2)

LONG = 300  # seconds: no rank is so late
PATIENCE = {"never_comes": 2.0, "another_group": 2.0, "another_shape": 2.0, "never_calls_world": 5.0}


def killed(comm):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(comm):
    """All ranks save steps 1 and 2 to the folder of the command line; the last one is killed in the second save."""
    parallel = distributed.DataParallel(CONFIG, comm, stage=1)
    checkpoints = distributed.ShardedCheckpoints(sys.argv[2], comm)
    for step in (1, 2):
        parallel.flat.buffers["params"].fill(step)
        if step == 2 and comm.rank == comm.size - 1:
            sharded_checkpoints.save_state = lambda *given: killed(comm)
        checkpoints.save(step, parallel)


def raises(comm):
    raise ValueError("the data ends here")


def raises_in_a_thread(comm):
    thread = threading.Thread(target=raises, args=(comm,))
    thread.start()
    thread.join()
    time.sleep(LONG)


def never_comes(comm):
    time.sleep(LONG)


def another_shape(comm):
    comm.all_reduce(np.ones(1024, np.float32))


def another_group(comm):
    comm.barrier()


def aborts(comm):
    comm.abort("no more disk", status=5)


def last_starts_mpi_only() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        time.sleep(LONG)


def main(fault: str) -> None:
    if fault == "never_calls_world":
        last_starts_mpi_only()
    comm = distributed.world(timeout=PATIENCE["never_calls_world"] if fault == "never_calls_world" else LONG)
    pair = comm.split(0, name="pair")
    comm.barrier()
    comm.timeout = pair.timeout = PATIENCE.get(fault, LONG)
    if comm.rank == comm.size - 1 or fault == "killed_while_saving":
        globals()[fault](comm)
    (pair if fault == "another_group" else comm).all_reduce(np.ones(1000, np.float32))
    comm.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
