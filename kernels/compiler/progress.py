"""Messages on stderr: progress of work that takes over a second, the notice that kernels are compiled, warnings.

``GPU_OPS_QUIET=1`` silences progress and the notice. The notice goes through ``logging.getLogger("gpu_ops")`` (level
INFO): to the handlers that the application has configured, at the level it has set, or to stderr if there are none. A
stderr that cannot be written is not an error: then nothing is shown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, cast

PATIENCE = 1.0  # seconds before anything is shown
SLOW = 10.0  # seconds after which a kernel that still compiles is named
silent = False  # of several processes that do the same work, one shows progress: the others set this
_in_steps: ContextVar[bool] = ContextVar("gpu_ops.in_steps", default=False)
_announced = threading.Lock()  # acquired by the first compilation of this process, and never released

LOGGER = logging.getLogger("gpu_ops")


class _Stderr:
    """Current stderr, which may be closed, full, incomplete or None. Output that it cannot show is dropped."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with without_stderr():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with without_stderr():
            self._stream.flush()

    def isatty(self) -> bool:
        with without_stderr():
            return bool(self._stream.isatty())
        return False


def _quiet() -> bool:
    return silent or _in_steps.get() or os.environ.get("GPU_OPS_QUIET", "0") not in ("", "0")


@contextmanager
def visible(message: str) -> Iterator[None]:
    """Show ``message`` on stderr once the block has run for :data:`PATIENCE` seconds, and how long it took.

    On a terminal it is a spinner that disappears. In a log or notebook it is a line, and a second line at the end,
    since other output may have come in between and other threads may be at work.
    """
    if _quiet():
        yield
        return
    done = threading.Event()
    shown = threading.Event()
    stderr = _Stderr()
    terminal = stderr.isatty()

    def wait() -> None:
        if done.wait(PATIENCE):
            return
        shown.set()
        if terminal:
            from rich.console import Console

            with Console(file=cast("TextIO", stderr)).status(message):
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
    stderr = _Stderr()
    stderr.write(f"{line}\n")  # in one write, unlike print()
    stderr.flush()


@contextmanager
def compilation(label: str, target: str, *, kept: bool = True) -> Iterator[Callable[[], None]]:
    """Announce that kernels are compiled: a line per process, and one for a kernel that takes over :data:`SLOW`.

    Within the block the caller looks the kernel up in the cache, and calls the function that this yields when it has
    to be compiled. ``kept``: later processes load it from the cache.
    """
    timer = threading.Timer(
        SLOW, _notice, (f"compiling {label} for {target} takes longer than {SLOW:.0f} s",)
    )
    timer.daemon = True

    def begin() -> None:
        if timer.ident is not None or _quiet():
            return
        if _announced.acquire(blocking=False):
            later = "once; later processes load them" if kept else "in each process that uses them"
            _notice(f"compiling kernels for {target}, {later}")
        with contextlib.suppress(RuntimeError):  # no thread can start: see visible()
            timer.start()

    try:
        yield begin
    finally:
        timer.cancel()


def _notice(message: str) -> None:
    """Log a line; on stderr, like the last resort of logging, where the application has configured no handler.

    Without a handler the level of the root logger counts only if it differs from logging's default, WARNING.
    """
    if LOGGER.hasHandlers():
        with without_stderr():  # of a handler that writes to the same stderr
            LOGGER.info(message)
        return
    by_default = LOGGER.level == logging.NOTSET and LOGGER.getEffectiveLevel() == logging.WARNING
    if LOGGER.isEnabledFor(logging.INFO) or (by_default and LOGGER.manager.disable < logging.INFO):
        _say(f"gpu_ops: {message}")


@contextmanager
def steps(message: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; the function it yields advances it. In a log, the lines of :func:`visible`.

    Until it ends, nested messages of this thread are suppressed.
    """
    stderr = _Stderr()
    if _quiet() or not stderr.isatty():
        with visible(message):
            yield from _quietly(lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=cast("TextIO", stderr)), transient=True) as bar:
        task = bar.add_task(message, total=total)
        yield from _quietly(lambda: bar.advance(task))


def _quietly(advance: Callable[[], None]) -> Iterator[Callable[[], None]]:
    token = _in_steps.set(True)
    try:
        yield advance
    finally:
        _in_steps.reset(token)


def several(count: int, what: str) -> str:
    """``1 block``, ``1,024 blocks``"""
    return f"{count:,} {what}" + "s" * (count != 1)


def warn(message: str, *, stacklevel: int) -> None:
    """Warn, without an error if stderr cannot be written."""
    with without_stderr():
        warnings.warn(message, stacklevel=stacklevel + 1)


def without_stderr() -> contextlib.suppress:
    """Go on without a stderr that is closed (ValueError), full, None or an object that lacks a method."""
    return contextlib.suppress(OSError, ValueError, AttributeError)
