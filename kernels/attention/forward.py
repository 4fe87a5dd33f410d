"""Launch of attention forward on each backend.

Arrays are (batch, seqlen, nheads, head_dim) in any strides with the last axis contiguous; packed sequences (end to
end) have one batch entry. :mod:`.config` chooses tiles; the kernels are ``forward_sm80.cu`` and ``combine.cu``, and
the CPU kernels of ``cpu/forward.py``. :mod:`.forward_numba` launches their twins for Numba.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_ops.kernels.attention import forward_numba
from gpu_ops.kernels.attention.config import (
    MAX_HEAD_DIM,
    SPACE,
    DeviceLimits,
    ForwardConfig,
    ForwardProblem,
    ForwardTile,
    Mask,
    configs,
    select_config,
)
from gpu_ops.kernels.attention.problem import (
    ATTENTION_SHAPE,
    PLAIN,
    UNLIMITED,
    UNLIMITED_INT64,
    Attention,
    Features,
    as_bshd,
    sequence_table,
)
from gpu_ops.kernels.common.arguments import CODES, DTYPES, address, four_axes, seed_on_host, strides_of
from gpu_ops.kernels.common.tuning import choose
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Spec, Tensor, lowers

__all__ = [
    "launch_raw",
    "optional_arrays",
    "optional_tensors",
    "prepared",
    "raw_unsupported",
    "variants",
]

Array = np.ndarray[Any, Any]


def launch_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.attention.cpu import forward as kernels
    from gpu_ops.kernels.attention.cpu.config import DECODE_ROWS, select_config

    a = Attention.of(spec)
    decodes = a.bias is None and a.visible is None and not a.dropped
    config = select_config(
        a.batch,
        a.nheads,
        a.nheads_kv,
        a.seqlen_q,
        a.seqlen_k,
        a.num_splits,
        decode=decodes,
        dtype=a.k.dtype,
        dims=a.head_dim + a.head_dim_v,
    )
    few = DECODE_ROWS // (a.nheads // a.nheads_kv) if a.packed and decodes and config.kernel == "tiled" else 0
    more: dict[str, Any] = {"config": config, "results": (a.out.dtype, a.lse_dtype)}
    if few:
        attend = prepared(kernels.prepare_ragged, a, few=few, **more)
    else:
        attend = prepared(kernels.prepare, a, **more)
    if a.lse is None:
        builder.empty(a.lse_shape, a.lse_dtype, "lse")
    if a.known_lengths:
        builder.constant(sequence_table(a), "sequences")
    layout, k_name, v_name = spec["layout"], a.k.name, a.v.name
    has_options = bool(optional_tensors(a))

    def run(views: Mapping[str, Any]) -> None:
        q, k, v, out, lse = views["q"], views[k_name], views[v_name], views["out"], views["lse"]
        if layout != "bshd":
            q, k = as_bshd(q, layout), as_bshd(k, layout)
            v, out = as_bshd(v, layout), as_bshd(out, layout)
            lse = lse if lse.ndim == 3 else lse[None]
        attend.run(q, k, v, out, lse, views["sequences"], optional_arrays(a, views) if has_options else {})

    text = f"{config}; sequences of up to {few} queries: decode kernel" if few else str(config)
    builder.call(run, text, attend.scratch)


def prepared(prepare: Callable[..., Any], a: Attention, **more: Any) -> Any:
    """Call ``prepare`` of the forward or backward kernels for this call. Its result has ``run`` and ``scratch``."""
    left, right = a.window(UNLIMITED_INT64)
    return prepare(
        a.q,  # only shape and dtype of the arrays are read
        a.k,
        a.v,
        a.batch,
        max_seqlen_q=a.seqlen_q,
        max_seqlen_k=a.seqlen_k,
        left=left,
        right=right,
        block_q=a.block_q,
        block_k=a.block_k,
        packed=a.packed,
        given=optional_tensors(a),
        **a.numbers,
        **more,
    )


def optional_tensors(a: Attention) -> dict[str, Any]:
    """Arrays of a call in addition to q, k and v, by the names of the CPU kernels."""
    from gpu_ops.kernels.attention.cpu.config import OPTIONAL

    return {name: x for name in OPTIONAL if (x := getattr(a, name)) is not None}


def optional_arrays(a: Attention, views: Mapping[str, Any]) -> dict[str, Array]:
    """Optional arrays of one call, in the form that the CPU kernels take."""
    arrays = {}
    if a.block_table is not None:
        arrays["block_table"] = views["block_table"]
    if a.k_scale is not None:
        arrays["k_scale"], arrays["v_scale"] = views["k_scale"], views["v_scale"]
    if a.sinks is not None:
        arrays["sinks"] = views["sinks"].astype(np.float64)
    if a.alibi_slopes is not None:
        arrays["alibi_slopes"] = _broadcast(views["alibi_slopes"].astype(np.float64), (a.batch, a.nheads))
    if a.bias is not None:
        # Kernels need unit stride on the last axis: only that axis is written out, the others stay broadcast.
        bias = views["bias"] if a.bias.ndim else views["bias"][None]
        if bias.shape[-1] != a.seqlen_k or bias.strides[-1] != bias.itemsize:
            bias = np.ascontiguousarray(np.broadcast_to(bias, (*bias.shape[:-1], a.seqlen_k)))
        arrays["bias"] = _broadcast(bias, (a.batch, a.nheads, a.seqlen_q, a.seqlen_k))
    if a.visible is not None:
        blocks = -(-a.seqlen_q // a.block_q), -(-a.seqlen_k // a.block_k)
        arrays["visible"] = _broadcast(views["block_mask.visible"], (a.batch, a.nheads, *blocks))
    if a.dropped:
        arrays["dropout_seed"] = seed_on_host(views["seed"])
    return arrays


def _broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast ``x``. NumPy's function takes 2 us even where it only adds axes."""
    x = x[(None,) * (len(shape) - x.ndim)]
    return x if x.shape == shape else np.broadcast_to(x, shape)


