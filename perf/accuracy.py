"""The error of a benched result against the float64 reference, and whether it is within tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.reference.tolerance import FORWARD, GRADIENT, tolerance
from perf.case import DTYPES, Case, RunOptions, make_inputs, results, to_float64, to_host

ATTENTION_FLOAT32_MEAN = 1e-5
"""float32 attention must also have a mean absolute error below this."""


@dataclass(frozen=True)
class Error:
    """Error of the result that is worst relative to its tolerance."""

    largest: float
    mean: float
    tolerance: float
    naive_largest: float
    """The error of the same formula in NumPy with every intermediate rounded to the dtype."""
    worst: str
    ok: bool
    sampled: str
    """``part of the benched result`` or ``a smaller problem``."""


def check(case: Case, inputs: Any, config: RunOptions) -> Error:
    if case.sample is not None:
        # recomputes part of the result that was timed
        inputs, ours = case.sample(inputs, case.ours(inputs)())
        sampled = "part of the benched result"
    else:
        inputs = make_inputs(case, config, small=True)
        ours = case.ours(inputs)()
        sampled = "a smaller problem"
    if config.device == "cuda":
        inputs = to_host(inputs)
    exact = [to_float64(r) for r in results(case.reference(inputs, "float64"))]
    naive = [to_float64(r) for r in results(case.reference(inputs, "naive"))]
    return compare(results(ours), exact, naive, case=case, sampled=sampled)


def compare(
    ours: Sequence[Any], exact: Sequence[np.ndarray], naive: Sequence[np.ndarray], *, case: Case, sampled: str
) -> Error:
    if len(ours) != len(exact):
        raise AssertionError(f"{case.key}: {len(ours)} results, the reference gives {len(exact)}")
    triples = enumerate(zip(ours, exact, naive, strict=True))
    errors = [_error(f"result {i}", *arrays, case, sampled) for i, arrays in triples]
    return max(errors, key=lambda error: (not error.ok, error.largest / max(error.tolerance, 1e-300)))


def _error(name: str, ours: Any, exact: np.ndarray, naive: np.ndarray, case: Case, sampled: str) -> Error:
    actual = to_float64(ours)
    if actual.shape != exact.shape:
        raise AssertionError(f"{case.key}, {name}: shape {actual.shape}, the reference gives {exact.shape}")
    with np.errstate(invalid="ignore"):
        difference = np.where(actual == exact, 0.0, np.abs(actual - exact))  # equal infinities have no error
    difference[np.isnan(difference)] = np.inf
    # a result's own dtype: lse and dweight are float32 for any inputs
    dtype = DTYPES.get(str(ours.dtype), DTYPES[case.dtype])
    allowed = tolerance(exact, naive, dtype, GRADIENT if case.backward else FORWARD)
    at = np.unravel_index(int(difference.argmax()), difference.shape) if difference.size else ()
    largest = float(difference.max(initial=0.0))
    mean = float(difference.mean()) if difference.size else 0.0
    ok = largest <= allowed
    if case.op == "attention" and case.dtype == "float32":
        ok = ok and mean < ATTENTION_FLOAT32_MEAN
    return Error(
        largest=largest,
        mean=mean,
        tolerance=float(allowed),
        naive_largest=float(np.abs(naive - exact).max(initial=0.0)),
        worst=f"{name} at {tuple(int(i) for i in at)}: {actual[at]:.9g}, reference {exact[at]:.9g}",
        ok=bool(ok),
        sampled=sampled,
    )
