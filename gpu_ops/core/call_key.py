"""The cache key of a call: shapes, strides, dtypes and options, in about 2 us.

Calls with equal keys are validated alike, so a later one goes straight to the program of the first.
Values that decide nothing (lengths, pages, positions) are not in the key; an op's hook looks at them every time.
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
"""Types of options that are their value; hashable."""


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
    """Register what tells two arrays of a library apart; None: never remembered."""

    def register(function: Callable[[Any], tuple[Any, ...] | None]) -> Any:
        _describe[kind] = function
        return function

    return register


def call_key(written: Sequence[str | int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides how a call is validated and run; None where only validation itself can tell.

    ``written``: the arguments that receive results, by position or name.
    """
    environment = _environment()
    key: list[Any] = [*environment, len(args), *kwargs]
    device = kwargs.get("device")
    if type(device) not in PLAIN:
        return None
    on_emulator = (device or environment[0]) not in (None, "cpu", b"cpu", "cuda", b"cuda")
    for x in (*args, *kwargs.values()):
        kind = type(x)
        if kind is np.ndarray:
            shape = x.shape
            if not shape and x.dtype.kind in "UT":  # a word, such as a format's name: its value decides
                return None
            key += (x.dtype, shape, x.strides)
            if on_emulator:
                key.append(x.__array_interface__["data"][0] % 16)
        elif kind in PLAIN:
            key += (kind, x)  # the type too: 1 == 1.0 == True
        else:
            described = _described(kind, x)
            if described is None:
                return None
            key += described
            if on_emulator:
                inside = x if kind is tuple or kind is list else (x,)
                key += [i.__array_interface__["data"][0] % 16 for i in inside if isinstance(i, np.ndarray)]
    results: list[Any] = []
    for where in written:
        if type(where) is int:
            given = args[where] if where < len(args) else None
        else:
            given = kwargs.get(where)  # type: ignore[arg-type]
        if given is not None:
            results += given if type(given) is tuple else (given,)
    if results:
        places = _places(results, (*args, *kwargs.values()))
        if places is None:
            return None
        key += places
    return tuple(key)


def array_key(x: Any) -> tuple[Any, ...] | None:
    """What tells an array apart that an argument holds; None: never remembered."""
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
    if kind is type or isinstance(x, np.dtype):  # of a result
        return kind, x
    says = x.call_key if hasattr(kind, "call_key") else None  # the class's: an object may answer to any name
    return None if says is None else (kind, says)


def _environment() -> tuple[Any, ...]:
    """The variables, read from the dictionary behind ``os.environ``: the mapping itself takes 1 us for each."""
    if DEFAULTS.get() is not None:
        return tuple([default(name) for name in _VARIABLES])
    data = getattr(os.environ, "_data", None)
    found = os.environ if data is None else data
    return tuple([found.get(name) for name in _ENVIRONMENT])


def _places(results: list[Any], arguments: tuple[Any, ...]) -> list[Any] | None:
    """For each array that receives results, which of the arguments' arrays it is.

    None: it is no array, read-only or misaligned, or may share memory with an array that it is not.
    """
    arrays: list[Any] = []
    for x in arguments:
        kind = type(x)
        if kind is np.ndarray:
            arrays.append(x)
        elif kind in PLAIN:
            continue
        elif kind is tuple or kind is list:
            arrays += [i for i in x if type(i) not in PLAIN]
        elif hasattr(kind, "call_arrays"):
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
    same = []
    for i, x in enumerate(arrays):
        if x is out:
            same.append(i)
        elif not isinstance(x, np.ndarray) or (
            not (owns and x.flags.owndata) and np.may_share_memory(out, x)
        ):
            return None
    return tuple(same)


def _places_elsewhere(results: list[Any], arrays: list[Any]) -> list[Any] | None:
    """``arrays`` may include some in host memory, which arguments hold."""
    if not all([type(x) in _describe for x in results]):
        return None
    if not all([type(x) in _describe or type(x) is np.ndarray for x in arrays]):
        return None
    extents = [extent(x) for x in arrays]
    places: list[Any] = []
    for out in results:
        same = [i for i, x in enumerate(arrays) if x is out]
        low, high = extents[same[0]]
        touched = [i for i, (start, end) in enumerate(extents) if start < high and low < end]
        if touched and touched != same:  # an empty array touches nothing
            return None
        places.append(tuple(same))
    return places


def extent(x: Any) -> tuple[int, int]:
    """The addresses that an array of NumPy's, CuPy's or torch's lies within."""
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
    """The first byte of an array and the one after its last, relative to its first element; kept."""
    if 0 in shape:
        return 0, 0
    reach = [stride * (n - 1) for stride, n in zip(strides, shape, strict=True)]
    return sum([r for r in reach if r < 0]), sum([r for r in reach if r > 0]) + itemsize
