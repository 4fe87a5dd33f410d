"""Text and tables on a terminal and in a pipe, for the commands. No other module imports rich."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn, TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

__all__ = [
    "fixed_console",
    "make_console",
    "plain_table",
    "print_json",
    "print_table",
    "run_command",
    "waiting",
]

UNLIMITED_WIDTH = 10_000  # wider than any table


def make_console(file: TextIO | None = None) -> Console:
    """Console that wraps at the width of a terminal (``COLUMNS`` overrides it), but not in a file or a pipe."""
    stream = sys.stdout if file is None else file
    if not stream.isatty():
        return fixed_console(UNLIMITED_WIDTH, file)
    console = Console(file=file)
    return fixed_console(shutil.get_terminal_size().columns, file) if console.is_dumb_terminal else console


def fixed_console(width: int, file: IO[str] | None = None, **options: Any) -> Console:
    """Make a console of this width on any terminal: without a height, rich assumes 80 columns for a dumb one."""
    return Console(width=width, height=25, file=file, **options)


def plain_table(title: str) -> Table:
    """Make a table with a title and without a header."""
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": None, "padding": (0, 2)}
    return Table(title=title, show_header=False, **look)


def print_json(contents: Any) -> None:
    """Print the answer of a command for programs."""
    print(json.dumps(contents, indent=2))


def print_table(console: Console, table: Table) -> None:
    """Print a table within the console's width, wrapped between words; wider if that is not enough.

    No word is broken: a terminal that is too narrow breaks the line itself, and no text is lost.
    """
    probe = fixed_console(UNLIMITED_WIDTH, console.file)
    needed = Measurement.get(probe, probe.options, table).minimum
    for (
        column
    ) in table.columns:  # rich counts the longest word of a column that does not wrap, and breaks words
        words = [Measurement.get(probe, probe.options, cell) for cell in (column.header, *column.cells)]
        longest = max(cell.maximum for cell in words)
        column.min_width = longest if column.no_wrap else max(cell.minimum for cell in words)
        needed += max(0, column.min_width - max(cell.minimum for cell in words))
        column.max_width = longest
    spare = max(0, console.width - needed)
    for column in table.columns:
        if not column.no_wrap:
            assert column.min_width is not None
            assert column.max_width is not None
            column.width = min(column.max_width, column.min_width + spare)
            spare -= column.width - column.min_width
    fixed_console(max(console.width, needed), console.file).print(table)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Exit with the status that ``main`` returns; after an interrupt with a line and 130, after a reader that closed
    the pipe with 141, as in a shell."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes nowhere
        status = 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    raise SystemExit(status)


@contextmanager
def waiting(console: Console, what: str, is_quiet: bool = False) -> Iterator[None]:
    """Show a message while waiting, unless ``is_quiet``: a spinner on a terminal, a line in a pipe."""
    if is_quiet:
        yield
        return
    if console.is_terminal:
        with console.status(what):
            yield
        return
    console.print(f"{what} ...", markup=False, highlight=False)
    console.file.flush()
    yield
