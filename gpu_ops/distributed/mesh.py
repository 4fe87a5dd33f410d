"""Communicator of all ranks, and meshes of it."""

from __future__ import annotations

import faulthandler
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_ops.core import checks
from gpu_ops.distributed.comm import Comm, SingleProcess
from gpu_ops.errors import CommError, MissingPackageError, OptionError
from gpu_ops.kernels.compiler import progress
from gpu_ops.kernels.compiler.toolkit import install_command

__all__ = ["LaunchedJob", "Mesh", "launched", "world"]

_TIMEOUT = 600.0  # seconds
_lock = threading.Lock()
_made: list[Comm] = []


def world(timeout: float | None = None) -> Comm:
    """Return the communicator of all ranks that the launcher started; the same object in every call.

    Parameters
    ----------
    timeout : float, optional
        Seconds that a rank waits for the others before it ends the job, with a message; default 600. Meshes and
        splits made later inherit it.

    Returns
    -------
    Comm
        ``SingleProcess`` without a launcher (or under one that starts one process). Under mpiexec, mpirun, srun or
        ``scripts/launch.sh N command``: ``Nccl`` on a machine with CUDA devices and nccl4py, which takes CuPy arrays
        and arrays in host memory; else ``Mpi``.

    Raises
    ------
    MissingPackageError
        Several ranks, but no mpi4py: ``pip install mpi4py mpich``.
    CommError
        MPI and the launcher disagree about the number of ranks.

    Notes
    -----
    All ranks make the first call, which starts MPI and waits for all processes; a rank that waits longer than
    ``timeout`` prints where it waits and ends. From then on an uncaught exception ends all ranks, with a non-zero
    exit status. A rank whose program ends while another waits for it ends all ranks too: the job's status is the one
    passed to sys.exit, exit or quit (0 included), or 1 if it ended in another way, such as ``raise SystemExit(5)``.
    While threads of a rank still run, it counts as ended only if that status is not 0. If a rank ends by os._exit(0),
    ``scripts/launch.sh`` never reports success, but mpiexec alone may. Ranks that wait on the GPU for NCCL do not
    notice. Only rank 0 prints progress. With ``Nccl`` each rank of a machine gets a separate CUDA device as CuPy's
    current one. NCCL has not run on GPUs yet: the tests use a stand-in.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed
    >>> comm = distributed.world()
    >>> comm.rank, comm.size
    (0, 1)
    >>> comm.all_reduce(np.array([1.0, 2.0]))
    array([1., 2.])
    """
    if timeout is not None:
        timeout = checks.number("world", "timeout", timeout, above=0.0)
    with _lock:
        if not _made:
            _made.append(_start(launched(), _TIMEOUT if timeout is None else timeout))
        comm = _made[0]
    if timeout is not None:
        comm.timeout = timeout
    return comm


def _start(launch: LaunchedJob | None, timeout: float) -> Comm:
    if launch is None or launch.size == 1:
        return SingleProcess(timeout=timeout)
    if not launch.has_mpi:
        raise CommError(
            f"{launch.launcher} started {launch.size} processes; arrays in host memory travel by MPI: start them by "
            f"`scripts/launch.sh {launch.size} command`, or mpiexec"
        )
    # MPI's start waits for all processes with the GIL held: if one of them has ended, this ends the others
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        from gpu_ops.distributed.mpi import Mpi, end_job_on_errors, leave_with_all
        from gpu_ops.distributed.nccl import Nccl, nccl_missing
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        raise MissingPackageError(
            f"{launch.launcher} started {launch.size} processes, but mpi4py does not load ({error}); "
            f"{install_command('mpi')}"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    comm = (Mpi if nccl_missing() else Nccl).world(timeout)
    if comm.size != launch.size:
        raise CommError(
            f"{launch.launcher} started {launch.size} processes and mpi4py finds {comm.size}: it loaded another MPI "
            "than the launcher's. Install mpich or openmpi, not both, and use its mpiexec (srun: see srun --mpi=list)"
        )
    end_job_on_errors(comm)
    leave_with_all(comm)
    if isinstance(comm, Nccl):
        comm.use_own_device()
    progress.silent = comm.rank > 0
    return comm


class Mesh:
    """Ranks on a grid, with a communicator along each of its axes.

    Neighbours in ``tp`` are neighbours in the world, and so on the same machine; then come ``cp``, ``dp`` and ``pp``.

    Parameters
    ----------
    comm : Comm, optional
        The ranks to arrange; default :func:`world`.
    tp, cp, pp, dp : int
        Ranks for tensor, context, pipeline and data parallelism; their product is ``comm.size``.

    Attributes
    ----------
    tp, cp, pp, dp : Comm
        This rank's communicator along each axis.

    Examples
    --------
    >>> from gpu_ops.distributed import Mesh
    >>> mesh = Mesh(tp=1, dp=1)
    >>> mesh.tp, mesh.group("dp", "cp").size
    (<SingleProcess 'tp': rank 0 of 1>, 1)
    """

    def __init__(
        self, comm: Comm | None = None, *, tp: int = 1, cp: int = 1, pp: int = 1, dp: int = 1
    ) -> None:
        comm = world() if comm is None else comm
        checks.instance("Mesh", "comm", comm, Comm)
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}  # the first varies fastest
        self.shape = {name: checks.integer("Mesh", name, n, low=1) for name, n in sizes.items()}
        if math.prod(self.shape.values()) != comm.size:
            words = " * ".join(f"{name}={n}" for name, n in self.shape.items())
            raise OptionError(f"Mesh: {words} is not {comm.size}, the number of ranks")
        self.comm = comm
        self.coordinates: dict[str, int] = {}
        rest = comm.rank
        for name, n in self.shape.items():
            rest, self.coordinates[name] = divmod(rest, n)
        self._groups: dict[tuple[str, ...], Comm] = {}
        self.tp, self.cp, self.pp, self.dp = (self.group(name) for name in ("tp", "cp", "pp", "dp"))

    def group(self, *axes: str) -> Comm:
        """Return the communicator of the ranks that differ from this one along ``axes`` only.

        ``group("dp", "cp")`` is the group that sums gradients of weights. All ranks make the first call for given
        axes.
        """
        for axis in axes:
            checks.one_of("Mesh.group", "axes", axis, self.shape)
        along = tuple(axis for axis in self.shape if axis in axes)
        if along not in self._groups:
            color = 0
            for name, n in reversed(self.shape.items()):
                color = color * n + (0 if name in along else self.coordinates[name])
            self._groups[along] = self.comm.split(color, name="_".join(along) or "self")
        return self._groups[along]

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={n}' for name, n in self.shape.items())}) at {self.coordinates}"


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
