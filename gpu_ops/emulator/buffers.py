"""Arrays that a kernel may address: arguments, and arrays whose address is in a struct or in a table of pointers."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.signature import Parameter, plain_name, variable
from gpu_ops.emulator.syntax import DTYPE, Array, Variable
from gpu_ops.kernels.compiler.uninterrupted import hold_in_forks

ALLOWED = (
    "NumPy arrays and Buffers of them, numbers, NumPy scalars, and structs as bytes; 0 is a null pointer"
)


@dataclass(frozen=True, eq=False)
class Buffer:
    """Array argument with a name and the state of its contents.

    Parameters
    ----------
    array : numpy.ndarray
    name : str
        Name for messages.
    written : bool
        False for an array without contents: it is a fault to read a byte before the kernel has written it.
    poison : bool array, optional
        Mask that is broadcast to the array. True marks padding that must not be read.
    """

    array: Array
    name: str = ""
    written: bool = True
    poison: Array | None = None


@dataclass(frozen=True, eq=False)
class Pinned(Buffer):
    """Array that already has a device address."""

    device: int = 0


def check_array(what: str, x: Any, given: Any) -> None:
    """Refuse an array that no kernel can use. ``given``: the array, or a Buffer of it."""
    wrong = ""
    if x.dtype.hasobject or x.dtype.kind in "SU":
        wrong = "an array of Python objects" if x.dtype.hasobject else f"an array of text ({x.dtype})"
    elif not x.dtype.isnative:
        wrong = f"an array of bytes in the other order ({x.dtype.str}; astype converts it)"
    elif isinstance(x, np.ma.MaskedArray):
        wrong = "a masked array"
    if wrong:
        raise EmulatorError(f"{what} is {wrong}; a kernel takes {ALLOWED}")
    if isinstance(given, Buffer) and given.poison is not None:
        try:
            np.broadcast_to(given.poison, x.shape)
        except ValueError as error:
            raise EmulatorError(
                f"{what}: poison has shape {np.shape(given.poison)}, the array {x.shape}"
            ) from error


# ---- addresses that are known before a launch --------------------------------------------------------------

# Above all other global memory and below the windows, with the array in the middle of a region.
_BASE, _REGION, _REGIONS = 1 << 50, 1 << 38, 1 << 17
_REMEMBERED = 4096  # regions of freed arrays that are kept for messages


@dataclass(eq=False)
class _Region:
    """Device addresses of an array that owns its memory, and of its views: host addresses plus a constant."""

    owner: weakref.ref[Array]
    host: int
    bytes: int
    device: int
    views: dict[tuple[object, ...], Buffer] = field(default_factory=dict)  # their arrays keep no memory alive
    name: str = ""  # name of the latest view

    @property
    def alive(self) -> bool:
        return self.owner() is not None


class _View:
    """View that can be made again as long as its owner lives."""

    def __init__(self, like: Any, owner: Array | None = None) -> None:
        self.__array_interface__ = like.__array_interface__
        self.owner = owner


_regions: dict[int, _Region] = {}  # by number
_numbers = itertools.cycle(range(_REGIONS))
_lock = threading.Lock()
hold_in_forks(_lock)


def pointer(array: Array | Buffer) -> int:
    """Device address of an array, for a field of a struct or an element of a table of pointers.

    It stays the same in all launches of this process as long as the array's memory lives. Launches check accesses
    through it like those through an argument. The address does not keep the array alive; an access after the array
    is freed is a fault that says so. A :class:`Buffer` sets the array's name for messages and its state at the start
    of each launch; the latest one for an array counts.

        >>> import numpy as np
        >>> from gpu_ops import emulator
        >>> rows = [np.arange(n, dtype=np.float32) for n in (3, 4)]
        >>> table = np.array([emulator.pointer(row) for row in rows], np.uint64)  # float**

    Raises :class:`EmulatorError` if it is not a NumPy array, or is one that no kernel can use.
    """
    buffer = array if isinstance(array, Buffer) else Buffer(array)
    x = buffer.array
    if not isinstance(x, np.ndarray):
        raise EmulatorError(f"pointer takes a NumPy array or a Buffer of one, not {type(x).__name__}")
    check_array("the array", x, buffer)
    if x.size == 0:
        return 0
    owner: Any = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    with _lock:
        region = _region(owner)
        key = _host(x), x.shape, x.strides, x.dtype.str
        known = region.views.get(key)
        name = buffer.name or (known.name if known else f"the {x.dtype} array {x.shape} of pointer()")
        region.name = name
        region.views[key] = replace(buffer, array=_View(x), name=name)  # type: ignore[arg-type]
        return region.device + _host(x) - region.host


def _region(owner: Array) -> _Region:
    """Region that holds the memory of an array; a new one if none does."""
    low, high = _host(owner), _host(owner) + owner.nbytes
    for region in _regions.values():
        if region.alive and region.host <= low and high <= region.host + region.bytes:
            return region
    number = next(n for n in _numbers if n not in _regions or not _regions[n].alive)
    _regions.pop(number, None)
    device = _BASE + number * _REGION + _REGION // 2
    made = _regions[number] = _Region(weakref.ref(owner), low, owner.nbytes, device)
    gone = [n for n, region in _regions.items() if not region.alive]
    for n in gone[: max(0, len(gone) - _REMEMBERED)]:
        del _regions[n]
    return made


def pinned() -> Iterator[Pinned]:
    """Live arrays that have addresses."""
    with _lock:
        for region in _regions.values():
            owner = region.owner()
            if owner is None:
                continue
            for view in region.views.values():
                kept: Any = _View(view.array, owner)
                array = np.asarray(kept)
                device = region.device + _host(array) - region.host
                yield Pinned(array, view.name, view.written, view.poison, device)


def gone(address: int) -> str:
    """Description of the freed array that had an address; empty if the array is alive or no array had it."""
    region = _regions.get((address - _BASE) // _REGION) if address >= _BASE else None
    if region is None or region.alive:
        return ""
    name = f"`{region.name}`" if region.name.isidentifier() else region.name
    return f"of {name}: its memory has been freed since. Keep a reference to the array"


def _host(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


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
