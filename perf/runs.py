"""Saved runs. A CSV file holds one row per case; the lines above it hold the facts of the run, as ``# key: JSON``.

A contender's columns start with its name: ``ours_median`` (seconds), ``naive_peak`` (bytes). An empty cell means "not
measured". ``pandas.read_csv(path, comment="#")`` reads it.
"""

from __future__ import annotations

import csv
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf.case import RunOptions
from perf.machine import label
from perf.stats import Limits

SCHEMA = 2
Row = dict[str, Any]


@dataclass
class Run:
    facts: dict[str, Any]
    """schema, created, seconds; the dicts machine, limits and config."""
    rows: list[Row]

    def get(self, group: str, name: str) -> Any:
        """One fact; None if this run does not have it."""
        return self.facts.get(group, {}).get(name)


def new_run(
    rows: Sequence[Row], machine: dict[str, Any], limits: Limits, config: RunOptions, seconds: float
) -> Run:
    facts = {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": seconds,
        "machine": machine,
        "limits": asdict(limits),
        "config": asdict(config),
    }
    return Run(json.loads(json.dumps(facts)), list(rows))  # the same types as a run that was loaded


def save(run: Run, folder: str | Path) -> Path:
    """Write ``<folder>/<date>-<commit>[-quick].csv``; returns the path."""
    machine = run.facts["machine"]
    date = run.facts["created"].translate({ord(c): None for c in ":-Z"})
    quick = "-quick" if run.get("config", "quick") else ""
    path = Path(folder) / f"{date}-{machine['commit'].replace('+', '-')}{quick}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    # two columns name the run, so that tables of several runs can be joined
    rows = [{"device": label(machine), "commit": machine["commit"], **row} for row in run.rows]
    partial = path.with_suffix(".partial")  # so that an interrupt leaves the file of the previous case
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {key}: {json.dumps(value)}\n" for key, value in run.facts.items())
        columns = list(dict.fromkeys(column for row in rows for column in row))
        # text is quoted, so that a reader does not take a "#" in it for a comment
        writer = csv.DictWriter(file, columns, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)
    return path


def load(path: str | Path) -> Run:
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    head = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
    reader = csv.DictReader(lines[len(head) :], quoting=csv.QUOTE_NONNUMERIC)
    try:
        pairs = (line[2:].partition(": ") for line in head)
        facts = {key: json.loads(value) for key, _, value in pairs}
        rows = [{column: cell for column, cell in row.items() if cell != ""} for row in reader]
    except ValueError as error:
        raise ValueError(f"{path} is no saved run of perf: {error}") from error
    if facts.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no saved run of perf: no line '# schema: {SCHEMA}'")
    return Run(facts, rows)
