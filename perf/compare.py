"""Compares two saved runs case by case and flags regressions."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_ops.kernels.compiler.progress import several
from perf.runs import Row, Run

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
        comparison.missing = [
            key for key in before if key not in after
        ]  # a narrower run leaves cases out on purpose
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
