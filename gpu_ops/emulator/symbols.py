"""Arrays that replace ``__constant__`` and ``__device__`` variables of the module: ``symbols=`` of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.signature import Parameter, plain_name, variable
from gpu_ops.emulator.syntax import DTYPE, Array, Variable


def bind(program: PtxProgram, symbols: Mapping[str, Any] | None) -> dict[str, Array]:
    """Arrays by the variables' names in PTX. An array is the variable's memory; a number is its value."""
    if symbols is None:
        return {}
    if not isinstance(symbols, Mapping):
        raise EmulatorError(
            f"symbols is {type(symbols).__name__}; pass a dict of arrays by the variables' names"
        )
    arrays: dict[str, Array] = {}
    for name, value in symbols.items():
        target = _find(program, name)
        arrays[target.name] = _array(name, target, value, declared(program, target))
    return arrays


def declared(program: PtxProgram, target: Variable) -> Parameter | None:
    """Declaration of a variable in the CUDA C++ text, if there is one."""
    texts = "\n".join(program.module.sources.values())
    return variable(plain_name(target.name), texts)


def is_unset(program: PtxProgram, target: Variable) -> bool:
    """Whether the host must set a variable: a ``__constant__`` without an initial value.

    PTX omits an initial value of zeros, so only the CUDA C++ text distinguishes ``= 0`` from no value. A
    ``__device__`` variable without an initial value is zero. Constants of Numba always have one.
    """
    if target.space != "const" or target.initial or target.name.startswith("_cudapy_cmem"):
        return False
    declaration = declared(program, target)
    return declaration is None or not declaration.type.endswith("=")


def _find(program: PtxProgram, name: str) -> Variable:
    candidates = [v for v in program.globals if name in (v.name, plain_name(v.name))]
    exact = [v for v in candidates if v.name == name] or candidates
    if len(exact) != 1:
        names = ", ".join(plain_name(v.name) for v in program.globals if not v.name.startswith("$"))
        has = f"the module has: {names}" if names else "the module has none"
        raise EmulatorError(f"symbols names {name!r}, which is no __constant__ or __device__ variable; {has}")
    return exact[0]


def _array(name: str, target: Variable, value: Any, declaration: Parameter | None) -> Array:
    if isinstance(value, bool | int | float):
        dtype = DTYPE[target.type]
        if target.bytes != dtype.itemsize:
            raise EmulatorError(
                f"symbols[{name!r}] is a number, and the variable has {target.bytes} bytes; pass an array"
            )
        if declaration is not None and declaration.type.split()[0] in ("float", "double"):
            dtype = np.dtype(f"f{dtype.itemsize}")
        array = np.array(value, dtype)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    else:
        raise EmulatorError(f"symbols[{name!r}] is {type(value).__name__}; pass a NumPy array or a number")
    if not array.flags.c_contiguous or array.dtype.hasobject:
        raise EmulatorError(
            f"symbols[{name!r}] must be a C-contiguous array, since it is the variable's memory"
        )
    what = f"the variable has {target.bytes} bytes"
    if declaration is not None and declaration.element and not declaration.accepts(array.dtype):
        what = f"{what} of type {declaration.type.removesuffix(' =')}"
    elif array.nbytes == target.bytes:
        return array
    raise EmulatorError(
        f"symbols[{name!r}] has {array.nbytes} bytes ({array.size} elements of {array.dtype}), {what}"
    )
