"""Speed compared with other libraries, and memory of a call: bars per case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perf.pictures import bars, lengths
from perf.pictures.data import (
    Machine,
    bandwidth_text,
    by_op,
    bytes_text,
    contenders,
    dtypes,
    flops_text,
    headline,
    one_dtype,
    rate,
    ratio_text,
    time_text,
    working,
)
from perf.pictures.style import Canvas
from perf.runs import Row

SLOW = ("torch_efficient", "torch_math")
"""Backends that torch does not choose itself where it has a faster one: not in the overview."""
SIX = (
    "attention forward",
    "attention decode",
    "rmsnorm forward",
    "rope half-split",
    "swiglu forward",
    "sample top_k",
)
"""Cases of the picture of a page's first screen: the first whose op and name begin so."""
ABOVE = "above 100 %: a cache holds a part of the data, or products of integers replace those of the limit"


def pictures(machine: Machine) -> Iterator[tuple[str, Canvas]]:
    """Pictures as (name, picture): an overview, every case by dtype, cases of grids on no line, and memory."""
    rows = machine.rows()
    if chosen := headline(rows):
        yield "speed", bars.draw(speed(machine, chosen, leave_out=SLOW))
        if six := faster(machine, chosen):
            yield "faster", bars.draw(six)
    for dtype in dtypes(rows):
        selected = [row for row in rows if row["dtype"] == dtype]
        yield f"speed_{dtype}", bars.draw(speed(machine, selected))
    drawn = {
        row["key"]
        for passes in lengths.series(machine).values()
        for selected in passes.values()
        for row in selected
    }
    if rest := [row for row in machine.rows(grid=True) if row["key"] not in drawn]:
        yield "speed_grid", bars.draw(speed(machine, rest, grid=True))
    if held := one_dtype([row for row in rows if "ours_peak" in row and "naive_peak" in row]):
        yield "memory", bars.draw(memory(machine, held))


def speed(
    machine: Machine, rows: Sequence[Row], *, leave_out: Sequence[str] = (), grid: bool = False
) -> bars.Picture:
    names = [name for name in contenders(rows) if name not in leave_out]
    dtype = dtypes(rows)[0] if len(dtypes(rows)) == 1 else ""
    groups = []
    for op, cases in by_op(rows).items():
        for row in cases:
            detail = row["shape"] if dtype else f"{row['shape']}, {row['dtype']}"
            groups.append(bars.Group(op, row["name"], detail, *bars_of(machine, row, names)))
    above = any(bar.length > 1.02 for group in groups for bar in group.bars)
    value = "rate" if machine.on_gpu else "time"
    return bars.Picture(
        title=f"Speed{' in ' + dtype if dtype else ''}: {machine.name}",
        subtitle=f"longer is faster · at the bars: {value} of a call, and how many times as long as gpu_ops it takes",
        caption=(*([ABOVE] if above else []), limits_text(machine, grid=grid), machine.origin),
        axis="share of the measured limit",
        groups=groups,
        contenders=[(name, machine.contender(name)) for name in names],
        percent=True,
        line=(1.0, "limit"),
    )


def faster(machine: Machine, rows: Sequence[Row]) -> bars.Picture | None:
    """Six cases compared with torch alone; None without torch."""
    compared = [row for row in rows if row.get("torch_median") and row.get("ours_median")]
    groups = []
    for start in SIX:
        row = next((row for row in compared if f"{row['op']} {row['name']}".startswith(start)), None)
        if row is None:
            continue
        ratio = row["torch_median"] / row["ours_median"]
        text = f"{ratio:.2g} times as fast{'' if ratio >= 1 else ': slower'}"
        groups.append(
            bars.Group("", f"{row['op']}, {row['name']}", row["shape"], [bars.Bar("ours", ratio, text)])
        )
    if not groups:
        return None
    return bars.Picture(
        title=f"gpu_ops and torch in {dtypes(compared)[0]}: {machine.name}",
        subtitle="longer is faster · time of torch divided by time of gpu_ops, for the same call",
        caption=(machine.origin,),
        axis="times as fast as torch",
        groups=groups,
        contenders=[("ours", machine.contender("ours"))],
        line=(1.0, "torch"),
    )


def bars_of(machine: Machine, row: Row, names: Sequence[str]) -> tuple[list[bars.Bar], str]:
    """Bars of a case, or a note that says why it has none."""
    if "ours_median" not in row:
        return [], f"failed: {str(row.get('failure', '')).partition(chr(10))[0][:60]}"
    result = []
    for name in names:
        if seconds := row.get(f"{name}_median"):
            text = rate(row, seconds) if machine.on_gpu else time_text(seconds)
            text += "" if name == "ours" else f" · {ratio_text(seconds / row['ours_median'])}"
            result.append(bars.Bar(name, row["limit_seconds"] / seconds, text))
    return result, ""


def limits_text(machine: Machine, *, grid: bool) -> str:
    """Text of the limits; each row has the limits of its run."""
    limits = machine.limits(grid=grid)
    which = "the same run" if len(machine.some(grid=grid)) == 1 else "each run, here of the latest"
    half = f", of 16 bits {flops_text(limits['matmul_half'])}" if limits.get("matmul_half") else ""
    copy, read = bandwidth_text(limits["copy"]), bandwidth_text(limits["read"])
    single = flops_text(limits["matmul"])
    return f"limits measured in {which}: copy {copy}, read {read}, float32 matmul {single}{half}"


def memory(machine: Machine, rows: Sequence[Row]) -> bars.Picture:
    names, dtype = ("ours", "naive"), dtypes(rows)[0]
    groups = []
    for op, cases in by_op(rows).items():
        for row in cases:
            made = [
                bars.Bar(who, size / 2**20, bytes_text(size))
                for who in names
                if (size := working(row, who)) is not None
            ]
            groups.append(bars.Group(op, row["name"], row["shape"], made))
    return bars.Picture(
        title=f"Memory of a call in {dtype}: {machine.name}",
        subtitle="shorter is better · peak during the call, beyond its inputs and results",
        caption=(machine.origin,),
        axis="MiB",
        groups=groups,
        contenders=[(name, machine.contender(name)) for name in names],
    )
