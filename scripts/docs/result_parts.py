"""Tables and pictures of the benchmark results in the repository."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from perf import runs
from perf.machine import label
from perf.pictures import draw_all

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURES = ROOT / "build" / "pictures"  # drawn by the build, from perf/results


def results() -> str:
    """Tables of all saved runs, newest first."""
    saved = [
        (path, runs.load(path))
        for path in (ROOT / "perf" / "results").glob("*/*.csv")
        if path.parent.name != "local"
    ]
    saved.sort(key=lambda pair: pair[1].facts["created"], reverse=True)
    return "\n\n".join(table(path, run) for path, run in saved)


def table(path: Path, run: runs.Run) -> str:
    facts = run.facts
    versions = facts["machine"]["versions"]
    peers = f"torch {versions['torch']}" if "torch" in versions else "no torch"
    rows = [
        "| op | | shape | dtype | time | rate | of the limit | x NumPy | x torch |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    rows += [f"| {' | '.join(cells(row))} |" for row in run.rows if "ours_median" in row]
    head = f"## {label(facts['machine'])}, {facts['created'][:10]}"
    source = f"Commit {facts['machine']['commit']}, {peers}; `{path.relative_to(ROOT)}`."
    return "\n".join([head, "", source, "", *rows])


def cells(row: dict[str, Any]) -> list[str]:
    """Cells of one case. The rate is in the unit of its limit."""
    seconds = row["ours_median"]
    if row.get("limited_by") == "matmul":
        rate = f"{row['flops'] / seconds / 1e12:.3g} TFLOPS"
    else:
        rate = f"{row['bytes'] / seconds / 1e9:.3g} GB/s"
    share = f"{row['share_of_limit']:.0%}" if "share_of_limit" in row else ""
    ratios = [f"{row[name]:.2g}" if name in row else "" for name in ("times_naive", "times_torch")]
    return [
        f"`{row['op']}`",
        row["name"],
        row["shape"],
        row["dtype"],
        duration(seconds),
        rate,
        share,
        *ratios,
    ]


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def draw_pictures() -> None:
    """Draw all saved runs, with matplotlib."""
    shutil.rmtree(PICTURES, ignore_errors=True)
    for _ in draw_all([ROOT / "perf" / "results"], PICTURES, general=True):
        pass


def pictures(*words: str) -> str:
    """Pictures that :func:`draw_pictures` drew and whose names contain one of the words."""
    paths = sorted(PICTURES.rglob("*.svg"))
    chosen = [path for path in paths if any(word in path.stem for word in words)]
    return "\n\n".join(
        f"![{path.stem.replace('-', ' ').replace('_', ' ')}](/{path.relative_to(ROOT)})" for path in chosen
    )
