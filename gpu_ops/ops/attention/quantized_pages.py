"""Key and value pages with one byte per element, and their scales, for attention and rope_append_kv."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call
from gpu_ops.errors import DTypeError, OptionError

__all__ = ["QUANTIZED", "check_scales", "read_scales", "update_scales"]

QUANTIZED: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_CODES = (*QUANTIZED.values(), np.dtype(np.uint8))  # uint8 holds the bits of e4m3 numbers
_AXES = "num_pages page_size nheads_kv"
_FLOAT32 = np.dtype(np.float32)


def read_scales(call: Call, k: str, v: str, k_scale: Any, v_scale: Any, *, paged: bool) -> bool:
    """Read the scales if ``k`` and ``v``, names of views, are quantized pages; return whether they are."""
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    views = call.views
    if not check_scales(call, {k: views[k], v: views[v]}, scales, views["q"].dtype, paged=paged):
        return False
    for name, scale in scales.items():
        _check_scale(call, name, call.read(name, scale))
    return True


def update_scales(call: Call, k_scale: Any, v_scale: Any) -> None:
    """Declare the scales of pages that the call writes, after :func:`check_scales`."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(call, name, call.update(name, scale, _FLOAT32))


def check_scales(
    call: Call, pages: dict[str, Array], scales: dict[str, Any], dtype: np.dtype[Any], *, paged: bool
) -> bool:
    """Whether ``pages`` are quantized. ``dtype``: q's. ``paged``: whether the call has a page table or slots."""
    op, (k, v) = call.op, pages
    names = [name for name, scale in scales.items() if scale is not None]
    if not any(x.dtype in _CODES for x in pages.values()):
        if names:
            raise OptionError(
                f"{op}: {names[0]} is for pages of {', '.join(map(str, _CODES))}, and {k} is {pages[k].dtype}; "
                "omit it"
            )
        return False
    if pages[k].dtype != pages[v].dtype:
        raise DTypeError(
            f"{op}: {v} is {pages[v].dtype} but {k} is {pages[k].dtype}; both need one dtype of page"
        )
    if not paged:
        raise OptionError(
            f"{op}: {k} is {pages[k].dtype}; a quantized cache lies in pages: pass block_table="
        )
    if len(names) < 2:
        missing = next(name for name in scales if name not in names)
        raise OptionError(
            f"{op}: {k} is {pages[k].dtype} and {missing} is missing; pass k_scale= and v_scale=, float32 "
            "(num_pages, page_size, nheads_kv)"
        )
    if dtype == np.float64:
        raise DTypeError(
            f"{op}: q is float64, and quantized pages take float16, bfloat16 or float32; cast it, or keep the "
            "pages in float64"
        )
    return True


def _check_scale(call: Call, name: str, scale: Array) -> None:
    call.axes.bind(name, scale, _AXES)
    checks.exactly(call.op, name, scale, scale.shape, _FLOAT32)
