"""NUMBA_NUM_THREADS: an invalid number of threads is refused by name, and small machines do not start thousands."""

from __future__ import annotations

import pytest

from gpu_ops.kernels.common.cpu import parallel
from tests.support.processes import python


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
