"""Cases of a parametrized test that the default run takes; ``scripts/test.sh --full`` runs the others as well.

Most of a first run is compilation, one kernel for each dtype and backend. So the default takes float32 and bfloat16
where a test has them, and leaves out tests marked ``full``, and those marked ``full_on`` a backend there. Of what is
left, each value of each parameter is in one case at least, and each value with each backend: a law that holds for
all ops is tried on every op and backend, in one dtype or two, and not on all combinations. The choice follows from
the list of cases alone, so it is the same on every machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

import numpy as np

DTYPES = "float32", "bfloat16"
"""Accumulation and storage formats that differ most; float16 and float64 are compiled from the same sources."""


def chosen_items(items):
    """Ids of the items of the default run. An item without parameters is one of them unless it is marked."""
    groups = defaultdict(list)
    for item in items:
        if not is_full(item):
            groups[item.path, item.cls, item.originalname].append(item)
    chosen = set()
    for group in groups.values():
        cases = [item for item in group if _dtype(item) in DTYPES] or group
        values = {value for item in cases for value in _without_dtype(item)}
        # what other dtypes alone have
        cases = [item for item in group if item in cases or not _without_dtype(item) <= values]
        chosen |= {id(cases[n]) for n in chosen_cases([_values(item) for item in cases])}
    return chosen


def is_full(item):
    """Whether a marker leaves this item, or its backend, to the full run."""
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    backends = {name for mark in item.iter_markers("full_on") for name in mark.args}
    on_this = isinstance(backend, dict) and f"{backend['device']}-{backend['backend']}" in backends
    return on_this or item.get_closest_marker("full") is not None


def _dtype(item):
    """Name of the item's dtype; the first of :data:`DTYPES` if it has none."""
    dtype = item.callspec.params.get("dtype") if hasattr(item, "callspec") else None
    try:
        return np.dtype(DTYPES[0] if dtype is None else dtype).name
    except TypeError:  # another kind of type
        return DTYPES[0]


def _without_dtype(item):
    """The values of an item's parameters by their ids, except those that name its dtype."""
    return {part for part in enumerate(_values(item)[0]) if _dtype(item) not in part[1]}


def _values(item):
    """The values of an item's parameters by their ids, and whether the last one is its backend."""
    callspec = getattr(item, "callspec", None)
    return (tuple(callspec._idlist), "backend" in callspec.params) if callspec else ((), False)


def chosen_cases(cases):
    """Indices of few ``(values, with backend)`` that have all values, and all pairs of a value and a backend."""
    covered = [_parts(*case) for case in cases]
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


def _parts(values, with_backend):
    numbered = list(enumerate(values))
    pairs = itertools.product(numbered[:-1], numbered[-1:]) if with_backend else ()
    return {*numbered, *pairs}
