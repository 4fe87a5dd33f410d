"""The cache key of a call: shapes, strides, dtypes and options, in about 2 us.

Validation gives the same result for calls with equal keys, so a later call goes straight to the program of the first.
Values that do not select the program (lengths, pages, positions) are not in the key; an op's hook reads them in
every call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu_ops.core.defaults import DEFAULTS, default

__all__ = ["ANY_NUMBER", "INTEGERS", "PLAIN", "array_key", "call_key", "describes", "extent"]

INTEGERS: set[type] = {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}
_FLOATS: set[type] = {float, *(np.dtype(code).type for code in np.typecodes["Float"])}
PLAIN: set[type] = {bool, np.bool_, *INTEGERS, *_FLOATS, str, np.str_, type(None)}
"""Types of options whose key is their value; hashable."""


class _AnyInteger:
    call_key, call_arrays = "an integer", ()


class _AnyFloat:
    call_key, call_arrays = "a float", ()


ANY_NUMBER: dict[type, Any] = dict.fromkeys(INTEGERS, _AnyInteger()) | dict.fromkeys(_FLOATS, _AnyFloat())
"""Placeholders by type, for numbers that are not part of the call key."""
_VARIABLES = ("GPU_OPS_DEVICE", "GPU_OPS_BACKEND", "GPU_OPS_ARCH", "GPU_OPS_SANITIZE")
_ENVIRONMENT = tuple(
    os.environ.encodekey(name) if hasattr(os.environ, "_data") else name for name in _VARIABLES
)

_describe: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {}


def describes(kind: type) -> Callable[[Callable[[Any], tuple[Any, ...] | None]], Any]:
    """Register a function that returns the key of a library's array; None: its calls are not cached."""

    def register(function: Callable[[Any], tuple[Any, ...] | None]) -> Any:
        _describe[kind] = function
        return function

    return register


