"""Errors against the float64 reference, compared with those of textbook code in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perf.pictures import bars
from perf.pictures.data import Machine, by_op, dtypes
from perf.pictures.style import Canvas
from perf.runs import Row

FIGURES = {"ours": "error_largest", "naive": "error_naive_largest"}
SUBTITLE = (
    "further left is better · largest absolute error against float64 · "
    "allowed: twice the textbook's, of gradients three times"
)


def pictures(machine: Machine) -> Iterator[tuple[str, Canvas]]:
    """One picture per dtype."""
    checked = [row for row in machine.rows() if "error_largest" in row]
    for dtype in dtypes(checked):
        yield (
            f"error_{dtype}",
            bars.draw(errors(machine, [row for row in checked if row["dtype"] == dtype], dtype)),
        )


def errors(machine: Machine, rows: Sequence[Row], dtype: str) -> bars.Picture:
    groups = [
        bars.Group(op, row["name"], row["shape"], [dot(who, row[column]) for who, column in FIGURES.items()])
        for op, cases in by_op(rows).items()
        for row in cases
    ]
    return bars.Picture(
        title=f"Error in {dtype}: {machine.name}",
        subtitle=SUBTITLE,
        caption=(machine.origin,),
        axis="largest absolute error",
        groups=groups,
        contenders=[("ours", "gpu_ops"), ("naive", f"textbook NumPy, every step rounded to {dtype}")],
        dots=True,
    )


def dot(contender: str, error: float) -> bars.Bar:
    return bars.Bar(contender, error, f"{error:.1e}" if error else "0")
