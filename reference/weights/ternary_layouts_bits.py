"""Helpers of the ternary layouts: 2-bit fields, padding, and errors that name the first fault."""

from __future__ import annotations

import numpy as np

from gpu_ops.reference.precision import Array

__all__ = [
    "Array",
    "LayoutError",
    "codes_to_trits",
    "join",
    "pad_columns",
    "refuse",
    "refuse_code",
    "refuse_padding",
    "split",
]


class LayoutError(ValueError):
    """Bytes that no encoder of the format writes, or a scale that the format cannot hold."""


def pad_columns(x: Array, multiple: int, value: int) -> Array:
    extra = -x.shape[1] % multiple
    return np.pad(x, ((0, 0), (0, extra)), constant_values=value) if extra else x


def join(codes: Array, *, axis: int, shifts: tuple[int, ...]) -> Array:
    """Four 2-bit codes along ``axis`` -> one byte."""
    moved = np.moveaxis(codes, axis, 0)
    fields = [code << np.uint8(shift) for code, shift in zip(moved, shifts, strict=True)]
    return np.asarray(fields[0] | fields[1] | fields[2] | fields[3])


def split(data: Array, *, axis: int, shifts: tuple[int, ...]) -> Array:
    """Inverse of :func:`join`; ``data`` has length 1 on ``axis``."""
    return np.concatenate([data >> np.uint8(s) & np.uint8(3) for s in shifts], axis=axis)


def codes_to_trits(codes: Array, k: int, format: str, strict: bool) -> Array:
    if strict:
        refuse_padding(codes[:, k:], 1, format, "columns")
        refuse_code(codes[:, :k], 3, format)
    return (codes[:, :k] - np.uint8(1)).view(np.int8)


def refuse_code(codes: Array, code: int, format: str) -> None:
    bad = codes == code
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise LayoutError(
            f"{format}: code {code} at {where} is no trit ({int(bad.sum())} of {codes.size} such)"
        )


def refuse_padding(padding: Array, filler: int, format: str, which: str) -> None:
    if (padding != filler).any():
        raise LayoutError(f"{format}: the padding {which} hold something other than {filler}: wrong shape?")


def refuse(bad: Array, values: Array, format: str, why: str, *, show: bool = True) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        value = f"value {values[where]} at {where} " if show else f"position {where} "
        raise LayoutError(f"{format}: {value}{why} ({int(bad.sum())} such)")
