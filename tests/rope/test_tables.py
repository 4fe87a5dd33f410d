"""Tables of cos and sin for rope: values, sharing, and bounds."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gpu_ops import rope
from gpu_ops.ops.rope.tables import RopeTables, clear_rope_tables
from tests.support.processes import PATIENCE


@pytest.mark.parametrize("computed", [np.float32, np.float64])
def test_tables_are_the_rounded_cosines_of_the_positions(computed):
    clear_rope_tables()
    inv_freq = 10000.0 ** (-np.arange(32) / 32)
    # growing, shrinking, gathered, far apart, negative: kept tables and direct ones must agree
    for positions in (
        [range(10)],
        [[16]],
        [range(3000)],
        [[4096, 5, 5]],
        [[10**7, 3]],
        [[-4, 4]],
        [range(9)],
    ):
        p = np.array(positions, np.int64)
        cos, sin, rows = RopeTables(inv_freq, 1.25, computed)(p, int(p.min()), int(p.max()))
        assert rows.shape == p.shape
        assert cos.dtype == sin.dtype == computed
        angles = p[..., None] * inv_freq
        tolerance = 0.5000001 * np.finfo(computed).eps * 1.25 + 1e-15
        np.testing.assert_allclose(cos[rows], 1.25 * np.cos(angles), rtol=0, atol=tolerance)
        np.testing.assert_allclose(sin[rows], 1.25 * np.sin(angles), rtol=0, atol=tolerance)


def test_tables_are_kept_shared_and_bounded():
    clear_rope_tables()
    inv_freq = 10000.0 ** (-np.arange(64) / 64)
    first = RopeTables(inv_freq, 1.0, np.float32)(np.arange(100)[None], 0, 99)
    again = RopeTables(inv_freq, 1.0, np.float32)(np.array([[77]]), 77, 77)
    assert again[0] is first[0]  # a decode step finds the prefill's table
    assert RopeTables(inv_freq, 2.0, np.float32)(np.arange(100)[None], 0, 99)[0] is not first[0]
    for theta in range(2, 40):  # far more than the budget
        tables = RopeTables(float(theta) ** (-np.arange(64) / 64), 1.0, np.float32)
        tables(np.arange(20000)[None], 0, 19999)
    from gpu_ops.ops.rope import tables as module

    assert sum(c.nbytes + s.nbytes for c, s in module._kept.values()) <= module._BUDGET
    clear_rope_tables()


def test_threads_share_the_tables(rng):
    clear_rope_tables()
    q = rng.standard_normal((1, 500, 2, 16)).astype(np.float32)
    expected = rope(q, backend="reference")
    results: list = [None] * 8

    def work(i):
        n = 500 - 30 * i  # every thread needs another length of the same table
        results[i] = rope(q[:, :n])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, expected[:, : 500 - 30 * i], atol=1e-6)
