"""Ops from many Python threads at once, and across forks: same results, no deadlock, no abort."""

from __future__ import annotations

import os
import threading
import time
import weakref
from queue import SimpleQueue

import numpy as np
import pytest

from gpu_ops.kernels.common.cpu import parallel
from tests.support.calls import OPS, call, results
from tests.support.processes import PATIENCE, python

THREADS, ROUNDS = 8, 20


def same(actual, expected):
    return all(np.array_equal(f, e) for f, e in zip(results(actual), results(expected), strict=True))


@pytest.mark.parametrize("op", OPS)
def test_eight_threads_at_once(op):
    """Every thread's results are bit-equal to those computed in a single thread."""
    case = call(op)
    expected = case()
    barrier, wrong = threading.Barrier(THREADS), []

    def work():
        barrier.wait()
        for _ in range(ROUNDS):
            if not same(case(), expected):
                wrong.append(op)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not wrong


def test_a_thread_that_sleeps_holds_no_arrays():
    """Work that a pool thread has not started when a call ends does not keep the call's arrays."""
    held = threading.Event()
    for _ in range(parallel.thread_count()):
        busy = [(held.wait, ())]  # until the end: every helper's turn comes later
        parallel.waiting_threads().put((iter(busy), np.zeros(1), [], SimpleQueue()))
    try:
        array = np.zeros(4)
        alive, done = weakref.ref(array), []
        parallel.launch(lambda state, n_tasks, x: done.append(x.sum()), 8, array)
        del array
        assert done == [0]
        assert alive() is None
    finally:
        held.set()


@pytest.mark.parametrize("seconds", [0, 2e-3], ids=["soon", "late"])
def test_all_is_done_when_a_call_returns(seconds):
    """This holds even if a helper's last task takes longer than the caller polls for its end."""
    done, lock = [], threading.Lock()

    def claim(state):
        with lock:
            state[0] += 1
            return int(state[0]) - 1

    def kernel(state, n_tasks):
        while (task := claim(state)) < n_tasks:
            helping = threading.current_thread() is not threading.main_thread()
            time.sleep(seconds if helping else seconds / 10)
            done.append(task)

    for _ in range(20):
        done.clear()
        parallel.launch(kernel, 8)
        assert sorted(done) == list(range(8))


@pytest.mark.parametrize("who", ["caller", "helper"])
def test_an_exception_ends_the_call(who):
    """It reaches the caller, and no thread continues to work."""
    working = threading.Semaphore(0)

    def kernel(state, n_tasks):
        caller = threading.current_thread() is threading.main_thread()
        if not caller:
            working.release()
        elif not working.acquire(timeout=PATIENCE):
            pytest.fail("nobody helped")
        if caller == (who == "caller"):
            raise MemoryError("no scratch")

    if parallel.thread_count() == 1:
        pytest.skip("NUMBA_NUM_THREADS=2 or more runs this")
    with pytest.raises(MemoryError, match="no scratch"):
        parallel.launch(kernel, 2)


