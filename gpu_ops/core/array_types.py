"""Types of the arrays that public functions take, for annotations: NumPy, CuPy, torch, JAX, or any other."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

__all__ = ["AnyArray", "ArrayT", "NumPyT", "SupportsCudaArrayInterface", "SupportsDLPack"]


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
