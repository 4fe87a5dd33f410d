"""Tables and lines of the commands, on a terminal and in a pipe; progress of pip."""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import runpy
import subprocess
import sys

import pytest
from rich.console import Console

from gpu_ops.cli import terminal
from perf import report
from scripts import pip_install
from tests.support.processes import PATIENCE, ROOT

WORDS = "measured between words that are long"


class Screen(io.StringIO):
    """Object that looks like a terminal to programs."""

    def isatty(self):
        return True


def shown(columns, monkeypatch, term="xterm"):
    """Table with a label of many words, as shown on a terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", term)
    grid = report.make_table("title", ("case",), ("figure",))
    grid.add_row(" ".join([WORDS] * 4), "123456")
    screen = Screen()
    terminal.print_table(terminal.make_console(screen), grid)
    return re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).splitlines()


TERMS = ["xterm", "dumb", "unknown"]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("columns", [40, 80, 400])
def test_a_table_fits_a_terminal(columns, term, monkeypatch):
    lines = shown(columns, monkeypatch, term)
    assert max(map(len, lines)) <= columns
    text = " ".join(lines)
    assert all(text.count(word) == 4 * WORDS.split().count(word) for word in ("measured", "between", "words"))


@pytest.mark.parametrize("term", TERMS)
def test_a_terminal_narrower_than_a_word_breaks_none(term, monkeypatch):
    lines = shown(12, monkeypatch, term)
    assert any("measured" in line for line in lines)
    assert any("123456" in line for line in lines)


def test_figures_leave_labels_their_words(monkeypatch):
    """A figure of several words does not wrap, and takes no width from the labels."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    grid = report.make_table("title", ("case", "shape"), ("time", "memory", "error"))
    grid.add_row("backward causal", "2048 x 4096", "1.07 ms (1.02-1.12)", "1 MiB / 300 MiB", "1e-06 / 4e-06")
    screen = Screen()
    terminal.print_table(terminal.make_console(screen), grid)
    text = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    for words in ("backward", "causal", "2048", "1.07 ms (1.02-1.12)", "1 MiB / 300 MiB", "1e-06 / 4e-06"):
        assert words in text


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("columns", [40, 200])
def test_no_column_that_does_not_wrap_is_cut(columns, term, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", term)
    grid = report.make_table("title", (), ("case", *("figure",) * 8))
    cells = ["forward causal B1 S2048 H32/8 D128", *["12.345 ms (long)"] * 8]
    grid.add_row(*cells)
    screen = Screen()
    terminal.print_table(terminal.make_console(screen), grid)
    text = screen.getvalue()
    assert text.count(cells[1]) == 8
    assert cells[0] in text
    assert report.width(grid) > 150


@pytest.mark.parametrize("force", ["", "1"])  # colours in a CI log
@pytest.mark.parametrize("columns", ["40", "200"])
def test_nothing_wraps_off_a_terminal(columns, force, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", force)
    monkeypatch.setenv("TERM", "dumb")
    grid = report.make_table("title", ("case",), ("figure",))
    grid.add_row("a label of many words, " * 20, "1" * 300)
    console = terminal.make_console()
    terminal.print_table(console, grid)
    console.print("a long line, " * 20)
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "label" in line)
    assert "a label of many words, " * 20 in line
    assert "1" * 300 in line
    assert "a long line, " * 19 in out


def test_a_pipe_is_told_what_is_waited_for(capsys):
    console = Console(width=80)
    with terminal.waiting(console, "looking for [kernels]"):
        assert capsys.readouterr().out == "looking for [kernels] ...\n"


@pytest.mark.parametrize(
    "module",
    ["gpu_ops", "perf", "perf.bench_softmax", "perf.pictures", "perf.tune"],
)
def test_an_interrupted_command_ends_with_a_line_and_130(module, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", interrupt)
    monkeypatch.setattr(sys, "argv", [module])
    main = importlib.util.find_spec(module).origin.replace("__init__", "__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(main, run_name="__main__")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


# Progress of scripts/setup.sh.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Collecting numba>=0.61\n", "looking up packages"),
        (
            "  Downloading numba-0.68.1-cp311-cp311-manylinux_2_27.whl (3.8 MB)\n",
            "downloading numba (3.8 MB)",
        ),
        ("Using cached ml_dtypes-0.6.0-cp311.whl (5 MB)\n", "downloading ml_dtypes (5 MB)"),
        ("Processing /wheels/nvidia_cuda_nvrtc_cu12-12.9.86-py3.whl\n", "downloading nvidia_cuda_nvrtc_cu12"),
        ("Installing collected packages: numpy, numba\n", "unpacking all of them"),
        ("     ---- 3.8/3.8 MB 8.5 MB/s\n", ""),
    ],
)
def test_stages_of_pip(line, words):
    assert pip_install.stage(line) == words


def test_a_failure_shows_what_pip_printed():
    done = subprocess.run(
        [sys.executable, "scripts/pip_install.py", "--no-index", "/no/such/folder"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert "/no/such/folder" in done.stderr
