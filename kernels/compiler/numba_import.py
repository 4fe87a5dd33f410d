"""Imports Numba completely, in a thread of its own that Ctrl-C does not reach.

If two threads import it at once, or an interrupt stops the import halfway, it stays broken for the rest of the
process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def uninterrupted(function: Callable[[], None]) -> None:
    """Run ``function`` to its end in a thread of its own, even if the waiting caller is interrupted."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # raised again in the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="gpu_ops_uninterrupted")
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        run()
    else:
        thread.join()
    if errors:
        raise errors[0]


class Once:
    """Runs a function once, to its end, even if callers are interrupted. After an error the next call tries again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self._lock, self._done = function, threading.RLock(), False
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
            # a forked child would wait for a thread it does not have
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
