"""Cards and architectures of tests that need no GPU: by default those that differ most, the others in slow tests."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_ops.presets import PRESETS

CARDS = [p for p in PRESETS.values() if p.arch.compute_capability >= (8, 0)]
EXTREMES = (
    "sm_89",
    "RTX 5090",
    "sm_87",
    "A100-40",
    "H100 PCIe",
    "B200",
)  # by shared memory: fewest and most SMs


def slow(*levels: Any) -> list[Any]:
    """Slow values of a parameter."""
    return [pytest.param(level, marks=pytest.mark.slow) for level in levels]


each_card = pytest.mark.parametrize(
    "card", [p if p.name in EXTREMES else slow(p)[0] for p in CARDS], ids=lambda p: p.name
)
