"""memory.Pool counts the memory of calls, and refuses calls that exceed its limit before anything is written."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpu_ops
from gpu_ops import memory
from gpu_ops.core.allocator import IN_USE
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DeviceError, OptionError, OutOfMemoryError
from gpu_ops.memory import pool as pools
from tests.support.calls import OPS, WRITTEN, call
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray
from tests.support.processes import exit_code, python

X = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
WEIGHT = np.ones(512, np.float32)
LARGE = np.ones((1024, 1024), np.float32)  # whose results are lent by the CPU's own pool


def refused(run, *args, **kwargs):
    """Error, without the frames that hold its allocations."""
    try:
        run(*args, **kwargs)
    except OutOfMemoryError as error:
        return error.with_traceback(None)
    raise AssertionError("it fits")


# On the CPU NumPy makes its codes.
@pytest.mark.parametrize("op", [op for op in OPS if op != "ternary_quantize"])
def test_a_call_takes_what_its_trace_says_and_no_less(op):
    case = call(op)
    with memory.Trace() as trace:
        result = case()
        del result
    written = {name: x.copy() for name, x in case.arrays.items() if name in WRITTEN.get(op, ())}
    need = trace.peak_bytes
    if need:
        forget_calls()
        for _ in range(2):  # the first call and a later one
            with memory.limit(need - 1) as pool:
                error = refused(case)
            assert error.required > error.available
            assert str(error).startswith(op)
            assert pool.current == 0
        assert all(np.array_equal(case.arrays[name], x) for name, x in written.items())
    with memory.limit(need) as pool:
        result = case()
    del result
    assert (pool.peak, pool.current, pool.holders) == (need, 0, {})


def test_the_error_says_who_fills_the_pool():
    with memory.Pool(3 * X.nbytes, name="block") as pool:
        kept = gpu_ops.softmax(X)
        cache = pool.empty((64, 256), name="KV cache")
        rows = gpu_ops.rmsnorm(X, WEIGHT)
        error = refused(gpu_ops.swiglu, X, X)
        again = refused(gpu_ops.swiglu, X, X)
        assert str(again) == str(error)
        del cache, rows
        gpu_ops.swiglu(X, X)  # and a retry works
    assert error.required == X.nbytes
    assert error.available == 3 * X.nbytes - 2 * X.nbytes - X.nbytes // 2
    assert error.holders == (("softmax: y", X.nbytes), ("rmsnorm: y", X.nbytes), ("KV cache", X.nbytes // 2))
    assert "of 'block' has 65536 bytes left; the largest: softmax: y 131072 bytes" in str(error)
    assert pool.holders == {"softmax: y": kept.nbytes}


def test_a_refused_call_writes_nothing():
    out, kept = np.full((2, *X.shape), 7, np.float32), X.copy()
    with memory.limit(0):
        gpu_ops.softmax(X, out=out[0])  # allocates nothing
        error = refused(gpu_ops.rmsnorm, X, WEIGHT, out=out[1], return_rstd=True)
    assert error.required == 4 * len(X)
    assert (out[1] == 7).all()
    assert np.array_equal(X, kept)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_workspaces_count(arch, monkeypatch):
    q = np.zeros((1, 64, 2, 64), np.float16)
    lse = np.zeros((1, 2, 64), np.float32)
    monkeypatch.setenv("GPU_OPS_ARCH", arch)
    options = {"causal": True, "device": "emulator", "backend": "raw"}
    need = gpu_ops.workspace_size("attention_backward", q, q, q, q, q, lse, **options)
    with memory.limit(3 * q.nbytes + need // 2):
        error = refused(gpu_ops.attention_backward, q, q, q, q, q, lse, **options)
    assert str(error).startswith("attention_backward workspace: ")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *[("8 GB", 8 * 10**9), ("8 GiB", 8 << 30), ("8gib", 8 << 30), (" 1.5 KiB ", 1536), ("0B", 0)],
        *[("2 TB", 2 * 10**12), (12, 12), (np.int64(5), 5)],
    ],
)
def test_sizes(text, nbytes):
    assert memory.limit(text).limit == nbytes


@pytest.mark.parametrize(
    "text", ["", "8", "GB", "8 XB", "-8 GB", "8 GB!", "nan GB", "1e9 B", -1, 1.5, True, None, b"8 GB", "٣ GB"]
)
def test_no_sizes(text):
    with pytest.raises(OptionError, match=r"^(memory\.)?limit: size"):
        memory.limit(text)


def test_mistakes_are_typed():
    with pytest.raises(OptionError, match="device"):
        memory.Pool(1, device="gpu")
    with pytest.raises(OptionError, match="enter it"):
        memory.Pool(1).empty((1,))
    with memory.limit(1), pytest.raises(OptionError, match="enter it"):
        memory.Pool(1).empty((1,))


def test_the_tightest_limit_holds():
    outer, inner = memory.Pool(X.nbytes, name="outer"), memory.Pool(2 * X.nbytes, name="inner")
    with outer, inner:
        y = gpu_ops.softmax(X)
        assert "'outer'" in str(refused(gpu_ops.softmax, X))
        with outer:  # entered again: it counts once
            assert outer.current == inner.current == y.nbytes
        del y
    with inner, outer, memory.limit(0):
        assert "limit of 0 bytes" in str(refused(gpu_ops.softmax, X))
    assert not inner.current
    with inner:
        z = gpu_ops.softmax(X)
        assert inner.current == z.nbytes
        assert outer.current == 0
    assert not IN_USE


def test_plans_and_arenas_within_a_pool():
    def run():
        return gpu_ops.softmax(gpu_ops.softmax(X)).copy()

    with memory.limit(0), memory.Trace() as trace:
        run()
    with memory.Pool() as pool:
        arena = memory.Arena(trace)
        taken = pool.current
        assert arena.nbytes <= taken <= arena.nbytes + 64
        with arena:
            result = run()
            with pytest.raises(OptionError, match="in use in this thread already"), pool:
                pass
        assert pool.current == pool.peak == taken
    assert np.array_equal(result, run())
    with memory.Trace(), pytest.raises(OptionError, match="in use in this thread already"), pool:
        pass
    with memory.limit(1000):
        assert refused(memory.Arena, trace).available == 1000


@pytest.mark.parametrize("x", [X, LARGE], ids=["small", "lent"])
@pytest.mark.parametrize(
    "hold", [lambda y: y[3:5], memoryview, np.from_dlpack], ids=["view", "buffer", "dlpack"]
)
def test_memory_that_is_still_seen_counts(x, hold):
    with memory.Pool() as pool:
        y = gpu_ops.softmax(x)
        held = hold(y)
        del y
        assert pool.current == x.nbytes
    del held
    assert pool.current == 0


def test_a_pool_holds_in_the_threads_that_enter_it():
    pool, entered = memory.Pool(X.nbytes), threading.Barrier(2, timeout=30)

    def other():
        gpu_ops.softmax(LARGE)  # no limit here
        with pool:
            entered.wait()  # the first thread has its result
            refusal = refused(gpu_ops.softmax, X)
            entered.wait()  # and has released it
            entered.wait()
            return refusal, gpu_ops.softmax(X)

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(other)
        with pool:
            y = gpu_ops.softmax(X)
            entered.wait()
            entered.wait()
            del y
            entered.wait()
        refusal, z = future.result()
    assert refusal.holders == (("softmax: y", X.nbytes),)
    assert pool.current == z.nbytes
    assert not IN_USE


def test_threads_never_exceed_the_limit_of_their_sum():
    pool = memory.Pool(3 * X.nbytes)

    def work(_):
        refusals = 0
        with pool:
            for _ in range(100):
                try:
                    y = gpu_ops.softmax(X)
                    del y
                except OutOfMemoryError:
                    refusals += 1
        return refusals

    with ThreadPoolExecutor(8) as threads:
        refusals = sum(threads.map(work, range(8)))
    assert refusals < 800
    assert X.nbytes <= pool.peak <= pool.limit
    assert pool.current == 0


def test_nothing_is_left_of_a_thousand_calls():
    before = len(pools._WATCHES)
    with memory.limit(X.nbytes) as pool:
        for _ in range(1000):
            y = gpu_ops.softmax(X)
            del y
    assert (pool.current, pool.peak, pool.holders) == (0, X.nbytes, {})
    assert len(pools._WATCHES) == before
    assert not pool._gone


def test_an_array_may_go_while_its_thread_counts():
    """The garbage collector may free it at any allocation."""
    with memory.Pool() as pool:
        y = gpu_ops.softmax(X)
        with pools._lock:
            del y
        assert pool.current == 0
        cycle = [gpu_ops.softmax(X)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert pool.current == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork (POSIX)")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_counts_on():
    with memory.limit(X.nbytes) as pool:
        with pools._lock:  # as another thread may
            child = os.fork()
            if child == 0:
                os._exit(0 if pool.current == 0 else 1)
        assert exit_code(child) == 0


def test_a_process_ends_quietly():
    code = (
        "import sys; sys.stderr = sys.stdout\n"
        "import numpy as np, gpu_ops; from gpu_ops import memory\n"
        "pool = memory.Pool(); pool.__enter__()\n"
        "y = pool.empty((4,)); z = pool.empty((1 << 20,)); cycle = [y]; cycle.append(cycle)"
    )
    assert python("-c", code) == ""


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_all_that_cupy_allocates_counts(cupy, kernels):
    x, weight = cupy.asarray(X), cupy.asarray(WEIGHT)
    with memory.Pool("1 MiB", device="cuda") as pool, memory.limit(0):
        y, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, backend=kernels)
        assert pool.holders == {"rmsnorm: y": X.nbytes, "rmsnorm: rstd": 512}
        extra = cupy.empty((10,), np.float32)
        assert pool.holders["array"] == 512
        assert pool.current == pool._memory.used == X.nbytes + 1024
        with memory.limit(X.nbytes - 1, device="cuda"):
            error = refused(gpu_ops.softmax, x, backend=kernels)
        assert (error.required, error.available) == (X.nbytes, X.nbytes - 1)
        assert pool.current == pool._memory.used == X.nbytes + 1024
    np.testing.assert_allclose(gpu_ops.softmax(x, backend=kernels).host, gpu_ops.softmax(X), rtol=1e-5)
    assert pool.current == X.nbytes + 1024  # they live on
    del y, rstd, extra
    assert (pool.current, pool._memory.used, pool.holders) == (0, 0, {})


@needs_nvrtc
def test_a_capture_that_needs_a_workspace_is_refused_in_a_pool_too(cupy):
    q = FakeArray(np.ones((1, 16, 1, 8), np.float16))
    grads = tuple(FakeArray(np.ones((1, 16, 1, 8), np.float16)) for _ in "qkv")
    args = (q, q, q, q, q, FakeArray(np.zeros((1, 1, 16), np.float32)))
    with memory.Pool(device="cuda"):
        gpu_ops.attention_backward(*args, grads=grads)
        cupy.capturing = True
        with pytest.raises(DeviceError, match="pass workspace="):
            gpu_ops.attention_backward(*args, grads=grads)


def test_a_card_with_less_than_the_limit(cupy):
    with memory.Pool("1 GiB", device="cuda") as pool:
        pool._memory.set_limit(size=1024)
        error = refused(gpu_ops.softmax, FakeArray(X))
    assert error.required == X.nbytes
    assert pool.current == 0
