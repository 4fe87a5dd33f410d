"""Ranks with a fault, one per run: it is in the last rank.

``mpiexec -n 3 python -m tests.distributed.ranks.faults raises``
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from sys import exit as early_exit

import numpy as np

from gpu_ops import distributed, models
from gpu_ops.distributed import sharded_checkpoints

CONFIG = models.LlamaConfig(vocab=16, hidden=8, ffn=16, nlayers=1, nheads=2)

LONG = 300  # seconds: no rank is so late
ON_ALL_RANKS = ("killed_while_saving", "first_to_end", "exits_at_once")
PATIENCE = {
    "never_comes": 2.0,
    "another_group": 2.0,
    "another_shape": 2.0,
    "never_calls_world": 5.0,
    "ends_before_world": 5.0,
}


def killed(comm):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(comm):
    """Save steps 1 and 2 on all ranks to the folder of the command line; kill the last rank in the second save."""
    parallel = distributed.DataParallel(CONFIG, comm, stage=1)
    checkpoints = distributed.ShardedCheckpoints(sys.argv[2], comm)
    for step in (1, 2):
        parallel.flat.buffers["params"].fill(step)
        if step == 2 and comm.rank == comm.size - 1:
            sharded_checkpoints.save_state = lambda *arguments: killed(comm)
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


def exits(comm):
    sys.exit(int(sys.argv[2]))


def exits_with_words(comm):
    sys.exit("no such file")


def quits(comm):
    quit(3)


def exits_by_an_imported_name(comm):
    early_exit(3)


def exits_while_a_thread_runs(comm):
    threading.Thread(target=threading.Event().wait).start()
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    sys.exit(3)


def swallows_an_exit(comm):
    """Return from the program, long after a sys.exit that did not end it."""
    with contextlib.suppress(SystemExit):
        sys.exit(3)


def exits_at_once(comm):
    os._exit(0)


def raises_system_exit(comm):
    raise SystemExit(3)


def ends(comm):
    """Return from the program; ``main`` makes no further call."""


def first_to_end(comm):
    """No fault: the last rank ends when everything that the others need of it has begun; they continue without it.

    Its main thread ends even earlier, and another thread makes its last call.
    """
    last, words = comm.size - 1, np.arange(1 << 18, dtype=np.float64)
    others = comm.split(int(comm.rank == last))
    if comm.rank == last:
        comm.send(words, 0)
        threading.Timer(0.5, comm.broadcast, (words,), {"root": last}).start()
        sys.exit(0)
    heard = comm.broadcast(np.zeros_like(words), root=last)
    time.sleep(0.5)
    if comm.rank == 0:
        heard = comm.recv(words.shape, words.dtype, last).wait() + heard - words
    np.testing.assert_array_equal(others.all_reduce(heard, "max"), words)


def last_starts_mpi_only() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        time.sleep(LONG)


def main(fault: str) -> None:
    if fault == "never_calls_world":
        last_starts_mpi_only()
    if fault == "ends_before_world" and os.environ["PMI_RANK"] == "2":
        sys.exit(0)
    if fault == "first_to_end":  # after the handler of world(): when all ranks have ended
        atexit.register(lambda: distributed.world().barrier())
    comm = distributed.world(timeout=PATIENCE[fault] if fault.endswith("_world") else LONG)
    pair = comm.split(0, name="pair")
    comm.barrier()
    comm.timeout = pair.timeout = PATIENCE.get(fault, LONG)
    last = comm.rank == comm.size - 1
    if last or fault in ON_ALL_RANKS:
        globals()[fault](comm)
    if fault == "first_to_end" or (fault in ("ends", "swallows_an_exit") and last):
        return
    (pair if fault == "another_group" else comm).all_reduce(np.ones(1000, np.float32))
    comm.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
