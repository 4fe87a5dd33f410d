"""Kernel arguments as the bytes of the parameter space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.memory import Buffer, Memory
from gpu_ops.emulator.syntax import Variable
from gpu_ops.emulator.types import DTYPE, Array

__all__ = ["buffers", "checked", "pack"]

_ALLOWED = (
    "NumPy arrays and Buffers of them, numbers, NumPy scalars, and structs as bytes; 0 is a null pointer"
)


def checked(args: Any) -> list[Any]:
    """The arguments, each of a type that a kernel can get."""
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise EmulatorError(
            f"args is {_type(args)}; pass a sequence of the kernel's arguments, such as (x, y, n)"
        )
    for i, arg in enumerate(args):
        value = arg.array if isinstance(arg, Buffer) else arg
        allowed = np.ndarray if isinstance(arg, Buffer) else np.ndarray | np.generic | bytes | int | float
        if not isinstance(value, allowed) or (isinstance(value, np.generic) and value.dtype.kind in "OU"):
            what = f"a Buffer of {_type(value)}" if isinstance(arg, Buffer) else _type(value)
            raise EmulatorError(f"argument {i} is {what}; a kernel takes {_ALLOWED}")
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise EmulatorError(f"argument {i} is an array of Python objects; a kernel takes {_ALLOWED}")
    return list(args)


def _type(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def buffers(args: Sequence[Any]) -> list[Buffer]:
    """The arrays among the arguments, named for messages."""
    found = []
    for i, arg in enumerate(args):
        if isinstance(arg, Buffer):
            found.append(arg if arg.name else Buffer(arg.array, f"argument {i}", arg.written, arg.poison))
        elif _is_array(arg):
            found.append(Buffer(arg, f"argument {i}"))
    return found


def pack(parameters: Sequence[Variable], args: Sequence[Any], memory: Memory) -> tuple[Array, dict[str, int]]:
    """(bytes, offset of each parameter by name).

    A CUDA C++ kernel takes an array as a pointer, a Numba kernel as the fields of its array struct; which one it is
    shows in the number of parameters.
    """
    named = [(f"argument {i}", a.array if isinstance(a, Buffer) else a) for i, a in enumerate(args)]
    if len(parameters) != len(named):
        named = [(name, field) for name, a in named for field in _numba_fields(a)]
    if len(named) != len(parameters):
        raise EmulatorError(
            f"the kernel takes {len(parameters)} parameters, {len(args)} arguments were given"
        )
    data, offsets, at = bytearray(), {}, 0
    for parameter, (name, value) in zip(parameters, named, strict=True):
        at = -(-at // parameter.align) * parameter.align
        offsets[parameter.name] = at
        data.extend(bytes(at - len(data)))
        data.extend(_bytes(name, parameter, value, memory))
        at += parameter.bytes
    return np.frombuffer(bytes(data) + bytes(16), np.uint8).copy(), offsets


def _is_array(arg: Any) -> bool:
    return isinstance(arg, np.ndarray) and arg.ndim > 0


def _numba_fields(arg: Any) -> Iterator[Any]:
    if not _is_array(arg):
        yield arg
        return
    yield from (0, 0, arg.size, arg.itemsize, arg, *arg.shape, *arg.strides)


def _bytes(name: str, parameter: Variable, value: Any, memory: Memory) -> bytes:
    size, dtype = parameter.bytes, DTYPE.get(parameter.type)
    if _is_array(value):
        if size != 8 or parameter.type not in ("b64", "u64", "s64"):
            kind = f"of type {parameter.type}" if dtype and size == dtype.itemsize else f"of {size} bytes"
            raise EmulatorError(f"{name} is an array, the kernel's parameter {kind} no pointer")
        return memory.pointer(value).to_bytes(size, "little")
    if isinstance(value, bool | int | float) and dtype is not None:
        return _number(name, parameter, value)
    data: bytes = value if isinstance(value, bytes) else np.asarray(value).tobytes()
    if len(data) != size:
        raise EmulatorError(f"{name} has {len(data)} bytes ({value!r}), the kernel's parameter {size}")
    # The types of bits (b32) take both.
    floats, ints = parameter.type[0] == "f", parameter.type[0] in "us"
    given = "" if isinstance(value, bytes) else np.asarray(value).dtype.kind
    if (floats and given in ("b", "i", "u")) or (ints and given == "f"):
        raise EmulatorError(f"{name} is {value!r}, the kernel's parameter of type {parameter.type}")
    return data


def _number(name: str, parameter: Variable, value: float) -> bytes:
    """A Python number, converted to the parameter's type."""
    size, dtype = parameter.bytes, DTYPE[parameter.type]
    if size != dtype.itemsize:
        raise EmulatorError(f"{name} is {value!r}, the kernel's parameter has {size} bytes of its own type")
    if isinstance(value, float) and dtype.kind != "f":
        if parameter.type[0] != "b" or size == 1:
            raise EmulatorError(f"{name} is {value!r}, the kernel's parameter an integer")
        dtype = np.dtype(f"f{size}")
    if dtype.kind == "f":
        return np.array(value, dtype).tobytes()
    if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
        raise EmulatorError(f"{name} is {value!r}, the kernel's parameter has {size} bytes")
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
