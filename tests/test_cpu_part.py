"""Functions that only kernels call: no machine code of their own, and the right result within other code."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numba
import numpy as np
import pytest

from gpu_ops.kernels.numba_cpu.ir.carve import carve, room, tally
from gpu_ops.kernels.numba_cpu.ir.held import held
from gpu_ops.kernels.numba_cpu.ir.memory import LINE_BYTES
from gpu_ops.kernels.numba_cpu.jit import REASSOC, alone, counted, uncounted


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


@uncounted
def loops(start, stop, step):
    total, last = 0, -1
    for i in range(start, stop, step):
        total, last = total + 1, i
    return total, last


@numba.njit
def call_loops(start, stop, step):
    return loops(start, stop, step)


def test_a_part_loops_as_python_does():
    for bounds in itertools.product((-3, 0, 4), (-5, 0, 4, 11), (-4, -1, 1, 2, 20)):
        numbers = range(*bounds)
        assert call_loops(*bounds) == (len(numbers), numbers[-1] if numbers else -1)


@uncounted
def divided(x, y):
    return x // y, x % y


@numba.njit
def call_divided(x, y):
    return divided(x, y)


def test_a_part_divides_as_python_does_and_0_by_0_is_0():
    for x, y in itertools.product((-7, -6, -1, 0, 1, 6, 7), (-3, -1, 1, 2, 7)):
        assert call_divided(x, y) == (x // y, x % y)
    assert call_divided(7, 0) == (0, 0)


@uncounted
def compared(x, y):
    return x < y, x <= y, x > y, x >= y, x == y, x != y


@numba.njit
def call_compared(x, y):
    return compared(x, y)


def test_a_part_compares_as_python_does():
    for x, y in itertools.product((-1, 0, 1), (-1, 0, 1)):
        assert call_compared(x, y) == compared.py_func(x, y)
    for x, y in itertools.product((-1.5, 0.0, np.nan), (-1.5, 0.0, np.nan)):
        assert call_compared(x, y) == compared.py_func(x, y)


@uncounted
def take_apart(x, out):
    for i in range(len(x)):
        plane = x[i]
        out[i, 0] = x[i, 1, 2] + plane[1, 0] + x[i, 1][1] + plane[1:][0, 2]
        out[i, 1:2][0] = x.shape[2] * x[i:].shape[0] + x.strides[0]
    out[2:, 2][:1] = plane[0, 0]
    x[1] = 5
    x[2:] = 7


@numba.njit
def call_take_apart(x, out):
    take_apart(x, out)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_part_indexes_as_numpy_does(transposed):
    def arrays():
        x = np.arange(24.0).reshape(4, 2, 3)
        return x.transpose(2, 1, 0) if transposed else x, np.zeros((4, 3))

    given, wanted = arrays(), arrays()
    call_take_apart(*given)
    take_apart.py_func(*wanted)
    for a, b in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


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


@pytest.mark.parametrize("decorate", [counted, uncounted, alone])
def test_a_part_computes_alike_in_all_kernels(decorate):
    """Also in one that may reorder sums, and has it compiled first."""

    @decorate
    def lost(x, y):
        return (x + y) - x

    caller = numba.njit(fastmath=set(REASSOC))(lambda x, y: lost(x, y))
    assert caller(1e30, 1.0) == 0.0
