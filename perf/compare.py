"""Compares two saved runs case by case and flags regressions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THRESHOLD = 1.10


@dataclass(frozen=True)
class Change:
    """``ratio`` is new time over old: 1.2 means a fifth slower."""

    key: str
    old: float
    new: float
    regressed: bool

    @property
    def ratio(self) -> float:
        return self.new / self.old


@dataclass
class Comparison:
    changes: list[Change] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Cases of the old run that this run was asked for too and has no timing of."""
    added: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    threshold: float = THRESHOLD

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.regressed]

    @property
    def exit_code(self) -> int:
        return 1 if self.regressions or self.missing or not self.changes else 0

    def summary(self) -> str:
        if not self.changes:
            return "nothing to compare: the two runs have no case in common"
        if not self.regressions and not self.missing:
            return f"no regression: {len(self.changes)} cases within {self.threshold:.2f}x of the old run"
        parts = []
        if self.regressions:
            worst = max(self.regressions, key=lambda change: change.ratio)
            parts.append(
                f"{len(self.regressions)} of {len(self.changes)} cases regressed by more than "
                f"{self.threshold:.2f}x, worst {worst.ratio:.2f}x: {worst.key}"
            )
        if self.missing:
            parts.append(f"{len(self.missing)} cases of the old run have no timing now: {self.missing[0]}")
        return "; ".join(parts)


def load(path: str | Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if data.get("schema") != 1:
        raise ValueError(f"{path} is no saved run of perf (schema 1), its schema is {data.get('schema')!r}")
    return data


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    threshold: float = THRESHOLD,
    ops: set[str] | None = None,
) -> Comparison:
    """A case regressed when its median is ``threshold`` times the old one and noise does not explain it: its
    fastest call is slower by as much, or its fast end (p20) lies above the old slow end (p80)."""
    before, after = _timings(old, ops), _timings(new, ops)
    found = Comparison(threshold=threshold)
    for key, timing in after.items():
        if key not in before:
            found.added.append(key)
            continue
        was = before[key]
        apart = timing["p20"] > was["p80"] or timing["fastest"] > threshold * was["fastest"]
        slower = timing["median"] > threshold * was["median"] and apart
        found.changes.append(Change(key, was["median"], timing["median"], slower))
    if _selection(old) == _selection(new):  # a narrower run leaves cases out on purpose
        found.missing = [key for key in before if key not in after]
    for name in ("cpu", "threads", "device", "gpu"):
        then, now = (run.get("machine", {}).get(name) for run in (old, new))
        if isinstance(then, dict) and isinstance(now, dict):
            then, now = then.get("name"), now.get("name")
        if then != now:
            found.warnings.append(f"{name} differs: {then} then, {now} now")
    if old.get("config", {}).get("quick") != new.get("config", {}).get("quick"):
        found.warnings.append("one run was --quick, the other was not")
    for name in ("copy", "read", "matmul"):
        then, now = (run.get("limits", {}).get(name) for run in (old, new))
        if then and now and not 0.8 < now / then < 1.25:
            found.warnings.append(
                f"the measured {name} limit is {now / then:.2f}x the old one: another load?"
            )
    return found


def _selection(run: Mapping[str, Any]) -> Any:
    config = run.get("config", {})
    return [config.get(name) for name in ("device", "quick", "dtypes", "seqlens")]


def _timings(run: Mapping[str, Any], ops: set[str] | None) -> dict[str, Any]:
    return {
        case["key"]: case["timings"]["ours"]
        for case in run["cases"]
        if "ours" in case["timings"] and (ops is None or case["op"] in ops)
    }
