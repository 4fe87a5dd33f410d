"""Functions that only kernels call: no machine code of their own, and the right result within other code."""

from __future__ import annotations

import numba
import numpy as np

from gpu_ops.kernels.numba_cpu.jit import counted, uncounted


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
