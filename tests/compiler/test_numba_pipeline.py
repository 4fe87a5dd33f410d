"""Device functions have no separate machine code, and give the right result when linked into a kernel."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import pytest

from gpu_ops.kernels.common.cpu.codegen.arena import arena, arena_array, arena_size, by_reference
from gpu_ops.kernels.common.cpu.codegen.memory import LINE_BYTES
from gpu_ops.kernels.common.cpu.codegen.numba_api import JITCodeLibrary, types
from gpu_ops.kernels.common.cpu.codegen.numba_pipeline import KernelLibrary
from gpu_ops.kernels.common.cpu.jit import (
    CONTRACT,
    KERNELS,
    REASSOC,
    Kernel,
    device_function,
    noinline_function,
)
from gpu_ops.kernels.norm.cpu.rmsnorm import rmsnorm_forward
from gpu_ops.kernels.rope.cpu.rope import rope_rotate


@device_function
def total(x):
    s = 0.0
    for value in x:
        s += value
    return s


@device_function(refcount=True)
def doubled(x):
    return 2 * x


@numba.njit
def total_of_doubled(x):
    return total(doubled(x))


def _machine_code(dispatcher):
    """True if the one compiled version has machine code."""
    (compiled,) = dispatcher.overloads.values()
    return compiled.target_context.codegen()._engine.is_symbol_defined(compiled.fndesc.llvm_func_name)


def test_device_functions_are_compiled_within_their_callers():
    assert total_of_doubled(np.arange(5.0)) == 20
    assert _machine_code(total_of_doubled)
    assert not _machine_code(total)
    assert not _machine_code(doubled)


@device_function
def plus(x, y):
    return x + y


@noinline_function
def minus(x, y):
    return x - y


@numba.njit
def use_constants(n):
    return plus(n, 1) + plus(n, n) + minus(n, 2)


def test_a_constant_makes_no_version_of_its_own():
    assert use_constants(3) == 4 + 6 + 1
    assert len(plus.overloads) == 1


def test_noinline_functions_are_called():
    use_constants(3)
    (code,) = use_constants.inspect_llvm().values()
    calls = [line for line in code.splitlines() if " call " in line]
    assert any("minus" in line for line in calls)
    assert not any("plus" in line for line in calls)


class Pair(NamedTuple):
    n: int
    x: np.ndarray


@device_function
def scaled_sum(pair):
    s = 0.0
    for value in pair.x:
        s += pair.n * value
    return s


@numba.njit
def through_pointer(n, x):
    return scaled_sum(by_reference(Pair(n, x))) + by_reference(Pair(n, x)).n


def test_a_tuple_by_reference_is_read_like_the_tuple():
    assert through_pointer(3, np.arange(5.0)) == 30 + 3


@device_function
def two_arrays(memory, n):
    return arena_array(memory, (n, 3), 0.0), arena_array(memory, n, np.int32(0))


@numba.njit
def arena_arrays(n):
    count = arena_size()
    two_arrays(count, n)
    memory = arena(count[0])
    x, y = two_arrays(memory, n)
    x[:] = 1.5
    y[:] = 2
    return x.sum(), y.sum(), x.ctypes.data % 64, y.ctypes.data - x.ctypes.data, count[0], 8 * len(memory)


def test_arena_arrays_fit_the_counted_size():
    n = 7
    first, second, past_line, distance, counted_bytes, size = arena_arrays(n)
    assert (first, second) == (1.5 * 3 * n, 2 * n)
    assert past_line == 0
    assert distance >= n * 3 * 8
    assert distance % LINE_BYTES == 0
    assert counted_bytes >= distance + n * 4
    assert size == counted_bytes + LINE_BYTES


@pytest.mark.parametrize("decorate", [device_function(refcount=True), device_function, noinline_function])
def test_a_device_function_computes_alike_in_all_kernels(decorate):
    """This includes a kernel that may reorder sums and that compiles the function first."""

    @decorate
    def lost(x, y):
        return (x + y) - x

    caller = numba.njit(fastmath=set(REASSOC))(lambda x, y: lost(x, y))
    assert caller(1e30, 1.0) == 0.0


@pytest.fixture
def compiled_libraries(monkeypatch, tmp_path):
    """Libraries of which machine code is made."""
    libraries, finalize = [], JITCodeLibrary._finalize_specific
    monkeypatch.setattr(
        JITCodeLibrary, "_finalize_specific", lambda self: libraries.append(self) or finalize(self)
    )
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    return libraries


def numba_callees(state, n_tasks, x):
    zeros = np.zeros(n_tasks, np.complex64)  # of types that no kernel uses
    state[0] = max(x[0], x[1]) + zeros.size


@numba.njit
def zeros_and_maximum(n, x):
    return np.zeros(n, np.complex64), max(x[0], x[1])


def test_functions_of_numba_are_compiled_within_a_kernel(compiled_libraries):
    """And serve functions of other packages that are compiled later."""
    kernel = Kernel(numba_callees, lambda _: (types.int16[::1],), (None,), CONTRACT)
    KERNELS.remove(kernel)
    state, x = np.zeros(1, np.int64), np.array([3, 5], np.int16)
    kernel[None](state, 4, x)
    assert state[0] == 5 + 4
    assert [type(library) for library in compiled_libraries] == [KernelLibrary]

    zeros, maximum = zeros_and_maximum(4, x)
    assert (zeros == 0).all()
    assert zeros.dtype == np.complex64
    assert maximum == 5


@pytest.mark.parametrize("kernel", [rmsnorm_forward, rope_rotate], ids=lambda kernel: kernel.name)
def test_a_kernel_is_optimised_and_made_machine_code_of_once(compiled_libraries, kernel):
    """Device functions that are compiled by themselves, too, took a third of the first call's time."""
    again = Kernel(kernel._function, kernel._signature, ("float16",), CONTRACT)
    KERNELS.remove(again)
    again["float16"]
    assert [type(library) for library in compiled_libraries] == [KernelLibrary]
