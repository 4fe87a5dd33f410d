"""Arguments of public functions, checked against their annotations before the body runs.

A public package ends with a call of :func:`publish`. It checks the arguments of everything in ``__all__``, and
suggests the nearest name for an unknown one. Only precise annotations are checked: ``int`` (of 64 bits), ``float``
(finite), ``bool``, ``str``, classes, dtypes, and sequences, tuples and mappings of them. Arguments annotated ``Any``
and arrays are left to the body.
"""

from __future__ import annotations

import collections.abc as abc
import difflib
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.errors import DTypeError, GpuOpsError, OptionError, UnknownOptionError, suggest

__all__ = ["publish"]

Check = Callable[[str, str, Any], object]  # function, argument, value; raises the caller's error
_ANYTHING = (Any, object, inspect.Parameter.empty)
_UNIONS = (typing.Union, types.UnionType)
_SEQUENCES = (abc.Sequence, abc.Collection, abc.Iterable, list, tuple)
_ORDERED = (abc.Sequence, list, tuple)  # where a mapping is a mistake: elsewhere its keys count


def publish(package: dict[str, Any], renamed: abc.Mapping[str, str] | None = None) -> None:
    """Check the arguments of a package's public functions and classes. ``package``: its ``globals()``.

    ``renamed``: current names by earlier ones, which still work in this version, with a DeprecationWarning.

    Modules within gpu_ops that import a function from its own module call it unchecked.
    """
    who, names = package["__name__"], package["__all__"]
    for name in names:
        value = package[name]
        if inspect.isclass(value):
            _check_class(value)
        elif inspect.isfunction(value) and not hasattr(value, "op"):
            package[name] = checked(value, name)
            package[name].__module__ = who  # where pickle finds it
    package["__dir__"] = lambda: sorted(names)
    suggest(package, names, renamed)


def _check_class(kind: type) -> None:
    """Check the constructor and the public methods, except those named in ``checks_itself``: they are called often,
    and their bodies check. A dataclass without ``__post_init__`` accepts any values."""
    plain = hasattr(kind, "__dataclass_fields__") and not hasattr(kind, "__post_init__")
    for name, value in list(vars(kind).items()):
        if name in getattr(kind, "checks_itself", ()):
            continue
        if name == "__init__" and not plain:
            setattr(kind, name, checked(value, kind.__name__))
        elif not name.startswith("_") and inspect.isfunction(value):
            setattr(kind, name, checked(value, value.__qualname__))
        elif not name.startswith("_") and isinstance(value, (classmethod, staticmethod)):
            function = value.__func__
            setattr(kind, name, type(value)(checked(function, function.__qualname__)))


