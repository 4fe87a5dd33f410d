"""One rank of ``python -m perf --op comm``: times every collective for every size; rank 0 writes them to a file."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpu_ops import distributed
from perf.comm import COPY

SIZES = tuple(1 << n for n in range(10, 27, 2))  # 1 KiB to 64 MiB
SLICE, QUICK_SLICE = 0.4, 0.05  # seconds for an operation and size, about
LEAST, MOST = 5, 200  # calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer calls, up to 1 MiB")
    args = parser.parse_args()
    comm = distributed.world()
    sizes = SIZES[:6] if args.quick else SIZES
    times: dict[str, dict[int, float]] = {}
    sent: dict[str, float] = {}
    for size in sizes:
        x = np.random.default_rng(comm.rank).standard_normal((comm.size, size // 4 // comm.size))
        for name, call in operations(comm, x.astype(np.float32)).items():
            before = comm.bytes_sent.total()
            call()
            sent[name] = (comm.bytes_sent.total() - before) / size
            seconds = timed(comm, call, QUICK_SLICE if args.quick else SLICE)
            times.setdefault(name, {})[size] = seconds
    sent[COPY] = 1.0
    if comm.rank == 0:
        report = {"world": type(comm).__name__, "ranks": comm.size, "times": times, "sent": sent}
        args.path.write_text(json.dumps(report))
    comm.barrier()


def operations(comm: distributed.Comm, x: np.ndarray) -> dict[str, Callable[[], object]]:
    """Collectives on an array (ranks, n), and a copy of it by one rank."""
    result = np.empty_like(x)
    gathered = np.empty((comm.size * comm.size, x.shape[1]), x.dtype)
    return {
        "all_reduce": lambda: comm.all_reduce(x, out=result),
        "reduce_scatter": lambda: comm.reduce_scatter(x),
        "all_gather": lambda: comm.all_gather(x, out=gathered),
        "all_to_all": lambda: comm.all_to_all(x, 0, 0, out=result),
        "broadcast": lambda: comm.broadcast(x, out=result),
        "shift": lambda: comm.shift(x).wait(),
        COPY: lambda: np.copyto(result, x) if comm.rank == 0 else None,
    }


def timed(comm: distributed.Comm, call: Callable[[], object], slice_seconds: float) -> float:
    """Median over the calls of the slowest rank's seconds. All ranks make the same number of calls."""
    first = np.array([_seconds(comm, call)])
    count = int(np.clip(slice_seconds / comm.all_reduce(first, "max")[0], LEAST, MOST))
    each = np.array([_seconds(comm, call) for _ in range(count)])
    return statistics.median(comm.all_reduce(each, "max").tolist())


def _seconds(comm: distributed.Comm, call: Callable[[], object]) -> float:
    comm.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
