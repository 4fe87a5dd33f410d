"""An infinity among the values that a query sees: its column of the result is that infinity or NaN, the others are
as without it. Behind a mask it is not there.

The exact weight of a visible key is above 0, and the result that infinity. A weight that underflows makes 0 x inf,
which is NaN, and kernels that split a value into two parts make NaN of inf - inf.
"""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from tests.calls import DTYPES

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    return {"*": {"dtype": [DTYPES[1]], "gap": [200.0], "infinity": [np.inf]}} if raw else {"*": None}


@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
@pytest.mark.parametrize("gap", [0.0, 50.0, 200.0, 2000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_an_infinite_value(dtype, gap, infinity, backend):
    """``gap``: how far the score of its key is below that of key 0."""
    q, k, v = np.ones((1, 6, 1, 16), dtype), np.zeros((1, 6, 1, 16), dtype), np.ones((1, 6, 1, 16), dtype)
    k[0, 0] = gap / 4
    v[0, :, 0] = np.arange(6)[:, None] / 8
    with np.errstate(invalid="ignore", over="ignore"):
        want = gpu_ops.attention(q, k, v, causal=True, **backend)
        v[0, 3, 0, 5] = infinity
        found = gpu_ops.attention(q, k, v, causal=True, **backend)
    sees = np.zeros(found.shape, bool)
    sees[0, 3:, 0, 5] = True
    close = 1e-30  # of weights below float32's range, one way of computing keeps a little
    np.testing.assert_allclose(*(x[~sees].astype(np.float64) for x in (found, want)), rtol=0, atol=close)
    hit = found[sees].astype(np.float64)
    assert ((hit == infinity) | np.isnan(hit)).all()
    if gap == 0 and backend["device"] == "cpu":
        assert (hit == infinity).all()
