"""Text and tables on a terminal and in a pipe, for the commands. Nothing else imports rich."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

__all__ = ["make_console", "print_table", "waiting"]

UNLIMITED = 10_000  # a width that nothing reaches


def make_console(file: TextIO | None = None) -> Console:
    """Lines wrap at the width of a terminal (``COLUMNS`` overrides it), and not at all in a file or a pipe."""
    stream = sys.stdout if file is None else file
    return Console(file=file, width=None if stream.isatty() else UNLIMITED)


def print_table(console: Console, table: Table) -> None:
    """As wide as the console at most, by wrapping between words; where that is not enough, as wide as it must be.

    No word is broken: a terminal that is too narrow breaks the line itself, and nothing is lost.
    """
    probe = Console(width=UNLIMITED, file=console.file)
    needed = Measurement.get(probe, probe.options, table).minimum
    for column in table.columns:  # rich counts the longest word of a column that does not wrap, and breaks words
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
    Console(width=max(console.width, needed), file=console.file).print(table)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Say what is waited for: a spinner on a terminal, a line in a pipe."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    console.print(f"{what} ...", markup=False, highlight=False)
    console.file.flush()
    yield
