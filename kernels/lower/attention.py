"""Attention on the GPU: the launch of the CUDA C++ kernels and of their Numba twins.

Arrays are (batch, seqlen, nheads, head_dim) in any strides with the last axis contiguous; sequences laid end to
end have one batch entry. :mod:`.attention_config` says which tiles; the kernels are ``cuda/attention_fwd_sm80.cu``,
``cuda/attention_combine.cu`` and ``numba_cuda/attention.py``. Nothing here reads memory of the device, and all that
is allocated is ``device.empty`` for the partial results of divided keys and, for the twins, 32 bytes per sequence:
with ``out`` given, a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, address, float32, strides_of
from gpu_ops.kernels.lower.attention_config import (
    MAX_HEAD_DIM,
    Config,
    DeviceLimits,
    Mask,
    Problem,
    select_config,
)
from gpu_ops.kernels.lower.attention_shape import ATTENTION_SHAPE, UNLIMITED
from gpu_ops.kernels.lower.attention_tuning import SPACE
from gpu_ops.kernels.lower.tuning import choose

__all__ = ["UNLIMITED", "forward", "raw_cannot", "variants"]

Array = Any  # of the device: numpy.ndarray or cupy.ndarray

_LOG2E = math.log2(math.e)
_ALIGNMENT = 16  # of every address and stride: what cp.async copies at a time
_MAX_GRID_YZ = 65535


def forward(
    device: Any,
    backend: str,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    left: int = UNLIMITED,
    right: int = UNLIMITED,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    visible: Array | None = None,
    block_q: int = 1,
    block_k: int = 1,
    offsets: tuple[Array, ...] = (),
    seqused_k: Array | None = None,
    block_table: Array | None = None,
    num_splits: int = 0,
) -> None:
    """Fills ``out`` and, when given, ``lse`` (batch, nheads, seqlen_q).

    ``left``, ``right``: keys visible on either side of the diagonal. ``sinks`` (nheads,), ``alibi_slopes`` (batch
    or 1, nheads); ``bias`` and ``visible`` have four axes, of length 1 where they broadcast. ``offsets``:
    cu_seqlens of q and k, whose sequences lie end to end; ``seqused_k``: k and v are caches, with ``block_table``
    in pages. ``max_seqlen_*`` may be bounds.
    """
    batch = offsets[0].shape[0] - 1 if offsets else q.shape[0]
    if batch * max_seqlen_q == 0:
        return
    left, right = min(left, UNLIMITED), min(right, UNLIMITED)
    if max_seqlen_q == 1 and right >= 0:
        right = UNLIMITED  # the only query sits on the last key
    if backend == "numba":
        _numba(
            device, q, k, v, out, lse, batch,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale,
            left=left, right=right, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, bias=bias,
            visible=visible, block_q=block_q, block_k=block_k, offsets=offsets, seqused_k=seqused_k,
            block_table=block_table, num_splits=num_splits,
        )  # fmt: skip
        return

    nheads, head_dim, head_dim_v = q.shape[2], q.shape[3], v.shape[3]
    mask: Mask = "kNone" if left == right == UNLIMITED else "kCausal" if left == UNLIMITED else "kLocal"
    own_lengths = bool(offsets) or block_table is not None
    lean = softcap <= 0 and alibi_slopes is None and bias is None and not (mask == "kLocal" and own_lengths)
    problem = Problem(
        q.dtype.itemsize, batch, nheads, k.shape[2], max_seqlen_q, max_seqlen_k, head_dim, head_dim_v,
        mask=mask, window=left + max(right, 0) + 1 if mask == "kLocal" and right < UNLIMITED else 0,
        block_mask=visible is not None, varlen=bool(offsets), num_splits=num_splits, lean=lean,
    )  # fmt: skip
    config = choose(SPACE, problem, DeviceLimits(device.sms, device.smem_per_block_optin), device.card)
    split = config.num_splits > 1
    target, target_lse = out, lse
    if split:
        parts = (config.num_splits, q.shape[0], nheads, q.shape[1])  # packed sequences: one of total_q
        target = device.empty((*parts, head_dim_v), np.float32, "parts of out")
        target_lse = device.empty((2, *parts), np.float32, "maxima and sums of parts")

    shape = np.zeros((), ATTENTION_SHAPE)
    for name, array in (("q", q), ("k", k), ("v", v)):
        shape[name] = strides_of(array)[:3]
    _place(shape, target, target_lse, split)
    if bias is not None:
        shape["bias"] = strides_of(bias)
    if visible is not None:
        shape["block_mask"] = strides_of(visible)
    if alibi_slopes is not None:
        shape["alibi_batch"] = strides_of(alibi_slopes)[0]
    if block_table is not None:
        shape["block_table_batch"] = strides_of(block_table)[0]
    scale = max(abs(softmax_scale), _SMALLEST)
    numbers = {
        "seqlen_q": max_seqlen_q, "seqlen_k": max_seqlen_k, "nheads": nheads, "group": problem.group,
        "head_dim": head_dim, "head_dim_v": head_dim_v, "window_left": left, "window_right": right,
        "block_q": block_q, "block_k": block_k, "page_size": k.shape[1], "num_splits": config.num_splits,
        "scale_log2": float32(scale * _LOG2E), "negate": softmax_scale < 0,
    }  # fmt: skip
    if softcap > 0:
        numbers |= {"softcap_in": float32(scale / softcap), "softcap_log2": float32(softcap * _LOG2E)}
    for name, value in numbers.items():
        shape[name] = value

    kernel = _kernel(
        config, q.dtype.name, mask,
        SOFTCAP=softcap > 0, ALIBI=alibi_slopes is not None, SINKS=sinks is not None and not split,
        BIAS="kNone" if bias is None else "kSame" if bias.dtype == q.dtype else "kFloat",
        BLOCK_MASK=visible is not None, VARLEN=bool(offsets), SEQUSED_K=seqused_k is not None,
        PAGED=block_table is not None,
    )  # fmt: skip
    arrays = (
        q, k, v, target, target_lse, *(offsets or (None, None)), seqused_k, block_table,
        None if split else sinks, alibi_slopes, bias, None if visible is None else visible.view(np.uint8),
    )  # fmt: skip
    args = (*map(_pointer, arrays), shape[()])
    device.launch(kernel, config.grid, (config.threads, 1, 1), args, shared=config.shared_bytes)
    if target_lse is not None and split:
        _place(shape, out, lse, False)
        shape["out_split"], shape["lse_split"] = target[0].size, target_lse[0, 0].size
        shape["seqlen_q"] = q.shape[1]
        rows = q.shape[0] * nheads * q.shape[1]
        args = (target, target_lse, _pointer(sinks), out, _pointer(lse), np.int64(rows), shape[()])
        combine = _combine(q.dtype.name, sinks is not None)
        device.launch(combine, (-(-rows // _COMBINE_ROWS), 1, 1), (32 * _COMBINE_ROWS, 1, 1), args)


def raw_cannot(q: Array, k: Array, v: Array, out: Array | None, batch: int, seqlen: int) -> str | None:
    """Why the CUDA C++ kernels cannot run these arrays; None when they can.

    Arrays that are not aligned are refused and not copied: a cache may be most of the device's memory.
    """
    itemsize, dims = q.dtype.itemsize, (q.shape[3], v.shape[3])
    if q.dtype.name not in DTYPES:
        return f"{q.dtype.name} has Numba kernels only"
    most = MAX_HEAD_DIM[itemsize]
    if max(dims) > most or any(d % 8 for d in dims):
        return f"head_dim {dims[0]}/{dims[1]}: {q.dtype.name} wants multiples of 8 up to {most}"
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        if array is None or not array.size:
            continue
        strides = [stride for n, stride in zip(array.shape[:-1], array.strides[:-1], strict=True) if n > 1]
        if math.gcd(_ALIGNMENT, address(array), *strides) < _ALIGNMENT:
            return (
                f"address and strides {array.strides} of {name} are not all multiples of {_ALIGNMENT} bytes"
            )
    if max(batch, 2 * q.shape[2]) > _MAX_GRID_YZ:
        return f"batch {batch}, {q.shape[2]} heads: a grid has at most {_MAX_GRID_YZ} blocks that way"
    if seqlen >= UNLIMITED:
        return f"sequences of {seqlen}: at most {UNLIMITED - 1} tokens"
    return None


_SMALLEST = 2.0**-126  # of scales: a score that is masked is -inf times the scale, and -inf times 0 is NaN


def _kernel(config: Config, dtype: str, mask: Mask, *, BIAS: str = "kNone", **flags: bool) -> CudaKernel:
    tile = config.tile
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[dtype], "HEAD_DIM": config.head_dim, "HEAD_DIM_V": config.head_dim_v,
        "VALUE_PARTS": config.value_parts, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "WARPS_M": tile.warps_m, "WARPS_N": tile.warps_n, "MASK": mask, "BIAS": BIAS,
    }  # fmt: skip
    for name in ("SOFTCAP", "ALIBI", "SINKS", "BLOCK_MASK", "VARLEN", "SEQUSED_K", "PAGED"):
        defines[name] = int(flags.get(name, False))
    defines |= {"PACK_GQA": int(config.pack_gqa), "SPLIT": int(config.num_splits > 1)}
    return CudaKernel("attention_fwd_sm80", "attention_forward", tuple(defines.items()))


def _combine(dtype: str, sinks: bool) -> CudaKernel:
    defines: tuple[tuple[str, str | int], ...] = (("DTYPE", DTYPES[dtype]), ("SINKS", int(sinks)))
    return CudaKernel("attention_combine", "attention_combine", defines)


_COMBINE_ROWS = 4  # per block, a warp each


def _place(shape: Array, out: Array, lse: Array | None, split: bool) -> None:
    """Where out and lse lie: parts (num_splits, batch, nheads, seqlen_q), of lse two, or those of the caller."""
    strides = strides_of(out)
    if split:
        shape["out_split"], batch, head, row = strides[:4]
    else:
        batch, row, head = strides[:3]
    shape["out"] = batch, row, head
    if lse is not None:
        *of_split, shape["lse_batch"], shape["lse_head"], _ = strides_of(lse)
        shape["lse_split"] = of_split[-1] if split else 0


def _numba(
    device: Any,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    batch: int,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    offsets: tuple[Array, ...],
    seqused_k: Array | None,
    alibi_slopes: Array | None,
    bias: Array | None,
    visible: Array | None,
    block_q: int,
    block_k: int,
    num_splits: int,
    **rest: Any,
) -> None:
    """Options as the Numba kernels take them: broadcast, and (q start, q length, k start, k length) per sequence."""
    from gpu_ops.kernels.numba_cuda import attention_launch

    # Operators of arrays, which make a CuPy array on the GPU and wait for nothing.
    sequences = np.zeros_like(q, np.int64, shape=(batch, 4), order="C")
    sequences[:, 1], sequences[:, 3] = max_seqlen_q, max_seqlen_k
    for column, ends in zip((0, 2), offsets, strict=False):
        sequences[:, column] = ends[:-1]
        sequences[:, column + 1] = ends[1:] - ends[:-1]
    if seqused_k is not None:
        sequences[:, 3] = seqused_k
    nheads = q.shape[2]
    if lse is None:
        lse = device.empty((q.shape[0], nheads, q.shape[1]), _statistics(q), "lse")
    if alibi_slopes is not None:
        alibi_slopes = np.broadcast_to(alibi_slopes, (batch, nheads))
    if bias is not None:
        bias = np.broadcast_to(bias, (batch, nheads, max_seqlen_q, max_seqlen_k))
    if visible is not None:
        blocks = (-(-max_seqlen_q // block_q), -(-max_seqlen_k // block_k))
        visible = np.broadcast_to(visible, (batch, nheads, *blocks))
    attention_launch.forward(
        device, q, k, v, out, lse, sequences,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, alibi_slopes=alibi_slopes, bias=bias,
        visible=visible, block_q=block_q, block_k=block_k,
        num_splits=1 if offsets else num_splits, **rest,
    )  # fmt: skip


def variants(arch: str) -> Iterator[Variant]:
    """The commonest of the kernels, decoding from pages among them, then of their Numba twins.

    All tiles and options would be thousands; each takes one to five seconds, and a call compiles what it needs.
    """
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has neither bfloat16 nor cp.async
    limits = DeviceLimits(100, smem_per_block_optin(arch))
    shapes: tuple[tuple[str, int, Mask, int], ...] = (
        ("bfloat16", 64, "kCausal", 4096), ("bfloat16", 128, "kCausal", 4096), ("bfloat16", 256, "kNone", 4096),
        ("float32", 128, "kCausal", 4096), ("float16", 128, "kNone", 1),
    )  # fmt: skip
    for dtype, head_dim, mask, seqlen_q in shapes:
        itemsize = 4 if dtype == "float32" else 2
        config = select_config(
            Problem(itemsize, 4, 32, 8, seqlen_q, 4096, head_dim, head_dim, mask=mask), limits
        )
        decode = seqlen_q == 1
        kernel = _kernel(config, dtype, mask, SEQUSED_K=decode, PAGED=decode)
        yield Variant(kernel, config.threads, config.shared_bytes)
    yield Variant(_combine("float16", False), 32 * _COMBINE_ROWS)
    yield from _numba_variants()


def _numba_variants() -> Iterator[Variant]:
    from gpu_ops.kernels.numba_cuda.attention import forward_kernel
    from gpu_ops.kernels.numba_cuda.attention_combine import combine_kernel
    from gpu_ops.kernels.numba_cuda.attention_config import THREADS
    from gpu_ops.kernels.numba_cuda.attention_config import select_config as select_twin

    for config in (
        select_twin("bfloat16", 128, 128, rows=4096, masked=True),  # 254 registers: none has more
        select_twin("float16", 128, 128, rows=4, paged=True, split=True),
    ):
        yield Variant(forward_kernel(config), THREADS)
    yield Variant(combine_kernel("float16", False), THREADS)


def _pointer(array: Array | None) -> Array:
    return np.uint64(0) if array is None else array


def _statistics(q: Array) -> type:
    return np.float64 if q.dtype == np.float64 else np.float32
