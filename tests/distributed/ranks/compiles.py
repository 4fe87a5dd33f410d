"""Ranks that need the same kernel at once, with an empty cache: print how many compiled it."""

from __future__ import annotations

import numpy as np

import gpu_ops
from gpu_ops import distributed
from gpu_ops.kernels.common.cpu import jit


def main() -> None:
    comm = distributed.world(timeout=300)
    saved = []
    publish = jit.publish
    jit.publish = lambda *arguments: (saved.append(arguments[-1]), publish(*arguments))
    comm.barrier()
    gpu_ops.softmax(np.ones((4, 64), np.float32), device="cpu", backend="numba")
    each = comm.all_gather(np.array([len(saved)]))
    kernels = max(each)
    assert kernels > 0
    if comm.rank == 0:
        print(sum(each) // kernels)


if __name__ == "__main__":
    main()
