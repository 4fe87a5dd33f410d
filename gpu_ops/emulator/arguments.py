"""Checks of a launch's arguments, and packing of kernel arguments into the bytes of the parameter space."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.emulator.buffers import ALLOWED, Buffer, check_array
from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.memory import Memory
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.signature import Parameter, numba_arguments
from gpu_ops.emulator.syntax import DTYPE, Array, Variable
from gpu_ops.errors import OptionError
from gpu_ops.kernels.program import MAX_GRID
from gpu_ops.presets import PRESETS, Arch, DevicePreset, select_preset

_BLOCK = (1024, 1024, 64)
_THREADS = 1024


def dimensions(what: str, size: int | Iterable[int]) -> tuple[int, int, int]:
    """Grid or block as three numbers, each at least 1."""
    try:
        sizes = [operator.index(n) for n in (size if isinstance(size, Iterable) else (size,))]
    except TypeError:
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise EmulatorError(f"{what} is {size!r}; pass 1 to 3 ints, each at least 1, such as 4 or (4, 2)")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def check_text(what: str, given: Any, wanted: str) -> None:
    if not isinstance(given, str):
        raise EmulatorError(f"{what} is {type(given).__name__}; pass {wanted}")


def block_ids(sample: Iterable[int] | None, count: int) -> npt.NDArray[np.int64]:
    """Linear ids of the blocks to run."""
    if sample is None:
        return np.arange(count)
    try:
        ids = sorted({operator.index(i) for i in sample})
    except TypeError as error:
        raise EmulatorError(f"sample is {sample!r}; pass linear ids of blocks, such as [0, 17]") from error
    if ids and not 0 <= ids[0] <= ids[-1] < count:
        raise EmulatorError(f"sample names blocks outside the grid of {count}")
    return np.array(ids, np.int64)


def sanitize_mode(given: bool | str | None) -> bool | str:
    """Mode of ``sanitize=``, by default from ``GPU_OPS_SANITIZE``: False, True or ``"collect"``."""
    if given is None:
        mode = os.environ.get("GPU_OPS_SANITIZE", "")
        given = "collect" if mode == "collect" else mode != "0"
    if given not in (False, True, "collect"):
        raise EmulatorError(f"sanitize is {given!r}; pass True, False or 'collect'")
    return given


def truncating(given: str | None) -> bool:
    """Whether tensor cores truncate, by ``tensor_cores=`` or by default ``GPU_OPS_TENSOR_CORES``."""
    modes = {"exact": False, "truncate": True}
    mode = os.environ.get("GPU_OPS_TENSOR_CORES") or "exact" if given is None else given
    if not isinstance(mode, str) or mode not in modes:
        source = "GPU_OPS_TENSOR_CORES" if given is None else "tensor_cores"
        raise EmulatorError(f"{source} is {mode!r}; pass 'exact' or 'truncate'")
    return modes[mode]


def folders(given: Any) -> tuple[str, ...]:
    """Check ``include=`` and return its folders."""
    try:
        return (given,) if isinstance(given, str) else tuple(map(os.fspath, given))
    except TypeError as error:
        raise EmulatorError(f"include is {given!r}; pass a sequence of folders") from error


def limit(given: int) -> int:
    """Check ``max_instructions=`` and return it."""
    if not isinstance(given, int | np.integer) or given < 1:
        raise EmulatorError(f"max_instructions is {given!r}; pass a number, 1 or more")
    return int(given)


def seconds(given: float) -> float:
    """Check ``max_seconds=`` and return it."""
    if not isinstance(given, int | float | np.integer | np.floating) or not given > 0:
        raise EmulatorError(f"max_seconds is {given!r}; pass a number of seconds, more than 0")
    return float(given)


def select_card(arch: str) -> tuple[str, DevicePreset]:
    """Architecture to compile for and card to emulate, for the name of an architecture or a card."""
    check_text("arch", arch, "an architecture such as 'sm_90', or a card's name")
    real = re.fullmatch(r"sm_\d{2,3}[af]?", arch)
    try:
        preset = select_preset(arch)
    except OptionError as error:
        if not real:
            cards = ", ".join(name for name, preset in PRESETS.items() if not preset.generic)
            raise EmulatorError(
                f"arch is {arch!r}; pass an architecture such as 'sm_90', or one of: {cards}"
            ) from error
        preset = PRESETS["sm_80"]  # for architectures without a preset, such as sm_52 in hand-written PTX
    return arch if real else preset.arch.name, preset


def check_launch(
    program: PtxProgram, arch: Arch, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int
) -> None:
    """Refuse a launch that no card of the architecture accepts for any kernel."""
    title, static = program.title, program.shared_bytes
    if _exceeds(grid, MAX_GRID):
        raise EmulatorError(f"{title}: a grid of {grid} blocks; at most {MAX_GRID}")
    if math.prod(block) > _THREADS:
        raise EmulatorError(f"{title}: a block of {block} threads; a block has 1 to {_THREADS}")
    if _exceeds(block, _BLOCK):
        raise EmulatorError(f"{title}: a block of {block} threads; at most {_BLOCK}")
    directives = program.module.functions[program.name].directives
    max_block, exact = directives.get(".maxntid", block), (*directives.get(".reqntid", block), 1, 1)[:3]
    if math.prod(block) > math.prod(max_block):
        raise EmulatorError(
            f"{title}: a block of {block} threads; __launch_bounds__ (.maxntid) allows {math.prod(max_block)}"
        )
    if block != exact:
        raise EmulatorError(f"{title}: a block of {block} threads; .reqntid asks for {exact}")
    if not isinstance(shared, int | np.integer) or shared < 0:
        raise EmulatorError(f"{title}: shared is {shared!r}; pass a number of bytes, 0 or more")
    if static + shared > arch.smem_per_block_optin:
        raise EmulatorError(
            f"{title}: {shared} bytes of dynamic and {static} of static shared memory; "
            f"a block of {arch.name} may have {arch.smem_per_block_optin}"
        )


def _exceeds(size: tuple[int, int, int], most: tuple[int, int, int]) -> bool:
    return any(n > limit for n, limit in zip(size, most, strict=True))


# ---- kernel arguments --------------------------------------------------------------------------------------


def check_arguments(args: Any) -> list[Any]:
    """Check that each argument has a type that a kernel accepts, and return them."""
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise EmulatorError(
            f"args is {_type(args)}; pass a sequence of the kernel's arguments, such as (x, y, n)"
        )
    for i, arg in enumerate(args):
        value = arg.array if isinstance(arg, Buffer) else arg
        allowed = np.ndarray if isinstance(arg, Buffer) else np.ndarray | np.generic | bytes | int | float
        if not isinstance(value, allowed) or (isinstance(value, np.generic) and value.dtype.kind in "OU"):
            what = f"a Buffer of {_type(value)}" if isinstance(arg, Buffer) else _type(value)
            raise EmulatorError(f"argument {i} is {what}; a kernel takes {ALLOWED}")
        if isinstance(value, np.ndarray):
            check_array(f"argument {i}", value, arg)
    return list(args)


def _type(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def buffers(args: Sequence[Any], signature: Sequence[Parameter] = ()) -> list[Buffer]:
    """Arrays among the arguments, named for messages: by their parameters if those are known."""
    named = []
    for i, arg in enumerate(args):
        name = signature[i].name if len(signature) == len(args) else ""
        name = name or f"argument {i}"
        if isinstance(arg, Buffer):
            named.append(arg if arg.name else replace(arg, name=name))
        elif _is_array(arg):
            named.append(Buffer(arg, name))
    return named


def check_types(title: str, signature: Sequence[Parameter], args: Sequence[Any]) -> None:
    """Refuse an array whose element size differs from that of the parameter's pointee, where that is known."""
    for i, (parameter, arg) in enumerate(zip(signature, args, strict=len(signature) == len(args))):
        array = arg.array if isinstance(arg, Buffer) else arg
        if len(signature) != len(args) or not _is_array(array) or parameter.accepts(array.dtype):
            continue
        remedy = "convert it with astype, or reinterpret it with view"
        if parameter.type.count("*") > 1:
            remedy = "a table of pointers is np.array([emulator.pointer(x), ...], np.uint64)"
        name = f"parameter {parameter.name!r} of {title}" if parameter.name else f"parameter {i} of {title}"
        raise EmulatorError(
            f"{name} is {parameter.type}, with {parameter.scalar} bytes per element; argument {i} is an array of "
            f"{array.dtype}, with {array.itemsize}: {remedy}"
        )