def checked(function: Callable[..., Any], who: str) -> Any:
    """Wrap ``function`` to raise a typed error for an argument that does not fit its annotation."""
    if hasattr(function, "declared"):
        return function
    declared: list[tuple[list[tuple[str, Check]], dict[str, Check]]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not declared:
            declared.append(_declared(function))
        positional, named = declared[0]
        for (name, check), value in zip(positional, args, strict=False):
            if check is not _anything:
                check(who, name, value)
        for name, value in kwargs.items():
            named.get(name, _anything if None in named else _unknown(function))(who, name, value)
        return function(*args, **kwargs)

    call.declared = True  # type: ignore[attr-defined]
    return call


def _declared(function: Callable[..., Any]) -> tuple[list[tuple[str, Check]], dict[Any, Check]]:
    """Checks of positional arguments in order, and of all by name. The key None matches any other keyword."""
    parameters = inspect.signature(function).parameters.values()
    scope = vars(sys.modules[function.__module__])
    by_name = {p.name: _check_of(p.annotation, scope) for p in parameters if p.kind is not p.VAR_KEYWORD}
    positional = [
        (p.name, by_name[p.name])
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    extra: dict[Any, Check] = {None: _anything} if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
    return positional, by_name | extra


def _unknown(function: Callable[..., Any]) -> Check:
    def check(who: str, name: str, value: Any) -> None:
        names = [n for n in inspect.signature(function).parameters if n not in ("self", "cls")]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownOptionError(f"{who}: unknown argument {name!r}{hint}; it takes {', '.join(names)}")

    return check


# ---- from annotations to checks ----------------------------------------------------------------------------


def _anything(who: str, name: str, value: Any) -> None:
    """A value of any type."""


def _check_of(annotation: Any, scope: dict[str, Any]) -> Check:
    """Check of one annotation, whose names are in ``scope``."""
    if isinstance(annotation, str):
        if annotation.removesuffix(" | None") == "npt.DTypeLike":  # a union that may include None
            return functools.partial(_dtype, annotation.endswith("None"))
        annotation = eval(annotation, scope)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    simple: dict[Any, Check] = {
        int: _integer,
        float: checks.number,
        bool: checks.flag,
        type(None): _nothing,
        None: _nothing,
    }
    if annotation in simple:
        return simple[annotation]
    if origin in _UNIONS and all(_is_plain(part) for part in parts if part is not type(None)):
        kinds = tuple(part for part in parts if part is not type(None))
        return _one_of([functools.partial(_instance, kinds), *[_nothing][: len(parts) - len(kinds)]])
    if origin in _UNIONS:
        return _one_of([_check_of(part, scope) for part in parts])
    if origin in _SEQUENCES or annotation in _SEQUENCES:
        return _sequence(origin or annotation, [_check_of(part, scope) for part in parts if part is not ...])
    if origin in (abc.Mapping, dict):
        return functools.partial(_mapping, [_check_of(part, scope) for part in parts])
    if origin is abc.Callable:
        return _callable
    cls = origin or annotation
    if not inspect.isclass(cls) or cls in _ANYTHING:
        return _anything
    if getattr(cls, "_is_protocol", False) and not getattr(cls, "_is_runtime_protocol", False):
        return _anything
    return functools.partial(_instance, (cls,))


def _is_plain(part: Any) -> bool:
    """Whether an annotation is a class that only its instances satisfy."""
    special = (int, float, bool, *_ANYTHING)
    return inspect.isclass(part) and typing.get_origin(part) is None and part not in (*special, *_SEQUENCES)


def _one_of(options: list[Check]) -> Check:
    if _anything in options:
        return _anything
    first = [option for option in options if option is not _nothing]

    def check(who: str, name: str, value: Any) -> None:
        if value is None and len(first) < len(options):
            return
        errors = []
        for option in first:
            try:
                option(who, name, value)
            except GpuOpsError as error:
                errors.append(error)
            else:
                return
        raise errors[-1] if len(errors) == 1 else type(errors[-1])("; or ".join(map(str, errors)))

    return check


def _refuse(who: str, name: str, expected: str, value: Any) -> typing.NoReturn:
    shown = repr(value) if isinstance(value, (str, int, float, bool)) else ""
    raise OptionError(f"{who}: {name} must be {expected}, got {type(value).__name__} {shown}".rstrip())


def _nothing(who: str, name: str, value: Any) -> None:
    if value is not None:
        _refuse(who, name, "None", value)


def _integer(who: str, name: str, value: Any) -> None:
    checks.integer(who, name, value, low=-(2**63), high=2**64 - 1)


def _dtype(optional: bool, who: str, name: str, value: Any) -> None:
    if value is None and optional:
        return
    try:
        if value is None or isinstance(value, np.ndarray) or not np.dtype(value).itemsize:
            raise TypeError
    except Exception as error:
        shown = value if isinstance(value, str) else type(value).__name__
        dtypes = "'bfloat16' or 'float8_e4m3fn'"
        raise DTypeError(f"{who}: {name}={shown!r} is no dtype; pass one such as {dtypes}") from error


def _instance(kinds: tuple[type, ...], who: str, name: str, value: Any) -> None:
    if isinstance(value, kinds):
        return
    if kinds == (str,):
        _refuse(who, name, "a string", value)
    words = " or ".join(cls.__name__ for cls in kinds)
    remedy = "".join(f"; {cls.made_by}" for cls in kinds if hasattr(cls, "made_by"))
    raise OptionError(f"{who}: {name} must be a {words}, got {type(value).__name__}{remedy}")


def _callable(who: str, name: str, value: Any) -> None:
    if not callable(value):
        _refuse(who, name, "a function", value)


def _mapping(parts: list[Check], who: str, name: str, value: Any) -> None:
    if not isinstance(value, abc.Mapping):
        _refuse(who, name, "a dict", value)
    of_key, of_value = parts
    for key, item in value.items():
        of_key(who, f"a key of {name}", key)
        of_value(who, f"{name}[{key!r}]", item)


def _sequence(kind: Any, parts: list[Check]) -> Check:
    """Check of a list, tuple or array. ``parts``: one check for all elements, or one per element of a fixed tuple."""

    def check(who: str, name: str, value: Any) -> None:
        is_mapping = kind in _ORDERED and isinstance(value, abc.Mapping)
        if is_mapping or isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            _refuse(who, name, "a sequence", value)
        if isinstance(value, np.ndarray) and (not value.ndim or (kind is tuple and value.ndim != 1)):
            _refuse(who, name, "a sequence", value)
        if not hasattr(value, "__len__"):  # an iterator, which a check would exhaust
            if kind in (abc.Iterable, list, tuple):
                return
            _refuse(who, name, "a sequence", value)
        if len(parts) > 1 and len(value) != len(parts):
            raise OptionError(f"{who}: {name} must hold {len(parts)} values, got {len(value)}")
        if not parts or parts[0] is _anything:
            return
        if parts[0] is _integer:  # a prompt may have many
            if isinstance(value, np.ndarray):
                if value.size and value.dtype.kind not in "iu":
                    _refuse(who, name, f"a sequence of integers, not of {value.dtype}", value)
                return
            if set(map(type, value)) == {int}:
                return
        for i, item in enumerate(value):
            parts[i if len(parts) > 1 else 0](who, f"{name}[{i}]", item)

    return check
