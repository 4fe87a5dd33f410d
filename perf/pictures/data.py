"""Data of the pictures: the saved runs of a machine as one set of rows, and their figures as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.machine import label
from perf.runs import Row, Run, load

LABELS = {
    "ours": "gpu_ops",
    "numba": "gpu_ops, Numba kernels",
    "torch": "torch",
    "torch_cudnn": "torch, cuDNN",
    "torch_flash": "torch, flash",
    "torch_efficient": "torch, efficient",
    "torch_math": "torch, math",
    "cublas": "cuBLAS, dense weights",
}
"""Contenders in the order of their bars; ``naive`` and unknown ones come last."""
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Machine:
    """Rows of one machine without and with ``--grid``: the latest row of each case."""

    runs: Sequence[Run]
    """Oldest first."""

    @property
    def name(self) -> str:
        return label(self.runs[-1].facts["machine"])

    def some(self, *, grid: bool) -> list[Run]:
        return [run for run in self.runs if bool(run.get("config", "grid")) == grid]

    def rows(self, *, grid: bool = False) -> list[Row]:
        return list({row["key"]: row for run in self.some(grid=grid) for row in run.rows}.values())

    def limits(self, *, grid: bool = False) -> dict[str, Any]:
        """Limits of the latest run with or without a grid."""
        return dict(self.some(grid=grid)[-1].facts["limits"])

    @property
    def on_gpu(self) -> bool:
        return bool(self.runs[-1].get("machine", "gpu"))

    @property
    def origin(self) -> str:
        """Machine, dates and commits."""
        dates = unique(run.facts["created"][:10] for run in self.runs)
        commits = unique(run.facts["machine"]["commit"] for run in self.runs)
        return f"{self.name} · {', '.join(dates)} · commit {', '.join(commits)}"

    def contender(self, name: str) -> str:
        """Name of a contender as readers know it."""
        formula = "plain CuPy" if self.on_gpu else "plain NumPy"
        return LABELS.get(name, formula if name == "naive" else name.replace("_", " "))


def machines(paths: Iterable[Path]) -> dict[str, Machine]:
    """Saved runs by machine, from files and folders. A machine is named by the folder its files are in."""
    files = [file for path in paths for file in (sorted(path.rglob("*.csv")) if path.is_dir() else [path])]
    by_folder: dict[str, list[Run]] = {}
    for file in unique(files):
        by_folder.setdefault(file.resolve().parent.name, []).append(load(file))
    for folder, runs in by_folder.items():
        runs.sort(key=lambda run: str(run.facts["created"]))
        names = unique(label(run.facts["machine"]) for run in runs)
        if len(names) > 1:
            raise ValueError(
                f"{folder} has runs of several machines, {'; '.join(names)}: give the files of one"
            )
    return {folder: Machine(runs) for folder, runs in by_folder.items()}


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def contenders(rows: Iterable[Row]) -> list[str]:
    """Contenders that a row has a time for, ours first."""
    timed = {key.removesuffix("_median") for row in rows for key in row if key.endswith("_median")} - {
        "limit"
    }
    known = [name for name in LABELS if name in timed]
    return [*known, *sorted(timed - {*known, "naive"}), *(["naive"] if "naive" in timed else [])]


def kinds(rows: Iterable[Row], dtype: str) -> list[Row]:
    """First case of each kind of each op; the kind is the first word of the case's name."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["dtype"] == dtype and "ours_median" in row:
            first.setdefault((row["op"], row["name"].replace(",", "").split()[0]), row)
    return list(first.values())


def one_dtype(rows: Sequence[Row]) -> list[Row]:
    """Kinds, in 16 bits where those were measured."""
    return kinds(rows, next((name for name in HALF if name in dtypes(rows)), "float32"))


def headline(rows: Sequence[Row]) -> list[Row]:
    """Kinds that a library has too."""
    libraries = [name for name in contenders(rows) if name not in ("ours", "naive", "numba")]
    return one_dtype([row for row in rows if any(f"{name}_median" in row for name in libraries)])


def working(row: Row, who: str) -> float | None:
    """Peak memory of a call beyond its inputs and results; None where it was not measured."""
    return max(0.0, row[f"{who}_peak"] - row[f"{who}_results"]) if f"{who}_peak" in row else None


def by_op(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["op"], []).append(row)
    return dict(sorted(groups.items()))


def dtypes(rows: Iterable[Row]) -> list[str]:
    return unique(row["dtype"] for row in rows)


def number(value: float) -> str:
    """Number with three digits and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Value in the largest unit that is not larger than the value."""
    size, unit = next(((size, unit) for size, unit in units if value >= size), units[-1])
    return f"{number(value / size)} {unit}"


def rate(row: Row, seconds: float) -> str:
    """Rate in TFLOPS where arithmetic is the limit, else in bytes per second."""
    if row["limited_by"] == "matmul":
        return flops_text(row["flops"] / seconds)
    return bandwidth_text(row["bytes"] / seconds)


def flops_text(per_second: float) -> str:
    return scaled(per_second, ((1e12, "TFLOPS"), (1e9, "GFLOPS")))


def bandwidth_text(per_second: float) -> str:
    return scaled(per_second, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")))


def time_text(seconds: float) -> str:
    return scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))


def bytes_text(count: float) -> str:
    return (
        scaled(count, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")))
        if count >= 2**10
        else f"{count:.0f} B"
    )


def ratio_text(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 1.95 else f"{ratio:.2f}x"