def check_numba(entry: str, args: Sequence[Any]) -> None:
    """Refuse arguments if their number or number of axes does not match the Numba kernel, where that is known."""
    wanted = numba_arguments(entry)
    if wanted is None:
        return
    if len(wanted) != len(args):
        raise EmulatorError(f"the kernel takes {len(wanted)} arguments, {len(args)} were given")
    for i, (axes, arg) in enumerate(zip(wanted, args, strict=True)):
        array = arg.array if isinstance(arg, Buffer) else arg
        actual = array.ndim if _is_array(array) else -1
        if actual != axes:
            names = [f"an array of {n} axes" if n >= 0 else "a number" for n in (actual, axes)]
            raise EmulatorError(f"argument {i} is {names[0]}, the kernel's parameter {names[1]}")


def pack(parameters: Sequence[Variable], args: Sequence[Any], memory: Memory) -> tuple[Array, dict[str, int]]:
    """Pack arguments; return (bytes, offset of each parameter by name).

    A CUDA C++ kernel takes an array as a pointer, a Numba kernel as the fields of an array struct. The number of
    parameters distinguishes the two.
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
            description = (
                f"of type {parameter.type}" if dtype and size == dtype.itemsize else f"of {size} bytes"
            )
            raise EmulatorError(f"{name} is an array, the kernel's parameter {description} no pointer")
        return memory.pointer(value).to_bytes(size, "little")
    if isinstance(value, bool | int | float) and dtype is not None:
        return _number(name, parameter, value)
    data: bytes = value if isinstance(value, bytes) else np.asarray(value).tobytes()
    if len(data) != size:
        raise EmulatorError(f"{name} has {len(data)} bytes ({value!r}), the kernel's parameter {size}")
    # Untyped parameters (b32) take ints and floats.
    floats, ints = parameter.type[0] == "f", parameter.type[0] in "us"
    kind_code = "" if isinstance(value, bytes) else np.asarray(value).dtype.kind
    if (floats and kind_code in ("b", "i", "u")) or (ints and kind_code == "f"):
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
        try:
            return np.array(value, dtype).tobytes()
        except OverflowError as error:
            raise EmulatorError(f"{name} is an integer that {dtype} does not hold") from error
    if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
        raise EmulatorError(f"{name} is {value!r}, the kernel's parameter has {size} bytes")
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
