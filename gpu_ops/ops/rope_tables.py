"""What ``rope`` needs beside q and k: cos and sin for the CPU, frequencies for GPUs, made in float64 and kept.

On the CPU a table of cos and sin has one row per position and one column per frequency. Counting positions (0, 1,
2, ...) share one table that grows by doubling, so a prefill, its decode steps and every layer of a model use the same
one. Far apart or negative positions get a table of just the rows they need.

On a GPU the kernels compute cos and sin themselves, since there a table would be another 512 bytes to read per token
for a head_dim of 128, 2.5 % of what Llama-3-8B's q and k move, and positions that lie on the device would have to be
waited for to know how long it must be. What they need are the frequencies.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.core.arrays import Array
from gpu_ops.core.device import CudaDevice, Device, EmulatorDevice

__all__ = ["clear_rope_tables", "frequencies", "rope_tables", "tables_of", "turns"]

Table: TypeAlias = tuple[Array, Array]
Rows: TypeAlias = npt.NDArray[np.int64]

_BUDGET = 64 << 20  # bytes kept: two models' tables for 65536 positions of 128 components in float32
_BLOCK = 256

_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    # a thread that the child does not have may hold the old one
    os.register_at_fork(after_in_child=_new_lock)

_kept: OrderedDict[tuple[bytes, float, str], Table] = OrderedDict()

_MOST_FREQUENCIES = 64  # arrays kept on devices: as many models, or steps of a dynamic scaling
_on_devices: OrderedDict[tuple[int, str, bytes], Any] = OrderedDict()


def rope_tables(
    positions: Rows, first: int, last: int, inv_freq: Array, attention_factor: float, dtype: npt.DTypeLike
) -> tuple[Array, Array, Rows]:
    """``cos``, ``sin`` of shape (rows, frequencies) and, shaped like ``positions``, the row of each position.

    ``first`` and ``last`` are the smallest and the largest position. ``dtype``, float32 or float64, is what the
    tables are rounded to; angles are float64.
    """
    return tables_of(inv_freq, attention_factor, dtype)(positions, first, last)


def tables_of(
    inv_freq: Array, attention_factor: float, dtype: npt.DTypeLike
) -> Callable[[Rows, int, int], tuple[Array, Array, Rows]]:
    """:func:`rope_tables` of these frequencies: a function of positions, the first and the last."""
    dtype = np.dtype(dtype)
    key = (inv_freq.tobytes(), attention_factor, dtype.str)
    turn = inv_freq, attention_factor, dtype

    def tables(positions: Rows, first: int, last: int) -> tuple[Array, Array, Rows]:
        if positions.size == 0:
            empty = np.empty((0, len(inv_freq)), dtype)
            return empty, empty, positions
        with _lock:
            kept = _kept.get(key)
            if kept is not None:
                _kept.move_to_end(key)
        if first >= 0 and kept is not None and last < len(kept[0]):
            return *kept, positions
        # 4: a table somewhat longer than needed now is likely to be wanted later; one far longer is a waste
        if first >= 0 and last < 4 * max(positions.size, _BLOCK):
            length = 1 << last.bit_length()  # the next power of two that is > last
            row_bytes = 2 * len(inv_freq) * dtype.itemsize
            if length * row_bytes > _BUDGET:
                return *_count_up(last + 1, *turn), positions
            table = _count_up(length, *turn)
            _keep(key, table)
            return *table, positions
        distinct, rows = np.unique(positions, return_inverse=True)
        cos, sin = _direct(distinct, *turn)
        return cos, sin, rows.reshape(positions.shape).astype(np.int64, copy=False)

    return tables


def frequencies(device: Device, backend: str, inv_freq: npt.NDArray[np.float64]) -> Array:
    """The frequencies on a device: :func:`turns` for the CUDA C++ kernels, themselves for the Numba kernels.

    Those of a CUDA device stay there. Only the first call with them copies and waits, so a call that is captured in a
    CUDA graph must not be the first.
    """
    wanted = turns(inv_freq) if backend == "raw" else inv_freq
    if isinstance(device, EmulatorDevice):
        device.name("frequencies", wanted)
    if not isinstance(device, CudaDevice):
        return wanted
    key = (device.ordinal, backend, inv_freq.tobytes())
    with _lock:
        found = _on_devices.get(key)
        if found is None:
            import cupy

            found = cupy.asarray(wanted)
            cupy.cuda.get_current_stream().synchronize()  # other streams will read it
            _on_devices[key] = found
            if len(_on_devices) > _MOST_FREQUENCIES:
                _on_devices.popitem(last=False)
        _on_devices.move_to_end(key)
    result: Array = found
    return result


def turns(inv_freq: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    """``inv_freq / (2 pi)`` in units of 2^-64, rounded, without whole turns: what a position adds to an angle.

    A position times this, modulo 2^64, is the angle without its whole turns, off by ``position * 2^-65`` turns.
    """
    return _turns(inv_freq.tobytes())


@functools.lru_cache(maxsize=_MOST_FREQUENCIES)
def _turns(inv_freq: bytes) -> npt.NDArray[np.uint64]:
    found = []
    for numerator, denominator in map(float.as_integer_ratio, np.frombuffer(inv_freq).tolist()):
        scaled, unit = numerator * _TURNS_PER_RADIAN, denominator << (_BITS - 64)
        found.append((scaled + unit // 2) // unit % 2**64)
    result = np.array(found, np.uint64)
    result.flags.writeable = False  # it is shared
    return result


def _turns_per_radian(bits: int) -> int:
    """``2**bits / (2 pi)``, by Machin's formula: pi / 4 = 4 arctan(1 / 5) - arctan(1 / 239)."""

    def arctan_of_inverse(n: int) -> int:
        power = total = (1 << 2 * bits) // n
        k = 1
        while power:
            power //= -n * n
            k += 2
            total += power // k
        return total

    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    return (1 << 3 * bits) // (2 * pi)


_BITS = 256  # 64 of them are kept; the others are for frequencies up to 2**100 and for rounding
_TURNS_PER_RADIAN = _turns_per_radian(_BITS)


def clear_rope_tables() -> None:
    """Forget all kept tables and frequencies."""
    with _lock:
        _kept.clear()
        _on_devices.clear()


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
    for start in range(0, len(positions), _BLOCK):  # by blocks: the float64 angles stay in the cache
        block = slice(start, start + _BLOCK)
        angles = positions[block, None] * inv_freq
        cos[block] = factor * np.cos(angles)
        sin[block] = factor * np.sin(angles)
    return cos, sin


def _count_up(length: int, inv_freq: Array, factor: float, dtype: npt.DTypeLike) -> Table:
    """Positions 0 .. length - 1."""
    if np.dtype(dtype) == np.float64:
        return _direct(np.arange(length), inv_freq, factor, dtype)
    # exp(i (start + j) f) = exp(i start f) exp(i j f): a product instead of two calls, five times faster,
    # with a few units of 1e-16 of error that the rounding to float32 hides
    cos = np.empty((length, len(inv_freq)), dtype)
    sin = np.empty_like(cos)
    turn_start = np.exp(1j * np.arange(0, length, _BLOCK)[:, None] * inv_freq)
    turn_j = factor * np.exp(1j * np.arange(_BLOCK)[:, None] * inv_freq)
    turn = np.empty_like(turn_j)
    for start, at_start in zip(range(0, length, _BLOCK), turn_start, strict=True):
        n = min(_BLOCK, length - start)
        np.multiply(turn_j, at_start, out=turn)
        cos[start : start + n] = turn.real[:n]
        sin[start : start + n] = turn.imag[:n]
    return cos, sin
