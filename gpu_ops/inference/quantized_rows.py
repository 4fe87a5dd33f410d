"""Rows of quantized pages as numbers, for the few keys and values that dense attention reads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import cast, on_cuda
from gpu_ops.core.state_arrays import to_device

__all__ = ["numbers"]


def numbers(slots: Any, pages: Any, scale: Any, dtype: Any) -> Any:
    """Numbers of the pages in these slots, in ``dtype``, rounded once.

    Parameters
    ----------
    slots : int64 array (...,)
        Slots, page * page_size + row.
    pages : int8 or uint8 (bits of e4m3) array (num_pages, page_size, nheads_kv, head_dim)
    scale : float32 array (num_pages, page_size, nheads_kv)

    Returns
    -------
    array (..., nheads_kv, head_dim), on the device of the pages
    """
    page, row = slots // pages.shape[1], slots % pages.shape[1]
    codes = pages[page, row]
    if codes.dtype == np.int8:
        decoded = codes.astype(np.float32)
    else:
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        decoded = to_device(every, "cuda" if on_cuda(pages) else "cpu")[codes]
    return cast(decoded * scale[page, row][..., None], np.dtype(dtype))
