"""Arrays of any library as NumPy views, and results back in that library; overlap of arrays.

Zero-copy where the protocol allows. Accepted: NumPy arrays, objects with ``__dlpack__`` on the CPU (torch, JAX,
...), and CUDA arrays (:mod:`gpu_ops.core.cuda_arrays`). bfloat16 is ``ml_dtypes.bfloat16``; NumPy cannot exchange it
by DLPack, so it crosses as 16-bit integers of the same bits.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpu_ops.core.call_key import describes
from gpu_ops.errors import DeviceError, DTypeError, ShapeError

__all__ = [
    "AnyArray",
    "Array",
    "ArrayT",
    "NumPyT",
    "SupportsCudaArrayInterface",
    "SupportsDLPack",
    "as_bits",
    "as_rows",
    "bounds_of",
    "cast",
    "check_shareable",
    "check_writable",
    "give",
    "host_view",
    "is_row_major",
    "library_of",
    "on_cuda",
    "overlap",
    "overlaps_itself",
    "same_memory",
    "store",
]

Array: TypeAlias = npt.NDArray[Any]  # or a CuPy array, which has the same attributes

_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 13)  # device memory; managed memory
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FOREIGN_ERRORS = Exception
"""Errors that methods of other libraries' arrays raise: any exception."""
_HOST_LIBRARIES = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}
_CUPY = {"cupy": "cupy"}


