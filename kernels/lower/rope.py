"""RoPE on the GPU: vectors, heads per thread and blocks for a problem, and the launch. ``select_config`` needs none.

Arrays are (batch, seqlen, nheads, head_dim) in any strides with the last axis contiguous. The CUDA C++ kernel is
``cuda/rope.cu``, its readable twin ``numba_cuda/rope.py``. Nothing here reads memory of the device or allocates any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, address, heads_alignment

__all__ = ["RopeConfig", "rope", "select_config", "variants"]

Array = Any  # of the device: numpy.ndarray or cupy.ndarray

_THREADS = 128  # of a block at most: __launch_bounds__ of rope.cu
_RESIDENT = 10 * _THREADS  # threads that an SM has registers for
_MAX_GRID, _MAX_GRID_Y = 2**31 - 1, 65535

# Heads per thread: they share the 25 instructions of each angle, where a pair takes about 8. As many as it takes to
# have all threads on the device at once; more than this gain little.
_MOST_HEADS = 16

_HEAD_STRIDES = np.dtype([("batch", "i8"), ("seqlen", "i8"), ("head", "i8")], align=True)
_SHAPE = np.dtype(
    [
        *[(name, _HEAD_STRIDES) for name in ("q", "k", "q_out", "k_out")],
        *[(name, "i8") for name in ("positions_batch", "positions_seqlen", "first")],
        *[(name, "u4") for name in ("tokens", "seqlen")],
        *[
            (name, "i4")
            for name in ("nheads", "nheads_kv", "q_blocks", "position_bytes", "rotary_dim", "tail")
        ],
        *[(name, "f4") for name in ("cos_scale", "sin_scale")],
    ],
    align=True,
)


@dataclass(frozen=True)
class RopeConfig:
    """How units, heads and tokens are laid out on threads."""

    vec: int  # elements per access
    block: tuple[int, int, int]  # units, heads, tokens
    grid: tuple[int, int, int]  # tokens, heads of q and then of k, units
    q_blocks: int  # of grid[1]


def select_config(
    tokens: int,
    nheads: int,
    nheads_kv: int,
    rotary_dim: int,
    tail: int,
    itemsize: int,
    *,
    alignment: int,
    tokens_inner: bool,
    sms: int,
) -> RopeConfig:
    """The launch for a problem with at least one element.

    ``tail``: components to copy behind rotary_dim. ``alignment``: bytes that divide every address and stride.
    ``tokens_inner``: tokens, not heads, are side by side in memory.
    """
    vec = math.gcd(16, alignment, rotary_dim // 2 * itemsize, tail * itemsize) // itemsize
    units = rotary_dim // (2 * vec) + -(-tail // (2 * vec))
    x = min(units, _THREADS)
    most_heads = max(nheads, nheads_kv)
    y = 1 if tokens_inner else max(1, min(32 // x, most_heads))  # a warp has what lies side by side
    z = min(max(1, _THREADS // (x * y)), tokens, 64)  # 64: the most threads of a block along z

    threads = tokens * (nheads + nheads_kv) * units  # with a head each
    heads = min(_MOST_HEADS, -(-threads // (_RESIDENT * sms)))
    heads = max(heads, -(-2 * most_heads // (y * (_MAX_GRID_Y - 1))))
    q_blocks, k_blocks = (-(-n // (y * heads)) for n in (nheads, nheads_kv))
    return RopeConfig(vec, (x, y, z), (-(-tokens // z), q_blocks + k_blocks, -(-units // x)), q_blocks)


def rope(
    device: Any,
    backend: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    positions: Array | None,
    frequencies: Array,
    *,
    first: int,
    interleaved: bool,
    cos_scale: float,
    sin_scale: float,
) -> None:
    """Rotate one or two arrays, which differ in nheads alone, in one launch.

    ``positions``: int32 or int64 (batch or 1, seqlen), or None: ``first``, ``first + 1``, ... ``frequencies``, one
    per pair: of ``gpu_ops.ops.rope_tables.frequencies``. An output may be its input exactly, else they are apart.
    """
    batch, seqlen, _, head_dim = inputs[0].shape
    tokens = batch * seqlen
    q, q_out = inputs[0], outputs[0]
    # Without k: a stand-in with no heads.
    k, k_out = (inputs[1], outputs[1]) if len(inputs) == 2 else (q[:, :, :0], q_out[:, :, :0])
    nheads, nheads_kv = q.shape[2], k.shape[2]
    if tokens * (nheads + nheads_kv) * head_dim == 0:
        return
    rotary_dim = 2 * frequencies.shape[0]
    in_place = all(address(x) == address(y) for x, y in zip(inputs, outputs, strict=True))
    tail = 0 if in_place else head_dim - rotary_dim
    if backend == "numba":
        from gpu_ops.kernels.numba_cuda import rope as twins

        twin = twins.kernel(q.dtype.name, "" if positions is None else positions.dtype.name)
        numbers = (first, int(interleaved), tail, cos_scale, sin_scale)
        args = (q, k, q_out, k_out, 0 if positions is None else positions, frequencies, *numbers)
        device.launch(twin, (min(tokens, _MAX_GRID), 1, 1), (twins.THREADS, 1, 1), args)
        return

    arrays = {"q": q, "k": k, "q_out": q_out, "k_out": k_out}
    config = select_config(
        tokens, nheads, nheads_kv, rotary_dim, tail, q.dtype.itemsize,
        alignment=heads_alignment(arrays.values()), tokens_inner=_tokens_inner(q if nheads else k), sms=device.sms,
    )  # fmt: skip
    fields: dict[str, Any] = {
        name: tuple(stride // x.dtype.itemsize for stride in x.strides[:3]) for name, x in arrays.items()
    } | {
        "positions_batch": 0, "positions_seqlen": 0, "first": first, "tokens": tokens, "seqlen": seqlen,
        "nheads": nheads, "nheads_kv": nheads_kv, "q_blocks": config.q_blocks, "position_bytes": 0,
        "rotary_dim": rotary_dim, "tail": tail, "cos_scale": cos_scale, "sin_scale": sin_scale,
    }  # fmt: skip
    if positions is not None:
        size = fields["position_bytes"] = positions.dtype.itemsize
        fields["positions_batch"] = positions.strides[0] // size if positions.shape[0] > 1 else 0
        fields["positions_seqlen"] = positions.strides[1] // size
    shape = np.array(tuple(fields[name] for name in _SHAPE.fields or ()), _SHAPE)[()]
    pointers = (*arrays.values(), frequencies if positions is None else positions, frequencies)
    kernel = _kernel(config, q.dtype.name, interleaved)
    device.launch(kernel, config.grid, config.block, (*pointers, shape))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``rope`` launches; the same on every architecture."""
    for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        for size, interleaved in itertools.product((16, 8, 4, 2), (False, True)):
            if size >= itemsize:
                config = select_config(
                    2**20, 32, 8, 128, 0, itemsize, alignment=size, tokens_inner=False, sms=1
                )
                yield Variant(_kernel(config, dtype, interleaved), math.prod(config.block))


def _kernel(config: RopeConfig, dtype: str, interleaved: bool) -> CudaKernel:
    defines = (("DTYPE", DTYPES[dtype]), ("VEC", config.vec), ("INTERLEAVED", int(interleaved)))
    return CudaKernel("rope", "rope", defines)


def _tokens_inner(x: Array) -> bool:
    return bool(x.shape[1] > 1 and x.shape[2] > 1 and abs(x.strides[1]) < abs(x.strides[2]))
