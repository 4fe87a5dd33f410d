"""Ctrl-C anywhere: nothing hangs, no thread keeps working, later calls are right; first calls of many threads."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from gpu_ops.cli.warmup import in_processes
from tests.support.calls import OPS
from tests.support.processes import PATIENCE, ROOT, python


def run(code: str) -> None:
    python("-c", code)


def run_all(code: str) -> subprocess.CompletedProcess[str]:
    """Run code and return its result with its stderr, for any exit status."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)


ANYWHERE = """
import faulthandler, sys, threading, time
from gpu_ops.kernels.common.cpu import parallel

faulthandler.dump_traceback_later(300, exit=True)
parallel.thread_count = lambda: 3
parallel.waiting_threads()
at_work = []

def compiled(state, n_tasks):
    at_work.append(1)
    time.sleep(1e-3)
    at_work.pop()

def interrupt(*counts):
    \"\"\"Ctrl-C when the interpreter looks for it in ``launch`` for the n-th time, and once more after that.\"\"\"
    left = list(counts)
    def look(frame, event, argument):
        if frame.f_code.co_filename == parallel.__file__ and frame.f_code.co_name != "waiting_threads":
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
                sys.setprofile(look if left else None)
                raise KeyboardInterrupt
    sys.setprofile(look)

for again in ((), (1,), (2,), (3,), (5,)):
    count, interrupted = 0, True
    while interrupted:
        count += 1
        try:
            interrupt(count, *again)
            parallel.launch(compiled, 3)
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not at_work, (count, again)
    assert count > 10, count
"""


def test_anywhere_in_a_launch():
    """Interrupt once, and a second time while the call is being stopped."""
    run(ANYWHERE)


FIRST = """
import inspect, sys, numpy as np, gpu_ops
from gpu_ops.kernels.compiler import cache

kept = []
cache.publish = lambda entry, *parts: kept.append(parts[-1])  # what an interrupt lost would be compiled again

def interrupt(left):
    \"\"\"Ctrl-C when the main thread has called n functions, or returned from them.\"\"\"
    def look(frame, event, argument):
        nonlocal left
        if event == "return" or frame.f_code.co_flags & inspect.CO_GENERATOR:  # Python closes these by itself
            return
        left -= 1
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt
    sys.setprofile(look)

x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32)
found, count = None, 0
while found is None:
    try:
        interrupt(count)
        found = gpu_ops.swiglu(x, x)
    except KeyboardInterrupt:
        count += 1
    finally:
        sys.setprofile(None)
np.testing.assert_allclose(found, gpu_ops.swiglu(x, x, backend="reference"), rtol=1e-5, atol=1e-6)
assert count > 50, count
assert kept == ["swiglu_forward_silu-float32.nbc"], kept
"""


def test_anywhere_in_first_calls(tmp_path, monkeypatch):
    """The next call finds started compilations finished, compiled once; no exception is reported as ignored."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    done = run_all(FIRST)
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr


NO_IMPORTS = """
import sys, threading
import numpy as np
from tests.support.calls import OPS, call

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            found.append((one.op, name))

found, calls = [], [call(op) for op in OPS]
sys.meta_path.insert(0, Finder())
for one in calls:
    if "gpu_ops.kernels.common.cpu.jit" in sys.modules:  # kernels that do nothing: their imports are what counts
        sys.modules["gpu_ops.kernels.common.cpu.jit"].Kernel.__getitem__ = lambda kernel, variant: lambda *a: None
    with np.errstate(all="ignore"):
        one()
assert not found, found
"""


def test_the_main_thread_imports_nothing():
    """An interrupt in an import would leave a Numba module broken, and Python's import lock too."""
    run(NO_IMPORTS)


EXIT = """
import sys, numpy as np, gpu_ops
from gpu_ops.kernels.compiler import uninterrupted

def look(frame, event, argument):
    \"\"\"Ctrl-C when the main thread waits for a kernel to be compiled.\"\"\"
    if event == "c_call" and frame.f_code.co_name == "_in_a_thread" and argument.__name__ == "acquire":
        if getattr(frame.f_locals["call"].func, "__name__", "") == "_compile" and frame.f_locals["ended"].locked():
            look.count += 1
            if look.count == 2:
                sys.setprofile(None)
                raise KeyboardInterrupt

look.count = 0
x = np.ones((4, 32), np.float32)
sys.setprofile(look)
gpu_ops.swiglu(x, x)
"""


