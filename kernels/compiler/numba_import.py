"""Numba, imported as a whole: by a thread of its own, which no Ctrl-C reaches.

Imported by two threads at once, or left half imported by an interrupt, it stays broken for as long as the process
lives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def uninterrupted(function: Callable[[], None]) -> None:
    """Run it to its end, in a thread of its own, whatever interrupts who waits for it here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, name="gpu_ops_uninterrupted")
    try:
        thread.start()
    except RuntimeError:  # there is no thread to be had
        run()
    else:
        thread.join()
    if errors:
        raise errors[0]


class Once:
    """A function that runs once, to its end, whatever interrupts who waits for it; after an error, once more."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self._lock, self._done = function, threading.RLock(), False
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
            # a child would wait for a thread it does not have
            held, let_go = self._lock.acquire, self._lock.release
            os.register_at_fork(before=held, after_in_parent=let_go, after_in_child=let_go)

    def __call__(self) -> None:
        if not self._done:
            uninterrupted(self._run)

    def _run(self) -> None:
        with self._lock:
            if not self._done:
                self._function()
                self._done = True


@Once
def import_numba() -> None:
    import numba.core.registry  # the targets too
    import numba.np.arrayobj  # noqa: F401  # what kernels import beside it
