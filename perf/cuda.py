"""Timing, memory, energy and limits on a CUDA device. Imported only with ``--device cuda``; needs CuPy.

Time comes from device events around one call. A large fill runs first and is read again. It keeps the device busy
while Python prepares the call, which hides the launch overhead. It also leaves the caches cold and clean, because
writing back dirty lines would slow the call. Memory is the peak of CuPy's pool during a call, and the driver's count
around it. Energy and clocks are NVML's, over back-to-back calls. The limits are a device-to-device copy and cuBLAS.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from perf.case import Call, Case, RunOptions, make_inputs, nbytes
from perf.machine import nvml_device
from perf.stats import Limits, Power


@functools.cache
def _scratch() -> Any:
    """Buffer larger than the L2 cache, which takes the fastest device a tenth of a millisecond to fill."""
    return cupy.empty(max(4 * last_level_cache(), 512 << 20), cupy.uint8)


def flush() -> None:
    """Empty the L2 cache, dirty lines included."""
    _scratch().fill(1)
    _scratch().view(cupy.uint64).max()


def timed(call: Call) -> float:
    """Seconds between two device events, including the gaps between launches."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    flush()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def last_level_cache() -> int:
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def power(call: Callable[[], Any], seconds: float) -> Power | None:
    """Power of back-to-back calls for this long; NVML's counter has steps of 20 to 100 ms. None without NVML."""
    try:
        nvml, device = nvml_device()
        joules(nvml, device)
    except Exception:  # no package, no permission, a card before Volta
        return None
    call()
    cupy.cuda.Device().synchronize()
    calls, clocks, last = 0, [], None
    before, start = joules(nvml, device), time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(_BATCH):
            call()
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        clocks.append(
            [nvml.nvmlDeviceGetClockInfo(device, of) for of in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)]
        )
        if last is not None:  # one batch stays queued, so that the device never waits for the host
            last.synchronize()
        calls, last = calls + _BATCH, event
    cupy.cuda.Device().synchronize()
    spent, took = joules(nvml, device) - before, time.perf_counter() - start
    return Power(spent / calls, spent / took, *np.mean(clocks, axis=0).tolist())


_BATCH = 8  # calls


def joules(nvml: Any, device: Any) -> float:
    """Joules that a device has used since its driver was loaded."""
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3


class PoolPeak(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """Peak of the bytes in use from CuPy's pool."""

    name = "PoolPeak"

    def __init__(self) -> None:
        self.peak = 0

    def malloc_postprocess(self, **_: Any) -> None:
        self.peak = max(self.peak, cupy.get_default_memory_pool().used_bytes())


def peak_growth(case: Case, config: RunOptions, contender: str) -> tuple[int, int]:
    """Peak bytes of one warm call beyond its inputs, and the bytes of its results.

    The peak is the larger of the pool's count and the driver's: a library with its own allocator shows only in the
    driver's.
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
    out = cupy.empty_like(a)
    single = best(lambda: cupy.matmul(a, b, out=out), repetitions)
    half_a, half_b, half_out = (x.astype(cupy.float16) for x in (a, b, out))
    half = best(lambda: cupy.matmul(half_a, half_b, out=half_out), repetitions)
    flops = 2.0 * n**3
    return Limits(2 * size / copy, size / read, flops / single, buffer_bytes=size, matmul_half=flops / half)


def best(call: Call, repetitions: int) -> float:
    """Best of ``repetitions``, after enough of the same work to bring the clocks up."""
    start = time.perf_counter()
    while time.perf_counter() - start < _WARM_SECONDS:
        timed(call)
    return min(timed(call) for _ in range(repetitions))


_WARM_SECONDS = 0.5
