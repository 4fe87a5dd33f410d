"""The narrow values that lie side by side in one register: pairs of 16 bits, the bytes of a word.

Byte order is the host's, which has to be little-endian as the GPU is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_ops.emulator.types import Array

__all__ = ["join", "split"]


def split(words: Array, dtype: npt.DTypeLike) -> Array:
    """The lanes of every word, shape (T, lanes), lowest first; a view."""
    return words[:, np.newaxis].view(dtype)


def join(lanes: Array, dtype: npt.DTypeLike) -> Array:
    """The words that hold these lanes: the inverse of :func:`split`."""
    return np.ascontiguousarray(lanes).view(dtype)[:, 0]