_ALIGNMENT = 16  # bytes: of every address and stride; a cp.async copies 16, or 8 or 4 of quantized pages
_COMBINE_ROWS = 4  # per block, a warp each

for _op in ("attention", "attention_varlen", "attention_decode"):
    lowers(_op, "cpu")(launch_cpu)
    lowers(_op, "numba")(forward_numba.launch_numba)


@lowers("attention", "raw")
@lowers("attention_varlen", "raw")
@lowers("attention_decode", "raw")
def launch_raw(spec: Spec, builder: Builder) -> None:
    """One launch, or two where the keys are divided: the parts, then the kernel that combines them."""
    a = Attention.of(spec)
    if a.batch * a.seqlen_q == 0:
        return
    problem = tile_problem(a)
    config = choose(builder, SPACE, problem, DeviceLimits(builder.sms, builder.smem_per_block_optin))
    split = config.num_splits > 1
    out, lse = a.out, a.lse
    if split:
        parts = (config.num_splits, *a.lse_shape)  # packed sequences: one of total_q
        out = builder.empty((*parts, a.head_dim_v), np.float32, "parts of out")
        lse = builder.empty((2, *parts), np.float32, "maxima and sums of parts")
    lengths = (*(*a.cu_seqlens, None, None)[:2], a.seqused_k, a.block_table, a.k_scale, a.v_scale)
    visible = None if a.visible is None else a.visible.view(np.uint8)
    scores = (None if split else a.sinks, a.alibi_slopes, a.bias, visible, a.seed)
    arrays = (a.q, a.k, a.v, out, lse, *lengths, *scores)
    shape = _shape(a, config, out, lse)
    arguments = (*map(_pointer, arrays), a.with_seed(shape))
    results: dict[str, str | int] = {"OUT": DTYPES[a.out.dtype.name], "WIDE_LSE": _wide_lse(a)}
    results = {} if split else results
    reads = _reads(a, config)
    kernel = _kernel(config, a.q.dtype.name, problem.mask, a.features(sinks=not split), **reads, **results)
    builder.launch(kernel, config.grid, (config.threads, 1, 1), arguments, shared=config.shared_bytes)
    if lse is not None and split:
        _combine_parts(a, builder, out, lse, shape)


