"""Progress on stderr for work that takes longer than a second: lines at its start and end, or a bar."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PATIENCE = 1.0  # seconds before anything is shown
silent = False  # of several processes that do the same, one speaks: the others set this
_in_steps: ContextVar[bool] = ContextVar("gpu_ops.in_steps", default=False)


@contextmanager
def visible(message: str) -> Iterator[None]:
    """Show ``message`` on stderr once the block has run for :data:`PATIENCE` seconds, and how long it took.

    On a terminal it is a spinner that disappears. In a log or notebook it is a line, and a second line at the end,
    since other output may have come in between and other threads may be at work.
    """
    if silent or _in_steps.get():
        yield
        return
    done = threading.Event()
    shown = threading.Event()
    terminal = sys.stderr is not None and sys.stderr.isatty()

    def wait() -> None:
        if done.wait(PATIENCE):
            return
        shown.set()
        if terminal:
            from rich.console import Console

            with Console(stderr=True).status(message):
                done.wait()
        else:
            _say(f"{message} ...")

    start = time.perf_counter()
    watcher = threading.Thread(target=wait, daemon=True)
    # no thread can start if the interpreter is shutting down or the system has none left: then show nothing
    with contextlib.suppress(RuntimeError):
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if watcher.ident is not None:
            watcher.join()
        if shown.is_set() and not terminal:
            _say(f"{message}: {time.perf_counter() - start:.1f} s")


def _say(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{line}\n")  # in one write, unlike print()
        sys.stderr.flush()


@contextmanager
def steps(message: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; the function it yields advances it. In a log, the lines of :func:`visible`.

    Until it ends, nested messages of this thread are suppressed.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if silent or not terminal:
        with visible(message):
            yield from _quietly(lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=total)
        yield from _quietly(lambda: bar.advance(task))


def _quietly(advance: Callable[[], None]) -> Iterator[Callable[[], None]]:
    token = _in_steps.set(True)
    try:
        yield advance
    finally:
        _in_steps.reset(token)
