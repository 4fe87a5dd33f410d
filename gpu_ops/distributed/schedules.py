"""Schedules of pipelines, as data: the actions of each rank, row by row.

A model is divided into stages; rank r of p has stages r, r + p, ... A batch is divided into microbatches. A row's
action is one of these:

==== =================================================================================
F    the forward pass of a microbatch through a stage
B    its backward pass
I    the part of B that the previous stage waits for: the gradient of the stage's input
W    the rest of B: the gradients of its weights
==== =================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gpu_ops.core import checks
from gpu_ops.errors import OptionError

__all__ = ["SCHEDULES", "ScheduleStep", "bubble", "schedule"]

_OP = "schedule"
COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class ScheduleStep(NamedTuple):
    """Action on a microbatch in a stage."""

    stage: int
    microbatch: int
    action: str


def schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> list[list[ScheduleStep]]:
    """Rows of each rank, in order.

    Parameters
    ----------
    name : {"gpipe", "1f1b", "interleaved", "zb-h1"}
        See the notes.
    ranks, microbatches : int
    chunks : int
        Stages of each rank; more than one only for interleaved.

    Raises
    ------
    OptionError

    Notes
    -----
    With p ranks, m microbatches and v chunks, the ratio of the time that ranks wait to the time that they work:

    =========== ========================= ============================================
    schedule    bubble                    microbatches that rank r holds at a time
    =========== ========================= ============================================
    gpipe       (p - 1) / m               m
    1f1b        (p - 1) / m               min(p - r, m)
    interleaved (p - 1) / (v m)           1 / v of each: 2 (p - r) - 1 + (v - 1) p
    zb-h1       (p - 1) / (3 m)           min(p, m), of which p - r in full
    =========== ========================= ============================================

    The bubble of zb-h1 is for F, I and W of equal cost. In general ranks wait for (p - 1) (F + I - W), if W costs no
    more than F and m is at least p. Interleaved requires m to be a multiple of p.

    Sources: Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters", 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2023.

    Examples
    --------
    >>> from gpu_ops.distributed import schedule
    >>> [f"{row.action}{row.microbatch}" for row in schedule("1f1b", 2, 3)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    checks.one_of(_OP, "name", name, SCHEDULES)
    ranks = checks.integer(_OP, "ranks", ranks, low=1)
    microbatches = checks.integer(_OP, "microbatches", microbatches, low=1)
    chunks = checks.integer(_OP, "chunks", chunks, low=1, high=499)
    if name != "interleaved" and chunks > 1:
        raise OptionError(f"{_OP}: {name} has one stage per rank; use interleaved for chunks={chunks}")
    if name == "interleaved" and microbatches % ranks:
        raise OptionError(f"{_OP}: interleaved wants a multiple of {ranks} microbatches, got {microbatches}")
    return [list(SCHEDULES[name](rank, ranks, microbatches, chunks)) for rank in range(ranks)]


def bubble(rows: list[list[ScheduleStep]], costs: Mapping[str, float] = COSTS) -> float:
    """Ratio of the time that ranks wait to the time that they work, if messages take no time.

    Raises
    ------
    OptionError
        A row waits for another that never comes.

    Examples
    --------
    >>> from gpu_ops.distributed import bubble, schedule
    >>> bubble(schedule("1f1b", 4, 12))
    0.25
    """
    if not any(rows):
        raise OptionError("bubble: rows holds no action; pass what schedule(...) returns")
    stages = 1 + max(row.stage for rank_rows in rows for row in rank_rows)
    ended: dict[ScheduleStep, float] = {}
    now, left = [0.0] * len(rows), [iter(rank_rows) for rank_rows in rows]
    waiting = [next(rank_rows, None) for rank_rows in left]
    while any(waiting):
        before = len(ended)
        for rank, row in enumerate(waiting):
            needed = _needed(row, stages) if row else []
            times = [next((ended[r] for r in either if r in ended), None) for either in needed]
            if row and None not in times:
                now[rank] = max([now[rank], *(t for t in times if t is not None)]) + costs[row.action]
                ended[row] = now[rank]
                waiting[rank] = next(left[rank], None)
        if len(ended) == before:
            raise OptionError(f"bubble: {[row for row in waiting if row]} wait for each other")
    work = max(sum(costs[row.action] for row in rank_rows) for rank_rows in rows)
    return max(now) / work - 1


def _needed(row: ScheduleStep, stages: int) -> list[tuple[ScheduleStep, ...]]:
    """Rows that must end before a row starts: one of each tuple."""
    stage, microbatch, action = row
    if action == "F":
        return [(ScheduleStep(stage - 1, microbatch, "F"),)] if stage else []
    if action == "W":
        return [(ScheduleStep(stage, microbatch, "I"),)]
    before = stage + 1, microbatch
    gradient = [(ScheduleStep(*before, "B"), ScheduleStep(*before, "I"))] if stage + 1 < stages else []
    return [(ScheduleStep(stage, microbatch, "F"),), *gradient]


def _gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[ScheduleStep]:
    for action in "FB":
        for i in range(microbatches):
            yield ScheduleStep(rank, i, action)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[ScheduleStep]:
    """Interleaved rows: B and F alternate after the first few F. Microbatches pass a chunk in groups of ``ranks``."""
    total = microbatches * chunks
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, total)
    for i in range(total + ahead):
        for number, action in ((i, "F"), (i - ahead, "B")):
            if 0 <= number < total:
                group, place = divmod(number, ranks * chunks)
                chunk, within = divmod(place, ranks)
                chunk = chunk if action == "F" else chunks - 1 - chunk
                yield ScheduleStep(chunk * ranks + rank, group * ranks + within, action)


def _zb_h1(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[ScheduleStep]:
    """Rows of 1F1B where W lags I by r microbatches on rank r: W fills the time it would wait at the end."""
    for row in _interleaved(rank, ranks, microbatches, 1):
        if row.action == "F":
            yield row
        else:
            yield ScheduleStep(rank, row.microbatch, "I")
            if row.microbatch >= rank:
                yield ScheduleStep(rank, row.microbatch - rank, "W")
    for i in range(max(0, microbatches - rank), microbatches):
        yield ScheduleStep(rank, i, "W")


SCHEDULES: dict[str, Callable[[int, int, int, int], Iterator[ScheduleStep]]] = {
    "gpipe": _gpipe,
    "1f1b": _interleaved,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
}
