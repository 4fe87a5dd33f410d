"""Ranks under a real MPI (``tests/ranks``), what happens when one of them fails, and what needs no MPI."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu_ops import distributed
from gpu_ops.distributed.launchers import launched
from gpu_ops.distributed.single import Single
from gpu_ops.errors import CommError
from tests.processes import PATIENCE, ROOT, python

MPIEXEC = shutil.which(
    "mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
)
needs_mpi = pytest.mark.skipif(
    not (MPIEXEC and find_spec("mpi4py")), reason="needs mpi4py and mpiexec: pip install 'gpu-ops[mpi]'"
)
# modules of tests/ranks, and the numbers of ranks that the default tests run them on; the slow ones run the others
GROUPS = {"collectives": (2, 3, 4), "mesh": (2, 3, 4), "context": (3,), "tensor": (4,), "vocabulary": (3,)}
RANKS = (2, 3, 4)
SEVERAL = (
    "check_a_message_of_another_size",
    "check_a_different_call",
    "check_uneven_lengths",
)  # checks that one rank cannot run


def launch(ranks: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python arguments`` as so many ranks of one thread each."""
    threads = {"NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    assert MPIEXEC is not None
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **threads, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@needs_mpi
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks(ranks):
    passes(ranks, [group for group, default in GROUPS.items() if ranks in default])


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "ranks"), [(group, n) for group, default in GROUPS.items() for n in RANKS if n not in default]
)
def test_other_ranks(group, ranks):
    passes(ranks, [group])


def passes(ranks: int, groups: list[str]) -> None:
    done = launch(ranks, "-m", "tests.ranks", *groups)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count(f"checks passed on {ranks} ranks") == len(groups)


# fault, whether calls are compared, what some rank says, whether the default tests run it
FAULTS = (
    ("killed", "0", "", True),
    ("raises", "0", "ValueError: the data ends here", True),
    ("raises_in_a_thread", "0", "ValueError in a thread ends the job", False),
    ("another_group", "0", "in barrier(), call 2 of 'world'", False),
    ("another_shape", "1", "rank 2 all_reduce(float32 (1024,), op='sum'), call 2 of 'world'", True),
    ("another_shape", "0", "", False),
    ("aborts", "0", "no more disk", False),
)


@needs_mpi
@pytest.mark.parametrize(
    ("fault", "checked", "words"),
    [pytest.param(*row, marks=[] if default else [pytest.mark.slow]) for *row, default in FAULTS],
)
def test_a_rank_that_fails_ends_the_job(fault, checked, words):
    done = launch(3, "-m", "tests.ranks.faults", fault, GPU_OPS_COMM_CHECK=checked)
    assert done.returncode != 0
    assert words in done.stderr, done.stderr[-4000:]


@needs_mpi
def test_a_rank_that_never_comes_is_named():
    done = launch(3, "-m", "tests.ranks.faults", "never_comes")
    assert done.returncode != 0
    call = r"all_reduce\(float32 \(1000,\), op='sum'\), call 2 of 'world'"
    assert re.search(
        rf"rank [01] of 'world' \([01] of the world, on \S+\): waited 1 s in {call}", done.stderr
    ), done.stderr
    assert re.search(rf"rank [01] \([01] of the world, on \S+\) waits in {call}", done.stderr), done.stderr
    assert re.search(r"rank 2 \(2 of the world, on \S+\) does not answer", done.stderr), done.stderr


@needs_mpi
@pytest.mark.slow
def test_processes_compile_a_kernel_once(tmp_path):
    """And one of them says so."""
    done = launch(3, "-m", "tests.ranks.compiles", GPU_OPS_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["1"]
    assert 1 <= done.stderr.count("compiling") <= 2  # at its start and its end


VARIABLES = {
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "1"},
    "MPICH": {
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_ID": "0",
    },
    "srun": {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4"},
}


@pytest.mark.parametrize("launcher", VARIABLES)
def test_launchers(launcher):
    found = launched(VARIABLES[launcher])
    assert found is not None
    assert (found.launcher, found.rank, found.size) == (launcher, 1, 4)
    assert found.has_mpi == (launcher != "torchrun")


def test_no_launcher():
    assert launched({}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a shell of salloc
    assert launched({"RANK": "0"}) is None
    with pytest.raises(CommError, match="PMI_SIZE='many'"):
        launched({"PMI_RANK": "0", "PMI_SIZE": "many"})


ONE = "from gpu_ops import distributed as d; c = d.world(); print(type(c).__name__, c.size)"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "CommError: torchrun started 4 processes"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "4"},
            "MissingPackageError: MPICH started 4 processes, but mpi4py does not load",
        ),
    ],
)
def test_what_cannot_start_says_what_to_do(variables, words):
    code = (
        f"import sys\nsys.modules['mpi4py'] = None\ntry:\n    {ONE}\n"
        "except Exception as error:\n    print(type(error).__name__, error, sep=': ')"
    )
    said = python("-c", code, **variables)
    assert words in said
    assert "launch.sh" in said or "pip install 'gpu-ops[mpi]'" in said


def test_one_process_needs_no_mpi():
    code = f"import sys; sys.modules['mpi4py'] = None\n{ONE}"
    assert python("-c", code).split() == ["Single", "1"]
    assert python("-c", code, PMI_RANK="0", PMI_SIZE="1").split() == ["Single", "1"]


def test_import_loads_no_mpi():
    code = "import sys, gpu_ops.distributed; print('mpi4py' in sys.modules, 'numba' in sys.modules)"
    assert python("-c", code).split() == ["False", "False"]


def test_abort_of_one_rank():
    with pytest.raises(SystemExit) as ended:
        Single().abort("no more disk", 3)
    assert ended.value.code == 3


@pytest.mark.parametrize("group", GROUPS)
def test_one_rank(group):
    """The checks that take one rank, in this process."""
    comm = distributed.world()
    assert (comm.rank, comm.size) == (0, 1)
    for name, check in vars(importlib.import_module(f"tests.ranks.{group}")).items():
        if name.startswith("check_") and name not in SEVERAL:
            check(comm)


@needs_mpi
@pytest.mark.slow
def test_launch_script(tmp_path):
    """Threads are shared out; a failed run starts again, and its last exit status is the script's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    code = "import os, sys; print(os.environ['NUMBA_NUM_THREADS']); open(sys.argv[1], 'a').write('x'); sys.exit(3)"

    def run(*arguments):
        command = ["scripts/launch.sh", *arguments]
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    count = tmp_path / "count"
    cores = len(os.sched_getaffinity(0))
    done = run("1", "--restarts", "2", sys.executable, "-c", code, str(count))
    assert done.returncode == 3
    assert count.read_text() == "xxx"
    assert done.stdout.split() == [str(cores)] * 3
    assert (
        run("2", sys.executable, "-c", code.replace("3)", "0)"), str(count)).stdout.split()
        == [str(max(1, cores // 2))] * 2
    )
    for wrong in ([], ["0", "true"], ["2"], ["2", "--restarts", "x", "true"]):
        done = run(*wrong)
        assert done.returncode == 2
        assert "usage" in done.stderr