def call_key(written: Sequence[str | int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Key of everything that validating and running a call depend on; None where only validation itself can tell.

    ``written``: the arguments that receive results, by position or name.
    """
    environment = _environment()
    key: list[Any] = [*environment, len(args), *kwargs]
    device = kwargs.get("device")
    if type(device) not in PLAIN:
        return None
    on_emulator = (device or environment[0]) not in (None, "cpu", b"cpu", "cuda", b"cuda")
    for x in (*args, *kwargs.values()):
        cls = type(x)
        if cls is np.ndarray:
            shape = x.shape
            if not shape and x.dtype.kind in "UT":  # a word, such as a format's name: its value decides
                return None
            key += (x.dtype, shape, x.strides)
            if on_emulator:
                key.append(x.__array_interface__["data"][0] % 16)
        elif cls in PLAIN:
            key += (cls, x)  # the type too: 1 == 1.0 == True
        else:
            described = _described(cls, x)
            if described is None:
                return None
            key += described
            if on_emulator:
                items = x if cls is tuple or cls is list else (x,)
                key += [i.__array_interface__["data"][0] % 16 for i in items if isinstance(i, np.ndarray)]
    results: list[Any] = []
    for argument in written:
        if type(argument) is int:
            result = args[argument] if argument < len(args) else None
        else:
            result = kwargs.get(argument)  # type: ignore[arg-type]
        if result is not None:
            results += result if type(result) is tuple else (result,)
    if results:
        places = _places(results, (*args, *kwargs.values()))
        if places is None:
            return None
        key += places
    return tuple(key)


def array_key(x: Any) -> tuple[Any, ...] | None:
    """Key of an array held by an argument; None: its calls are not cached."""
    if type(x) is np.ndarray:
        return x.dtype, x.shape, x.strides
    describe = _describe.get(type(x))
    return None if describe is None else describe(x)


def _described(kind: type, x: Any) -> tuple[Any, ...] | None:
    if kind is tuple or kind is list:
        if all([type(i) in PLAIN for i in x]):
            return kind, *[(type(i), i) for i in x]
        if all([type(i) is np.ndarray for i in x]):
            return kind, *[(i.dtype, i.shape, i.strides) for i in x]
        if all([type(i) in _describe for i in x]):
            parts = [_describe[type(i)](i) for i in x]
            return None if None in parts else (kind, *parts)
        return None
    if kind is np.memmap:
        return kind, x.dtype, x.shape, x.strides
    describe = _describe.get(kind)
    if describe is not None:
        return describe(x)
    if kind is type or isinstance(x, np.dtype):  # a result's dtype
        return kind, x
    # look on the class: an object may answer to any name
    key = x.call_key if hasattr(kind, "call_key") else None
    return None if key is None else (kind, key)


def _environment() -> tuple[Any, ...]:
    """Variables read from the dictionary behind ``os.environ``; the mapping itself takes 1 us for each."""
    if DEFAULTS.get() is not None:
        return tuple([default(name) for name in _VARIABLES])
    data = getattr(os.environ, "_data", None)
    variables = os.environ if data is None else data
    return tuple([variables.get(name) for name in _ENVIRONMENT])


def _places(results: list[Any], arguments: tuple[Any, ...]) -> list[Any] | None:
    """Indices, for each array that receives results, of the arguments' arrays that are the same object.

    None: one is not an array, is read-only or misaligned, or may share memory with another array.
    """
    arrays: list[Any] = []
    for x in arguments:
        cls = type(x)
        if cls is np.ndarray:
            arrays.append(x)
        elif cls in PLAIN:
            continue
        elif cls is tuple or cls is list:
            arrays += [i for i in x if type(i) not in PLAIN]
        elif hasattr(cls, "call_arrays"):
            arrays += x.call_arrays
        else:
            arrays.append(x)
    if any([type(out) is not np.ndarray for out in results]):
        return _places_elsewhere(results, arrays)
    places = [_place_on_host(out, arrays) for out in results]
    return None if None in places else places


def _place_on_host(out: np.ndarray[Any, Any], arrays: list[Any]) -> Any:
    flags = out.flags
    if not (flags.writeable and flags.aligned):
        return None
    owns = flags.owndata
    matches = []
    for i, x in enumerate(arrays):
        if x is out:
            matches.append(i)
        elif not isinstance(x, np.ndarray) or (
            not (owns and x.flags.owndata) and np.may_share_memory(out, x)
        ):
            return None
    return tuple(matches)


def _places_elsewhere(results: list[Any], arrays: list[Any]) -> list[Any] | None:
    """:func:`_places` for arrays of other libraries. Arguments may hold some ``arrays`` in host memory."""
    if not all([type(x) in _describe for x in results]):
        return None
    if not all([type(x) in _describe or type(x) is np.ndarray for x in arrays]):
        return None
    extents = [extent(x) for x in arrays]
    places: list[Any] = []
    for out in results:
        matches = [i for i, x in enumerate(arrays) if x is out]
        low, high = extents[matches[0]]
        touched = [i for i, (start, end) in enumerate(extents) if start < high and low < end]
        if touched and touched != matches:  # an empty array touches nothing
            return None
        places.append(tuple(matches))
    return places


def extent(x: Any) -> tuple[int, int]:
    """Start and end address of a NumPy, CuPy or torch array."""
    if hasattr(x, "data_ptr"):
        address, itemsize = x.data_ptr(), x.element_size()
        steps = tuple([stride * itemsize for stride in x.stride()])
    else:
        address = x.__array_interface__["data"][0] if type(x) is np.ndarray else x.data.ptr
        itemsize, steps = x.itemsize, x.strides
    low, high = _span(x.shape, steps, itemsize)
    return address + low, address + high


@functools.lru_cache(4096)
def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Offsets of an array's first byte and of its end, relative to its first element; cached."""
    if 0 in shape:
        return 0, 0
    reach = [stride * (n - 1) for stride, n in zip(strides, shape, strict=True)]
    return sum([r for r in reach if r < 0]), sum([r for r in reach if r > 0]) + itemsize
