"""gpu_ops.memory: a trace records the allocations of a step without running it, and an arena holds all of them."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import memory
from gpu_ops.core.device import cuda_missing
from gpu_ops.errors import DeviceError, OptionError, OutOfMemoryError
from gpu_ops.memory.arena import place
from gpu_ops.memory.trace import Buffer

ROWS, COLS = 64, 512
WEIGHT = np.ones(COLS, np.float32)


def make_x(rows=ROWS):
    return np.random.default_rng(0).standard_normal((rows, COLS)).astype(np.float32)


def step(x):
    h = gpu_ops.rmsnorm(x, WEIGHT)
    h = gpu_ops.rmsnorm(h, WEIGHT)
    return gpu_ops.softmax(h)


def traced(run, *args, device=None):
    with memory.Trace(device) as trace:
        result = run(*args)
        del result
    return trace


def test_a_trace_runs_nothing():
    out = np.zeros((ROWS, COLS), np.float32)
    with memory.Trace() as trace:
        assert gpu_ops.softmax(make_x(), out=out) is out
        assert not trace.buffers
        assert not out.any()
        x = trace.empty((1 << 21, COLS), np.float32)  # 4 GiB
        y = step(x)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert trace.live_bytes == 2 * x.nbytes
    assert trace.peak_bytes == 3 * x.nbytes + 4 * len(
        x
    )  # x, and both norms with an rstd, or a norm and the softmax


def test_what_lives_at_the_peak():
    trace = traced(step, make_x())
    assert [b.label for b in trace.at_peak()] == ["rmsnorm: y", "rmsnorm: y", "rmsnorm: rstd"]
    assert trace.peak_bytes == sum(b.nbytes for b in trace.at_peak())
    assert trace.live_bytes == 0


def test_a_trace_is_what_a_run_allocates(monkeypatch):
    monkeypatch.setenv("GPU_OPS_POOL_MB", "0")  # so that NumPy allocates, and tracemalloc sees it
    monkeypatch.setattr(gpu_ops.memory_pool.POOL, "limit", 0)
    x = make_x(4096)
    step(x)
    tracemalloc.start()
    step(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    planned = traced(step, x).peak_bytes
    assert abs(peak - planned) < 0.02 * planned


def test_other_threads_are_not_traced():
    x = np.ones((4, 8), np.float32)
    with memory.Trace(device="H100 SXM") as trace, ThreadPoolExecutor(1) as pool:
        y = pool.submit(gpu_ops.softmax, x).result()
        gpu_ops.softmax(x)
    np.testing.assert_array_equal(y, np.full((4, 8), 0.125, np.float32))
    assert [buffer.nbytes for buffer in trace.buffers] == [y.nbytes]


@pytest.mark.parametrize("card", ["H100 SXM", "sm_80"])
def test_a_trace_plans_for_a_card(card, monkeypatch):
    q = np.zeros((1, 64, 2, 64), np.float16)
    lse = np.zeros((1, 2, 64), np.float32)

    def gradients():
        return gpu_ops.attention_backward(q, q, q, q, q, lse, causal=True)

    trace = traced(gradients, device=card)
    workspaces = sum(b.nbytes for b in trace.buffers if not b.label.startswith("attention_backward: "))
    monkeypatch.setenv("GPU_OPS_ARCH", card)
    needed = gpu_ops.workspace_size(
        "attention_backward", q, q, q, q, q, lse, causal=True, device="emulator", backend="raw"
    )
    assert 0 < workspaces <= needed < workspaces + 256 * len(trace.buffers)


def test_wrong_arguments_raise_as_in_a_run():
    with memory.Trace(), pytest.raises(gpu_ops.errors.ShapeError):
        gpu_ops.rmsnorm(make_x(), np.ones(3, np.float32))
    with pytest.raises(OptionError, match="H1000"), memory.Trace("H1000"):
        pass
    step(make_x())  # the trace is over


def test_an_arena_holds_a_step():
    x = make_x()
    trace = traced(step, x)
    arena = memory.Arena(trace)
    assert arena.nbytes <= 1.05 * trace.peak_bytes
    right = step(x)
    for _ in range(3):
        with arena:
            y = step(x)
            assert np.array_equal(y, right)
            del y


def test_an_arena_allocates_nothing_more(monkeypatch):
    monkeypatch.setattr(gpu_ops.memory_pool.POOL, "limit", 0)
    x = make_x(1024)
    arena = memory.Arena(traced(step, x))
    with arena:
        step(x)
    tracemalloc.start()
    with arena:
        step(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 8


def test_another_step_is_refused():
    arena = memory.Arena(traced(step, make_x()))
    with arena, pytest.raises(OptionError, match="allocation 0 is rmsnorm: y, 65536 bytes"):
        step(make_x(32))
    with arena:
        step(make_x())
        with pytest.raises(OptionError, match="no more"):
            step(make_x())


def test_what_still_lives_is_not_overwritten():
    arena = memory.Arena(traced(step, make_x()))
    with arena:
        kept = step(make_x())
    with pytest.raises(OptionError, match="softmax: y"), arena:
        pass
    del kept

    def keeps_more(x):
        first = gpu_ops.rmsnorm(x, WEIGHT)
        return first, gpu_ops.softmax(gpu_ops.rmsnorm(first, WEIGHT))

    with arena, pytest.raises(OptionError, match="is still alive where the trace had let it go"):
        keeps_more(make_x())


def test_an_arena_that_does_not_fit_is_refused_before_the_first_kernel():
    trace = traced(step, make_x())
    with pytest.raises(OutOfMemoryError) as refused:
        memory.Arena(trace, limit=1000)
    assert refused.value.available == 1000
    assert refused.value.required == memory.Arena(trace).nbytes
    with memory.Trace() as huge:
        y = gpu_ops.softmax(huge.empty((1 << 30, 1 << 12), np.float32))
        del y
    with pytest.raises(OutOfMemoryError):
        memory.Arena(huge)


def test_an_arena_is_entered_once():
    arena = memory.Arena(traced(step, make_x()))
    with arena:
        with pytest.raises(OptionError, match="in use already"), arena:
            pass
        step(make_x())  # still in the arena
        with pytest.raises(OptionError, match="no more"):
            step(make_x())
    with arena:
        step(make_x())


def test_scratch_at_the_peak():
    x, weight = make_x(), np.ones((256, COLS), np.float32)
    trace = traced(lambda: gpu_ops.linear(x, weight))
    labels = [b.label for b in trace.at_peak()]
    assert sorted(labels) == ["linear: y", "scratch of the CPU's kernels"]
    assert trace.peak_bytes == sum(b.nbytes for b in trace.at_peak())


def test_traces_and_arenas_do_not_nest():
    arena = memory.Arena(traced(step, make_x()))
    with arena, pytest.raises(OptionError, match="in use in this thread already"), memory.Trace():
        pass
    with arena:
        step(make_x())


def test_the_emulator_runs_in_an_arena(monkeypatch):
    monkeypatch.setenv("GPU_OPS_DEVICE", "emulator")
    monkeypatch.setenv("GPU_OPS_BACKEND", "raw")
    x = make_x(4)
    with memory.Trace("sm_80") as trace:
        y = step(x)
        del y
    with memory.Arena(trace):
        assert np.array_equal(step(x), step_outside(x))


def step_outside(x):
    """Run a step in another thread: an arena belongs to one thread."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(step, x).result()


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 30))),
        max_size=40,
    )
)
def test_buffers_alive_at_once_share_nothing(drawn):
    buffers = [Buffer("", size, came, None if more is None else came + more) for size, came, more in drawn]
    offsets, total = place(buffers, 16)
    for i, (a, at) in enumerate(zip(buffers, offsets, strict=True)):
        assert at % 16 == 0
        assert at + a.nbytes <= total
        for b, other in zip(buffers[:i], offsets, strict=False):
            together = (b.freed_at is None or a.allocated_at < b.freed_at) and (
                a.freed_at is None or b.allocated_at < a.freed_at
            )
            disjoint = at + a.nbytes <= other or other + b.nbytes <= at
            assert disjoint or not together


def test_cuda_is_the_card_at_hand(cupy):
    """The card of the fake CuPy is an A30, which has the preset of its architecture."""
    assert traced(step, make_x(), device="cuda").buffers == traced(step, make_x(), device="sm_80").buffers


@pytest.mark.skipif(cuda_missing() is None, reason="has a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(DeviceError, match=r"device='cuda': .*; name a card"), memory.Trace("cuda"):
        pass


def test_earlier_names_of_a_buffers_moments():
    buffer = memory.Buffer("x", 1, 3, 5)
    with pytest.warns(DeprecationWarning, match="allocated_at"):
        assert buffer.came == 3
    with pytest.warns(DeprecationWarning, match="freed_at"):
        assert buffer.went == 5
