"""Timing, memory and limits on a CUDA device. Imported only with ``--device cuda``; needs CuPy.

Time comes from device events around one call. A large fill runs first: it keeps the device busy while Python prepares
the call, so the launch overhead is hidden, and it leaves the caches cold. Memory is the peak of CuPy's pool during a
call, and the driver's count around it. The limits are a device-to-device copy and cuBLAS.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

import cupy
import numpy as np

from perf.case import Call, Case, Config, Inputs, make_inputs, nbytes
from perf.limits import Limits


def put(x: Inputs) -> Inputs:
    """Copy the arrays to the device. A TernaryMatrix moves itself."""
    return {name: cupy.asarray(one) if isinstance(one, np.ndarray) else one for name, one in x.items()}


def get(x: Inputs) -> Inputs:
    """The inverse of :func:`put`, for the reference."""
    return {name: cupy.asnumpy(one) if isinstance(one, cupy.ndarray) else one for name, one in x.items()}


@functools.cache
def _scratch() -> Any:
    """Larger than the L2 cache, and a tenth of a millisecond to fill on the fastest device."""
    return cupy.empty(max(4 * last_level_cache(), 512 << 20), cupy.uint8)


def timed(call: Call) -> float:
    """Seconds between two device events, including the gaps between launches."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    _scratch().fill(1)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def last_level_cache() -> int:
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


class PoolPeak(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """The peak of the bytes in use from CuPy's pool."""

    name = "PoolPeak"

    def __init__(self) -> None:
        self.peak = 0

    def malloc_postprocess(self, **_: Any) -> None:
        self.peak = max(self.peak, cupy.get_default_memory_pool().used_bytes())


def peak_growth(case: Case, config: Config, contender: str) -> tuple[int, int]:
    """Peak bytes of one warm call beyond its inputs, and the bytes of its results.

    The larger of the pool's count and the driver's: a library with its own allocator shows only in the driver's.
    """
    prepare = case.contender(contender)
    prepare(make_inputs(case, config, small=True))()
    call = prepare(make_inputs(case, config))
    cupy.cuda.Device().synchronize()
    release()  # memory that torch has cached would not show as growth
    used, held = cupy.get_default_memory_pool().used_bytes(), driver_used()
    hook = PoolPeak()
    with hook:
        value = call()
        cupy.cuda.Device().synchronize()
    return max(hook.peak - used, driver_used() - held, 0), nbytes(value)


def release() -> None:
    """Give the cached memory of CuPy's and torch's pools back to the device."""
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


def driver_used() -> int:
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def measure_limits(repetitions: int = 20) -> Limits:
    size = max(4 * last_level_cache(), 256 << 20)
    source = cupy.arange(size // 8, dtype=cupy.uint64)
    target = cupy.ones_like(source)
    copy = best(lambda: cupy.copyto(target, source), repetitions)
    read = best(lambda: source.max(), repetitions)
    n = 8192
    a, b = (cupy.random.standard_normal((n, n), dtype=cupy.float32) for _ in range(2))
    single = best(lambda: a @ b, repetitions)
    half_a, half_b = a.astype(cupy.float16), b.astype(cupy.float16)
    half = best(lambda: half_a @ half_b, repetitions)
    flops = 2.0 * n**3
    return Limits(2 * size / copy, size / read, flops / single, buffer_bytes=size, matmul_half=flops / half)


def best(call: Call, repetitions: int) -> float:
    timed(call)
    return min(timed(call) for _ in range(repetitions))
