"""Memory of large results is reused, but never while an array uses it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import memory_pool
from gpu_ops.errors import OptionError
from gpu_ops.memory_pool import MemoryPool
from tests.support.processes import exit_code, python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems' C libraries keep large arrays"
)

MB = 1 << 20


@pytest.fixture
def pool(monkeypatch):
    """Separate pool that keeps 8 MiB."""
    monkeypatch.setenv("GPU_OPS_POOL_MB", "8")
    return MemoryPool()


def address(x):
    return x.__array_interface__["data"][0]


def test_a_large_result_gets_the_memory_of_the_last(monkeypatch):
    pool = MemoryPool()
    monkeypatch.setattr("gpu_ops.core.device.POOL", pool)
    x, weight = np.ones((9000, 1000), np.float32), np.ones(1000, np.float32)
    assert x.nbytes > memory_pool.FROM_BYTES
    y = gpu_ops.rmsnorm(x, weight)
    assert pool.kept_bytes == 0
    first, expected = address(y), y.copy()
    del y
    assert pool.kept_bytes >= x.nbytes
    y = gpu_ops.rmsnorm(x, weight)
    assert address(y) == first
    assert pool.kept_bytes == 0
    np.testing.assert_array_equal(y, expected)


def test_little_more_is_taken_than_asked_for(pool):
    for size in (MB, MB + 1, 2 * MB + 100, 5 * MB - 1):
        x = pool.empty((size,), np.uint8)
        del x
        assert pool.kept_bytes - size < 64 << 10
        assert [len(block) for block in pool._kept] == [pool.kept_bytes]
        pool._kept.clear()
        pool.kept_bytes = 0


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_it_is_an_array_like_others(pool, dtype):
    x = pool.empty((2, 617, 999), dtype)
    assert type(x) is np.ndarray
    assert (x.shape, x.dtype) == ((2, 617, 999), dtype)
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert x.flags.aligned
    x.fill(1)
    assert address(x) % 4096 == 0
    assert (x == 1).all()


def test_small_and_too_large_results_are_numpys(pool):
    for shape in ((), (0, 5), (MB - 1,), (8 * MB + 1,)):
        assert pool.empty(shape, np.uint8).flags.owndata
    for shape in ((MB,), (8 * MB,)):
        assert not pool.empty(shape, np.uint8).flags.owndata


@pytest.mark.parametrize(
    "hold", [lambda x: x[3:5], memoryview, np.from_dlpack], ids=["view", "buffer", "dlpack"]
)
def test_memory_that_is_still_seen_is_not_lent_again(pool, hold):
    x = pool.empty((4 * MB,), np.uint8)
    x.fill(7)
    held = hold(x)
    del x
    other = pool.empty((4 * MB,), np.uint8)
    other.fill(9)
    assert set(bytes(held)) == {7}
    assert pool.kept_bytes == 0
    del held
    assert pool.kept_bytes == 4 * MB


def test_only_a_block_of_the_size_is_lent(pool):
    x = pool.empty((4 * MB,), np.uint8)
    at = address(x)
    del x
    assert address(pool.empty((2 * MB,), np.uint8)) != at
    assert address(pool.empty((4 * MB - 5,), np.uint8)) == at  # whole huge pages


def test_what_exceeds_the_limit_goes_the_oldest_first(pool):
    results = [pool.empty((size * MB,), np.uint8) for size in (2, 4, 6)]
    while results:
        del results[0]
    assert [len(block) // MB for block in pool._kept] == [6]


def test_nothing_is_kept_without_a_limit(pool, monkeypatch):
    monkeypatch.setenv("GPU_OPS_POOL_MB", "0")
    assert pool.empty((4 * MB,), np.uint8).flags.owndata


@pytest.mark.parametrize("text", ["-1", "many", "", "1.5"])
def test_a_limit_that_is_no_number_is_refused(pool, monkeypatch, text):
    monkeypatch.setenv("GPU_OPS_POOL_MB", text)
    monkeypatch.setattr("gpu_ops.core.device.POOL", pool)
    x = np.ones((1024, 1024), np.float32)
    with pytest.raises(OptionError, match="GPU_OPS_POOL_MB"):
        gpu_ops.swiglu(x, x)


def test_without_a_mapping_the_result_is_numpys(pool, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more mappings")

    monkeypatch.setattr(memory_pool, "_Block", refuse)
    assert pool.empty((4 * MB,), np.uint8).flags.owndata


def test_the_system_is_offered_what_was_not_used_for_long(pool, monkeypatch):
    monkeypatch.setattr(memory_pool, "RECENT_BYTES", 4 * MB)
    results = [pool.empty((2 * MB,), np.uint8) for _ in range(4)]
    while results:
        del results[0]
    assert [block.offered for block in pool._kept] == [True, True, False, False]
    newest = pool.empty((2 * MB,), np.uint8)
    newest.fill(1)
    del newest
    assert [block.offered for block in pool._kept] == [True, True, False, False]


@pytest.mark.parametrize("advice", ["MADV_HUGEPAGE", "MADV_FREE"])
def test_a_system_without_the_advice_is_borne(pool, monkeypatch, advice):
    monkeypatch.setattr(memory_pool, "RECENT_BYTES", 0)
    monkeypatch.setattr(memory_pool.mmap, advice, -1)  # EINVAL
    x = pool.empty((4 * MB,), np.uint8)
    x.fill(3)
    del x
    assert pool.kept_bytes == 4 * MB


def test_a_result_may_be_freed_while_its_thread_is_in_the_pool(pool):
    """The garbage collector may free it at any allocation."""
    x = pool.empty((4 * MB,), np.uint8)
    with pool._lock:
        del x
        y = pool.empty((4 * MB,), np.uint8)
    y.fill(1)
    assert pool.kept_bytes == 0


def test_threads_never_share_a_block(pool):
    mistakes = []

    def work(mark):
        for _ in range(200):
            x = pool.empty((2 * MB,), np.uint8)
            x[::4096] = mark
            if (x[::4096] != mark).any():
                mistakes.append(mark)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(1, 9)))
    assert not mistakes
    assert pool.kept_bytes <= pool.limit


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork (POSIX)")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_writes_its_own_copy(pool):
    x = pool.empty((4 * MB,), np.uint8)
    x.fill(1)
    child = os.fork()
    if child == 0:
        x.fill(2)
        os._exit(0 if (x == 2).all() else 1)
    assert exit_code(child) == 0
    assert (x == 1).all()


def test_results_at_the_end_of_a_process_go_quietly():
    code = (
        "import numpy as np; from gpu_ops.memory_pool import POOL\n"
        "x = POOL.empty((64 << 20,), np.uint8); cycle = [x]; cycle.append(cycle)"
    )
    assert python("-c", f"import sys; sys.stderr = sys.stdout\n{code}") == ""
