"""Tables of python -m perf on terminals of any width, and the tour."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from gpu_ops.cli.terminal import fixed_console, make_console
from perf import cli, report, tour
from perf.case import RunOptions
from perf.harness import Error, Result
from perf.memory import Growth
from perf.stats import summarise
from tests.perf.case import square_case
from tests.support.processes import ROOT

MACHINE = {"cpu": "a processor", "threads": 2, "device": "cpu"}

# Prints the tables of every quick case on a terminal that it makes narrow itself.
TABLES = """
import fcntl, struct, sys, termios
from gpu_ops.cli.terminal import fixed_console, make_console
from perf import cli, report
from perf.case import RunOptions
from tests.perf.test_tables import result

config = RunOptions(quick=True)
for columns in (80, 100, 120):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    console = make_console()
    assert (console.width, console.is_terminal) == (columns, True)
    for name in cli.bench_names():
        report.print_results(console, name, [result(case) for case in cli.selected(name, config)])
    print("end of", columns, flush=True)
"""


def result(case, ratio=12.3, error=1.2e-6):
    """Result of a measured case."""
    times = [1.0e-3, 1.1e-3, 1.2e-3]
    timings = {"ours": times, "naive": [ratio * t for t in times]}
    return Result(
        case,
        {name: summarise(samples, first=1.0, sets=1) for name, samples in timings.items()},
        0.9e-3,
        "matmul" if case.in_flops else "copy",
        Error(error, 3e-8, 4.4e-6, 1e-6, "result 0 at (0,)", error <= 4.4e-6, "a smaller problem"),
        {"ours": Growth(1 << 20, 0), "naive": Growth(300 << 20, 0)},
    )


def on_a_terminal(code):
    """Output of a process on a pseudo-terminal, without colours."""
    ours, theirs = os.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "TERM": "xterm-256color", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    printed = bytearray()
    try:
        while part := os.read(ours, 1 << 16):
            printed += part
    except OSError:  # EIO: the child has closed its end
        pass
    os.close(ours)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", printed.decode())
    assert child.wait() == 0, text
    return text.splitlines()


def test_every_case_is_read_on_a_narrow_terminal():
    lines = on_a_terminal(TABLES)
    cases = [case for name in cli.bench_names() for case in cli.selected(name, RunOptions(quick=True))]
    assert len(cases) > 80
    for columns in (80, 100, 120):
        end = lines.index(f"end of {columns}")
        screen, lines = lines[:end], lines[end + 1 :]
        assert max(map(len, screen)) <= columns
        for case in cases:
            label = f"{case.name}  {case.shape}  {report.short_dtype(case.dtype)}"
            assert any(line.startswith(label) for line in screen), (columns, label)
        assert sum("1.1 ms" in line for line in screen) == len(cases)


def test_figures_are_left_out_in_order():
    rows = [result(square_case())]
    shown = ["1.1 ms (1.04-1.16)", "1.2e-06 / 4.4e-06 (3e-08)", "x torch", "1 MiB / 300 MiB"]
    widths = []
    for count in range(len(report.DROPPED) + 1):
        grid = report.table("square", rows, report.DROPPED[:count])
        widths.append(report.width(grid))
        text = " ".join(
            [*(str(c.header) for c in grid.columns), *(str(cell) for c in grid.columns for cell in c.cells)]
        )
        dropped = report.DROPPED[:count]
        assert ("(3e-08)" in text) == ("mean error" not in dropped)
        assert ("/ 4.4e-06" in text) == ("tolerance" not in dropped) == ("27%" not in text)
        assert ("1.04-1.16" in text) == ("p20-p80" not in dropped)
        assert (shown[2] in text) == ("empty peers" not in dropped)
        assert (shown[3] in text) == ("memory" not in dropped)
    assert widths == sorted(widths, reverse=True)


def test_a_pipe_gets_every_figure(capsys):
    report.print_results(make_console(), "square", [result(square_case())])
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "forward  64 x 32  fp32" in line]
    assert all(text in row for text in ("1.1 ms (1.04-1.16)", "1.2e-06 / 4.4e-06 (3e-08)", "1 MiB / 300 MiB"))


@pytest.mark.parametrize("columns", [60, 200])
def test_the_legend_has_the_columns_that_are_shown(columns, capsys):
    console, explained = fixed_console(columns), set()
    report.print_results(console, "square", [result(square_case())], explained)
    printed, names = " ".join(capsys.readouterr().out.split()), {text.partition(":")[0] for text in explained}
    assert names == {"time", "limit", "x naive", "error"} | ({"memory", "x torch"} if columns == 200 else set())
    assert ("error: largest as a share of its tolerance" in printed) == (columns == 60)
    report.print_results(console, "square", [result(square_case())], explained)
    assert "roofline" not in capsys.readouterr().out


def test_the_tour_has_the_main_cases_of_the_benches():
    chosen = {name: cli.selected(name, RunOptions(quick=True, tour=True)) for name in cli.bench_names()}
    assert 15 <= sum(map(len, chosen.values())) <= 25
    for name, cases in chosen.items():
        assert {(case.name, case.dtype) for case in cases} == set(getattr(cli.bench(name), "TOUR", ()))


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ([], False),
        (["--all"], True),
        (["--op", "rope"], True),
        (["--dtype", "float32"], True),
        (["--first", "1"], True),
    ],
)
def test_what_quick_chooses(options, full, capsys):
    assert cli.main(argv=["--quick", "--list", *options]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert ("rope | backward | B1 S2048 H32/8 D128 | float32" in listed) == (
        full and "--first" not in options
    )
    assert (len({line.split(" | ")[0] for line in listed}) == len(cli.bench_names())) == (
        full and "--op" not in options
    )


@pytest.mark.parametrize("error", [1.2e-6, 5e-6])
def test_the_last_words(error):
    """Six lines say what ran, how it compares, whether every error is within its bound, and where to read more."""
    linear = square_case(op="linear", name="forward", flops=1e9)
    results = [result(square_case(), 2.0), result(linear, 8.0, error)]
    lines = tour.last_words(results, MACHINE, 98.4, RunOptions(tour=True))
    assert len(lines) == 6
    assert lines[0].startswith("Ran 2 cases of 2 ops in 98 s on a processor")
    assert "memory bandwidth" in lines[1]
    assert "arithmetic" in lines[2]
    assert lines[3].startswith("The median is 5.0 times as fast as plain NumPy")
    assert "from 2.0 times, square forward fp32, to 8.0 times, linear forward fp32" in lines[3]
    within = (
        "2 of 2 cases within tolerance: every error"
        if error < 4e-6
        else "1 of 2 cases within tolerance; not: linear"
    )
    assert lines[4].startswith(within)
    assert "--all" in lines[5]
    assert "perf/pictures" in lines[5]
    single = tour.last_words(results[:1], {**MACHINE, "threads": 1}, 98.4, RunOptions(tour=True))
    assert single[0] == "Ran 1 case of 1 op in 98 s on a processor, 1 thread."
    assert "(1 case)" in single[1]
    assert single[-2].startswith("1 of 1 case within tolerance")


def test_the_time_left():
    assert tour.time_left(10.0, 0, 20) == ""
    assert tour.time_left(30.0, 5, 20) == ", about 2 min left"
    assert tour.time_left(30.0, 18, 20) == ", about 10 s left"
