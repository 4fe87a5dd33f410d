"""Saved runs and their comparison.

A CSV file holds one row per case; the lines above it hold the facts of the run, as ``# key: JSON``.

A contender's columns start with its name: ``ours_median`` (seconds), ``naive_peak`` (bytes). An empty cell means "not
measured". ``pandas.read_csv(path, comment="#")`` reads it.
"""

from __future__ import annotations

import csv
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_ops.kernels.compiler.progress import several
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


THRESHOLD = 1.10


@dataclass(frozen=True)
class Change:
    """A case in both runs. Times are in seconds; ratios are new / old: 1.2 means a fifth slower."""

    key: str
    old: float
    new: float
    fastest: float
    """The ratio of the fastest calls."""
    old_p80: float
    new_p20: float
    threshold: float

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def slower(self) -> bool:
        return self.ratio > self.threshold

    @property
    def regressed(self) -> bool:
        """True if the median is slower and noise does not explain it: the fastest call is slower by as much, or the
        fast end of the new calls is above the slow end of the old ones."""
        return self.slower and (self.fastest > self.threshold or self.new_p20 > self.old_p80)

    @property
    def verdict(self) -> str:
        """Verdict in words, with the figures behind it."""
        if not self.slower:
            return "faster" if self.ratio < 1 / self.threshold else "same"
        if self.fastest > self.threshold:
            return f"REGRESSED: the fastest call too, {self.fastest:.2f}x"
        ends = f"new p20 {1e3 * self.new_p20:.3f} ms, old p80 {1e3 * self.old_p80:.3f} ms"
        if self.regressed:
            return f"REGRESSED: the spreads do not meet, {ends}"
        return f"noise: fastest call {self.fastest:.2f}x, {ends}"


@dataclass
class Comparison:
    threshold: float
    changes: list[Change] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Cases of the old run that the new run should have timed and has not."""
    warnings: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.regressed]

    @property
    def noisy(self) -> list[Change]:
        """True if slower by more than the threshold but within the noise."""
        return [change for change in self.changes if change.slower and not change.regressed]

    @property
    def exit_code(self) -> int:
        return 1 if self.regressions or self.missing or not self.changes else 0

    def summary(self) -> str:
        if not self.changes:
            return "nothing to compare: the two runs have no case in common"
        bound, count = f"{self.threshold:.2f}x", len(self.changes)
        if not self.regressions and not self.missing:
            if not self.noisy:
                return f"no regression: {several(count, 'case')} within {bound} of the old run"
            worst = max(self.noisy, key=lambda change: change.ratio)
            return (
                f"no regression that noise does not explain: {count - len(self.noisy)} of {several(count, 'case')} "
                f"within {bound} of the old run; {len(self.noisy)} above it, up to {worst.ratio:.2f}x, but not in "
                "their fastest call (measure again on a quiet machine)"
            )
        parts = []
        if self.regressions:
            worst = max(self.regressions, key=lambda change: change.ratio)
            parts.append(
                f"{len(self.regressions)} of {several(count, 'case')} regressed by more than {bound}, "
                f"worst {worst.ratio:.2f}x: {worst.key}"
            )
        if self.missing:
            cases = several(len(self.missing), "case")
            parts.append(f"no timing now of {cases} of the old run: {self.missing[0]}")
        return "; ".join(parts)


def compare(old: Run, new: Run, *, threshold: float = THRESHOLD, ops: set[str] | None = None) -> Comparison:
    """Compare every case that both runs timed; :class:`Change` defines a regression."""
    before, after = ({row["key"]: row for row in run.rows if timed(row, ops)} for run in (old, new))
    comparison = Comparison(threshold, warnings=warnings(old, new))
    for key, now in after.items():
        if key not in before:
            continue
        was = before[key]
        fastest = now["ours_fastest"] / was["ours_fastest"]
        medians = was["ours_median"], now["ours_median"]
        comparison.changes.append(Change(key, *medians, fastest, was["ours_p80"], now["ours_p20"], threshold))
    selection = ("device", "quick", "tour", "dtypes", "seqlens", "grid")
    if all((old.get("config", name) or False) == (new.get("config", name) or False) for name in selection):
        # a narrower run leaves cases out on purpose
        comparison.missing = [key for key in before if key not in after]
    return comparison


def timed(row: Row, ops: set[str] | None) -> bool:
    return "ours_median" in row and (ops is None or row["op"] in ops)


def warnings(old: Run, new: Run) -> list[str]:
    """Differences between the runs that are not about the code."""
    messages = []
    for name in ("cpu", "threads", "device", "gpu"):
        then, now = (run.get("machine", name) for run in (old, new))
        if isinstance(then, dict) and isinstance(now, dict):
            then, now = then.get("name"), now.get("name")
        if then != now:
            messages.append(f"{name} differs: {then} then, {now} now")
    if old.get("config", "quick") != new.get("config", "quick"):
        messages.append("one run was --quick, the other was not")
    for name in ("copy", "read", "matmul"):
        then, now = (run.get("limits", name) for run in (old, new))
        if then and now and not 0.8 < now / then < 1.25:
            messages.append(f"the measured {name} limit is {now / then:.2f}x the old one: another load?")
    return messages