def test_different_ops_at_once():
    """Ops interleave: a pool thread that helps one call must not disturb another."""
    calls = [call(op) for op in OPS]
    expected = [case() for case in calls]
    wrong = []

    def work(first):
        for i in range(2 * len(calls)):
            which = (first + i) % len(calls)
            if not same(calls[which](), expected[which]):
                wrong.append(calls[which].op)

    threads = [threading.Thread(target=work, args=(2 * i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not wrong


def test_first_calls_of_one_kernel_race(tmp_path):
    """Eight threads call an uncompiled kernel at once: it is compiled once, and all get it."""
    code = """
import threading, numpy as np, gpu_ops
from gpu_ops.kernels.common.cpu import jit
compiled = []
load = jit.DiskCache.save_overload
jit.DiskCache.save_overload = lambda self, *a: (compiled.append(self._label), load(self, *a))
x = np.linspace(-1, 1, 96, dtype=np.float32).reshape(3, 32)
want = gpu_ops.swiglu(x, x, backend="reference")
found = []
threads = [threading.Thread(target=lambda: found.append(gpu_ops.swiglu(x, x))) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(found) == 8 and all(np.abs(y - want).max() < 1e-6 for y in found)
assert compiled == ["swiglu_forward_silu-float32"], compiled
"""
    run_alone(code, tmp_path)


FORK = """
import os, sys, threading, time, numpy as np, gpu_ops
rng = np.random.default_rng(0)
x = rng.standard_normal((512, 256)).astype(np.float32)
want = gpu_ops.swiglu(x, x)                      # the pool's threads exist now
stop = threading.Event()
def busy():
    while not stop.is_set():
        gpu_ops.swiglu(x, x)
threads = [threading.Thread(target=busy) for _ in range(3)]
for t in threads: t.start()
for i in range(10):
    child = os.fork()                            # in the middle of launches
    if child == 0:
        ok = all(np.array_equal(gpu_ops.swiglu(x, x), want) for _ in range(5))
        os._exit(0 if ok else 1)
    for _ in range(6000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid: break
        time.sleep(0.05)
    else:
        os.kill(child, 9); os.waitpid(child, 0); stop.set(); sys.exit(f"child {i} hangs")
    assert status == 0, f"child {i}: status {status}"
    assert np.array_equal(gpu_ops.swiglu(x, x), want)  # the parent goes on
stop.set()
for t in threads: t.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork (Linux, macOS)")
def test_fork_in_the_middle(tmp_path):
    """Children forked while other threads launch can compute; the parent continues."""
    run_alone(FORK, tmp_path, *("-W", "ignore::DeprecationWarning"))


@pytest.mark.parametrize("when", ["tasks", "end"])
def test_an_interrupt_leaves_nobody_at_work(when, monkeypatch):
    """After Ctrl-C while the caller works or waits for a helper's last task, it waits for all started helpers."""
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)
    begun, written = threading.Event(), []

    def compiled(state, n_tasks):
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(PATIENCE)
            if when == "tasks":
                raise KeyboardInterrupt
        else:
            begun.set()
            time.sleep(0.2)
            written.append(1)

    def interrupted(*_):
        raise KeyboardInterrupt

    if when == "end":
        monkeypatch.setattr(parallel, "spin_wait", {None: interrupted})
    with pytest.raises(KeyboardInterrupt):
        parallel.launch(compiled, 2)
    assert written == [1]


def test_without_threads_a_call_works_alone(monkeypatch):
    """It also leaves no unclaimed offers behind."""
    monkeypatch.setattr(parallel, "thread_count", lambda: 4)
    monkeypatch.setattr(parallel, "_offers", None)
    monkeypatch.setattr(parallel, "_helpers", [])

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    tasks = []
    parallel.launch(lambda state, n_tasks: tasks.append(n_tasks), 8)
    assert tasks == [8]
    assert parallel._offers.empty()


COMPILING = """
import os, sys, threading, time, numpy as np, gpu_ops
from gpu_ops.kernels.common.cpu import jit
from gpu_ops.kernels.norm.cpu import layernorm

x = np.ones((4, 32), np.float32)
compile_, begun = jit.EntryCompiler.compile_extra, threading.Event()
def slowly(self, *args):
    begun.set()
    time.sleep(0.5)
    return compile_(self, *args)
jit.EntryCompiler.compile_extra = slowly
thread = threading.Thread(target=lambda: gpu_ops.layernorm(x, x[0]))
thread.start()
assert begun.wait(300)
child = os.fork()
if not child:
    gpu_ops.layernorm(x, x[0])
    os._exit(0)
for _ in range(6000):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid: break
    time.sleep(0.05)
else:
    os.kill(child, 9); os.waitpid(child, 0); sys.exit("the child hangs")
assert status == 0
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork (Linux, macOS)")
def test_a_fork_while_another_thread_compiles(tmp_path):
    run_alone(COMPILING, tmp_path, *("-W", "ignore::DeprecationWarning"))


BESIDE_NUMBA = """
import sys, threading, numba, numpy as np, gpu_ops
from concurrent.futures import ThreadPoolExecutor

@numba.njit(parallel=True)
def theirs(x, y):
    for i in numba.prange(x.size):
        y[i] = x[i] * x[i]

rng = np.random.default_rng(0)
x = rng.standard_normal((1024, 256)).astype(np.float32)
q = rng.standard_normal((2, 512, 4, 64)).astype(np.float32)
a, b = np.arange(1 << 16, dtype=np.float64), np.empty(1 << 16)
wanted = gpu_ops.swiglu(x, x), gpu_ops.rope(q)
theirs(a, b)
assert numba.threading_layer() == sys.argv[1]
done = threading.Event()

def run_theirs():
    rounds = 0
    while not done.is_set():
        b[:] = 0
        theirs(a, b)
        assert np.array_equal(b, a * a)
        rounds += 1
    return rounds

def run_ours(i):
    found = gpu_ops.rope(q) if i % 2 else gpu_ops.swiglu(x, x)
    return np.array_equal(found, wanted[i % 2])

with ThreadPoolExecutor(8) as pool:
    beside = pool.submit(run_theirs)
    try:
        right = list(pool.map(run_ours, range(200)))
    finally:
        done.set()
    assert all(right)
    assert beside.result() > 1
"""


@pytest.mark.parametrize("layer", ["workqueue", pytest.param("omp", marks=pytest.mark.slow)])
def test_in_a_pool_beside_parallel_numba(layer, tmp_path):
    """Each call uses all threads, called from more threads than cores, while Numba's threading layer works:
    workqueue, which aborts the process if two threads launch on it."""
    run_alone(BESIDE_NUMBA, tmp_path, arguments=[layer], NUMBA_THREADING_LAYER=layer)


def test_results_after_the_interpreter_began_to_exit(tmp_path):
    """An atexit hook may still call ops: the pool no longer takes work, so the caller does it alone."""
    code = """
import atexit, numpy as np, gpu_ops
x = np.ones((4096, 64), np.float32)
want = gpu_ops.swiglu(x, x)
atexit.register(lambda: print("equal" if np.array_equal(gpu_ops.swiglu(x, x), want) else "different"))
"""
    assert run_alone(code, tmp_path).strip() == "equal"


def run_alone(code, tmp_path, *flags, arguments=(), **variables):
    """Run ``code`` in a fresh interpreter with a separate kernel cache."""
    return python(*flags, "-c", code, *arguments, GPU_OPS_CACHE_DIR=str(tmp_path), **variables)


# NUMBA_NUM_THREADS: an invalid number of threads is refused by name, and small machines do not start thousands.


def test_a_wrong_number_of_threads_is_named(tmp_path):
    """Every call raises until it is valid; functions that need no compiled kernel work."""
    code = """
import os, numpy as np, gpu_ops
x = np.ones((4, 32), np.float32)
for given in ("0", "-1", "abc", "1.5", ""):
    os.environ["NUMBA_NUM_THREADS"] = given
    for _ in range(2):
        try:
            gpu_ops.swiglu(x, x)
        except gpu_ops.errors.OptionError as error:
            assert f"NUMBA_NUM_THREADS={given!r}" in str(error), error
        else:
            raise SystemExit(f"{given!r} is taken")
    gpu_ops.swiglu(x, x, backend="reference")
os.environ["NUMBA_NUM_THREADS"] = "3"
gpu_ops.swiglu(x, x)
from gpu_ops.kernels.common.cpu import parallel
print(parallel.thread_count())
"""
    assert python("-c", code, GPU_OPS_CACHE_DIR=str(tmp_path)).strip() == "3"


def test_far_too_many_threads_are_not_started(monkeypatch):
    """100000 once started 22330, as many as the system allows."""
    cpus = parallel.config.NUMBA_DEFAULT_NUM_THREADS
    count, limit = parallel.thread_count.__wrapped__, 16 * cpus
    monkeypatch.setattr(parallel.config, "NUMBA_NUM_THREADS", limit)
    assert count() == limit
    monkeypatch.setattr(parallel.config, "NUMBA_NUM_THREADS", 100_000)
    with pytest.warns(
        UserWarning, match=f"NUMBA_NUM_THREADS=100000, .* {cpus} CPUs; {limit} threads are used"
    ):
        assert count() == limit
