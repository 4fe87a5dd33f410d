"""Launch of QK-norm, RoPE and the cache write on each backend, and configuration of the CUDA C++ kernel.

Arrays are (batch, seqlen, heads, head_dim), caches (pages, page_size, heads, head_dim), in any strides with the
last axis contiguous. The CUDA C++ kernel is ``rope_append_kv.cu``, its readable twin
``numba_cuda/rope_append_kv.py``, the CPU kernel ``cpu/rope_append_kv.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import (
    CODES,
    DTYPES,
    codes_of,
    float32,
    heads_alignment,
    power_of_two,
    strides_of,
)
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Spec, Tensor, lowers
from gpu_ops.kernels.rope.rope import frequencies, positions_of

__all__ = ["AppendConfig", "AppendShape", "raw_cannot", "select_config", "variants"]

_THREADS = 128  # of a block: __launch_bounds__ of rope_append_kv.cu
_BLOCKS = 9  # blocks that an SM has registers for
_WARP = 32
_MAX_BLOCK_Z = 64

_SHAPE = np.dtype(
    [
        *[(name, "i8", (3, 3)) for name in ("inputs", "outputs")],
        ("scales", "i8", (2, 3)),
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
    """Assignment of a head to threads, and of heads and tokens to blocks."""

    vec: int  # adjacent elements that a thread owns
    access: int  # elements per memory access: vec, or 1 where an array is not aligned
    units: int  # of a head: pairs of vectors, or vectors that hold pairs
    rotary_units: int
    units_per_thread: int
    block: tuple[int, int, int]  # threads per head, heads, tokens
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class AppendShape:
    """Sizes of a problem with at least one token, and the pairing of components."""

    tokens: int
    nheads: int
    nheads_kv: int
    head_dim: int
    rotary_dim: int
    itemsize: int
    interleaved: bool


def select_config(shape: AppendShape, *, alignment: int, sms: int) -> AppendConfig:
    """Configuration of the launch for a problem.

    ``alignment``: bytes that divide every address and stride. It decides how vectors are fetched, never which thread
    owns them: the same numbers give the same bits at any address.
    """
    tokens, nheads, nheads_kv = shape.tokens, shape.nheads, shape.nheads_kv
    vec, units, rotary_units = _units(shape.head_dim, shape.rotary_dim, shape.itemsize, shape.interleaved)
    access = vec if alignment % (vec * shape.itemsize) == 0 else 1
    x = min(_WARP, power_of_two(units))
    # A tile is heads of one kind (q, k or v), as many as each kind fills; the rest of the block is further tokens.
    y = min(_THREADS // x, math.gcd(power_of_two(nheads), power_of_two(nheads_kv)))
    z = min(_MAX_BLOCK_Z, min(_THREADS, max(_WARP, x * y * power_of_two(tokens))) // (x * y))
    tiles = -(-nheads // y) + 2 * -(-nheads_kv // y)
    columns = -(-tokens // z)
    # Heads of a token share its angles, a third of the work. Blocks split them only if there are too few blocks.
    parts = min(tiles, max(1, _BLOCKS * sms // columns))
    return AppendConfig(vec, access, units, rotary_units, -(-units // x), (x, y, z), (columns, parts, 1))


def _units(head_dim: int, rotary_dim: int, itemsize: int, interleaved: bool) -> tuple[int, int, int]:
    """Elements per vector, units of a head, units that rotate."""
    whole = math.gcd(16, head_dim * itemsize, (rotary_dim if interleaved else rotary_dim // 2) * itemsize)
    vec = max(1, (whole if whole in (4, 16) else math.gcd(4, whole)) // itemsize)
    vectors = 1 if interleaved and vec > 1 else 2  # of a unit
    rotary_units = rotary_dim // (vec * vectors)
    return vec, rotary_units + -(-(head_dim - rotary_dim) // (vec * vectors)), rotary_units


def raw_cannot(dtype: str, head_dim: int, rotary_dim: int, tokens: int, *, interleaved: bool) -> str | None:
    """Reason why the CUDA C++ kernel cannot run a problem; None when it can."""
    if dtype not in DTYPES:
        return f"{dtype} has Numba kernels only"
    itemsize = 4 if dtype == "float32" else 2
    vec, units, _ = _units(head_dim, rotary_dim, itemsize, interleaved)
    limit = _WARP if vec * itemsize == 16 else 2 * _WARP
    if units > limit:
        return f"head_dim {head_dim} is {units} units of {dtype} for the threads of a warp, and {limit} fit"
    return None if tokens < 2**31 else f"{tokens} tokens; its limit is 2**31 - 1"


@dataclass(frozen=True)
class _Operands:
    """Arrays of a call with the axes that kernels read; None: absent."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    frequencies: Tensor
    positions: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    slot_mapping: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @classmethod
    def of(cls, spec: Spec, frequencies: Tensor) -> _Operands:
        slots = spec.get("slot_mapping")
        tokens = [spec.tensor(name) for name in ("q", "k", "v", "rotated q")]
        if slots is not None:
            tokens, slots = [x[None] for x in tokens], slots[None]
        q, k, v, out = tokens
        return cls(
            q,
            k,
            v,
            out,
            codes_of(spec.tensor("k_cache")),
            codes_of(spec.tensor("v_cache")),
            spec.get("q_weight"),
            spec.get("k_weight"),
            frequencies,
            positions_of(spec),
            spec.get("seqused_k"),
            spec.get("block_table"),
            slots,
            spec.get("k_scale"),
            spec.get("v_scale"),
        )

    @property
    def in_order(self) -> tuple[Tensor | None, ...]:
        """Tensors in the order that all kernels take."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def codes(self) -> str:
        """Dtype of quantized pages, or an empty string."""
        return "" if self.k_scale is None else self.k_cache.dtype.name

    @property
    def tokens(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def is_empty(self) -> bool:
        return self.tokens == 0 or self.q.shape[2] + self.k.shape[2] == 0

    @property
    def alignment(self) -> int:
        """Bytes, at most 16, that divide every address and stride; quantized pages count as elements of q."""
        heads = heads_alignment((self.q, self.out, self.k, self.v))
        pages = heads_alignment((self.k_cache, self.v_cache)) * self.q.itemsize // self.k_cache.itemsize
        return math.gcd(heads, pages, *[w.address for w in (self.q_weight, self.k_weight) if w is not None])


@lowers("rope_append_kv", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    o, interleaved = _Operands.of(spec, frequencies(spec, builder, raw=True)), spec["interleaved"]
    if o.is_empty:
        return
    nheads, head_dim = o.q.shape[2:]
    sizes = (o.tokens, nheads, o.k.shape[2], head_dim, spec["rotary_dim"], o.q.itemsize)
    config = select_config(AppendShape(*sizes, interleaved), alignment=o.alignment, sms=builder.sms)
    args = (*(np.uint64(0) if a is None else a for a in o.in_order), _shape(spec, o, config))
    kernel = _kernel(config, o.q.dtype.name, interleaved, o.codes)
    builder.launch(kernel, config.grid, config.block, args)


def _shape(spec: Spec, o: _Operands, config: AppendConfig) -> Any:
    """Structure of numbers that the CUDA C++ kernel takes."""
    nheads, head_dim = o.q.shape[2:]
    nheads_kv = o.k.shape[2]
    shape = np.zeros((), _SHAPE)
    numbers: dict[str, Any] = {
        "inputs": [strides_of(x)[:3] for x in (o.q, o.k, o.v)],
        "outputs": [strides_of(x)[:3] for x in (o.out, o.k_cache, o.v_cache)],
        "heads": (nheads, nheads_kv, nheads_kv),
        "tokens": o.tokens,
        "seqlen": o.q.shape[1],
        "num_pages": o.k_cache.shape[0],
        "page_size": o.k_cache.shape[1],
        "max_pages": 1,
        "head_dim": head_dim,
        "rotary_dim": spec["rotary_dim"],
        "units": config.units,
        "rotary_units": config.rotary_units,
        "inverse_head_dim": 1 / head_dim,
        "attention_factor": spec["attention_factor"],
        "eps": float32(spec["eps"]),
        "weight_offset": float32(spec["weight_offset"]),
    }
    if o.k_scale is not None and o.v_scale is not None:
        numbers["scales"] = strides_of(o.k_scale), strides_of(o.v_scale)
    if o.block_table is not None:
        numbers["max_pages"] = o.block_table.shape[1] if o.k_cache.shape[1] else 0
        numbers["block_table"] = strides_of(o.block_table)[0]
    if o.slot_mapping is not None:
        numbers["slots"] = strides_of(o.slot_mapping)
    if o.positions is not None:
        numbers["positions"], numbers["position_bytes"] = strides_of(o.positions), o.positions.itemsize
    for name, number in numbers.items():
        shape[name] = number
    return shape[()]


@lowers("rope_append_kv", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rope.numba_cuda.rope_append_kv import THREADS, kernel, shared_numbers

    o = _Operands.of(spec, frequencies(spec, builder, raw=False))
    if o.is_empty:
        return
    twin = kernel(
        o.q.dtype.name,
        "" if o.positions is None else o.positions.dtype.name,
        "slots" if o.slot_mapping is not None else "rows" if o.block_table is None else "pages",
        o.q_weight is not None,
        o.codes,
    )
    numbers = (int(spec["interleaved"]), spec["eps"], spec["weight_offset"], spec["attention_factor"])
    args = (*(0 if a is None else a for a in o.in_order), *numbers)
    shared = shared_numbers(spec["rotary_dim"], o.q.shape[3], o.codes) * max(4, o.q.itemsize)
    builder.launch(twin, (min(o.tokens, MAX_GRID[0]), 1, 1), (THREADS, 1, 1), args, shared=shared)


@lowers("rope_append_kv", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rope.cpu import rope_append_kv as cpu

    packed = spec.get("slot_mapping") is not None
    how: dict[str, Any] = {name: spec[name] for name in ("eps", "weight_offset", "interleaved", "rotary_dim")}

    def run(views: Mapping[str, Any]) -> None:
        q, out, k, v = views["q"], views["rotated q"], views["k"], views["v"]
        slots = views.get("slot_mapping")
        if slots is not None:
            q, out, k, v, slots = q[None], out[None], k[None], v[None], slots[None]
        cpu.append(
            q,
            out,
            k,
            v,
            views["k_cache"],
            views["v_cache"],
            seqused_k=views.get("seqused_k"),
            block_table=views.get("block_table"),
            slot_mapping=slots,
            k_scale=views.get("k_scale"),
            v_scale=views.get("v_scale"),
            q_weight=views.get("q_weight"),
            k_weight=views.get("k_weight"),
            cos=views["cos"],
            sin=views["sin"],
            rows=views["rows"],
            **how,
        )

    tokens: list[Any] = [spec.tensor(name) for name in ("q", "k")]
    builder.call(run, cpu.config(*[x[None] for x in tokens] if packed else tokens))


# head_dim and rotary_dim for every way to divide a head.
_HEADS = ((128, 128), (60, 60), (200, 132), (124, 124), (7, 6), (127, 126))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``append`` launches; the same on every architecture."""
    seen = set()
    for codes, dtype, (head_dim, rotary_dim), interleaved, aligned in itertools.product(
        ("", *CODES), DTYPES, _HEADS, (False, True), (True, False)
    ):
        itemsize = 4 if dtype == "float32" else 2
        if raw_cannot(dtype, head_dim, rotary_dim, 1, interleaved=interleaved) is None:
            shape = AppendShape(1, 32, 8, head_dim, rotary_dim, itemsize, interleaved)
            config = select_config(shape, alignment=16 if aligned else itemsize, sms=1)
            kernel = _kernel(config, dtype, interleaved, codes)
            if kernel not in seen:
                seen.add(kernel)
                yield Variant(kernel, _THREADS)


def _kernel(config: AppendConfig, dtype: str, interleaved: bool, codes: str) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[dtype],
        "PAGE_DTYPE": CODES[codes] if codes else DTYPES[dtype],
        "VEC": config.vec,
        "ACCESS": config.access,
        "INTERLEAVED": int(interleaved),
        "UNITS": config.units_per_thread,
    }
    return CudaKernel("rope/rope_append_kv", "rope_append_kv", tuple(defines.items()))
