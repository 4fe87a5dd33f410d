"""Cases of a parametrized test that the default run takes; ``scripts/test.sh --full`` runs the others as well.

Most of a first run is compilation, one kernel for each dtype, backend and option. So the default run

- takes float32 and bfloat16 where a test has them,
- keeps few cases of what ``full_only.txt`` lists: tests, or their cases on one backend, whose own time, or that of
  compiling kernels that no other test uses, is more than their share. They are the cheapest that cover every option
  and dtype of every op, and every macro of every kernel, on every backend (``scripts/choose_tests.py``),
- and of the other cases takes few in which each value of each parameter occurs once.

So every op runs on every backend, in one dtype or two, and not in all combinations. The choice follows from the list
of cases and that file alone: it is the same on every machine.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np

DTYPES = "float32", "bfloat16"
"""Accumulation and storage formats that differ most; float16 and float64 are compiled from the same sources."""

FULL_ONLY = Path(__file__).with_name("full_only.txt")


def chosen_items(items):
    """Ids of the items of the default run."""
    groups, chosen = defaultdict(list), set()
    for item in items:
        if unit(item) not in full_only():
            groups[item.path, item.cls, item.originalname].append(item)
        elif case_of(item) in full_only()[unit(item)]:
            chosen.add(id(item))
    for group in groups.values():
        cases = [item for item in group if _dtype(item) in DTYPES] or group
        values = {value for item in cases for value in _without_dtype(item)}
        # what other dtypes alone have
        cases = [item for item in group if item in cases or not _without_dtype(item) <= values]
        chosen |= {id(cases[n]) for n in chosen_cases([_values(item) for item in cases])}
    return chosen


@cache
def full_only():
    """Cases to keep, by (test, backend) of :data:`FULL_ONLY`; the backend is empty for a test without one."""
    kept = defaultdict(set)
    for line in FULL_ONLY.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            test, backend, case, *_ = [*line.split("\t"), "", ""]
            kept[test, backend] |= {case} - {""}
    return dict(kept)


def unit(item):
    """The item's test, without parameters, and its backend: what is listed in :data:`FULL_ONLY`."""
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    name = f"{backend['device']}-{backend['backend']}" if isinstance(backend, dict) else ""
    return item.nodeid.partition("[")[0], name


def case_of(item):
    """Parameters of an item, as its id has them; ``*`` without."""
    return item.nodeid.partition("[")[2] or "*"


def _dtype(item):
    """Name of the item's dtype; the first of :data:`DTYPES` if it has none."""
    dtype = item.callspec.params.get("dtype") if hasattr(item, "callspec") else None
    try:
        return np.dtype(DTYPES[0] if dtype is None else dtype).name
    except TypeError:  # another kind of type
        return DTYPES[0]


def _without_dtype(item):
    """The values of an item's parameters by their ids, except those that name its dtype."""
    return {part for part in enumerate(_values(item)) if _dtype(item) not in part[1]}


def _values(item):
    """The values of an item's parameters by their ids."""
    return tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()


def chosen_cases(cases):
    """Indices of few tuples of ``cases`` in which each value of each position occurs."""
    covered = [set(enumerate(case)) for case in cases]
    missing, chosen = set().union(*covered), []
    # what a case would add, the first case first
    queue = [(-len(parts), n) for n, parts in enumerate(covered)]
    heapq.heapify(queue)
    while missing or not chosen:
        gain, n = heapq.heappop(queue)
        now = -len(covered[n] & missing)
        if now == gain:
            missing -= covered[n]
            chosen.append(n)
        else:  # others took some of its values since
            heapq.heappush(queue, (now, n))
    return chosen
