"""Replay of recorded launches in one native call, on all threads.

Every thread walks over the launches with the others::

    current launch | rmsnorm  | linear          | rmsnorm | ...
    caller         | the task | tasks 0, 2, 3   |  waits  |
    helper         |  waits   | task 1          | the task|

A launch is over when its tasks are claimed and no thread is in its kernel: a barrier of work, not of threads. Nobody
waits for a helper that is asleep or preempted, and a late one joins at the current launch. A wait of more than about
50 us lets other programs run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.entry import record_of
from gpu_ops.kernels.common.cpu.codegen.numba_api import (
    get_or_insert_function,
    intrinsic,
    ir,
    signature,
    types,
)
from gpu_ops.kernels.common.cpu.jit import kernel, read, write
from gpu_ops.kernels.common.cpu.parallel import emit_pause, launch, launch_inline, thread_count
from gpu_ops.kernels.recording import Recording

Array = np.ndarray[Any, Any]
_Step = tuple[Callable[..., Any], tuple[Any, ...]]

_PAUSES = 2000  # of 20 to 50 ns, before a waiting thread yields
_LINE = 8  # words of a cache line
# Columns of a row of launches, and counters of a launch, each on a separate line.
_ENTRY, _RECORD, _TASKS, _ONE_THREAD = range(4)
_CLAIMED, _WITHIN, _ONE_CLAIMED, _COUNTERS = 0, _LINE, 2 * _LINE, 3 * _LINE


class Replay:
    """Steps of a recording, to be run again with the same bits: launches between two other steps are one call."""

    def __init__(self, recording: Recording) -> None:
        self._steps: list[Callable[[], Any]] = []
        launches: list[_Step] = []
        for function, arguments in recording.steps:
            if function is np.copyto and _widens(*arguments):
                arguments = widen[None], 1, *map(np.atleast_2d, arguments)
                function = launch_inline
            if function in (launch, launch_inline):
                launches.append((function, arguments))
                continue
            self._add(launches)
            launches = []
            self._steps.append(partial(function, *arguments))
        self._add(launches)

    def __call__(self) -> None:
        for step in self._steps:
            step()

    def _add(self, launches: list[_Step]) -> None:
        if launches:
            self._steps.append(_Launches(launches))


def _widens(target: Array, source: Any) -> bool:
    """Whether a copy makes int64 of int32, and has at most two axes."""
    same_shape = isinstance(source, np.ndarray) and source.shape == target.shape and source.ndim <= 2
    return same_shape and target.dtype == np.int64 and source.dtype == np.int32


class _Launches:
    """Launches that follow each other. The arrays of their arguments live as long as this object."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps
        self._records, rows = [], []
        for function, (compiled, n_tasks, *arguments) in steps:
            entry, argument_types = compiled.entry
            record = np.array(record_of(argument_types, arguments), np.int64)
            self._records.append(record)
            one_thread = function is launch_inline or n_tasks == 1
            rows.append((entry, record.ctypes.data, n_tasks, int(one_thread)))
        self._rows = np.array(rows, np.int64)
        self._threads = 1 if self._rows[:, _ONE_THREAD].all() else thread_count()
        self._run = launch if self._threads > 1 else launch_inline
        self._compiled = run_launches[None]

    def __call__(self) -> None:
        counters, current = np.zeros(len(self._rows) * _COUNTERS, np.int64), np.zeros(1, np.int64)
        self._run(self._compiled, self._threads, self._rows, counters, current, _PAUSES)


@intrinsic
def _read(typingctx, x, i):
    """``x[i]``, before anything that follows."""

    def codegen(context, b, sig, args):
        return b.load_atomic(_place(context, b, sig, args), "seq_cst", 8)

    return signature(types.int64, x, types.int64), codegen


@intrinsic
def _add(typingctx, x, i, n):
    """``x[i]`` before an atomic addition of ``n``."""

    def codegen(context, b, sig, args):
        return b.atomic_rmw("add", _place(context, b, sig, args), args[2], "seq_cst")

    return signature(types.int64, x, types.int64, types.int64), codegen


@intrinsic
def _advance(typingctx, x, value):
    """Add 1 to ``x[0]`` if it is ``value``."""

    def codegen(context, b, sig, args):
        first = context.make_array(sig.args[0])(context, b, args[0]).data
        after = b.add(args[1], context.get_constant(types.int64, 1))
        b.cmpxchg(first, args[1], after, "seq_cst", "seq_cst")
        return context.get_dummy_value()

    return signature(types.void, x, types.int64), codegen


@intrinsic
def _call(typingctx, entry, x, i, n_tasks, record):
    """Call an entry, whose counter of tasks is ``x[i]``."""

    def codegen(context, b, sig, args):
        word = ir.IntType(64)
        function = b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [word] * 3).as_pointer())
        counter = b.ptrtoint(_place(context, b, sig, args, 1), word)
        b.call(function, [counter, args[3], args[4]])
        return context.get_dummy_value()

    return signature(types.void, entry, x, types.int64, types.int64, types.int64), codegen


@intrinsic
def _wait(typingctx, yields):
    """Pause, or let another thread run on this core."""

    def codegen(context, b, sig, args):
        with b.if_else(args[0]) as (yielding, pausing):
            with yielding:
                yield_type = ir.FunctionType(ir.IntType(32), [])
                b.call(get_or_insert_function(b.module, yield_type, "sched_yield"), [])
            with pausing:
                emit_pause(b)
        return context.get_dummy_value()

    return signature(types.void, yields), codegen


def _place(context: Any, b: Any, sig: Any, args: Any, index: int = 0) -> Any:
    array = context.make_array(sig.args[index])(context, b, args[index])
    return b.gep(array.data, [args[index + 1]])


@kernel(lambda _: (write("int64", 2), read("int32", 2)), variants=(None,))
def widen(state, n_tasks, target, source):
    """Copy int32 as int64: positions and token ids of a pass."""
    for i in range(target.shape[0]):
        for j in range(target.shape[1]):
            target[i, j] = source[i, j]


_WORDS = types.int64[::1]


@kernel(lambda _: (types.int64[:, ::1], _WORDS, _WORDS, types.int64), variants=(None,))
def run_launches(state, n_tasks, launches, counters, current, pauses):
    """Run launches with the other threads that call this. Nobody waits for one, so ``state`` is not used."""
    count = len(launches)
    i = _read(current, 0)
    while i < count:
        tasks, at = launches[i, _TASKS], i * _COUNTERS
        claimed, within = at + _CLAIMED, at + _WITHIN
        if _read(counters, claimed) < tasks:
            _add(counters, within, 1)
            if launches[i, _ONE_THREAD] != 0:
                if _add(counters, claimed, tasks) == 0:
                    _call(launches[i, _ENTRY], counters, at + _ONE_CLAIMED, tasks, launches[i, _RECORD])
            elif _read(counters, claimed) < tasks:
                _call(launches[i, _ENTRY], counters, claimed, tasks, launches[i, _RECORD])
            _add(counters, within, -1)
        waits = 0
        while _read(current, 0) == i:
            if _read(counters, claimed) >= tasks and _read(counters, within) == 0:
                _advance(current, i)
                break
            waits += 1
            _wait(waits > pauses)
        i = _read(current, 0)
