"""Cards for tests of launch choices: of each size of shared memory the fewest and the most SMs; others are slow."""

from __future__ import annotations

import pytest

from gpu_ops.presets import PRESETS

CARDS = [p for p in PRESETS.values() if p.arch.compute_capability >= (8, 0)]
EXTREMES = ("sm_89", "RTX 5090", "sm_87", "A100-40", "H100 PCIe", "B200")

each_card = pytest.mark.parametrize(
    "card",
    [pytest.param(p, id=p.name, marks=() if p.name in EXTREMES else pytest.mark.slow) for p in CARDS],
)
