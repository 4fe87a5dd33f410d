"""QK-norm, RoPE and the cache write on the GPU: threads per head and blocks for a problem, and the launch.

Arrays are (batch, seqlen, heads, head_dim), caches (pages, page_size, heads, head_dim), in any strides with the
last axis contiguous. The CUDA C++ kernel is ``cuda/rope_append_kv.cu``, its readable twin
``numba_cuda/rope_append_kv.py``. Nothing here reads memory of the device or allocates any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, address, epsilon, float32, heads_alignment, strides_of

__all__ = ["AppendConfig", "append", "raw_cannot", "select_config", "variants"]

Array = Any  # of the device: numpy.ndarray or cupy.ndarray

_THREADS = 128  # of a block: __launch_bounds__ of rope_append_kv.cu
_BLOCKS = 9  # that an SM has registers for
_WARP = 32
_MAX_GRID = 2**31 - 1

_SHAPE = np.dtype(
    [
        *[(name, "i8", (3, 3)) for name in ("inputs", "outputs")],
        *[(name, "i8", (2,)) for name in ("positions", "slots")],
        ("block_table", "i8"),
        *[(name, "u4") for name in ("tokens", "seqlen")],
        ("heads", "i4", (3,)),
        *[(name, "i4") for name in ("num_pages", "page_size")],
        ("max_pages", "u4"),
        *[(name, "i4") for name in ("head_dim", "rotary_dim", "units", "rotary_units", "position_bytes")],
        *[(name, "f4") for name in ("inverse_head_dim", "eps", "weight_offset", "attention_factor")],
    ],
    align=True,
)


@dataclass(frozen=True)
class AppendConfig:
    """How a head is laid out on threads, and heads and tokens on blocks."""

    vec: int  # elements that a thread owns side by side
    access: int  # elements per memory access: vec, or 1 where an array is not aligned
    units: int  # of a head: pairs of vectors, or vectors that hold pairs
    rotary_units: int
    units_per_thread: int
    block: tuple[int, int, int]  # threads per head, heads, tokens
    grid: tuple[int, int, int]


def select_config(
    tokens: int,
    nheads: int,
    nheads_kv: int,
    head_dim: int,
    rotary_dim: int,
    itemsize: int,
    *,
    interleaved: bool,
    alignment: int,
    sms: int,
) -> AppendConfig:
    """The launch for a problem with at least one token.

    ``alignment``: bytes that divide every address and stride. It decides how vectors are fetched, never who owns
    them, so that the same numbers give the same bits wherever they lie.
    """
    vec, units, rotary_units = _units(head_dim, rotary_dim, itemsize, interleaved)
    access = vec if alignment % (vec * itemsize) == 0 else 1
    x = min(_WARP, _power_of_two(units))
    # A tile is heads of one kind, so as many as every kind fills; the rest of the block is further tokens.
    y = min(_THREADS // x, math.gcd(_power_of_two(nheads), _power_of_two(nheads_kv)))
    z = min(_THREADS, max(_WARP, x * y * _power_of_two(tokens))) // (x * y)
    tiles = -(-nheads // y) + 2 * -(-nheads_kv // y)
    columns = -(-tokens // z)
    # Heads of a token share its angles, a third of the work: they part only where blocks are too few for the device.
    parts = min(tiles, max(1, _BLOCKS * sms // columns))
    return AppendConfig(vec, access, units, rotary_units, -(-units // x), (x, y, z), (columns, parts, 1))


def _units(head_dim: int, rotary_dim: int, itemsize: int, interleaved: bool) -> tuple[int, int, int]:
    """Elements per vector, units of a head, those that rotate."""
    whole = math.gcd(16, head_dim * itemsize, (rotary_dim if interleaved else rotary_dim // 2) * itemsize)
    vec = max(1, (whole if whole in (4, 16) else math.gcd(4, whole)) // itemsize)
    vectors = 1 if interleaved and vec > 1 else 2  # of a unit
    rotary_units = rotary_dim // (vec * vectors)
    return vec, rotary_units + -(-(head_dim - rotary_dim) // (vec * vectors)), rotary_units


def raw_cannot(dtype: str, head_dim: int, rotary_dim: int, tokens: int, *, interleaved: bool) -> str | None:
    """Why the CUDA C++ kernel cannot run a problem; None when it can."""
    if dtype not in DTYPES:
        return f"{dtype} has Numba kernels only"
    itemsize = 4 if dtype == "float32" else 2
    vec, units, _ = _units(head_dim, rotary_dim, itemsize, interleaved)
    most = _WARP if vec * itemsize == 16 else 2 * _WARP
    if units > most:
        return f"head_dim {head_dim} is {units} units of {dtype} for the threads of a warp, and {most} fit"
    return None if tokens < 2**31 else f"{tokens} tokens; its limit is 2**31 - 1"


def append(
    device: Any,
    backend: str,
    q: Array,
    out: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seqused_k: Array | None,
    block_table: Array | None,
    slot_mapping: Array | None,
    q_weight: Array | None,
    k_weight: Array | None,
    eps: float,
    weight_offset: float,
    positions: Array | None,
    frequencies: Array,
    attention_factor: float,
    interleaved: bool,
) -> None:
    """Fill ``out``, which may be q, and the tokens' rows of the caches.

    ``slot_mapping`` int64 (batch, seqlen), or ``seqused_k`` and perhaps ``block_table``; ``positions`` int32 or int64
    (batch or 1, seqlen), or None: the row of a token in its sequence; ``frequencies``, one per pair: of
    ``gpu_ops.ops.rope_tables.frequencies``.
    """
    batch, seqlen, nheads, head_dim = q.shape
    num_pages, page_size, nheads_kv, _ = k_cache.shape
    tokens, rotary_dim = batch * seqlen, 2 * frequencies.shape[0]
    if tokens == 0 or nheads + nheads_kv == 0:
        return
    optional = (positions, seqused_k, block_table, slot_mapping)
    arrays = (q, k, v, out, k_cache, v_cache, q_weight, k_weight, frequencies, *optional)
    if backend == "numba":
        from gpu_ops.kernels.numba_cuda.rope_append_kv import THREADS, kernel

        twin = kernel(
            q.dtype.name,
            "" if positions is None else positions.dtype.name,
            "slots" if slot_mapping is not None else "rows" if block_table is None else "pages",
            q_weight is not None,
        )
        args = (
            *(0 if a is None else a for a in arrays),
            int(interleaved),
            eps,
            weight_offset,
            attention_factor,
        )
        shared = rotary_dim * max(4, q.dtype.itemsize)
        device.launch(twin, (min(tokens, _MAX_GRID), 1, 1), (THREADS, 1, 1), args, shared=shared)
        return
    weights = [address(w) for w in (q_weight, k_weight) if w is not None]
    config = select_config(
        tokens, nheads, nheads_kv, head_dim, rotary_dim, q.dtype.itemsize, interleaved=interleaved,
        alignment=math.gcd(heads_alignment((q, out, k, v, k_cache, v_cache)), *weights), sms=device.sms,
    )  # fmt: skip
    shape = np.zeros((), _SHAPE)
    shape["inputs"] = [strides_of(x)[:3] for x in (q, k, v)]
    shape["outputs"] = [strides_of(x)[:3] for x in (out, k_cache, v_cache)]
    shape["heads"] = nheads, nheads_kv, nheads_kv
    numbers = {
        "tokens": tokens, "seqlen": seqlen, "num_pages": num_pages, "page_size": page_size, "max_pages": 1,
        "head_dim": head_dim, "rotary_dim": rotary_dim, "units": config.units, "rotary_units": config.rotary_units,
        "inverse_head_dim": 1 / head_dim, "attention_factor": attention_factor,
        "eps": epsilon(eps), "weight_offset": float32(weight_offset),
    }  # fmt: skip
    if block_table is not None:
        numbers |= {
            "max_pages": block_table.shape[1] if page_size else 0,
            "block_table": strides_of(block_table)[0],
        }
    if slot_mapping is not None:
        shape["slots"] = strides_of(slot_mapping)
    if positions is not None:
        shape["positions"] = strides_of(positions)
        shape["position_bytes"] = positions.dtype.itemsize
    for name, number in numbers.items():
        shape[name] = number
    args = (*(np.uint64(0) if a is None else a for a in arrays), shape[()])
    device.launch(_kernel(config, q.dtype.name, interleaved), config.grid, config.block, args)


# head_dim and rotary_dim of every way to divide a head.
_HEADS = ((128, 128), (60, 60), (200, 132), (124, 124), (7, 6), (127, 126))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``append`` launches; the same on every architecture."""
    seen = set()
    for dtype, (head_dim, rotary_dim), interleaved, aligned in itertools.product(
        DTYPES, _HEADS, (False, True), (True, False)
    ):
        itemsize = 4 if dtype == "float32" else 2
        if raw_cannot(dtype, head_dim, rotary_dim, 1, interleaved=interleaved) is None:
            config = select_config(
                1, 32, 8, head_dim, rotary_dim, itemsize,
                interleaved=interleaved, alignment=16 if aligned else itemsize, sms=1,
            )  # fmt: skip
            kernel = _kernel(config, dtype, interleaved)
            if kernel not in seen:
                seen.add(kernel)
                yield Variant(kernel, _THREADS)


def _kernel(config: AppendConfig, dtype: str, interleaved: bool) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[dtype],
        "VEC": config.vec,
        "ACCESS": config.access,
        "INTERLEAVED": int(interleaved),
        "UNITS": config.units_per_thread,
    }
    return CudaKernel("rope_append_kv", "rope_append_kv", tuple(defines.items()))


def _power_of_two(n: int) -> int:
    """The least that is n or more."""
    return 1 << (n - 1).bit_length() if n else 1
