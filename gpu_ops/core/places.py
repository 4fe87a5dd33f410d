"""Locations of a later call's arrays in its arguments, and the results that it allocates."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.core import device as devices
from gpu_ops.core.allocator import IN_USE, allocator
from gpu_ops.core.bound import Output, Source, as_integer
from gpu_ops.core.out_of_memory import out_of_memory
from gpu_ops.errors import OptionError, OutOfMemoryError
from gpu_ops.kernels.program import Layout, Spec
from gpu_ops.memory_pool import FROM_BYTES

__all__ = ["Allocation", "Place"]


class Place:
    """Location of an array in the arguments of calls with one key."""

    def __init__(self, name: str, source: Source, position: int, given: int) -> None:
        self.name, self.source, self.position = name, source, position
        self.by_position = position < given

    @property
    def is_direct(self) -> bool:
        """Whether it is an argument, or an item of a tuple or list passed as an argument."""
        return self.source.make in (None, as_integer) and not isinstance(self.source.item, str)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = self.source
        x = args[self.position] if self.by_position else kwargs.get(source.argument, source.default)
        item = source.item
        if item is None:
            return x
        return getattr(x, item) if isinstance(item, str) else x[item]


class Allocation:
    """A result that each call allocates."""

    def __init__(self, spec: Spec, o: Output, device: Any) -> None:
        self.name, self.shape, self.dtype, self.axes = o.name, *_allocation(spec, o)
        # allocations that the pool leaves to NumPy
        self._small = device is devices.HOST and o.layout.nbytes < FROM_BYTES

    def allocate(self, op: str, device: Any) -> Any:
        try:
            current = allocator() if IN_USE else None
            if current is not None:
                array = current.allocate(self.shape, self.dtype, f"{op}: {self.name}", device)
            elif self._small:
                array = np.empty(self.shape, self.dtype)
            else:
                array = device.empty(self.shape, self.dtype, self.name)
        except (OptionError, OutOfMemoryError):  # from the pool or the allocator
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address can hold
            required = Layout.contiguous(self.shape, self.dtype).nbytes
            raise out_of_memory(op, error, f"a result of shape {self.shape}", required) from error
        return array if self.axes is None else array.transpose(self.axes)


def _allocation(spec: Spec, o: Output) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...] | None]:
    """Shape and dtype to allocate, and the transposition that turns it into the result."""
    shape, axes = o.layout.shape, o.axes
    if axes is None:
        return shape, o.layout.dtype, None
    inverse = tuple(axes.index(i) for i in range(len(axes)))
    return tuple(shape[a] for a in axes), o.layout.dtype, inverse
