"""Uninterrupted execution of work that must not be left half done: imports, compilation, the start of threads.

Ctrl-C raises KeyboardInterrupt in the main thread, between any two instructions of the interpreter. If an import of
Numba or a compilation stops halfway, Numba stays broken for the rest of the process; if any import does, Python's
import lock may stay locked. So such work runs in a *section*: in a thread that no interrupt reaches. The caller waits
for it. An interrupt ends the wait but not the work, which is complete for the next caller.
"""

from __future__ import annotations

import _thread
import atexit
import logging  # noqa: F401  # before the hooks below: see there
import os
import signal
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_POLL = (
    0.05  # seconds: an interrupt just before a wait begins, and any on Windows, is seen when the wait ends
)

_running: dict[int, threading.Lock] = {}  # by thread: locked until its section has ended
_gate = threading.Lock()  # held by a fork: no section begins
_held_in_forks: list[Any] = []


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that runs to its end even if the caller is interrupted: each call is a section.

    Only the main thread gets interrupts; any other one runs the function itself.
    """

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        call = partial(function, *args, **options)
        if threading.get_ident() == threading.main_thread().ident:
            return _in_a_thread(call)
        return _section(call)

    return run


def _in_a_thread(call: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()
    context = copy_context()

    def run() -> None:
        try:
            results.append(context.run(_section, call))
        except BaseException as error:  # raised again in the caller
            errors.append(error)
        finally:
            ended.release()

    try:
        # not threading.Thread: an interrupt within its start() or join() can leave its locks locked
        _thread.start_new_thread(run, ())
    except RuntimeError:  # no thread can be started
        run()
    while not ended.acquire(timeout=_POLL):
        pass
    if errors:
        raise errors.pop()
    return results[0]


def _section(call: Callable[[], T]) -> T:
    thread = threading.get_ident()
    if thread in _running:  # part of a section
        return call()
    ended = threading.Lock()
    with ended:
        with _gate:
            _running[thread] = ended
        try:
            return call()
        finally:
            del _running[thread]


def _wait_for_sections() -> None:
    for thread, ended in list(_running.items()):
        if thread != threading.get_ident():
            while not ended.acquire(timeout=_POLL):
                pass
            ended.release()


@atexit.register
def _finish() -> None:
    """Wait for sections: no thread may compile while the interpreter exits. Ctrl-C while waiting ends the process."""
    try:
        _wait_for_sections()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def hold_in_forks(lock: Any) -> None:
    """Make forks take this lock, after all sections have ended, so that the data it guards is whole in the child."""
    _held_in_forks.append(lock)


def _before_fork() -> None:
    _gate.acquire()
    _wait_for_sections()
    for lock in _held_in_forks:
        lock.acquire()


def _after_fork() -> None:
    for lock in reversed(_held_in_forks):
        lock.release()
    _gate.release()


def _after_fork_in_child() -> None:
    me = threading.get_ident()
    for thread in [thread for thread in _running if thread != me]:
        del _running[thread]
    _after_fork()


# The last hooks registered run first. Those of logging take its lock, which a section may wait for.
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
