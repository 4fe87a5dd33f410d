"""Schedules of pipelines as tables: every row once, in a valid order, with the bubble of the formula."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from gpu_ops.distributed import ScheduleStep, bubble, schedule
from gpu_ops.distributed.schedules import SCHEDULES
from gpu_ops.errors import OptionError

ACTIONS = {"zb-h1": "FIW"}
CASES = [
    (name, p, m, v)
    for name, p, m in itertools.product(SCHEDULES, (1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 24))
    for v in ((1, 2, 3) if name == "interleaved" else (1,))
    if name != "interleaved" or m % p == 0
]


def held(rows):
    """Maximum number of microbatches whose forward pass is done and whose last action is not."""
    last = "W" if any(row.action == "W" for row in rows) else "B"
    change = {"F": 1, last: -1}
    return max(itertools.accumulate(change.get(row.action, 0) for row in rows))


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_every_row_once_and_microbatches_in_order(name, p, m, v):
    table = schedule(name, p, m, v)
    actions = ACTIONS.get(name, "FB")
    for rank, rows in enumerate(table):
        stages = range(rank, p * v, p)
        every = [ScheduleStep(s, i, a) for s in stages for i in range(m) for a in actions]
        assert Counter(rows) == Counter(every)
        for stage, action in itertools.product(stages, actions):
            assert [row.microbatch for row in rows if row[::2] == (stage, action)] == list(range(m))


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_bubble_is_the_formulas(name, p, m, v):
    share = bubble(schedule(name, p, m, v))
    if name == "zb-h1":
        assert share == pytest.approx((p - 1) / (3 * m)) if m >= p else share < (p - 1) / m or p == 1
    else:
        assert share == pytest.approx((p - 1) / (v * m))


@pytest.mark.parametrize(("f", "i", "w"), [(2.0, 3.0, 1.5), (1.0, 1.25, 0.75), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_bubble_of_other_costs(p, f, i, w):
    """(p - 1) (F + I - W), and of 1F1B (p - 1) (F + I + W), over the work."""
    m, costs = 3 * p, {"F": f, "I": i, "W": w, "B": i + w}
    work = m * (f + i + w)
    assert bubble(schedule("zb-h1", p, m), costs) == pytest.approx((p - 1) * (f + i - w) / work)
    assert bubble(schedule("1f1b", p, m), costs) == pytest.approx((p - 1) * (f + i + w) / work)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 3), (4, 12), (8, 24)])
def test_how_many_microbatches_are_held(p, m):
    for r in range(p):
        assert held(schedule("gpipe", p, m)[r]) == m
        assert held(schedule("1f1b", p, m)[r]) == min(p - r, m)
        assert held(schedule("zb-h1", p, m)[r]) == min(p, m)
        if m % p == 0:
            max_held = min(2 * (p - r) - 1 + p, 2 * m) if p > 1 else 2
            assert held(schedule("interleaved", p, m, 2)[r]) == max_held


def test_orders_that_never_end():
    table = schedule("1f1b", 2, 2)
    table[0].reverse()
    with pytest.raises(OptionError, match="wait for each other"):
        bubble(table)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 0, 1), "ranks"),
        (("1f1b", 2, 0), "microbatches"),
        (("zb-h", 2, 2), "did you mean 'zb-h1'"),
        (("gpipe", 2, 2, 2), "use interleaved"),
        (("interleaved", 4, 6, 2), "multiple of 4 microbatches, got 6"),
    ],
)
def test_mistakes(arguments, words):
    with pytest.raises(OptionError, match=words):
        schedule(*arguments)
