"""Display of long work: two lines in a log, a bar on a terminal, and no output of the work itself."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import time
import warnings

import pytest

from gpu_ops.kernels.compiler import progress
from tests.support.processes import PATIENCE


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)


def work(advance):
    for _ in range(2):
        with progress.visible("compiling"):
            time.sleep(0.05)
        advance()


def test_a_log_has_a_line_when_patience_ends_and_one_at_the_end(capsys):
    with progress.steps("measuring", 2) as advance:
        work(advance)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "measuring ..."
    assert re.match(r"measuring: \d", last)


def test_a_log_says_what_is_waited_for(capsys):
    """The log says it before the wait, not after."""
    waited, seen = time.monotonic() + PATIENCE, ""
    with progress.visible("compiling"):
        while not seen and time.monotonic() < waited:
            time.sleep(0.01)
            seen = capsys.readouterr().err
    assert seen == "compiling ...\n"
    assert capsys.readouterr().err.startswith("compiling: ")


def test_what_is_fast_is_silent(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with progress.visible("compiling"):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.steps("measuring", 2) as advance:
        work(advance)
    shown = screen.getvalue()
    assert "measuring" in shown
    assert "2/2" in shown
    assert "compiling" not in shown


def test_an_error_inside_ends_it():
    with pytest.raises(KeyError), progress.steps("measuring", 2):
        raise KeyError
    assert not progress._in_steps.get()


def test_without_a_thread_it_is_silent(monkeypatch, capsys):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with progress.visible("compiling"):
        time.sleep(0.02)
    assert capsys.readouterr().err == ""


class Closed(io.StringIO):
    """A stderr closed by ``sys.stderr.close()``."""

    def __init__(self):
        super().__init__()
        self.close()


class Full(io.StringIO):
    """A file on a full disk, or a pipe that nobody reads."""

    def write(self, text):
        raise OSError(28, "No space left on device")


class FullTerminal(Full):
    def isatty(self):
        return True


class Bare:
    """Replacement of stderr in some hosts: an object that can only write."""

    def write(self, text):
        return len(text)


@pytest.mark.parametrize("handler", [False, True])
@pytest.mark.parametrize("stream", [Closed, Full, FullTerminal, Bare, type(None)])
def test_a_stderr_that_cannot_be_written_is_no_error(stream, handler, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(progress, "_announced", threading.Lock())
    monkeypatch.setattr(progress, "LOGGER", logging.Logger("gpu_ops"))
    monkeypatch.delenv("GPU_OPS_QUIET", raising=False)
    if handler:
        progress.LOGGER.addHandler(logging.StreamHandler(sys.stderr))
    failures = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_value))
    with progress.compilation("kernel", "this CPU") as begin:
        begin()
    with progress.steps("measuring", 2) as advance:
        work(advance)
    with progress.visible("compiling"):
        time.sleep(0.05)
    assert not failures


@pytest.mark.parametrize("stream", [Closed, Full, Bare, type(None)])
def test_a_warning_without_a_stderr_is_no_error(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: sys.stderr.write(str(message)))
        progress.warn("not cached", stacklevel=1)


def test_a_warning_names_the_line_that_it_is_about():
    with pytest.warns(UserWarning, match="not cached") as record:
        progress.warn("not cached", stacklevel=1)
    assert record[0].filename == __file__
