"""Kernel arguments as the bytes of the parameter space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.memory import Buffer, Memory
from gpu_ops.emulator.syntax import Variable
from gpu_ops.emulator.types import DTYPE, Array

__all__ = ["buffers", "pack"]


def buffers(args: Sequence[Any]) -> list[Buffer]:
    """The arrays among the arguments, named for messages."""
    found = []
    for i, arg in enumerate(args):
        if isinstance(arg, Buffer):
            found.append(arg if arg.name else Buffer(arg.array, f"argument {i}", arg.written, arg.poison))
        elif isinstance(arg, np.ndarray) and arg.ndim:
            found.append(Buffer(arg, f"argument {i}"))
    return found


def pack(parameters: Sequence[Variable], args: Sequence[Any], memory: Memory) -> tuple[Array, dict[str, int]]:
    """(bytes, offset of each parameter by name).

    A CUDA C++ kernel takes an array as a pointer, a Numba kernel as the fields of its array struct; which one it is
    shows in the number of parameters.
    """
    args = [a.array if isinstance(a, Buffer) else a for a in args]
    values: list[Any]
    if len(parameters) == len(args):
        values = [memory.pointer(a) if _is_array(a) else a for a in args]
    else:
        values = [field for a in args for field in _numba_fields(a, memory)]
    if len(values) != len(parameters):
        raise EmulatorError(
            f"the kernel takes {len(parameters)} parameters, {len(args)} arguments were given"
        )
    data, offsets, at = bytearray(), {}, 0
    for i, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        at = -(-at // parameter.align) * parameter.align
        offsets[parameter.name] = at
        data.extend(bytes(at - len(data)))
        data.extend(_bytes(i, parameter, value))
        at += parameter.bytes
    return np.frombuffer(bytes(data) + bytes(16), np.uint8).copy(), offsets


def _is_array(arg: Any) -> bool:
    return isinstance(arg, np.ndarray) and arg.ndim > 0


def _numba_fields(arg: Any, memory: Memory) -> Iterator[Any]:
    if not _is_array(arg):
        yield arg
        return
    yield from (0, 0, arg.size, arg.itemsize, memory.pointer(arg), *arg.shape, *arg.strides)


def _bytes(i: int, parameter: Variable, value: Any) -> bytes:
    size, dtype = parameter.bytes, DTYPE.get(parameter.type)
    if isinstance(value, (bool, int, float)) and dtype is not None:
        if size != dtype.itemsize:
            raise EmulatorError(
                f"argument {i} is {value!r}, the kernel's parameter has {size} bytes of its own type"
            )
        if isinstance(value, float) and dtype.kind != "f":
            if parameter.type[0] != "b":
                raise EmulatorError(f"argument {i} is {value!r}, the kernel's parameter an integer")
            dtype = np.dtype(f"f{size}")
        if dtype.kind == "f":
            return np.array(value, dtype).tobytes()
        if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
            raise EmulatorError(f"argument {i} is {value!r}, the kernel's parameter has {size} bytes")
        return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    data: bytes = value if isinstance(value, bytes) else np.asarray(value).tobytes()
    if len(data) != size:
        raise EmulatorError(f"argument {i} has {len(data)} bytes ({value!r}), the kernel's parameter {size}")
    return data
