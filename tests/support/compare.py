"""Assertions whose messages give the worst index and both values."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_ops import reference
from gpu_ops.reference.tolerance import FORWARD, error_report, tolerance


def assert_close(actual, reference, naive, dtype, factor=FORWARD, what="result"):
    """Assert that ``actual`` obeys the tolerance rule of gpu_ops.reference.tolerance; float32 also MAE < 1e-5.

    ``reference``: precision="float64"; ``naive``: precision="naive"; ``dtype``: of the inputs.
    """
    actual = np.asarray(actual)
    problem = error_report(actual, reference, tolerance(reference, naive, dtype, factor))
    assert problem is None, f"{what}: {problem}"
    if np.dtype(dtype) == np.float32 and factor == FORWARD and actual.size:
        expected = np.asarray(reference, np.float64)
        finite = np.isfinite(expected)
        if finite.any():
            error = np.abs(actual.astype(np.float64)[finite] - expected[finite])
            scale = max(1.0, float(np.abs(expected[finite]).max()))  # 1e-5 applies to values of order one
            assert error.mean() < 1e-5 * scale, f"{what}: mean absolute error {error.mean():.3g}"


@contextlib.contextmanager
def naive_ops():
    """Run ops on the backend "reference", which is naive_t here: a model's textbook code, the same on any CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_OPS_BACKEND", "reference")
        for module in pkgutil.walk_packages(reference.__path__, f"{reference.__name__}."):
            for _, function in inspect.getmembers(importlib.import_module(module.name), inspect.isfunction):
                if (function.__kwdefaults__ or {}).get("precision") == "rounded":
                    patch.setitem(function.__kwdefaults__, "precision", "naive")
        yield


def random(rng, shape, dtype, scale=1.0):
    """Normal values rounded to ``dtype``."""
    return (scale * rng.standard_normal(shape)).astype(dtype)


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
