"""What this machine can do at all, measured in the same run as the kernels it judges.

CPU: the larger of our own compiled loops (peaks.py) and NumPy's inner loops and BLAS, on the threads the kernels
get. NumPy's: reading is ``bitwise_or.reduce`` (a vector loop that releases the GIL) over one slice per thread,
copying ``copyto``, arithmetic one large float32 ``matmul``. Best of the repetitions: a limit that a lucky run
beats is no limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from perf.machine import available_cores, last_level_cache, memory_available


@dataclass(frozen=True)
class Limits:
    """Bytes per second (copy counts reads and writes) and float operations per second."""

    copy: float
    read: float
    matmul: float
    matmul_bfloat16: float | None = None
    """torch's bfloat16 matmul where torch is installed: for information, no share is taken of it."""
    buffer_bytes: int = 0
    matmul_half: float | None = None
    """Of 16-bit inputs on a GPU, of bfloat16 on a CPU that multiplies it: sets the limit of those cases."""

    def bandwidth(self, kind: str) -> float:
        return self.read if kind == "read" else self.copy

    def seconds(self, flops: float, traffic: float, kind: str, *, half: bool = False) -> tuple[float, str]:
        """The least time for that work (the roofline), and which limit sets it; ``half``: matmul_half."""
        matmul = self.matmul_half if half and self.matmul_half else self.matmul
        arithmetic, memory = flops / matmul, traffic / self.bandwidth(kind)
        return (arithmetic, "matmul") if arithmetic >= memory else (memory, kind)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    *, device: str = "cpu", threads: int | None = None, quick: bool = False, use_torch: bool = True
) -> Limits:
    if device == "cuda":
        from perf.cuda import measure_limits

        return measure_limits()
    count = threads or available_cores()
    buffer = buffer_size(quick)
    copy, read = bandwidths(buffer, count, repetitions=5 if quick else 10)
    size, repetitions = (2048, 3) if quick else (4096, 5)
    matmul = numpy_matmul(size, repetitions)
    bfloat16 = None
    if use_torch:
        peer = torch_matmul(size, repetitions, count)
        if peer:
            matmul, bfloat16 = max(matmul, peer[0]), peer[1]
    from perf import peaks

    peak = peaks.measure(buffer, repetitions=5 if quick else 10)
    copy, read = max(copy, peak.copy, peak.copy_non_temporal), max(read, peak.read)
    return Limits(copy, read, max(matmul, peak.multiply_add), bfloat16, buffer, peak.dot_bfloat16)


def buffer_size(quick: bool) -> int:
    """Past the last-level cache, within an eighth of the free memory: virtual machines report the
    whole host's cache, which can be larger than their memory."""
    wanted = min(2 * last_level_cache(), (256 << 20) if quick else (1 << 30))
    return max(32 << 20, min(wanted, memory_available() // 8))


def bandwidths(buffer: int, threads: int, repetitions: int) -> tuple[float, float]:
    """Of one buffer, as large as the inputs that the cases rotate over: its first half copied onto its
    second, and all of it read."""
    words = buffer // 8 // (2 * threads) * (2 * threads)
    whole = np.arange(1, words + 1, dtype=np.uint64)  # touched here, so that no page fault is timed
    slices = np.split(whole, threads)
    sources, targets = (np.split(half, threads) for half in np.split(whole, 2))
    with ThreadPoolExecutor(threads) as pool:
        read = best(lambda: list(pool.map(np.bitwise_or.reduce, slices)), repetitions)
        copy = best(lambda: list(pool.map(np.copyto, targets, sources)), repetitions)
    return 8 * words / copy, 8 * words / read


def numpy_matmul(size: int, repetitions: int) -> float:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    return 2.0 * size**3 / best(lambda: np.matmul(a, b, out=out), repetitions)


def torch_matmul(size: int, repetitions: int, threads: int) -> tuple[float, float] | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty_like(a)
    single = best(lambda: torch.mm(a, b, out=out), repetitions)
    a, b, out = a.bfloat16(), b.bfloat16(), out.bfloat16()
    half = best(lambda: torch.mm(a, b, out=out), repetitions)
    return 2.0 * size**3 / single, 2.0 * size**3 / half


def best(call: Callable[[], Any], repetitions: int) -> float:
    call()
    fastest = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
