"""The ternary storage formats: one row each, in one table that checks itself.

A trit ``t`` is -1, 0 or +1; its code is ``t + 1`` unless the row says otherwise. A stored scale always
multiplies: ``W = scale * t``. How each format lays out its bits is in :mod:`ternary_layouts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["FORMATS", "TernaryFormat", "describe_formats", "ternary_format"]


@dataclass(frozen=True)
class TernaryFormat:
    """What a format is called, what it costs and what it asks of a matrix ``(N, K)``.

    ``unit_rows`` x ``unit_cols`` weights take ``unit_bytes``; a matrix that does not divide is padded
    when ``pads``, else refused. ``linear`` formats count elements over the whole matrix, so that only
    N*K must divide.
    """

    name: str
    unit_rows: int
    unit_cols: int
    unit_bytes: int
    pads: bool
    scale: str
    invalid: str
    used_by: str
    linear: bool = False
    block_scale: int = 0  # weights per embedded fp16 scale, 0 when scales are kept apart

    @property
    def bits_per_weight(self) -> float:
        """Bits of the packed array per weight, embedded scales included, padding excluded."""
        return 8 * self.unit_bytes / (self.unit_rows * self.unit_cols)

    @property
    def constraint(self) -> str:
        """What the shape must satisfy, in words."""
        if self.linear:
            return f"N*K % {self.unit_cols} == 0"
        parts = [("N", self.unit_rows), ("K", self.unit_cols)]
        if self.pads:
            padded = [f"{axis} padded to {n}" for axis, n in parts if n > 1]
            return "any shape, " + " and ".join(padded)
        return " and ".join(f"{axis} % {n} == 0" for axis, n in parts if n > 1)

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the packed uint8 array; ValueError when ``shape`` does not fit the format."""
        n, k = shape
        if self.linear:
            if n * k % self.unit_cols:
                raise ValueError(self._misfit(shape))
            return (n * k // self.unit_cols * self.unit_bytes,)
        if not self.pads and (n % self.unit_rows or k % self.unit_cols):
            raise ValueError(self._misfit(shape))
        if self.name == "bitnet_gpu":  # tiles, not rows: the bytes of one row are scattered
            return (n * k // 4,)
        return (math.ceil(n / self.unit_rows), math.ceil(k / self.unit_cols) * self.unit_bytes)

    def _misfit(self, shape: tuple[int, int]) -> str:
        others = ", ".join(repr(f.name) for f in FORMATS.values() if f.pads)
        return (
            f"format {self.name!r} needs {self.constraint}, got shape {tuple(shape)}; "
            f"formats that take any shape: {others}"
        )


_ROWS = (
    TernaryFormat(
        "planes", 1, 32, 8, True, "apart", "both planes set; a set bit in the padding",
        "unsloth-rs: per row, u32 words of a plus plane, then of a minus plane",
    ),
    TernaryFormat(
        "base3", 1, 5, 1, True, "apart", "byte > 242; a padding digit that is not 1",
        "ONNX Runtime WebGPU and others: 5 trits per byte, first one in the lowest digit",
    ),
    TernaryFormat(
        "hf_bitnet", 4, 1, 1, True, "apart", "code 3; a set bit in the padding rows",
        "transformers BitNet checkpoints: row r + i*ceil(N/4) at bits 2i, packed along out_features",
    ),
    TernaryFormat(
        "bitnet_gpu", 16, 32, 128, False, "apart", "code 0 (code is t + 2)",
        "Microsoft BitNet CUDA kernel: 16x32 tiles permuted, 16-code interleaved words",
    ),
    TernaryFormat(
        "i2_s", 1, 128, 32, False, "apart", "code 3",
        "bitnet.cpp on x86: 128-weight blocks, most significant bits first; codes only, no trailer",
        linear=True,
    ),
    TernaryFormat(
        "tq1_0", 1, 256, 54, False, "fp16 per 256 in the block",
        "a byte that no 5 (4) digits produce; a scale that is not finite",
        "llama.cpp GGUF: base-3 fixed point, 5 trits per byte", block_scale=256,
    ),
    TernaryFormat(
        "tq2_0", 1, 256, 66, False, "fp16 per 256 in the block", "code 3; a scale that is not finite",
        "llama.cpp GGUF: 2-bit codes, least significant bits first", block_scale=256,
    ),
    TernaryFormat(
        "w2", 1, 64, 16, True, "apart", "code 3; a padding code that is not 1",
        "the kernels here: K-contiguous rows of 16-code interleaved u32 words",
    ),
)  # fmt: skip


def _check(rows: tuple[TernaryFormat, ...]) -> dict[str, TernaryFormat]:
    """A table whose rows contradict each other or themselves fails at import, not in use."""
    entropy = math.log2(3)
    for row in rows:
        if row.bits_per_weight < entropy:
            raise AssertionError(f"{row.name}: {row.bits_per_weight} bits cannot hold a trit")
        if row.linear and (row.unit_rows != 1 or row.pads):
            raise AssertionError(f"{row.name}: a linear format has no row unit and no padding")
        if row.block_scale and (row.block_scale != row.unit_cols or "in the block" not in row.scale):
            raise AssertionError(f"{row.name}: an embedded scale belongs to one unit")
        fits = (row.unit_rows * 2, row.unit_cols * 3)
        if math.prod(row.packed_shape(fits)) != 6 * row.unit_bytes:
            raise AssertionError(f"{row.name}: packed_shape disagrees with unit_bytes")
    table = {row.name: row for row in rows}
    if len(table) != len(rows):
        raise AssertionError("two formats share a name")
    return table


FORMATS: dict[str, TernaryFormat] = {row.name: row for row in _ROWS}
_check(_ROWS)


def ternary_format(name: str) -> TernaryFormat:
    """The row called ``name``; ValueError lists those that exist."""
    if name not in FORMATS:
        raise ValueError(f"unknown ternary format {name!r}; formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def describe_formats() -> str:
    """The table as Markdown.

    >>> print(describe_formats().splitlines()[0])
    | format | bits/weight | shape | scale | refused | layout |
    """
    lines = ["| format | bits/weight | shape | scale | refused | layout |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {f.name} | {f.bits_per_weight:.4g} | {f.constraint} | {f.scale} | {f.invalid} | {f.used_by} |"
        for f in FORMATS.values()
    ]
    return "\n".join(lines)
