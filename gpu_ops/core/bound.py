"""A validated call: what :meth:`gpu_ops.core.call.Call.bind` gives and :mod:`gpu_ops.core.run` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gpu_ops.core.dispatch import Choice
from gpu_ops.kernels.program import Layout, Spec

if TYPE_CHECKING:
    from gpu_ops.core.cuda_arrays import CudaArrays

__all__ = ["Bound", "Finish", "Look", "Make", "Output", "Source", "as_integer"]

Look: TypeAlias = Callable[[dict[str, Any], str], tuple[dict[str, Any], dict[str, Any]]]
"""A hook that looks at values: (the call's arrays, backend) to (options that they decide, further views)."""


Make: TypeAlias = Callable[[Any, Any], Any]
"""What a kernel reads, of what is no array itself: (argument, device) to it."""


Finish: TypeAlias = Callable[[dict[str, Any], Any, Callable[[str], Any]], Any]
"""Makes what a call returns: (arrays by name, device, name to result in the caller's library)."""


@dataclass(frozen=True)
class Source:
    """Where a later call of the same key finds an array."""

    argument: str
    item: int | str | None = None
    """An index into the argument, or an attribute of it."""
    make: Make | None = None
    """For what is no array itself."""
    default: Any = None
    """In place of an argument that is not given."""

    @classmethod
    def named(cls, name: str) -> Source:
        """``x`` is an argument, ``x.part`` an attribute of it, ``x[1]`` an item."""
        argument, bracket, index = name.partition("[")
        if bracket:
            return cls(argument, int(index[:-1]))
        argument, _, attribute = name.partition(".")
        return cls(argument, attribute or None)


@dataclass(frozen=True)
class Output:
    """A result, or an array that is needed like one."""

    name: str
    layout: Layout
    source: Source | None
    """The caller's array for it; None: it is allocated."""
    returned: bool
    alias: str | None
    """The input that it is, in place."""
    axes: tuple[int, ...] | None = None
    """Allocated with its axes in this order, slowest first."""


@dataclass
class Bound:
    """A validated call, ready to be lowered and run."""

    op: str
    spec: Spec
    choice: Choice
    views: dict[str, Any]
    """The call's arrays by name, results that the caller gave included."""
    sources: dict[str, Source]
    copied: frozenset[str]
    """Inputs whose last axis was not contiguous; kernels read a copy."""
    outputs: tuple[Output, ...]
    updated: tuple[str, ...]
    """Inputs that are changed in place, and results that are added to what the caller's arrays hold."""
    given: dict[str, Any]
    """The caller's own objects for results, by argument."""
    problem: str | Callable[[], str]
    finish: Finish | None
    look: Look | None
    library: str | None
    cuda: CudaArrays | None
    workspace: Any


def as_integer(value: Any, device: Any) -> int:
    """What :meth:`Call.number` makes of an argument; a later call may pass on the argument itself."""
    return int(value)
