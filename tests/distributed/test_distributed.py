"""Ranks under a real MPI (``ranks/``), failures of a rank, and features that need no MPI."""

from __future__ import annotations

import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu_ops import distributed
from gpu_ops.distributed import mesh
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.distributed.mesh import launched
from gpu_ops.errors import CommError, MissingPackageError
from tests.distributed.ranks import faults
from tests.support.processes import PATIENCE, ROOT, python

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
MPIEXEC = shutil.which("mpiexec", path=PATH)
needs_mpi = pytest.mark.skipif(
    not (MPIEXEC and find_spec("mpi4py")), reason="needs mpi4py and mpiexec: pip install '.[mpi]'"
)
# modules of ranks/, and the numbers of ranks that the default tests run them on; the slow ones run the others
GROUPS = {
    **{"collectives": (2, 3, 4), "mesh": (2, 3, 4), "context": (3,), "tensor": (4,), "vocabulary": (3,)},
    **{"data": (2,), "uneven": (2, 4), "saved": (4,), "pipelines": (3, 4), "trained": (4,)},
}
RANKS = (2, 3, 4)
# checks that one rank cannot run
SEVERAL = (
    "check_a_message_of_another_size",
    "check_sends_that_nobody_waits_for",
    "check_tags",
    "check_a_different_call",
    "check_uneven_lengths",
    "check_different_options",
    "check_ranks_that_differ",
    "check_ranks_without_which_the_model_is_not_whole",
)


