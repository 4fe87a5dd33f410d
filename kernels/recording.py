"""Recording of a pass on the CPU: its launches and the NumPy operations between them, to be run again.

A recording holds the arrays of its pass. Run again, it reads their new contents and writes the same results; shapes,
strides, numbers of tasks and options are those of the recorded pass. Python's share of a call, 20 to 50 us, is not
repeated: ``common/cpu/replay.py`` runs the launches in one native call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Recording:
    """Steps of a pass: functions and their arguments."""

    def __init__(self) -> None:
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.refused = ""
        """Why the steps may not be run again; empty if they may."""


class _Local(threading.local):
    recording: Recording | None = None


LOCAL = _Local()
"""The recording of the thread, or None."""


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the launches of this thread, while they run."""
    outer, LOCAL.recording = LOCAL.recording, Recording()
    try:
        yield LOCAL.recording
    finally:
        LOCAL.recording = outer


def note(function: Callable[..., Any], *arguments: Any) -> None:
    """Add a step that has been run to the recording of this thread, if there is one."""
    if LOCAL.recording is not None:
        LOCAL.recording.steps.append((function, arguments))


def refuse_recording(reason: str) -> None:
    """Note that the recording of this thread, if there is one, may not be run again."""
    if LOCAL.recording is not None:
        LOCAL.recording.refused = reason


def on_host(function: Callable[..., Any], *arguments: Any) -> None:
    """Run a step that is no launch: one that writes to its arguments."""
    function(*arguments)
    note(function, *arguments)


def as_int64(x: Array) -> Array:
    """``x`` itself, or a copy as int64 that a recording makes anew."""
    if x.dtype == np.int64:
        return x
    copy = np.empty(x.shape, np.int64)
    on_host(np.copyto, copy, x)
    return copy
