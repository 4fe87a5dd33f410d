"""Arrays in and out: any array library's arrays as NumPy or CuPy views, results back in the caller's library.

Zero-copy where the protocol allows. Accepted: NumPy arrays, objects with ``__dlpack__`` on the CPU (torch, JAX,
...), and CUDA arrays (:mod:`gpu_ops.core.cuda_arrays`). bfloat16 is ``ml_dtypes.bfloat16``; NumPy cannot
exchange it by DLPack, so it crosses as 16-bit integers of the same bits.

What is checked, is checked on shapes, dtypes, strides and addresses alone, and so alike on either device.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpu_ops.core.aliasing import merges, overlap, overlaps_itself, same
from gpu_ops.errors import DeviceError, DTypeError, OptionError, OutOfMemoryError, ShapeError
from gpu_ops.memory_pool import POOL

if TYPE_CHECKING:
    from gpu_ops.core.cuda_arrays import CudaArrays
    from gpu_ops.core.device import Device
    from gpu_ops.core.dispatch import Choice

__all__ = ["Array", "Arrays", "New", "as_rows", "bounds_of", "check_shareable", "library_of"]

Array: TypeAlias = npt.NDArray[Any]  # or a CuPy array, which answers the same questions
New: TypeAlias = Callable[[tuple[int, ...], npt.DTypeLike, str], Array]
"""Makes a result: :meth:`Arrays.new`."""

_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 13)  # device memory; managed memory
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What the DLPack methods of other libraries raise, and NumPy for what they return.
_FOREIGN_ERRORS = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)


class Arrays:
    """The arrays of one call. The first one read decides the library of the results."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._library: str | None = None
        self._read: dict[str, Array] = {}
        self._write: dict[str, Array] = {}
        self._cuda: CudaArrays | None = None
        self._device: Device | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether the caller's arrays lie on a CUDA device."""
        return self._cuda is not None

    @contextlib.contextmanager
    def on(self, choice: Choice) -> Iterator[Device | None]:
        """The device that runs the kernels of this call, current while it does; None on the CPU."""
        if choice.device == "cuda":
            assert self._cuda is not None  # NumPy arrays have been copied by now
            self._device = self._cuda.device
            with self._cuda.active():
                yield self._device
            return
        if choice.device == "emulator":
            from gpu_ops.core.device import EmulatorDevice

            self._device = device = EmulatorDevice()
            for name, x in self._read.items():
                device.name(name, x)
            for name, x in self._write.items():
                device.name(name, x, written=False)
        yield self._device

    def launches(self, choice: Choice, compute: Callable[[Device | None], Any]) -> str:
        """What ``compute`` would launch on a GPU device, for ``explain()``."""
        from gpu_ops.core.device import Recorder, current_device
        from gpu_ops.kernels.lower.tuning import watched

        device = self._cuda.device if self._cuda is not None else current_device(choice.device)
        self._device = recorder = Recorder(device)
        with watched() as watch:
            compute(recorder)
        chosen = filter(None, (asked.measured for asked in watch.asked))
        tuned = [f"tuned: {label}, the fastest that autotune() measured" for label in chosen]
        return "\n            ".join([str(device), *recorder.launches, *tuned])

    def read(self, name: str, x: Any) -> Array:
        """A read-only use of ``x`` as a NumPy or CuPy view (last axis contiguous, or a copy that is)."""
        view = self._view(name, x)
        if not view.dtype.isnative:
            raise DTypeError(
                f"{self.op}: {name} is byte-swapped ({view.dtype.str}); "
                f"convert it: {name}.astype({name}.dtype.newbyteorder('='))"
            )
        if view.ndim and view.shape[-1] > 1 and view.strides[-1] != view.itemsize:
            # kernels need unit stride on the last axis only
            view = self._cuda.contiguous(view) if self._cuda else np.ascontiguousarray(view)
        self._read[name] = view
        return view

    def write(
        self,
        name: str,
        out: Any,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        in_place: str | None = None,
        rows: bool = False,
    ) -> Array | None:
        """Check an ``out`` argument; a writable view of it, or None when the caller gave none.

        ``out`` may not share memory with an input, except exactly with the one named ``in_place``, nor with what
        else is written.
        ``rows``: its leading axes must merge into one without a copy.
        """
        if out is None:
            return None
        view = self._view(name, out)
        if view.shape != shape:
            raise ShapeError(f"{self.op}: {name} has shape {view.shape}, expected exactly {shape}")
        self._check_writable(name, out, view, dtype, f" or omit {name}=")
        if rows and not merges(view):
            raise ShapeError(
                f"{self.op}: the leading axes of {name} (strides {view.strides}) do not merge into rows; "
                f"pass a C-contiguous array or omit {name}="
            )
        self._check_apart(name, view, in_place, " or omit it")
        self._write[name] = view
        return view

    def update(self, name: str, x: Any, dtype: npt.DTypeLike) -> Array:
        """A writable view of an argument that the op changes in place, such as a cache; its shape is not checked.

        It may not share memory with arrays read or updated before.
        """
        view = self._view(name, x)
        self._check_writable(name, x, view, dtype, "")
        self._check_apart(name, view, None, "")
        self._read[name] = view  # so that what is written later may not overlap it
        return view

    def write_each(
        self,
        name: str,
        out: Any,
        results: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]],
        *,
        in_place: dict[str, str] | None = None,
        rows: bool = False,
    ) -> list[Array]:
        """:meth:`write` for an op with several results, by name; they may not overlap each other either.

        An empty list when the caller gave none.
        """
        if out is None:
            return []
        labels = tuple(results)
        if not isinstance(out, (tuple, list)) or len(out) != len(labels) or any(o is None for o in out):
            given = f" of {len(out)}" if isinstance(out, (tuple, list)) else ""
            count = {2: "two", 3: "three", 4: "four"}[len(labels)]
            raise OptionError(
                f"{self.op}: {name} must be {count} arrays, ({', '.join(labels)}); "
                f"got {type(out).__name__}{given}"
            )
        views: list[Array] = []
        for (label, (shape, dtype)), array in zip(results.items(), out, strict=True):
            view = self.write(
                f"{name} {label}", array, shape, dtype, in_place=(in_place or {}).get(label), rows=rows
            )
            assert view is not None  # write returns None only for None
            views.append(view)
        return views

    def _check_writable(self, name: str, out: Any, view: Array, dtype: npt.DTypeLike, else_: str) -> None:
        if view.dtype != np.dtype(dtype):
            raise DTypeError(f"{self.op}: {name} is {view.dtype}, expected exactly {np.dtype(dtype)}")
        if _read_only(out, view):
            raise ShapeError(f"{self.op}: {name} is read-only; pass a writable array{else_}")
        if isinstance(view, np.ndarray) and not view.flags.aligned:
            raise ShapeError(f"{self.op}: {name} is not aligned to its itemsize; pass one that is{else_}")
        if view.size and view.ndim and view.shape[-1] > 1 and view.strides[-1] != view.itemsize:
            raise ShapeError(
                f"{self.op}: the last axis of {name} is not contiguous (strides {view.strides}); "
                f"pass a C-contiguous array{else_}"
            )

        if overlaps_itself(view):
            raise ShapeError(
                f"{self.op}: elements of {name} share memory with each other (shape {view.shape}, strides "
                f"{view.strides}); pass an array of its own{else_}"
            )

    def _check_apart(self, name: str, view: Array, in_place: str | None, else_: str) -> None:
        for other, x in (*self._read.items(), *self._write.items()):
            if overlap(view, x) and not (other == in_place and same(view, x)):
                allowed = f" other than being {in_place} itself" if in_place else ""
                raise ShapeError(
                    f"{self.op}: {name} shares memory with {other}{allowed}, which would be overwritten while "
                    f"it is read; pass a separate array{else_}"
                )

    def new(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "the result") -> Array:
        """An uninitialised result, where the kernels of this call run."""
        try:
            if self._device is not None:
                result: Array = self._device.empty(shape, dtype, name)
                return result
            return POOL.empty(shape, dtype)
        except OptionError:  # of the pool
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address has bits
            required = math.prod(shape) * np.dtype(dtype).itemsize
            raise OutOfMemoryError(
                f"{self.op}: no memory for a result of shape {shape}, {required / 2**30:.1f} GiB", required
            ) from error

    def give(self, x: Array) -> Any:
        """``x`` in the caller's library, sharing memory where that library can."""
        if self._cuda is not None:
            return self._cuda.give(x)
        if self._library is None:
            return x
        library = sys.modules[self._library]
        if x.dtype == _BFLOAT16:
            if self._library == "torch":
                return library.from_dlpack(x.view(np.int16)).view(library.bfloat16)
            return library.numpy.asarray(x)  # JAX knows ml_dtypes' bfloat16
        if self._library == "jax":
            return library.numpy.from_dlpack(x)
        return library.from_dlpack(x)

    def _view(self, name: str, x: Any) -> Array:
        if not isinstance(x, np.ndarray) and on_cuda(x):
            return self._cuda_view(name, x)
        if self._cuda is not None:
            raise DeviceError(
                f"{self.op}: {name} is in host memory but {next(iter(self._read))} on a CUDA device; "
                "copy one of them (cupy.asarray, cupy.asnumpy)"
            )
        if isinstance(x, np.ndarray):
            if isinstance(x, np.ma.MaskedArray):
                raise DTypeError(f"{self.op}: {name} is a masked array; fill it first: {name}.filled(value)")
            return np.asarray(x)
        if not hasattr(x, "__dlpack__"):
            kind = f"a number of type {type(x).__name__}" if isinstance(x, np.number) else type(x).__name__
            raise DTypeError(
                f"{self.op}: {name} is {kind}, not an array; pass a NumPy array or an object with "
                f"__dlpack__ (for a list: numpy.asarray({name}))"
            )
        try:
            device = tuple(x.__dlpack_device__())
        except _FOREIGN_ERRORS as error:  # torch's meta tensors, for one
            raise DeviceError(f"{self.op}: {name} has no data that can be shared: {error}") from error
        if device[:1] != (_DLPACK_CPU,):
            raise DeviceError(
                f"{self.op}: {name} is on device {device}; gpu_ops takes arrays in host memory and on CUDA devices"
            )
        library = library_of(x, {"torch": "torch", "jax": "jax", "jaxlib": "jax"})
        if not self._read:
            self._library = library
        return self._from_dlpack(name, x, library)

    def _from_dlpack(self, name: str, x: Any, library: str | None) -> Array:
        try:
            check_shareable(name, x)
            if library == "torch" and x.dtype == sys.modules["torch"].bfloat16:
                return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(_BFLOAT16)
            if library == "jax":
                return np.asarray(x)
            return np.from_dlpack(x)
        except _FOREIGN_ERRORS as error:
            raise DTypeError(f"{self.op}: {name} cannot be shared through DLPack: {error}") from error

    def _cuda_view(self, name: str, x: Any) -> Array:
        from gpu_ops.core.cuda_arrays import CudaArrays
        from gpu_ops.core.dispatch import require_cuda_kernels

        require_cuda_kernels(self.op, f"{name} is on a CUDA device")
        if self._cuda is None:
            if self._read:
                raise DeviceError(
                    f"{self.op}: {name} is on a CUDA device but {next(iter(self._read))} in host memory; "
                    "copy one of them (cupy.asarray, cupy.asnumpy)"
                )
            self._cuda = CudaArrays(self.op, name, x)
        view: Array = self._cuda.view(name, x)
        return view


