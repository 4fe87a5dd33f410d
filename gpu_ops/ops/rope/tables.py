"""Tables of cos and sin for the CPU kernels of RoPE, computed in float64 and cached.

A table has one row per position and one column per frequency. Consecutive positions (0, 1, 2, ...) share one table
that grows by doubling: a prefill, its decode steps and every layer of a model use the same one. Positions that are
negative or far apart get a table with only their rows.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.core.arrays import Array
from gpu_ops.kernels.recording import refuse_recording

__all__ = ["RopeTables", "clear_rope_tables"]

Table: TypeAlias = tuple[Array, Array]
Rows: TypeAlias = npt.NDArray[np.int64]

_BUDGET = 64 << 20  # bytes cached: tables of two models for 65536 positions of 128 components in float32
_BLOCK = 256

_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    # the old lock may be held by a thread that does not exist in the child
    os.register_at_fork(after_in_child=_new_lock)

_kept: OrderedDict[tuple[bytes, float, str], Table] = OrderedDict()


class RopeTables:
    """Tables of cos and sin of one set of frequencies, times the attention factor.

    Entries are rounded to ``dtype``, float32 or float64; angles are float64.
    """

    def __init__(self, inv_freq: Array, attention_factor: float, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._key = (inv_freq.tobytes(), attention_factor, self._dtype.str)
        self._turn = inv_freq, attention_factor, self._dtype
        self._row_bytes = 2 * len(inv_freq) * self._dtype.itemsize

    def __call__(self, positions: Rows, first: int, last: int) -> tuple[Array, Array, Rows]:
        """Return ``cos``, ``sin`` of shape (rows, frequencies) and the row of each position, shaped like
        ``positions``.

        ``first`` and ``last`` are the minimum and maximum position.
        """
        if positions.size == 0:
            empty = np.empty((0, len(self._turn[0])), self._dtype)
            return empty, empty, positions
        with _lock:
            kept = _kept.get(self._key)
            if kept is not None:
                _kept.move_to_end(self._key)
        if first >= 0 and kept is not None and last < len(kept[0]):
            return *kept, positions
        # 4: a table somewhat longer than needed now is likely to be used later; a far longer one is a waste
        if first >= 0 and last < 4 * max(positions.size, _BLOCK, 0 if kept is None else len(kept[0])):
            length = 1 << last.bit_length()  # the next power of two that is > last
            if length * self._row_bytes > _BUDGET:
                refuse_recording("a table of cos and sin of the positions so far")
                return *_count_up(last + 1, *self._turn), positions
            table = _count_up(length, *self._turn)
            _keep(self._key, table)
            return *table, positions
        refuse_recording("a table of cos and sin of these positions")
        distinct, rows = np.unique(positions, return_inverse=True)
        cos, sin = _direct(distinct, *self._turn)
        return cos, sin, rows.reshape(positions.shape).astype(np.int64, copy=False)


def clear_rope_tables() -> None:
    """Drop all cached tables."""
    with _lock:
        _kept.clear()


def _keep(key: tuple[bytes, float, str], table: Table) -> None:
    with _lock:
        _kept[key] = table
        _kept.move_to_end(key)
        total = sum(cos.nbytes + sin.nbytes for cos, sin in _kept.values())
        while total > _BUDGET:
            _, (cos, sin) = _kept.popitem(last=False)
            total -= cos.nbytes + sin.nbytes


def _direct(positions: Array, inv_freq: Array, factor: float, dtype: npt.DTypeLike) -> Table:
    cos = np.empty((len(positions), len(inv_freq)), dtype)
    sin = np.empty_like(cos)
    for start in range(0, len(positions), _BLOCK):  # in blocks, so that the float64 angles stay in the cache
        block = slice(start, start + _BLOCK)
        angles = positions[block, None] * inv_freq
        cos[block] = factor * np.cos(angles)
        sin[block] = factor * np.sin(angles)
    return cos, sin


def _count_up(length: int, inv_freq: Array, factor: float, dtype: npt.DTypeLike) -> Table:
    """Compute the table of positions 0 .. length - 1."""
    if np.dtype(dtype) == np.float64:
        return _direct(np.arange(length), inv_freq, factor, dtype)
    # exp(i (start + j) f) = exp(i start f) exp(i j f): a product instead of two calls, five times faster;
    # its error, a few units of 1e-16, is far below the rounding to float32
    cos = np.empty((length, len(inv_freq)), dtype)
    sin = np.empty_like(cos)
    start_phases = np.exp(1j * np.arange(0, length, _BLOCK)[:, None] * inv_freq)
    block_phases = factor * np.exp(1j * np.arange(_BLOCK)[:, None] * inv_freq)
    phases = np.empty_like(block_phases)
    for start, start_phase in zip(range(0, length, _BLOCK), start_phases, strict=True):
        n = min(_BLOCK, length - start)
        np.multiply(block_phases, start_phase, out=phases)
        cos[start : start + n] = phases.real[:n]
        sin[start : start + n] = phases.imag[:n]
    return cos, sin
