"""Functions that only kernels call: no machine code of their own, and the right result within other code."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from gpu_ops.kernels.numba_cpu.ir.carve import carve, room, tally
from gpu_ops.kernels.numba_cpu.ir.held import held
from gpu_ops.kernels.numba_cpu.ir.memory import LINE_BYTES
from gpu_ops.kernels.numba_cpu.jit import alone, counted, uncounted


@uncounted
def total(x):
    s = 0.0
    for value in x:
        s += value
    return s


@counted
def doubled(x):
    return 2 * x


@numba.njit
def total_of_doubled(x):
    return total(doubled(x))


def _machine_code(dispatcher):
    """Whether the one compiled version can be jumped to."""
    (compiled,) = dispatcher.overloads.values()
    return compiled.target_context.codegen()._engine.is_symbol_defined(compiled.fndesc.llvm_func_name)


def test_parts_are_finished_within_their_callers():
    assert total_of_doubled(np.arange(5.0)) == 20
    assert _machine_code(total_of_doubled)
    assert not _machine_code(total)
    assert not _machine_code(doubled)


@uncounted
def plus(x, y):
    return x + y


@alone
def minus(x, y):
    return x - y


@numba.njit
def use_constants(n):
    return plus(n, 1) + plus(n, n) + minus(n, 2)


def test_a_constant_makes_no_version_of_its_own():
    assert use_constants(3) == 4 + 6 + 1
    assert len(plus.overloads) == 1


def test_what_is_alone_is_called_and_not_inlined():
    use_constants(3)
    (code,) = use_constants.inspect_llvm().values()
    calls = [line for line in code.splitlines() if " call " in line]
    assert any("minus" in line for line in calls)
    assert not any("plus" in line for line in calls)


class Pair(NamedTuple):
    n: int
    x: np.ndarray


@uncounted
def scaled_sum(pair):
    s = 0.0
    for value in pair.x:
        s += pair.n * value
    return s


@numba.njit
def through_pointer(n, x):
    return scaled_sum(held(Pair(n, x))) + held(Pair(n, x)).n


def test_a_held_tuple_is_read_like_the_tuple():
    assert through_pointer(3, np.arange(5.0)) == 30 + 3


@uncounted
def two_arrays(memory, n):
    return carve(memory, (n, 3), 0.0), carve(memory, n, np.int32(0))


@numba.njit
def carved(n):
    count = tally()
    two_arrays(count, n)
    memory = room(count[0])
    x, y = two_arrays(memory, n)
    x[:] = 1.5
    y[:] = 2
    return x.sum(), y.sum(), x.ctypes.data % 64, y.ctypes.data - x.ctypes.data, count[0], 8 * len(memory)


def test_arrays_are_carved_out_of_what_was_counted():
    n = 7
    first, second, past_line, apart, counted_bytes, size = carved(n)
    assert (first, second) == (1.5 * 3 * n, 2 * n)
    assert past_line == 0
    assert apart >= n * 3 * 8
    assert apart % LINE_BYTES == 0
    assert counted_bytes >= apart + n * 4
    assert size == counted_bytes + LINE_BYTES
