"""Cases of a parametrized test that the default run takes; ``scripts/test.sh --full`` runs the others as well.

Each value of each parameter is in one case at least, and each value with each backend: a law that holds for all
ops is tried on every op and backend, in one dtype or two, and not on all combinations. The choice follows from the
list of cases alone, so it is the same on every machine.
"""

from __future__ import annotations

import itertools
from collections import defaultdict


def chosen_items(items):
    """Ids of the items of the default run. An item without parameters is always one of them."""
    groups = defaultdict(list)
    for item in items:
        groups[item.path, item.cls, item.originalname].append(item)
    return {
        id(group[n]) for group in groups.values() for n in chosen_cases([_values(item) for item in group])
    }


def _values(item):
    """The values of an item's parameters by their ids, and whether the last one is its backend."""
    callspec = getattr(item, "callspec", None)
    return (tuple(callspec._idlist), "backend" in callspec.params) if callspec else ((), False)


def chosen_cases(cases):
    """Indices of few ``(values, with backend)`` that have all values, and all pairs of a value and a backend."""
    covered = [_parts(*case) for case in cases]
    missing, chosen = set().union(*covered), []
    candidates = dict.fromkeys(range(len(cases)))
    while missing or not chosen:
        best = max(candidates, key=lambda n: (len(covered[n] & missing), -n))
        missing -= covered[best]
        chosen.append(best)
        del candidates[best]
    return chosen


def _parts(values, with_backend):
    numbered = list(enumerate(values))
    pairs = itertools.product(numbered[:-1], numbered[-1:]) if with_backend else ()
    return {*numbered, *pairs}
