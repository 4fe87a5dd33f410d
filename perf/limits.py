"""The machine's limits (bandwidth, arithmetic), measured in the same run as the kernels.

On a CPU: the larger of our own compiled loops (peaks.py) and NumPy's loops and BLAS, on as many threads as the
kernels use. NumPy reads with ``bitwise_or.reduce`` (a vector loop that releases the GIL), one slice per thread,
copies with ``copyto``, and computes one large float32 ``matmul``. The best repetition counts, because a kernel must
not beat its limit.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from perf.machine import available_cores, last_level_cache, memory_available
from perf.stats import Limits, best


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
    """Buffer size above the last-level cache, but within an eighth of the free memory: a virtual machine reports the
    cache of the whole host, which can exceed its memory."""
    wanted = min(2 * last_level_cache(), (256 << 20) if quick else (1 << 30))
    return max(32 << 20, min(wanted, memory_available() // 8))


def bandwidths(buffer: int, threads: int, repetitions: int) -> tuple[float, float]:
    """Copies the first half of a buffer onto the second, and reads all of it. The buffer is as large as the inputs
    that the cases rotate over."""
    words = buffer // 8 // (2 * threads) * (2 * threads)
    whole = np.arange(1, words + 1, dtype=np.uint64)  # writes every page, so that no page fault is timed
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
