"""Summaries of repeated timings, and the limits to which they are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 20th and 80th percentile, fastest, and the number of calls."""

    median: float
    p20: float
    p80: float
    fastest: float
    calls: int
    first: float = 0.0
    """The very first call, which compiles or loads kernels; not part of the rest."""
    sets: int = 1
    """How many copies of the inputs the calls rotate over."""


@dataclass(frozen=True)
class Power:
    """Power of back-to-back calls: energy of one call, and means over all of them."""

    joules: float
    watts: float
    sm_mhz: float
    memory_mhz: float


@dataclass(frozen=True)
class Limits:
    """Bytes per second (copy counts reads and writes) and float operations per second."""

    copy: float
    read: float
    matmul: float
    matmul_bfloat16: float | None = None
    """torch's bfloat16 matmul where torch is installed. For information: no case has it as its limit."""
    buffer_bytes: int = 0
    matmul_half: float | None = None
    """16-bit inputs on a GPU, bfloat16 on a CPU that multiplies it: the limit of cases with these dtypes."""

    def seconds(self, flops: float, traffic: float, kind: str, *, half: bool = False) -> tuple[float, str]:
        """Minimum time for this work (the roofline), and the limit that sets it. ``half`` selects matmul_half."""
        matmul = self.matmul_half if half and self.matmul_half else self.matmul
        arithmetic, memory = flops / matmul, traffic / (self.read if kind == "read" else self.copy)
        return (arithmetic, "matmul") if arithmetic >= memory else (memory, kind)


def summarise(samples: Sequence[float], *, first: float = 0.0, sets: int = 1) -> Timing:
    if not len(samples):
        raise ValueError("no samples to summarise")
    p20, median, p80 = (float(t) for t in np.percentile(np.asarray(samples, np.float64), [20, 50, 80]))
    return Timing(median, p20, p80, float(min(samples)), len(samples), first, sets)


def best(call: Callable[[], Any], repetitions: int) -> float:
    call()
    fastest = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