def host_view(op: str, name: str, x: Any) -> tuple[Array, str | None]:
    """A NumPy view of an array in host memory, and the array's library; None for NumPy."""
    if isinstance(x, np.ndarray):
        # without the module, or while a thread imports it, there is no masked array
        if isinstance(x, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
            raise DTypeError(f"{op}: {name} is a masked array; fill it first: {name}.filled(value)")
        return np.asarray(x), None
    if not _has(x, "__dlpack__"):
        description = f"a number of type {type(x).__name__}" if isinstance(x, np.number) else type(x).__name__
        advice = f"pass a NumPy array or an object with __dlpack__ (for a list: numpy.asarray({name}))"
        raise DTypeError(f"{op}: {name} is {description}, not an array; {in_place_of_array(x) or advice}")
    try:
        device_type, device_id = x.__dlpack_device__()
        device = int(device_type), int(device_id)
    except FOREIGN_ERRORS as error:  # torch's meta tensors, for one
        raise DeviceError(f"{op}: {name} has no data that can be shared: {error!r}") from error
    if device[0] != _DLPACK_CPU:
        raise DeviceError(
            f"{op}: {name} is on device {device}; gpu_ops takes arrays in host memory and on CUDA devices"
        )
    library = library_of(x, _HOST_LIBRARIES)
    try:
        check_shareable(name, x)
        return from_dlpack(x, library), library
    except MemoryError:
        raise
    except FOREIGN_ERRORS as error:
        raise DTypeError(f"{op}: {name} cannot be shared through DLPack: {error}") from error


def from_dlpack(x: Any, library: str | None) -> Array:
    """A NumPy view of an array of another library."""
    if library == "torch":
        remember_torch()
        x = x.detach()  # torch does not export a leaf that requires grad, even with grad mode off
        if x.dtype == sys.modules["torch"].bfloat16:
            return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(_BFLOAT16)
    if library == "jax":
        return np.asarray(x)
    return np.from_dlpack(x)


def give(x: Array, library: str | None) -> Any:
    """Return ``x`` in the caller's library, sharing memory where that library can."""
    if library is None:
        return x
    module = sys.modules[library]
    if x.dtype == _BFLOAT16:
        if library == "torch":
            return module.from_dlpack(x.view(np.int16)).view(module.bfloat16)
        return module.numpy.asarray(x)  # JAX knows ml_dtypes' bfloat16
    if library == "jax":
        return module.numpy.from_dlpack(x)
    return module.from_dlpack(x)


def library_of(x: Any, roots: Mapping[str, str]) -> str | None:
    """Library of the array ``x`` or of its base classes. ``roots``: libraries by a module name's first word."""
    words = (base.__module__.partition(".")[0] for base in type(x).__mro__)
    return next((roots[word] for word in words if word in roots), None)


def remember_torch() -> None:
    """Give calls with torch tensors their own key, from the first tensor on."""
    torch = sys.modules["torch"]

    @describes(torch.Tensor)
    def describe(x: Any) -> tuple[Any, ...] | None:
        if x.is_nested or _is_tracked(x) or x.is_neg() or x.is_conj() or x.layout is not torch.strided:
            return None
        return torch.Tensor, x.dtype, tuple(x.shape), x.stride(), x.device, x.data_ptr() % 16

    describes(torch.nn.Parameter)(describe)


def check_shareable(name: str, x: Any) -> None:
    """Raise TypeError for a torch tensor that is more than its bits: a view of them would drop the rest silently."""
    if _is_tracked(x):
        raise TypeError(
            f"gpu_ops does not track gradients; call {name}.detach(), or compute under torch.no_grad()"
        )
    if getattr(x, "is_nested", False) is True:
        raise TypeError(
            "it is a NestedTensor, whose sequences differ in length; pass its values and offsets "
            f"({name}.values(), {name}.offsets().int()): attention_varlen takes them as q and cu_seqlens_q"
        )
    if hasattr(x, "is_neg") and x.is_neg():
        raise TypeError(f"its bits are the negated values; resolve it first: {name}.resolve_neg()")


def _is_tracked(x: Any) -> bool:
    """Whether torch would track operations on ``x``: not under ``no_grad`` or inside ``autograd.Function``."""
    if not getattr(x, "requires_grad", False):
        return False
    torch = sys.modules.get("torch")
    return torch is None or library_of(x, _HOST_LIBRARIES) != "torch" or bool(torch.is_grad_enabled())


def as_bits(x: Array) -> Array:
    """View bfloat16 and float8, which CuPy and the emulator do not know, as unsigned integers of the same size."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}")) if x.dtype.kind == "V" else x


def cast(x: Any, dtype: npt.DTypeLike) -> Any:
    """Cast ``x`` to another float dtype, rounded to nearest even; ``x`` itself if it has that dtype."""
    dtype = np.dtype(dtype)
    if isinstance(x, np.ndarray) or x.dtype == dtype or _BFLOAT16 not in (x.dtype, dtype):
        return x.astype(dtype, copy=False)
    # CuPy has no casts of bfloat16, so go through the bits of float32
    if x.dtype == _BFLOAT16:
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)
    bits = x.astype(np.float32, copy=False).view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return (rounded * ~nan + 0x7FC0 * nan).astype(np.uint16).view(dtype)


def as_rows(x: Array) -> Array:
    """Reshape ``x`` to (rows, last axis): a view where the strides allow, else a copy (inputs only)."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def bounds_of(x: Array) -> tuple[int, int]:
    """Minimum and maximum of a nonempty array of integers."""
    if x.size > 256 or not isinstance(x, np.ndarray):
        return int(x.min()), int(x.max())
    numbers = x.ravel().tolist()  # Python is faster for few elements
    return min(numbers), max(numbers)


def on_cuda(x: Any) -> bool:
    """Whether ``x`` reports that it is on a CUDA device."""
    if library_of(x, _CUPY):  # its protocol methods would query the driver about the address
        return True
    if hasattr(type(x), "__dlpack_device__"):  # torch: reading the other protocol's attribute can raise
        try:
            return int(x.__dlpack_device__()[0]) in _DLPACK_CUDA
        except FOREIGN_ERRORS:  # torch's meta tensors, for one
            return False
    return _has(x, "__cuda_array_interface__")


def in_place_of_array(x: Any) -> str:
    """Advice on the array to pass in place of an object that holds numbers but is not an array; "" for others."""
    return str(getattr(type(x), "in_place_of_array", ""))


def _has(x: Any, name: str) -> bool:
    """``hasattr`` for objects whose attributes may raise anything."""
    try:
        return hasattr(x, name)
    except FOREIGN_ERRORS:
        return False


def is_read_only(x: Any, view: Any) -> bool:
    """Whether the caller's array may not be written."""
    if isinstance(view, np.ndarray):
        return not view.flags.writeable
    if hasattr(type(x), "__dlpack_device__"):
        return False  # DLPack before 1.0 cannot say so, and later versions refuse the export
    return bool(x.__cuda_array_interface__["data"][1])


def store(views: Mapping[str, Array], names: Sequence[str], results: Any) -> None:
    """Copy results, an array or a sequence of arrays, into the views of these names."""
    arrays = results if isinstance(results, (tuple, list)) else [results]
    for name, x in zip(names, arrays, strict=True):
        views[name][...] = x


def check_writable(op: str, name: str, out: Any, view: Array, dtype: npt.DTypeLike, else_: str) -> None:
    """Refuse an array that kernels cannot write results to. ``else_``: text of the caller's alternative."""
    if view.dtype != np.dtype(dtype):
        raise DTypeError(f"{op}: {name} is {view.dtype}, expected exactly {np.dtype(dtype)}")
    if is_read_only(out, view):
        raise ShapeError(f"{op}: {name} is read-only; pass a writable array{else_}")
    if isinstance(view, np.ndarray) and not view.flags.aligned:
        raise ShapeError(f"{op}: {name} is not aligned to its itemsize; pass one that is{else_}")
    if view.size and view.ndim and view.shape[-1] > 1 and view.strides[-1] != view.itemsize:
        raise ShapeError(
            f"{op}: the last axis of {name} is not contiguous (strides {view.strides}); "
            f"pass a C-contiguous array{else_}"
        )
    if overlaps_itself(view):
        raise ShapeError(
            f"{op}: elements of {name} share memory with each other (shape {view.shape}, strides "
            f"{view.strides}); pass an array of its own{else_}"
        )


class SupportsDLPack(Protocol):
    """An array that DLPack exchanges. The property is ``Any`` because libraries annotate the method differently."""

    @property
    def __dlpack__(self) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    """An array on a CUDA device, by Numba's protocol."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


AnyArray: TypeAlias = SupportsDLPack | SupportsCudaArrayInterface

ArrayT = TypeVar("ArrayT", bound=AnyArray)
"""An array of the caller's library. A NumPy array also fixes the result's dtype and number of axes."""

NumPyT = TypeVar("NumPyT", bound=np.ndarray[Any, np.dtype[Any]])
"""A NumPy array whose call also returns results of another dtype or number of axes."""


def is_row_major(x: Array) -> bool:
    """Whether the leading axes merge into one without a copy."""
    axes = [(n, stride) for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n != 1]
    return not x.size or all(outer == n * stride for (_, outer), (n, stride) in itertools.pairwise(axes))


def _address_view(x: Any) -> Array:
    """A NumPy array at the addresses of ``x``, to compare bytes with; its memory is never touched."""
    if isinstance(x, np.ndarray):
        return x
    interface = {
        "shape": x.shape,
        "strides": x.strides,
        "typestr": f"|V{x.itemsize}",
        "data": (x.data.ptr, True),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def same_memory(a: Array, b: Array) -> bool:
    """Whether two arrays of one shape are the same elements in memory."""
    a, b = _address_view(a), _address_view(b)
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0] and a.strides == b.strides


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays may have a byte in common."""
    if not a.size or not b.size:
        return False
    a, b = _address_view(a), _address_view(b)
    if not np.may_share_memory(a, b):  # disjoint address ranges: the common case, cheap
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # NumPy's stub is too narrow
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(x: Array) -> bool:
    """Whether two elements may share a byte; False if every axis steps past all bytes that smaller steps reach."""
    if not x.size or x.ndim == 0:
        return False
    reach = x.itemsize
    for stride, n in sorted((abs(stride), n) for n, stride in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False
