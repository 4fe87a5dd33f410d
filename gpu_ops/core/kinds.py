"""Calls of one kind: what decides how a call is checked and run, told apart in 2 us.

:func:`gpu_ops.core.dispatch.op` keeps what it made for a kind. Later calls of that kind skip what shapes, dtypes and
options decide; whatever the kind does not say they look at again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["ANY_INTEGER", "INTEGERS", "PLAIN", "are_apart", "as_it_lies", "kind_of", "on_plain_arrays"]

_RESULTS = ("out", "residual_out", "grads")  # arguments that receive results: an array, or a tuple of them
INTEGERS: set[type] = {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}
_FLOATS: set[type] = {float, *(np.dtype(code).type for code in np.typecodes["Float"])}
PLAIN: set[type] = {bool, np.bool_, *INTEGERS, *_FLOATS, str, np.str_, type(None)}
"""Types of options that say all by their value; hashable."""
ANY_INTEGER = SimpleNamespace(kind_of_call="an integer")
"""Stands for an integer whose value does not decide how a call is checked and run."""
_VARIABLES = tuple(
    os.environ.encodekey(name) if hasattr(os.environ, "_data") else name
    for name in ("GPU_OPS_DEVICE", "GPU_OPS_BACKEND")
)


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides how a call is checked and run, if that is no more than the shapes, strides and dtypes of NumPy
    arrays, which of them are worked on in place, and plain options; None otherwise."""
    kind: list[Any] = [*_environment(), *kwargs]
    for x in (*args, *kwargs.values()):
        of = type(x)
        if of is np.ndarray:
            kind += (x.dtype, x.shape, x.strides)
        elif of in PLAIN:
            kind += (of, x)  # the type too: 1 == 1.0 == True
        elif (of is tuple or of is list) and all([type(i) in INTEGERS for i in x]):
            kind += (of, tuple(x))
        elif of is tuple and all([type(i) is np.ndarray for i in x]):
            kind += [(i.dtype, i.shape, i.strides) for i in x]
        elif of is np.memmap:
            kind += (of, x.dtype, x.shape, x.strides)  # the type too: on_plain_arrays()
        elif (says := getattr(x, "kind_of_call", None)) is not None:
            kind.append(says)
        else:
            return None
    for name in _RESULTS:
        if kwargs.get(name) is not None:
            places = _in_place(kwargs[name], name, args, kwargs)
            if places is None:
                return None
            kind += places
    return tuple(kind)


def on_plain_arrays(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """``call``, which later calls of the kind of these arguments go to, with plain arrays where these are memory
    maps, as planners have them. NumPy makes every view of a map with code in Python."""
    if not any([type(x) is np.memmap for x in (*args, *kwargs.values())]):
        return call
    return lambda *args, **kwargs: call(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if type(x) is np.memmap else x


def _environment() -> tuple[Any, ...]:
    """Both variables as they lie in the dictionary behind ``os.environ``, which itself takes 1 us for each that is
    not set."""
    lies = getattr(os.environ, "_data", None)
    found = os.environ if lies is None else lies
    return found.get(_VARIABLES[0]), found.get(_VARIABLES[1])


def _in_place(
    given: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[bool, ...]] | None:
    """For each array that receives results, which arguments it is. None: the planner has to have a closer look,
    for it is no array, read-only or not aligned, or may share memory with one that it is not."""
    results = given if type(given) is tuple else (given,)
    others = [*args, *(x for other, x in kwargs.items() if other != name)]
    for other in _RESULTS:
        if type(kwargs.get(other)) is tuple:
            others += kwargs[other]
    others = [x for x in others if isinstance(x, np.ndarray)]
    views = _views(others)
    places = []
    for out in results:
        if type(out) is not np.ndarray:
            return None
        flags = out.flags
        near = views if flags.owndata else others
        if not (flags.writeable and flags.aligned):
            return None
        if any([x is not out and np.may_share_memory(out, x) for x in near]):
            return None
        places.append(tuple([x is out for x in others]))
    return places


def are_apart(outs: list[np.ndarray[Any, Any]], others: list[np.ndarray[Any, Any]]) -> bool:
    """Whether all of ``outs`` are writable, aligned and share no memory, with the others and with each other."""
    views = _views(others)
    for i, out in enumerate(outs):
        flags = out.flags
        near = outs[:i] + (views if flags.owndata else others)
        if not (flags.writeable and flags.aligned) or any([np.may_share_memory(out, x) for x in near]):
            return False
    return True


def _views(arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Those that do not own their memory: no other array that owns its own has any of it."""
    return [x for x in arrays if not x.flags.owndata]


def as_it_lies(x: Any) -> bool:
    """Not an array that kernels take a copy of."""
    return not isinstance(x, np.ndarray) or not x.ndim or x.shape[-1] <= 1 or x.strides[-1] == x.itemsize
