"""One visible line for work that takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds of silence


@contextmanager
def visible(message: str) -> Iterator[None]:
    """Show ``message`` on stderr if the block runs longer than :data:`PATIENCE`, and how long it took.

    On a terminal it is a spinner that disappears; in a log it is one line.
    """
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

    start = time.perf_counter()
    watcher = threading.Thread(target=wait, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        if shown.is_set() and not terminal and sys.stderr is not None:
            print(f"{message}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