def launch(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/launch.sh command``."""
    return subprocess.run(
        ["scripts/launch.sh", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PATH": PATH, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def ranks_run(ranks: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python arguments`` on ``ranks`` ranks of one thread each."""
    threads = {"NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return launch(ranks, sys.executable, *arguments, **threads, **variables)


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
    done = ranks_run(ranks, "-m", "tests.distributed.ranks", *groups)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count(f"checks passed on {ranks} ranks") == len(groups)


ENDED = "for rank 2 (2 of the world, on "
# fault and its argument, whether calls are compared, message of some rank, exit status of the job (None: any
# failure), whether the default tests run it
FAULTS = (
    ("killed", "0", "", None, True),
    ("raises", "0", "ValueError: the data ends here", 1, True),
    ("raises_in_a_thread", "0", "ValueError in a thread ends the job", 1, False),
    ("another_group", "0", "in barrier(), call 4 of 'world'", 1, False),
    ("never_calls_world", "0", "waits in world()", 1, False),
    ("another_shape", "1", "rank 2 all_reduce(float32 (1024,), op='sum'), call 4 of 'world'", 1, True),
    ("another_shape", "0", "", None, False),
    ("aborts", "0", "no more disk", 5, False),
    ("exits 3", "0", "whose program has ended by sys.exit, with status 3", 3, False),
    ("exits 0", "0", "waits in all_reduce(float32 (1000,), op='sum'), call 4 of 'world' " + ENDED, 0, False),
    ("exits 3", "1", ENDED, 3, False),
    ("exits_with_words", "0", "no such file", 1, False),
    ("quits", "0", "by sys.exit, with status 3", 3, False),
    ("exits_while_a_thread_runs", "0", "by sys.exit, with status 3", 3, True),
    ("exits_by_an_imported_name", "0", "by sys.exit, with status 3", 3, False),
    ("swallows_an_exit", "0", ENDED, 1, False),
    ("exits_at_once", "0", "launch: a rank ended (by os._exit?) without leaving the job", 1, True),
    ("raises_system_exit", "0", ENDED, 1, False),
    ("ends", "0", ENDED, 1, True),
    ("ends_before_world", "0", "in world", None, False),
)


@needs_mpi
@pytest.mark.parametrize(
    ("fault", "checked", "words", "status"),
    [pytest.param(*row, marks=[] if default else [pytest.mark.slow]) for *row, default in FAULTS],
)
def test_a_rank_that_fails_ends_the_job(fault, checked, words, status):
    done = ranks_run(3, "-m", "tests.distributed.ranks.faults", *fault.split(), GPU_OPS_COMM_CHECK=checked)
    assert done.returncode == status or (status is None and done.returncode != 0)
    assert words in done.stderr, done.stderr[-4000:]


@needs_mpi
def test_a_rank_may_end_before_the_others():
    done = ranks_run(3, "-m", "tests.distributed.ranks.faults", "first_to_end")
    assert done.returncode == 0, done.stderr[-4000:]


UNTIL_KILLED = """
import os, time
from gpu_ops import distributed
comm = distributed.world()
os.write(1, b"%d\\n" % os.getpid())
while True:
    comm.barrier()
    time.sleep(0.05)
"""


@needs_mpi
def test_ranks_end_with_the_script_that_launched_them():
    """Ranks end also if the script was started in the background of a shell, where Ctrl-C is ignored."""
    command = ["scripts/launch.sh", "2", "--restarts", "2", sys.executable, "-c", UNTIL_KILLED]
    shell = subprocess.Popen(
        ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command],
        cwd=ROOT,
        env={**os.environ, "PATH": PATH, "NUMBA_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    ranks = [int(shell.stdout.readline()) for _ in range(2)]
    shell.terminate()
    shell.communicate(timeout=PATIENCE)
    assert shell.returncode == 128 + signal.SIGTERM
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


@needs_mpi
def test_last_words_are_waited_for():
    """Wait until the other end of a pipe has read the output; not for other files, and not forever."""
    from gpu_ops.distributed.mpi import wait_until_read

    reading, writing = os.pipe()
    os.write(writing, b"no more disk")
    wait_until_read(writing, seconds=0.01)
    reader = threading.Timer(0.05, os.read, (reading, 100))
    reader.start()
    wait_until_read(writing, seconds=PATIENCE)
    assert not select.select([reading], [], [], 0)[0]
    reader.join()
    for end in (reading, writing):
        os.close(end)
    wait_until_read(writing, seconds=PATIENCE)  # closed
    with tempfile.TemporaryFile() as file:
        file.write(b"words")
        file.flush()
        wait_until_read(file.fileno(), seconds=PATIENCE)


@needs_mpi
def test_a_kill_while_saving_leaves_the_state_before(tmp_path):
    done = ranks_run(3, "-m", "tests.distributed.ranks.faults", "killed_while_saving", str(tmp_path))
    assert done.returncode != 0
    checkpoints = distributed.ShardedCheckpoints(tmp_path, SingleProcess())
    assert checkpoints.steps() == [1]
    parallel = distributed.DataParallel(faults.CONFIG, SingleProcess())
    assert checkpoints.load(parallel) == (1, {})
    assert all((x == 1).all() for x in parallel.gather_weights().values())
    checkpoints.save(3, parallel)
    assert [x.name for x in sorted(tmp_path.iterdir())] == [checkpoints.path(step).name for step in (1, 3)]


@needs_mpi
def test_a_rank_that_never_comes_is_named():
    done = ranks_run(3, "-m", "tests.distributed.ranks.faults", "never_comes")
    assert done.returncode != 0
    call = r"all_reduce\(float32 \(1000,\), op='sum'\), call 4 of 'world'"
    assert re.search(
        rf"rank [01] of 'world' \([01] of the world, on \S+\): waited 2 s in {call}", done.stderr
    ), done.stderr
    assert re.search(rf"rank [01] \([01] of the world, on \S+\) waits in {call}", done.stderr), done.stderr
    assert re.search(r"rank 2 \(2 of the world, on \S+\) does not answer", done.stderr), done.stderr


@needs_mpi
@pytest.mark.slow
def test_processes_compile_a_kernel_once(tmp_path):
    """One process compiles a kernel and reports it."""
    done = ranks_run(3, "-m", "tests.distributed.ranks.compiles", GPU_OPS_CACHE_DIR=str(tmp_path))
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
    launch_info = launched(VARIABLES[launcher])
    assert launch_info is not None
    assert (launch_info.launcher, launch_info.rank, launch_info.size) == (launcher, 1, 4)
    assert launch_info.has_mpi == (launcher != "torchrun")


def test_no_launcher():
    assert launched({}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a shell of salloc
    assert launched({"RANK": "0"}) is None
    with pytest.raises(CommError, match="PMI_SIZE='many'"):
        launched({"PMI_RANK": "0", "PMI_SIZE": "many"})


@pytest.mark.parametrize(
    ("launcher", "error", "words"),
    [
        ("torchrun", CommError, "torchrun started 4 processes; .* by `scripts/launch.sh 4 command`"),
        ("MPICH", MissingPackageError, r'mpi4py does not load .* pip install "\.\[mpi\]"'),
    ],
)
def test_what_cannot_start_says_what_to_do(launcher, error, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "gpu_ops.distributed.mpi", raising=False)
    with pytest.raises(error, match=words):
        mesh._start(launched(VARIABLES[launcher]), 1.0)


def test_one_process_needs_no_mpi():
    code = (
        "import sys; from gpu_ops import distributed; c = distributed.world(); print(type(c).__name__, c.size, "
        "'mpi4py' in sys.modules, 'numba' in sys.modules)"
    )
    assert python("-c", code, PMI_RANK="0", PMI_SIZE="1").split() == ["SingleProcess", "1", "False", "False"]


def test_abort_of_one_rank():
    with pytest.raises(SystemExit) as ended:
        SingleProcess().abort("no more disk", 3)
    assert ended.value.code == 3


@pytest.mark.parametrize("group", GROUPS)
def test_one_rank(group):
    """Run the checks for one rank in this process."""
    comm = distributed.world()
    assert (comm.rank, comm.size) == (0, 1)
    for name, check in vars(importlib.import_module(f"tests.distributed.ranks.{group}")).items():
        if name.startswith("check_") and name not in SEVERAL:
            check(comm)


@pytest.mark.peers
def test_torch_tensors():
    """Results of torch tensors are torch tensors."""
    torch = pytest.importorskip("torch")
    comm = SingleProcess()
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    for result in (
        comm.all_reduce(x.T),
        comm.all_gather(x.T, 1),
        comm.shift(x.T).wait()[0],
        comm.broadcast(x.T),
    ):
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, x.T)
    out = torch.empty_like(x)
    assert comm.all_reduce(x, out=out) is out
    assert torch.equal(out, x)
    q, k, v = torch.randn(3, 1, 16, 2, 8, dtype=torch.float64).unbind()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    out, lse = distributed.ring_attention(comm, q, k, v, causal=True, return_lse=True)
    assert torch.allclose(out, expected)
    grads = distributed.ring_attention_backward(comm, torch.ones_like(out), q, k, v, out, lse, causal=True)
    assert [type(x) for x in grads] == [torch.Tensor] * 3
    out, saved = distributed.ulysses_attention(comm, q, k, v, causal=True, return_saved=True)
    assert torch.allclose(out, expected)
    assert torch.allclose(
        distributed.ulysses_attention_backward(comm, torch.ones_like(out), saved, causal=True)[2], grads[2]
    )
    cu = torch.tensor([0, 16], dtype=torch.int32)
    packed = distributed.gathered_attention_varlen(comm, q[0], k[0], v[0], cu, causal=True)
    assert torch.allclose(packed, expected[0])


@needs_mpi
@pytest.mark.slow
def test_launch_script(tmp_path):
    """Threads are divided among ranks; a failed run restarts, and the script exits with the last exit status."""
    code = "import os, sys; print(os.environ['NUMBA_NUM_THREADS']); open(sys.argv[1], 'a').write('x'); sys.exit(3)"
    count = tmp_path / "count"
    cores = len(os.sched_getaffinity(0))
    unset = {"NUMBA_NUM_THREADS": "", "OMP_NUM_THREADS": ""}  # nproc heeds the second
    done = launch(1, "--restarts", 2, sys.executable, "-c", code, count, **unset)
    assert done.returncode == 3
    assert count.read_text() == "xxx"
    assert done.stdout.split() == [str(cores)] * 3
    done = launch(2, sys.executable, "-c", code.replace("3)", "0)"), count, **unset)
    assert done.stdout.split() == [str(max(1, cores // 2))] * 2
    for wrong in ([], ["0", "true"], ["2"], ["2", "--restarts", "x", "true"]):
        done = launch(*wrong)
        assert done.returncode == 2
        assert "usage" in done.stderr
