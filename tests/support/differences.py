"""Gradients against central differences in float64, along random directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]
STEP = 1e-5  # central differences in float64: truncation and rounding errors both near 1e-10


def check_gradients(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[Array],
    cotangents: Sequence[Array],
    gradients: Sequence[Array],
    rng: np.random.Generator,
) -> None:
    """Compare every gradient with a directional difference in only its input."""
    for index, (point, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        assert gradient.shape == point.shape
        direction = rng.standard_normal(point.shape)

        def value(step: float, index: int = index, direction: Array = direction) -> float:
            moved = list(inputs)
            moved[index] = moved[index] + step * direction
            return math.fsum(
                float(np.sum(c * out)) for c, out in zip(cotangents, function(*moved), strict=True)
            )

        difference = (value(STEP) - value(-STEP)) / (2 * STEP)
        assert difference == pytest.approx(float(np.sum(gradient * direction)), rel=1e-7, abs=1e-8), index
