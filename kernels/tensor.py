"""Arrays without memory: a lowering function's view of a call's arrays and workspaces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Layout", "Tensor"]

_ORIGIN = 1 << 60  # a tensor's fictitious address: no memory is there, and none is touched


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of an array in memory. ``misalignment``: its address modulo 16."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    misalignment: int = 0

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Layout:
        dtype = np.dtype(dtype)
        strides = tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return cls(shape, strides, dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def permuted(self, axes: tuple[int, ...]) -> Layout:
        """Layout of an array that is allocated with its axes in this order."""
        laid = Layout.contiguous(tuple(self.shape[a] for a in axes), self.dtype)
        strides = [0] * len(axes)
        for stride, a in zip(laid.strides, axes, strict=True):
            strides[a] = stride
        return Layout(self.shape, tuple(strides), self.dtype)


class Tensor:
    """View of one of a call's arrays or workspaces: an array without its memory.

    It has shape, strides, dtype and NumPy's views, without data. Raises where NumPy would copy.
    """

    __slots__ = ("_root", "_view", "name")

    def __init__(self, name: str, view: npt.NDArray[Any], root: npt.NDArray[Any] | None = None) -> None:
        self.name, self._view = name, view
        self._root = view if root is None else root

    @classmethod
    def of(cls, name: str, layout: Layout) -> Tensor:
        interface = {
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.dtype.itemsize}",
            "data": (_ORIGIN + layout.misalignment, True),
            "version": 3,
        }
        # the array keeps no reference to the object; it never looks at its memory
        view = np.asarray(SimpleNamespace(__array_interface__=interface))
        return cls(name, view.view(layout.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self._view.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._view.dtype

    @property
    def ndim(self) -> int:
        return self._view.ndim

    @property
    def size(self) -> int:
        return self._view.size

    @property
    def itemsize(self) -> int:
        return self._view.itemsize

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def address(self) -> int:
        """Fictitious address. Its alignment and its distance from other views of the same array are real."""
        return int(self._view.__array_interface__["data"][0])

    @property
    def offset(self) -> int:
        """Bytes from the start of the array."""
        return self.address - int(self._root.__array_interface__["data"][0]) if self.size else 0

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole array, not a view of another shape."""
        a, b = self._view, self._root
        return a is b or (a.shape, a.strides, a.dtype, self.offset) == (b.shape, b.strides, b.dtype, 0)

    def reshape(self, *shape: int | tuple[int, ...]) -> Tensor:
        sizes: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if -1 in sizes:
            known = math.prod(n for n in sizes if n != -1)
            sizes = tuple(self.size // max(known, 1) if n == -1 else n for n in sizes)
        return self._view_of(self._view.reshape(sizes, copy=False))  # assigning .shape would read the memory

    def ravel(self) -> Tensor:
        return self.reshape(-1)

    def swapaxes(self, a: int, b: int) -> Tensor:
        return self._view_of(self._view.swapaxes(a, b))

    def view(self, dtype: npt.DTypeLike) -> Tensor:
        return self._view_of(self._view.view(dtype))

    def broadcast_to(self, shape: tuple[int, ...]) -> Tensor:
        return self._view_of(np.broadcast_to(self._view, shape))

    def __getitem__(self, key: Any) -> Tensor:
        return self._view_of(self._view[key])

    def __len__(self) -> int:
        return len(self._view)

    def _view_of(self, view: npt.NDArray[Any]) -> Tensor:
        return Tensor(self.name, view, self._root)

    def __repr__(self) -> str:
        return f"Tensor({self.name}, {self.shape}, {self.dtype})"
