"""Arrays that a kernel may address: arguments, and arrays whose address is in a struct or in a table of pointers."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpu_ops.emulator.errors import EmulatorError
from gpu_ops.emulator.syntax import Array
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


# -- addresses that are known before a launch -----------------------------------------------------

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
