"""Parts of packed matrices: runs of rows of one format, as blocks of files or as panels for kernels."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.kernels.weights.packed_panels import (
    BlockLayout,
    Columns,
    pack_panels,
    panel_bytes,
    unpack_panels,
)
from gpu_ops.reference.weights.packed_bitsandbytes import DYNAMIC
from gpu_ops.reference.weights.packed_formats import FORMATS, Fields, PackedFormat, decode

__all__ = ["PIECE", "PackedPart", "layout_of", "merged"]

PIECE = 1 << 20  # weights that are encoded or decoded at a time
_PACKED_AT_ONCE = 1 << 19  # bytes of panels: NumPy's copies of them stay in a core's caches


class PackedPart:
    """A run of rows of one format, held as blocks or as panels for the CPU's vectors, not as both."""

    def __init__(self, format: PackedFormat, rows: int, cols: int, blocks: Array) -> None:
        self.format, self.rows, self.cols = format, rows, cols
        self.layout = layout_of(format)
        self._blocks: Array | None = blocks
        self._panels: tuple[int, Array] | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> tuple[Array, ...]:
        blocks, panels = self._blocks, self._panels  # in this order: a thread that repacks sets panels first
        return (panels[1],) if panels is not None else () if blocks is None else (blocks,)

    def blocks(self) -> Array:
        blocks, panels = self._blocks, self._panels
        if blocks is not None:
            return blocks
        assert panels is not None
        if not panels[1].size:
            return np.empty((self.rows, self.cols // self.format.block * self.format.nbytes), np.uint8)
        columns = unpack_panels(self.layout, panels[1], self.rows, panels[0])
        flat: list[Any] = [None if x is None else x.reshape(-1, x.shape[2]) for x in columns]
        return self.format.join(Fields(*flat)).reshape(self.rows, -1)

    def panels(self, lanes: int) -> Array:
        panels = self._panels
        if panels is not None and panels[0] == lanes:
            return panels[1]
        with self._lock:
            if self._panels is None or self._panels[0] != lanes:
                self._panels = lanes, self.packed(lanes)
                self._blocks = None
            return self._panels[1]

    def panels_shape(self, lanes: int) -> tuple[int, int]:
        return -(-self.rows // lanes), panel_bytes(self.layout, lanes, self.cols)

    def packed(self, lanes: int) -> Array:
        """Panels, made from blocks some rows at a time: NumPy's copies stay small."""
        blocks, panels = self.blocks(), np.empty(self.panels_shape(lanes), np.uint8)
        step = max(1, _PACKED_AT_ONCE // max(1, panels.shape[1]))
        for first in range(0, len(panels) if panels.size else 0, step):
            part = blocks[first * lanes : (first + step) * lanes]
            fields = self.format.split(part.reshape(-1, self.format.nbytes))
            shaped: list[Any] = [None if x is None else x.reshape(len(part), -1, x.shape[1]) for x in fields]
            panels[first : first + step] = pack_panels(self.layout, Columns(*shaped), lanes)
        return panels

    def decode(self, target: Array, columns: Array | None) -> None:
        """Write the weights to ``target``; stored column j to its column ``columns[j]``."""
        if not target.size:
            return
        blocks = self.blocks().reshape(-1, self.format.nbytes)
        weights = target.reshape(-1, self.format.block)
        step = max(1, PIECE // self.format.block)
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            with np.errstate(all="ignore"):  # a rounded weight may overflow
                weights[part] = decode(self.format, blocks[part])
        if columns is not None:
            step, order = max(1, PIECE // self.cols), np.argsort(columns)
            for first in range(0, self.rows, step):
                target[first : first + step] = target[first : first + step, order]

    def __getstate__(self) -> dict[str, Any]:
        return {"format": self.format.name, "rows": self.rows, "cols": self.cols, "blocks": self.blocks()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        format = FORMATS[state["format"]].for_columns(state["cols"])
        restored = PackedPart(format, state["rows"], state["cols"], state["blocks"])
        self.__dict__.update(restored.__dict__)


def merged(parts: list[PackedPart]) -> PackedPart:
    """One part of the rows of several of the same format."""
    rows = sum(part.rows for part in parts)
    return PackedPart(parts[0].format, rows, parts[0].cols, np.concatenate([part.blocks() for part in parts]))


@functools.cache
def layout_of(format: PackedFormat) -> BlockLayout:
    """Layout of a format's blocks, for kernels."""
    fields = format.split(np.zeros((1, format.nbytes), np.uint8))
    return BlockLayout(
        f"{format.name}_{format.block}" if format.nests else format.name,
        format.block,
        format.run,
        format.bits,
        0 if fields.scale is None else fields.scale[0].nbytes,
        fields.run_scales is not None,
        fields.minimum is not None,
        fields.run_minimums is not None,
        format.offset,
        tuple(map(float, format.values)) if format.offset is None and format.bits < 8 else (),
        DYNAMIC.tobytes() if format.nests else b"",
    )
