"""What measuring on a CUDA device does differently. Imported only with ``--device cuda``; needs CuPy.

Time comes from device events around one call, memory from the peak of CuPy's pool during it and from NVML
around it, limits from a device-to-device copy and cuBLAS.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cupy
import numpy as np

from perf.case import Call, Case, Config, make_inputs, nbytes
from perf.limits import Limits


def put(value: Any) -> Any:
    """Inputs on the device: arrays, dicts of them, dataclasses that hold them (TernaryMatrix)."""
    if isinstance(value, dict):
        return {name: put(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return cupy.asarray(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        arrays = {
            f.name: put(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.init and isinstance(getattr(value, f.name), np.ndarray)
        }
        return dataclasses.replace(value, **arrays)
    return value


def timed(call: Call) -> float:
    """Seconds on the device between two events, launch gaps included."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def last_level_cache() -> int:
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


class PoolPeak(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """The most that CuPy's pool has handed out at once."""

    name = "PoolPeak"

    def __init__(self) -> None:
        self.peak = 0

    def malloc_postprocess(self, **_: Any) -> None:
        self.peak = max(self.peak, cupy.get_default_memory_pool().used_bytes())


def peak_growth(case: Case, config: Config, contender: str) -> tuple[int, int]:
    """Peak bytes of one warm call beyond its inputs, and the bytes of its results.

    The pool's own count, or NVML's when that is larger: a library with its own allocator shows only there.
    """
    prepare = getattr(case, contender)
    prepare(make_inputs(case, config, small=True))()
    call = prepare(make_inputs(case, config))
    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    used, held = pool.used_bytes(), nvml_used()
    hook = PoolPeak()
    with hook:
        value = call()
        cupy.cuda.Device().synchronize()
    return max(hook.peak - used, nvml_used() - held, 0), nbytes(value)


def nvml_used() -> int:
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(cupy.cuda.Device().id)).used)


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
    return Limits(2 * size / copy, size / read, flops / single, flops / half, size)


def best(call: Call, repetitions: int) -> float:
    timed(call)
    return min(timed(call) for _ in range(repetitions))
