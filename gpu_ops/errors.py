"""Typed errors. Each is also the standard exception a NumPy user would expect.

A message names the given value, the allowed values and a remedy.
"""

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CommError",
    "DTypeError",
    "DeviceError",
    "FileError",
    "FormatError",
    "GpuOpsError",
    "KernelCompileError",
    "LossScaleError",
    "MissingFileError",
    "MissingPackageError",
    "OptionError",
    "OutOfMemoryError",
    "OutOfPages",
    "ShapeError",
    "StateError",
    "UnknownOptionError",
]


class GpuOpsError(Exception):
    """Base class of every error that gpu_ops raises on purpose."""


class ShapeError(GpuOpsError, ValueError):
    """An array has the wrong number of axes, an axis the wrong length, or ``out`` the wrong shape."""


class DTypeError(GpuOpsError, TypeError):
    """An argument is not an array, or the op does not take its dtype."""


class OptionError(GpuOpsError, ValueError):
    """A keyword option is unknown, out of range, or contradicts another one."""


class UnknownOptionError(OptionError, TypeError):
    """The op has no such keyword argument."""


class DeviceError(GpuOpsError, RuntimeError):
    """Arrays are on different devices, or the requested device or backend cannot run the problem."""


class CommError(GpuOpsError, RuntimeError):
    """Ranks make different calls, a message did not arrive as announced, or ranks do not find each other."""


class StateError(GpuOpsError, RuntimeError):
    """A method was called before another one that must come first."""


class LossScaleError(GpuOpsError, OverflowError):
    """Gradients overflow float16 at the smallest allowed loss scale."""


class FormatError(GpuOpsError, ValueError):
    """Packed data does not follow its format."""


class FileError(GpuOpsError, OSError):
    """A file cannot be read or written, or is not a regular file. ``errno`` and ``filename`` are as in OSError."""


class MissingFileError(FileError, FileNotFoundError):
    """No file, or no folder to write one in, exists at this path."""


class MissingPackageError(GpuOpsError, ImportError):
    """A package that only this function needs is not installed; the message has the command to install it."""


class OutOfMemoryError(GpuOpsError, MemoryError):
    """A buffer did not fit. ``required`` and ``available`` are bytes. ``holders``: labels and bytes of the largest
    holders of a :class:`gpu_ops.memory.Pool`; empty if none is in use."""

    def __init__(
        self,
        message: str,
        required: int = 0,
        available: int = 0,
        holders: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.required = required
        self.available = available
        self.holders = holders


class OutOfPages(GpuOpsError, MemoryError):
    """A cache has too few pages for a step. ``needed``, ``free`` and ``held``, by sequence, are numbers of pages."""

    def __init__(
        self, message: str, needed: int = 0, free: int = 0, held: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.held = dict(held or {})


class KernelCompileError(GpuOpsError, RuntimeError):
    """A kernel did not compile. ``log`` is the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


def suggest(package: dict[str, Any], names: Iterable[str], renamed: Mapping[str, str] | None = None) -> None:
    """Make a package suggest the nearest of ``names`` for an unknown name. ``package``: its ``globals()``.

    ``renamed``: current names by earlier ones, which still work in this version, with a DeprecationWarning.
    """

    def missing(name: str) -> Any:
        if renamed and name in renamed:
            who, current = package["__name__"], renamed[name]
            warnings.warn(f"{who}.{name} is now {who}.{current}", DeprecationWarning, stacklevel=2)
            return package[current]
        raise no_attribute(package["__name__"], name, names)

    package["__getattr__"] = missing


def no_attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Error for a name that a module does not have."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if name in near:  # a module that is not imported
        hint = f"; first import {module}.{name}"
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
