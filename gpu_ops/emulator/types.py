"""PTX types as NumPy dtypes.

A register holds bits: an unsigned array, or ``bool`` for a predicate. An instruction views them in the
type it names. bfloat16, tf32, float8 and the packed types stay bits, since NumPy has no arithmetic for
them; the instructions that compute with them unpack.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BITS", "DTYPE", "Array", "register_dtype"]

Array: TypeAlias = npt.NDArray[Any]

#: The NumPy dtype in which an instruction sees an operand of a PTX type.
DTYPE: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "pred": np.bool_,
        "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
        "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
        "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
        "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
        "f16": np.float16, "f32": np.float32, "f64": np.float64,
        "bf16": np.uint16, "tf32": np.uint32,
        "f16x2": np.uint32, "bf16x2": np.uint32, "f32x2": np.uint64, "u16x2": np.uint32, "s16x2": np.uint32,
        "e4m3x2": np.uint16, "e5m2x2": np.uint16,
    }.items()
}  # fmt: skip

#: Bits of each type; a predicate has one.
BITS: dict[str, int] = {name: 1 if name == "pred" else 8 * dtype.itemsize for name, dtype in DTYPE.items()}


def register_dtype(ptx_type: str) -> np.dtype[Any]:
    """The dtype that a register declared with this type is kept in: unsigned, at least 16 bits."""
    if ptx_type == "pred":
        return np.dtype(np.bool_)
    return np.dtype(f"u{max(2, DTYPE[ptx_type].itemsize)}")
