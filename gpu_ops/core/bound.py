"""A validated call: what :meth:`gpu_ops.core.call.Call.bind` gives and :mod:`gpu_ops.core.run` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gpu_ops.core.dispatch import Choice
from gpu_ops.kernels.program import Layout, Spec

if TYPE_CHECKING:
    from gpu_ops.core.cuda_arrays import CudaArrays

__all__ = ["Bound", "Finish", "Look", "Output", "Source", "as_integer", "permuted"]

Look: TypeAlias = Callable[[dict[str, Any], str], tuple[dict[str, Any], dict[str, Any]]]
"""A hook that looks at values: (the call's arrays, backend) to (options that they decide, further views)."""


Finish: TypeAlias = Callable[[dict[str, Any], Any, Callable[[str], Any]], Any]
"""Makes what a call returns: (arrays by name, device, name to result in the caller's library)."""


@dataclass(frozen=True)
class Source:
    """Where a later call of the same key finds an array."""

    argument: str
    item: int | str | None = None
    """An index into the argument, or an attribute of it."""
    make: Callable[[Any, Any], Any] | None = None
    """For what is no array itself: (argument, device) to the array."""


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
    """Inputs that are changed in place."""
    given: dict[str, Any]
    """The caller's own objects for results, by argument."""
    problem: str | Callable[[], str]
    finish: Finish | None
    look: Look | None
    library: str | None
    cuda: CudaArrays | None
    workspace: Any

    @property
    def tuple_argument(self) -> str | None:
        """The argument that is the tuple of all results; the call returns it."""
        items = [o.source and (o.source.argument, o.source.item) for o in self.outputs if o.returned]
        argument = items[0][0] if items and items[0] else ""
        whole = len(items) > 1 and items == [(argument, i) for i in range(len(items))]
        return argument if whole and self.finish is None else None


def as_integer(value: Any, device: Any) -> int:
    """What :meth:`Call.number` makes of an argument; a later call may pass on the argument itself."""
    return int(value)


def permuted(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout of an array that is allocated with its axes in this order."""
    laid = Layout.contiguous(tuple(layout.shape[a] for a in axes), layout.dtype)
    strides = [0] * len(axes)
    for stride, a in zip(laid.strides, axes, strict=True):
        strides[a] = stride
    return Layout(layout.shape, tuple(strides), layout.dtype)
