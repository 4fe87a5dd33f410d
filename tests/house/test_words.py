"""The rules for prose and names that ``scripts/words.py`` counts: a folder may break them less often, never more."""

from __future__ import annotations

import pytest

from scripts import words

# Times each rule is broken below a folder today. Lower a number when you mend something.
LIMITS = {
    "gpu_ops": {"docstring": 0, "phrase": 11, "name": 115},
    "kernels": {"docstring": 0, "phrase": 1, "name": 131},
    "perf": {"docstring": 0, "phrase": 3, "name": 24},
    "reference": {"docstring": 0, "phrase": 1, "name": 3},
    "scripts": {"docstring": 0, "phrase": 7, "name": 25},
    "tests": {"docstring": 0, "phrase": 10, "name": 98},
}


@pytest.mark.parametrize("folder", words.FOLDERS)
def test_no_folder_gets_worse(folder):
    total = dict.fromkeys(LIMITS[folder], 0)
    for path in words.files(words.ROOT / folder):
        for place in words.places(path.read_text(encoding="utf-8")):
            total[place.rule] += 1
    above = {rule: count for rule, count in total.items() if count > LIMITS[folder][rule]}
    assert not above, f"python scripts/words.py {folder} lists the places"


def test_what_breaks_the_rules_is_found():
    source = '"""Of the grid."""\n# lies beside it\nfound = 1\ndef f(kind, rows): """Number of rows."""\n'
    assert [(place.rule, place.line) for place in words.places(source)] == [
        ("docstring", 1),
        ("name", 3),
        ("name", 4),
        ("phrase", 2),
    ]