def raw_unsupported(spec: Spec) -> str | None:
    """Reason why the CUDA C++ kernels cannot run this call; None when they can.

    Arrays that are not aligned are refused and not copied: a cache may be most of the device's memory.
    """
    a = Attention.of(spec)
    itemsize, dims = a.q.itemsize, (a.head_dim, a.head_dim_v)
    if a.q.dtype.name not in DTYPES:
        return f"{a.q.dtype.name} has Numba kernels only"
    limit = MAX_HEAD_DIM[itemsize]
    if max(dims) > limit or any(d % 8 for d in dims):
        return f"head_dim {dims[0]}/{dims[1]}: {a.q.dtype.name} wants multiples of 8 up to {limit}"
    for name, x in (("q", a.q), ("k", a.k), ("v", a.v), ("out", a.out)):
        if not x.size:
            continue
        strides = [stride for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
        least = _ALIGNMENT // itemsize if x.itemsize == 1 else _ALIGNMENT
        if math.gcd(least, address(x), *strides) < least:
            return f"address and strides {x.strides} of {name} are not all multiples of {least} bytes"
    if max(a.batch, 2 * a.nheads) > MAX_GRID[1]:
        return f"batch {a.batch}, {a.nheads} heads: a grid has at most {MAX_GRID[1]} blocks that way"
    return a.raw_positions_unsupported()


def tile_problem(a: Attention) -> ForwardProblem:
    """Properties of the call that decide its tile."""
    left, right = a.window()
    mask: Mask = "kNone" if left == right == UNLIMITED else "kCausal" if left == UNLIMITED else "kLocal"
    own_lengths = a.packed or a.block_table is not None
    return ForwardProblem(
        a.q.itemsize,
        a.batch,
        a.nheads,
        a.nheads_kv,
        a.seqlen_q,
        a.seqlen_k,
        a.head_dim,
        a.head_dim_v,
        mask=mask,
        window=max(left + right + 1, 1) if mask == "kLocal" and right < UNLIMITED else 0,
        block_mask=a.visible is not None,
        varlen=a.packed,
        paged=a.block_table is not None,
        quantized=bool(a.codes),
        num_splits=a.num_splits,
        dropout=a.dropped > 0,
        wide_out=a.out.itemsize > a.q.itemsize,
        lean=a.features().plain and not (mask == "kLocal" and own_lengths),
    )


def _shape(a: Attention, config: ForwardConfig, out: Tensor, lse: Tensor | None) -> np.ndarray[Any, Any]:
    """The kernel's structure for the result arrays: the call's or those of the parts."""
    shape = np.zeros((), ATTENTION_SHAPE)
    for name, x in (("q", a.q), ("k", a.k), ("v", a.v)):
        shape[name] = strides_of(x)[:3]
    if a.k_scale is not None and a.v_scale is not None:
        shape["k_scale"], shape["v_scale"] = strides_of(a.k_scale), strides_of(a.v_scale)
    _place(shape, out, lse, config.num_splits > 1)
    if a.bias is not None:
        shape["bias"] = strides_of(four_axes(a.bias))
    if a.visible is not None:
        shape["block_mask"] = strides_of(four_axes(a.visible))
    if a.alibi_slopes is not None and a.alibi_slopes.ndim == 2:
        shape["alibi_batch"] = strides_of(a.alibi_slopes)[0]
    if a.block_table is not None:
        shape["block_table_batch"] = strides_of(a.block_table)[0]
    numbers = {
        **a.cuda_sizes(),
        "page_size": a.k.shape[1],
        "num_splits": config.num_splits,
        "scores": a.cuda_numbers(),
    }
    for name, value in numbers.items():
        shape[name] = value
    return shape


def _reads(a: Attention, config: ForwardConfig) -> dict[str, str | int]:
    """Macros of the kernel: how it locates sequences and keys, and the type of the keys."""
    whole_tiles = a.k.shape[1] > 0 and a.k.shape[1] % config.tile.block_n == 0
    return {
        "PAGE_DTYPE": CODES[a.codes] if a.codes else DTYPES[a.q.dtype.name],
        "VARLEN": int(a.packed),
        "SEQUSED_K": int(a.seqused_k is not None),
        "PAGED": 0 if a.block_table is None else 1 + int(whole_tiles),
    }


def _wide_lse(a: Attention) -> int:
    return int(a.lse_dtype == np.float64)


def _kernel(config: ForwardConfig, dtype: str, mask: Mask, scores: Features, **more: str | int) -> CudaKernel:
    tile = config.tile
    defines: dict[str, str | int] = {
        **dict.fromkeys(("DTYPE", "PAGE_DTYPE", "OUT"), DTYPES[dtype]),
        "HEAD_DIM": config.head_dim,
        "HEAD_DIM_V": config.head_dim_v,
        "VALUE_PARTS": config.value_parts,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WARPS_M": tile.warps_m,
        "WARPS_N": tile.warps_n,
        "ONE_K": int(tile.one_k),
        "MASK": mask,
        **scores.macros(dtype),
        **dict.fromkeys(("VARLEN", "SEQUSED_K", "PAGED", "WIDE_LSE"), 0),
        **more,
        "PACK_GQA": int(config.pack_gqa),
        "SPLIT": int(config.num_splits > 1),
    }
    return CudaKernel("attention/forward_sm80", "attention_forward", tuple(defines.items()))


def _combine_parts(a: Attention, builder: Builder, parts: Tensor, lse_parts: Tensor, shape: Any) -> None:
    shape = shape.copy()
    _place(shape, a.out, a.lse, False)
    shape["out_split"], shape["lse_split"] = parts[0].size, lse_parts[0, 0].size
    shape["seqlen_q"] = a.q.shape[1]
    rows = math.prod(a.lse_shape)
    arrays = (parts, lse_parts, a.sinks, a.out, a.lse)
    kernel = _combine(a.out.dtype.name, a.sinks is not None, _wide_lse(a))
    grid, block = (-(-rows // _COMBINE_ROWS), 1, 1), (32 * _COMBINE_ROWS, 1, 1)
    builder.launch(kernel, grid, block, (*map(_pointer, arrays), np.int64(rows), shape[()]))


def _combine(dtype: str, sinks: bool, wide_lse: int = 0) -> CudaKernel:
    defines: dict[str, str | int] = {"DTYPE": DTYPES[dtype], "SINKS": int(sinks), "WIDE_LSE": wide_lse}
    return CudaKernel("attention/combine", "attention_combine", tuple(defines.items()))


def _place(shape: Any, out: Tensor, lse: Tensor | None, split: bool) -> None:
    """Strides of out and lse: parts (num_splits, batch, nheads, seqlen_q), two for lse, or the caller's arrays."""
    strides = strides_of(out)
    if split:
        shape["out_split"], batch, head, row = strides[:4]
    else:
        batch, row, head = strides[:3]
    shape["out"] = batch, row, head
    if lse is not None:
        *of_split, shape["lse_batch"], shape["lse_head"], _ = strides_of(lse)
        shape["lse_split"] = of_split[-1] if split else 0


def variants(arch: str) -> Iterator[Variant]:
    """Most commonly used kernels, including decoding from pages, then their Numba twins.

    All tiles and options would be thousands of kernels. Each compiles in one to five seconds; calls compile lazily.
    """
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has neither bfloat16 nor cp.async
    limits = DeviceLimits(100, smem_per_block_optin(arch))
    shapes: tuple[tuple[str, int, Mask, int], ...] = (
        ("bfloat16", 64, "kCausal", 4096),
        ("bfloat16", 128, "kCausal", 4096),
        ("bfloat16", 256, "kNone", 4096),
        ("float32", 128, "kCausal", 4096),
        ("float16", 128, "kNone", 1),
    )
    for dtype, head_dim, mask, seqlen_q in shapes:
        itemsize = 4 if dtype == "float32" else 2
        config = select_config(
            ForwardProblem(itemsize, 4, 32, 8, seqlen_q, 4096, head_dim, head_dim, mask=mask), limits
        )
        decode = seqlen_q == 1
        kernel = _kernel(config, dtype, mask, PLAIN, SEQUSED_K=int(decode), PAGED=int(decode))
        yield Variant(kernel, config.threads, config.shared_bytes)
    ragged = ForwardProblem(2, 4, 32, 8, 4096, 4096, 128, 128, mask="kCausal", varlen=True, num_splits=1)
    config = select_config(ragged, limits)
    kernel = _kernel(config, "bfloat16", "kCausal", PLAIN, VARLEN=1)
    yield Variant(kernel, config.threads, config.shared_bytes)
    for codes, seqlen_q, mask in (("s8", 1, "kNone"), ("e4m3", 1, "kNone"), ("e4m3", 4096, "kCausal")):
        packed = {"VARLEN": 1} if seqlen_q > 1 else {}
        paged = ForwardProblem(2, 4, 32, 8, seqlen_q, 4096, 128, 128, mask=mask, paged=True, quantized=True)
        config = select_config(replace(paged, varlen=bool(packed), num_splits=len(packed)), limits)
        kernel = _kernel(config, "bfloat16", mask, PLAIN, SEQUSED_K=1, PAGED=1, PAGE_DTYPE=codes, **packed)
        yield Variant(kernel, config.threads, config.shared_bytes)
    one_k = (ForwardTile(128, 32, 4, one_k=True), 128), (ForwardTile(64, 64, 4, one_k=True), 256)
    for tile, head_dim in ((ForwardTile(128, 128, 4), 64), *one_k):
        problem = ForwardProblem(2, 4, 32, 8, 4096, 4096, head_dim, head_dim, mask="kCausal", num_splits=1)
        for _, config in configs(problem, limits, measured=True):  # autotune measures them
            if config.tile == tile and not config.pack_gqa:
                kernel = _kernel(config, "bfloat16", "kCausal", PLAIN)
                yield Variant(kernel, config.threads, config.shared_bytes)
    trained = ForwardProblem(2, 4, 32, 8, 4096, 4096, 128, 128, mask="kCausal", dropout=True)
    config = select_config(trained, limits)
    kernel = _kernel(config, "bfloat16", "kCausal", Features(dropout="number"))
    yield Variant(kernel, config.threads, config.shared_bytes)
    yield Variant(_combine("float16", False), 32 * _COMBINE_ROWS)
    yield from forward_numba.numba_variants()


def _pointer(array: Tensor | None) -> Tensor | np.uint64:
    return np.uint64(0) if array is None else array
