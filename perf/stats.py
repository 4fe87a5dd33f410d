"""Summaries of repeated timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def summarise(samples: Sequence[float], *, first: float = 0.0, sets: int = 1) -> Timing:
    if not len(samples):
        raise ValueError("no samples to summarise")
    p20, median, p80 = (float(t) for t in np.percentile(np.asarray(samples, np.float64), [20, 50, 80]))
    return Timing(median, p20, p80, float(min(samples)), len(samples), first, sets)
