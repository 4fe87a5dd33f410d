"""Replay of recorded launches in one native call: records of arguments, and threads that join late or leave."""

from __future__ import annotations

import os
import threading
from collections import namedtuple

import numpy as np
import pytest

import gpu_ops
from gpu_ops.kernels.common.cpu.codegen.entry import record_of
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.jit import kernel, read, write
from gpu_ops.kernels.common.cpu.parallel import claim, launch, launch_inline
from gpu_ops.kernels.common.cpu.replay import Replay
from gpu_ops.kernels.recording import on_host, recorded
from tests.support.processes import python

Pair = namedtuple("Pair", "flag tail")
PAIR = types.NamedTuple([types.boolean, types.UniTuple(types.float32, 2)], Pair)


@kernel(
    lambda _: (
        write("float64", 1),
        read("float32", 3),
        types.int64,
        types.uint64,
        types.float64,
        PAIR,
        types.Array(types.int8, 2, "C"),
    ),
    variants=(None,),
)
def arguments_seen(state, n_tasks, out, x, negative, large, real, pair, codes):
    """Write what each argument is."""
    task = claim(state)
    while task < n_tasks:
        out[0], out[1], out[2] = x[1, 2, 3], negative, real
        out[3] = 1.0 if large == np.uint64(0xFFFFFFFFFFFFFFFF) else 0.0
        out[4], out[5], out[6] = pair.flag, pair.tail[0], pair.tail[1]
        out[7], out[8] = codes[1, 2], x.strides[0]
        task = claim(state)


@kernel(lambda _: (write("int64", 2), types.int64), variants=(None,))
def add_rows(state, n_tasks, x, amount):
    task = claim(state)
    while task < n_tasks:
        for j in range(x.shape[1]):
            x[task, j] = x[task, j] * 3 + amount
        task = claim(state)


def test_a_record_holds_every_kind_of_argument():
    out = np.zeros(9)
    x = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)[::-1, :, ::2]
    codes = np.arange(12, dtype=np.int8).reshape(3, 4)
    values = out, x, -7, 0xFFFFFFFFFFFFFFFF, 0.25, Pair(True, (np.float32(1.5), np.float32(-2.5))), codes
    with recorded() as recording:
        launch_inline(arguments_seen[None], 1, *values)
    expected = out.copy()
    assert expected.tolist() == [x[1, 2, 3], -7, 0.25, 1, 1, 1.5, -2.5, 6, x.strides[0]]
    out[:] = 0
    Replay(recording)()
    assert out.tolist() == expected.tolist()


def test_what_has_no_place_in_a_record_is_refused():
    _, argument_types = add_rows[None].entry
    assert len(argument_types) == 2
    with pytest.raises(TypeError, match="holds no unicode_type"):
        record_of((types.unicode_type,), ("text",))


def test_steps_between_launches_stay_in_their_place():
    """A recording reads the new contents of its arrays, in the recorded order."""
    x, source = np.ones((8, 4), np.int64), np.arange(4, dtype=np.int16)
    with recorded() as recording:
        launch(add_rows[None], 8, x, 1)
        on_host(np.copyto, x[2], source)
        launch_inline(add_rows[None], 8, x, 2)
    assert x[0].tolist() == [14] * 4
    assert x[2].tolist() == [2, 5, 8, 11]
    x[:], source[:] = 0, 10
    Replay(recording)()
    assert x[0].tolist() == [5] * 4
    assert x[2].tolist() == [32] * 4


def replays(count: int, rows: int, launches: int) -> bool:
    """Whether ``count`` replays of many small launches, each of which reads the last one's result, are right."""
    x = np.zeros((rows, 3), np.int64)
    with recorded() as recording:
        for i in range(launches):
            (launch if i % 3 else launch_inline)(add_rows[None], rows, x, i)
    expected, replay = x.copy(), Replay(recording)
    for _ in range(count):
        x[:] = 0
        replay()
        if not np.array_equal(x, expected):
            return False
    return True


def test_launches_follow_each_other_on_threads_that_share_cores():
    """Four threads on any number of cores."""
    code = "from tests.core.test_native_replay import replays; assert replays(200, 16, 60)"
    python("-c", code, NUMBA_NUM_THREADS="4", GPU_OPS_QUIET="1")


def test_two_replays_at_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(replays(50, 8, 40))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system does not have")
def test_a_forked_child_replays():
    assert replays(1, 8, 10)
    child = os.fork()
    if child == 0:
        os._exit(0 if replays(5, 8, 10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_interrupted_replay_ends_and_the_next_is_right():
    """Ctrl-C in the midst of replays: it arrives after the native call, and no thread is left in a kernel."""
    code = """
import signal
from tests.core.test_native_replay import replays

signal.signal(signal.SIGALRM, signal.default_int_handler)
assert replays(1, 8, 10)
for i in range(20):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.0005 * i)
        while True:
            assert replays(20, 8, 30)
    except KeyboardInterrupt:
        assert replays(3, 8, 30)
"""
    python("-c", code, NUMBA_NUM_THREADS="3", GPU_OPS_QUIET="1")


def test_an_op_is_replayed_on_new_contents(rng):
    x, w = rng.standard_normal((6, 64), np.float32), np.ones(64, np.float32)
    gpu_ops.rmsnorm(x, w)
    with recorded() as recording:
        y = gpu_ops.rmsnorm(x, w)
    x *= 3
    x[0] += 1
    Replay(recording)()
    assert np.array_equal(y, gpu_ops.rmsnorm(x, w))
