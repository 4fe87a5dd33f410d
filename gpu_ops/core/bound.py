"""Validated calls: :meth:`gpu_ops.core.call.Call.bind` returns one and :mod:`gpu_ops.core.run` runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gpu_ops.core.dispatch import Choice
from gpu_ops.kernels.program import Layout, Spec

if TYPE_CHECKING:
    from gpu_ops.core.cuda_arrays import CudaArrays

__all__ = ["Bound", "CheckValues", "Finish", "Make", "Output", "Source", "as_integer"]

CheckValues: TypeAlias = Callable[[dict[str, Any], str], tuple[dict[str, Any], dict[str, Any]]]
"""A hook that reads values: (the call's arrays, backend) -> (options that depend on them, further views)."""


Make: TypeAlias = Callable[[Any, Any], Any]
"""A function that makes the array or number that kernels read from an argument: (argument, device) -> value."""


Finish: TypeAlias = Callable[[dict[str, Any], Any, Callable[[str], Any]], Any]
"""A function that makes the return value: (arrays by name, device, name -> result in the caller's library)."""


@dataclass(frozen=True)
class Source:
    """Location of an array in the arguments of a later call with the same key."""

    argument: str
    item: int | str | None = None
    """An index into the argument, or an attribute of it."""
    make: Make | None = None
    """For an argument that is not itself an array."""
    default: Any = None
    """Value of an argument that is not passed."""

    @classmethod
    def named(cls, name: str) -> Source:
        """Parse a name: ``x`` is an argument, ``x.part`` an attribute of it, ``x[1]`` an item."""
        argument, bracket, index = name.partition("[")
        if bracket:
            return cls(argument, int(index[:-1]))
        argument, _, attribute = name.partition(".")
        return cls(argument, attribute or None)


@dataclass(frozen=True)
class Output:
    """A result, or a hidden array that is allocated like one."""

    name: str
    layout: Layout
    source: Source | None
    """Location of the caller's array for it; None: it is allocated."""
    returned: bool
    alias: str | None
    """Name of the input that it overwrites in place."""
    axes: tuple[int, ...] | None = None
    """Order of its axes in newly allocated memory, slowest first."""


@dataclass
class Bound:
    """A validated call, ready to be lowered and run."""

    op: str
    spec: Spec
    choice: Choice
    views: dict[str, Any]
    """The call's arrays by name, including results that the caller passed."""
    sources: dict[str, Source]
    copied: frozenset[str]
    """Inputs whose layout kernels cannot read; kernels read a copy."""
    outputs: tuple[Output, ...]
    updated: tuple[str, ...]
    """Inputs that are changed in place, and results that are added to the contents of the caller's arrays."""
    given: dict[str, Any]
    """The caller's objects for results, by argument."""
    problem: str | Callable[[], str]
    finish: Finish | None
    check_values: CheckValues | None
    library: str | None
    cuda: CudaArrays | None
    workspace: Any


def as_integer(value: Any, device: Any) -> int:
    """Convert an argument of :meth:`Call.number`; a later call may pass on the argument itself."""
    return int(value)
