"""Run a compiled kernel on all cores: threads of a pool claim tasks from one atomic counter.

Why not ``prange``: Numba's default layers abort or stall when two Python threads launch at once
(workqueue), after a fork (OpenMP), or beside NumPy's own spinning BLAS threads (OpenMP: 85 us become
8 ms). Here the calling thread works itself and pool threads join in as they wake, so a small call
never waits for them; and compiling without parfors is several times faster.

A kernel is ``f(state, n_tasks, *arguments)`` with the loop::

    task = claim(state)
    while task < n_tasks:
        ...
        task = claim(state)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numba.core import config, types
from numba.core.typing import signature
from numba.extending import intrinsic

_pool: ThreadPoolExecutor | None = None


def thread_count() -> int:
    """Threads that work on one call: NUMBA_NUM_THREADS, else the cores this process may use."""
    return int(config.NUMBA_NUM_THREADS)


# Elements below which a second thread costs more (waking it: about 30 us) than it saves.
MIN_ELEMENTS_PER_TASK = 1 << 16
MIN_NANOSECONDS = 60_000  # likewise, where elements say little about the work
TASKS_PER_THREAD = 4  # enough for an even finish when one core is slower


def items_per_task(n_items: int, elements_per_item: int) -> int:
    """How many equal items (rows) one task takes."""
    least = -(-MIN_ELEMENTS_PER_TASK // max(elements_per_item, 1))
    even = -(-n_items // (thread_count() * TASKS_PER_THREAD))
    return max(least, even, 1)


def launcher(nanoseconds: float) -> Callable[..., None]:
    """:func:`launch`, or :func:`launch_here` for so little work that other threads would wake up too late.

    ``nanoseconds``: about what one thread takes for all of it.
    """
    return launch if nanoseconds >= MIN_NANOSECONDS else launch_here


def launch_here(compiled: Callable[..., None], n_tasks: int, *arguments: Any) -> None:
    """Run all tasks on the calling thread."""
    if n_tasks > 0:
        compiled(np.zeros(1, np.int64), n_tasks, *arguments)


def launch(compiled: Callable[..., None], n_tasks: int, *arguments: Any) -> None:
    """Run all tasks and return when they are done. Safe from any number of Python threads at once."""
    count = min(thread_count(), n_tasks)
    if count <= 1:
        launch_here(compiled, n_tasks, *arguments)
        return
    state = np.zeros(1, np.int64)  # the next unclaimed task
    call = [(state, n_tasks, *arguments)]
    helpers: list[Future[None]] = []
    for _ in range(count - 1):
        try:
            helpers.append(_threads().submit(_help, compiled, call))
        except RuntimeError:  # the interpreter is shutting down: work alone
            break
    try:
        compiled(state, n_tasks, *arguments)
    finally:
        state[0] = n_tasks  # on an exception too: nobody claims more, so nobody writes later
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        call.clear()  # what a thread that has not woken up is to find would keep the arrays until it does


def _help(compiled: Callable[..., None], call: list[tuple[Any, ...]]) -> None:
    compiled(*call[0])


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(thread_count() - 1, 1), thread_name_prefix="gpu_ops")
    return _pool


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_pool)  # a forked child has the object but not its threads


@intrinsic
def claim(typingctx, state):
    """Take the next task: ``state[0]`` before an atomic increment."""

    def codegen(context, builder, sig, args):
        array = context.make_array(sig.args[0])(context, builder, args[0])
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", array.data, one, "monotonic")

    return signature(types.int64, state), codegen