def library_of(x: Any, roots: Mapping[str, str]) -> str | None:
    """The library whose array ``x`` is, or is a subclass of; ``roots``: by the first word of its modules' names."""
    words = (kind.__module__.partition(".")[0] for kind in type(x).__mro__)
    return next((roots[word] for word in words if word in roots), None)


def check_shareable(name: str, x: Any) -> None:
    """TypeError for a tensor of torch's that is more than its bits: a view of them would drop the rest silently."""
    if getattr(x, "requires_grad", False):
        raise TypeError(f"it requires grad, and gpu_ops records none; detach it first: {name}.detach()")
    if hasattr(x, "is_neg") and x.is_neg():
        raise TypeError(f"its bits are the negated values; resolve it first: {name}.resolve_neg()")


def as_rows(x: Array) -> Array:
    """``x`` as (rows, last axis): a view where the strides allow, else a copy (inputs only)."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def bounds_of(x: Array) -> tuple[int, int]:
    """The smallest and the largest of the integers in an array, which is not empty."""
    if x.size > 256 or not isinstance(x, np.ndarray):
        return int(x.min()), int(x.max())
    numbers = x.ravel().tolist()  # Python is faster with few
    return min(numbers), max(numbers)


def on_cuda(x: Any) -> bool:
    """Whether ``x`` says that it lies on a CUDA device."""
    if hasattr(type(x), "__dlpack_device__"):  # torch: asking for the other protocol can raise
        try:
            return x.__dlpack_device__()[0] in _DLPACK_CUDA
        except (*_FOREIGN_ERRORS, IndexError):  # torch's meta tensors, for one
            return False
    return hasattr(x, "__cuda_array_interface__")


def _read_only(x: Any, view: Any) -> bool:
    if isinstance(view, np.ndarray):
        return not view.flags.writeable
    if hasattr(type(x), "__dlpack_device__"):
        return False  # the protocol of versions before 1.0 cannot say so, and those after refuse the export
    return bool(x.__cuda_array_interface__["data"][1])
