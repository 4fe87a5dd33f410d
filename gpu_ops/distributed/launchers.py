"""Rank of this process, from environment variables that its launcher sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_ops.errors import CommError

__all__ = ["LaunchedJob", "launched"]


@dataclass(frozen=True)
class LaunchedJob:
    """Launch of ``size`` processes by ``launcher``, of which this one is ``rank``."""

    launcher: str
    rank: int
    size: int
    has_mpi: bool


# launcher, variables of rank and size, another that must be set, whether its processes find each other by MPI.
# MPI's own launchers come first: a script that they start may set RANK and WORLD_SIZE as well.
LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None, True),
    ("MPICH", "PMI_RANK", "PMI_SIZE", None, True),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", True),  # a shell of salloc has no step
    ("torchrun", "RANK", "WORLD_SIZE", None, False),
)


def launched(variables: Mapping[str, str] = os.environ) -> LaunchedJob | None:
    """Read the launcher's variables; None if no launcher started this process."""
    for launcher, rank, size, also, has_mpi in LAUNCHERS:
        names = [name for name in (rank, size, also) if name is not None]
        if all(name in variables for name in names):
            try:
                return LaunchedJob(launcher, int(variables[rank]), int(variables[size]), has_mpi)
            except ValueError as error:
                settings = ", ".join(f"{name}={variables[name]!r}" for name in (rank, size))
                raise CommError(f"{launcher} set {settings}; both must be integers") from error
    return None
