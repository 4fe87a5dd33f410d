"""Checks that run on several ranks: ``mpiexec -n 4 python -m tests.distributed.ranks collectives mesh``.

A group is a module of this folder. Its ``check_*`` functions take the communicator of the world and run on every
rank, in order; the first error ends the job. Its ``prepare``, if present, runs before the world is made. Every call
is compared between ranks (GPU_OPS_COMM_CHECK).
"""

from __future__ import annotations

import importlib
import os
import sys

os.environ.setdefault("GPU_OPS_COMM_CHECK", "1")

from gpu_ops import distributed


def main(groups: list[str]) -> None:
    modules = {group: importlib.import_module(f"tests.distributed.ranks.{group}") for group in groups}
    for module in modules.values():
        getattr(module, "prepare", lambda: None)()
    comm = distributed.world(timeout=500)
    for group, module in modules.items():
        checks = [(name, check) for name, check in vars(module).items() if name.startswith("check_")]
        for name, check in checks:
            try:
                check(comm)
            except BaseException as error:
                error.add_note(f"in {group}.{name} on {comm}")
                raise
        comm.barrier()
        if comm.rank == 0:
            print(f"{group}: {len(checks)} checks passed on {comm.size} ranks", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
