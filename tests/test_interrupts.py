"""Ctrl-C anywhere: nothing hangs, nobody is left at work, later calls are right; first calls of many threads."""

from __future__ import annotations

import os

import pytest

from tests.processes import python


def run(code):
    python("-c", code)


ANYWHERE = """
import faulthandler, sys, threading, time
from gpu_ops.kernels.numba_cpu import parallel

faulthandler.dump_traceback_later(300, exit=True)
parallel.thread_count = lambda: 3
parallel.waiting_threads()
at_work = []

def compiled(state, n_tasks):
    at_work.append(1)
    time.sleep(1e-3)
    at_work.pop()

def interrupt(*counts):
    \"\"\"Ctrl-C when the interpreter looks for it in ``launch`` for so many times, and after that again.\"\"\"
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
    """Once, and a second time while the call is being ended."""
    run(ANYWHERE)


FIRST = """
import sys, numpy as np, gpu_ops
x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32)
left = COUNT

def look(frame, event, argument):
    \"\"\"Ctrl-C when the interpreter enters a function of a file for the COUNT-th time.

    Or for the next time, where it holds the lock of all imports: Python would never release that one.
    \"\"\"
    global left
    if event == "call" and FILE in frame.f_code.co_filename:
        left -= left > 0
        if not left and not ("importlib" in FILE and frame.f_code.co_name in ("__enter__", "__exit__")):
            sys.setprofile(None)
            raise KeyboardInterrupt

try:
    sys.setprofile(look)
    gpu_ops.swiglu(x, x)
except KeyboardInterrupt:
    pass
finally:
    sys.setprofile(None)
assert left == 0, f"only {COUNT - left} of {COUNT} calls"
np.testing.assert_allclose(gpu_ops.swiglu(x, x), gpu_ops.swiglu(x, x, backend="reference"), rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize(
    ("file", "count"),
    [
        ("threading.py", 5),  # another thread imports Numba
        ("importlib._bootstrap>", 1000),  # the kernels are imported
        ("llvmlite/binding", 500),  # and declared
        ("threading.py", 60),  # another thread compiles it
    ],
)
def test_during_the_first_call(file, count, tmp_path, monkeypatch):
    """Only in the main thread, which Ctrl-C reaches: Numba is imported and compiles in another one."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    run(FIRST.replace("COUNT", str(count)).replace("FILE", repr(file)))


MAIN_THREAD = """
import sys, threading, numpy as np, gpu_ops

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("numba.") and threading.current_thread() is threading.main_thread():
            found.append(name)

found = []
sys.meta_path.insert(0, Finder())
x = np.ones((4, 32), np.float32)
gpu_ops.swiglu(x, x)
gpu_ops.attention(x[None, None], x[None, None], x[None, None])
print(*found)
assert not found, found
"""


def test_the_main_thread_imports_nothing_of_numba():
    """A module of Numba that an interrupt leaves half imported stays broken."""
    run(MAIN_THREAD)


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
from gpu_ops.ops import rope_tables
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