AGAIN = """
import os, signal, sys, threading, time
from gpu_ops.kernels.common.cpu import jit

def compile_extra(self, function):
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "_wait_for_sections":  # the process ends
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

jit.EntryCompiler.compile_extra = compile_extra
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.kill with SIGINT (Linux, macOS)")
def test_a_second_interrupt_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    done = run_all(AGAIN + EXIT)
    assert done.returncode == -signal.SIGINT
    assert "ignored" not in done.stderr


def test_a_process_that_ends_keeps_what_was_begun(tmp_path, monkeypatch):
    """The process waits for the compiler, whose thread would not survive the end of the interpreter."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    done = run_all(EXIT)
    assert done.returncode
    assert done.stderr.count("Traceback") == done.stderr.count("KeyboardInterrupt") == 1
    assert "ignored" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*.nbc")] == ["swiglu_forward_silu-float32.nbc"]


OPS_AT_ONCE = """
import threading, numpy as np, gpu_ops
x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32)
calls = [lambda **b: gpu_ops.rmsnorm(x, x[0], **b), lambda **b: gpu_ops.swiglu(x, x, **b)] * 3
barrier, found = threading.Barrier(len(calls)), {}
def work(i):
    barrier.wait()
    found[i] = calls[i]()
threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
[t.start() for t in threads]; [t.join() for t in threads]
for i, one in enumerate(calls):
    np.testing.assert_allclose(found[i], one(backend="reference"), rtol=1e-5, atol=1e-6)
"""


def test_first_calls_of_different_ops_at_once():
    run(OPS_AT_ONCE)


FORKED = """
import os, signal, numpy as np, gpu_ops
from gpu_ops.ops.rope import tables as rope_tables
q = np.ones((1, 4, 2, 8), np.float32)
want = gpu_ops.rope(q)
rope_tables._lock.acquire()  # as another thread may hold it
child = os.fork()
if not child:
    signal.alarm(300)
    os._exit(0 if np.array_equal(gpu_ops.rope(q), want) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork (Linux, macOS)")
def test_a_child_forked_while_another_thread_rotates():
    run(FORKED)


def start_interrupted(cache: Path, seed: int, mean: float, ops: tuple[str, ...]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.interrupted", str(seed), str(mean), *ops]
    env, pipe = {**os.environ, "GPU_OPS_CACHE_DIR": str(cache)}, subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signal.setitimer (Linux, macOS)")
def test_interrupts_at_random_times(tmp_path):
    """First calls of every op in two processes at once: with an empty cache, then with a full one, repeatedly."""
    (quiet,) = interrupted([start_interrupted(tmp_path / "quiet", 0, 0.0, OPS)])
    cold = interrupted([start_interrupted(tmp_path / "cold", seed, 0.3, OPS) for seed in (1, 2)])
    chance, warm = random.Random(3), []
    for seed in range(3, 23, 2):
        ops = tuple(chance.sample(OPS, 6))
        warm += interrupted([start_interrupted(tmp_path / "cold", seed + i, 0.03, ops) for i in (0, 1)])
    for which, runs in (("cold", cold), ("warm", warm)):
        late = sorted(seconds for run in runs for seconds in run["late"])
        median, count = late[len(late) // 2], len(late)
        print(f"{which}: {count} interrupts, half within {1e3 * median:.1f} ms, all within {late[-1]:.2f} s")
        assert len(late) >= 200
        for run in runs:
            assert run["digests"] == {op: quiet["digests"][op] for op in run["digests"]}


def interrupted(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    reports = []
    for process in processes:
        out, err = process.communicate(timeout=4 * PATIENCE)
        assert process.returncode == 0, err
        assert not {"ignored", "Traceback", "Warning"} & set(err.split()), err
        reports.append(json.loads(out))
    return reports


# Processes that compile in advance: an interrupt ends them, and reaches only the process that started them.


def test_an_interrupt_ends_them_at_once():
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), in_processes(1, time.sleep, [(30,)] * 3) as futures:
        raise KeyboardInterrupt
    assert all(future.cancelled() or isinstance(future.exception(), BrokenProcessPool) for future in futures)
    assert set(multiprocessing.active_children()) <= before


def test_they_leave_interrupts_to_the_process_that_started_them():
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with in_processes(1, signal.pthread_sigmask, [(signal.SIG_BLOCK, ())]) as (future,):
        assert signal.SIGINT in future.result()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == ours
