"""Law: a call after any other gives the bits, or raises the error, that it gives or raises in a fresh process.

``forget_calls`` represents the fresh process. Both calls are small changes of one valid call: with an incomplete key,
the second would often be mistaken for the first.
"""

from __future__ import annotations

import collections
import functools
import re

import numpy as np
import pytest

from gpu_ops.core.op import forget_calls
from gpu_ops.errors import GpuOpsError
from tests.support.calls import DTYPES, OPS, call, results
from tests.support.laws import NAMES, outcome
from tests.support.second_calls import ENVIRONMENT, all_arrays, pair, pick

SIGNATURE = re.compile(r"(missing|takes|multiple values|required positional)")


def answer(case, held, environment, monkeypatch):
    """Bits of a call's results, or its error, and its arrays' contents after. ``held``: their contents before."""
    for x, then in held:
        if x.flags.writeable:
            x[...] = then
    arguments = all_arrays(case)
    value, error = attempt(case, environment, monkeypatch)
    if error is not None:
        for x, then in held:
            assert x.tobytes() == then.tobytes(), f"written to, then {error!r}"
        signature = type(error) is TypeError and SIGNATURE.search(str(error))
        assert signature or isinstance(error, GpuOpsError), repr(error)
        return type(error), str(error)
    arrays = results(tuple(value) if isinstance(value, list) else value)
    aliases = [i for r in arrays for i, x in enumerate(all_arrays(case)) if r is x]
    contents = [(type(x), x.dtype, x.shape, x.strides, x.tobytes()) for x in map(np.asanyarray, arrays)]
    return type(value), contents, aliases, [x.tobytes() for x in arguments]


def attempt(case, environment, monkeypatch):
    """Result or error of a call."""
    with np.errstate(all="ignore"), monkeypatch.context() as variables:
        for name, setting in environment.items():
            variables.setenv(name, setting)
        try:
            return case(), None
        except Exception as error:
            return None, error


@functools.cache
def results_of(name, dtype):
    """Results of a call of the table, for their shapes."""
    return outcome(call(name, dtype, seed=3), backend="reference")


def run_pairs(count, seed, monkeypatch):
    """Run ``count`` pairs. Returns the number of second calls that ran, and that raised."""
    for name in ("GPU_OPS_DEVICE", "GPU_OPS_BACKEND", "GPU_OPS_ARCH"):
        monkeypatch.delenv(name, raising=False)
    tally = collections.Counter()
    for i in range(count):
        rng = np.random.default_rng((seed, i))
        name, dtype = NAMES[i % len(NAMES)], pick(rng, DTYPES) if rng.random() < 0.3 else DTYPES[0]
        case = call(name, dtype, seed=3)
        backend = "reference" if dtype != DTYPES[0] or rng.random() < 0.6 else pick(rng, ("numba", None))
        case = case.having(backend=backend) if backend else case
        with np.errstate(all="ignore"):
            first, second = pair(case, rng, results_of(name, dtype))
        variables = pick(rng, ENVIRONMENT), pick(rng, ENVIRONMENT)
        if rng.random() < 0.8:
            variables = variables[1], variables[1]
        held = [(x, x.copy()) for x in (*all_arrays(first), *all_arrays(second))]
        what = f"pair {i} of seed {seed}: {name} {dtype}, {backend}"
        try:
            forget_calls()
            alone = answer(second, held, variables[1], monkeypatch)
            forget_calls()
            answer(first, held, variables[0], monkeypatch)
            after = answer(second, held, variables[1], monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
        assert after == alone, what
        tally["raised" if isinstance(alone[1], str) else "ran"] += 1
        tally[name.split()[0]] += 1
    return tally


def test_a_second_call_is_judged_like_a_first(monkeypatch):
    tally = run_pairs(3000, 1, monkeypatch)
    assert tally["ran"] > 500
    assert tally["raised"] > 300
    assert set(OPS) <= set(tally)


@pytest.mark.slow
def test_a_second_call_is_judged_like_a_first_at_length(monkeypatch):
    for seed in range(2, 22):
        run_pairs(1000, seed, monkeypatch)
