"""Launch of the CUDA C++ kernels of attention backward.

Three launches: statistics of the rows, all gradients with dq in float32 by atomics, and dq from it; or, with
``deterministic``, dk and dv, then dq by a second pass over the keys, in a fixed order. The gradients of sinks and
bias take one more launch each; their sums always have a fixed order. The kernels are ``backward_sm80.cu``,
``_statistics.cu``, ``_rows.cu`` and ``_bias.cu``; :mod:`.backward_config` chooses tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.attention.backward_config import (
    MAX_HEAD_DIM,
    PAD,
    BackwardTile,
    bias_shared_bytes,
    head_dims,
    head_parts,
    select_bias_tile,
    select_tile,
    shared_bytes,
)
from gpu_ops.kernels.attention.problem import (
    BACKWARD_ROWS,
    BACKWARD_SHAPE,
    PLAIN,
    UNLIMITED,
    Attention,
    as_bshd,
)
from gpu_ops.kernels.common.arguments import DTYPES, address, float32, four_axes, strides_of
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Spec, Tensor

__all__ = [
    "ROW_THREADS",
    "bias_kernel",
    "launch_raw",
    "main_kernel",
    "raw_unsupported",
    "rows_kernel",
    "statistics_kernel",
    "variants",
]

_ALIGNMENT = 16  # of every address and stride: what cp.async copies at a time


@dataclass(frozen=True)
class _Call:
    """A call's arrays as (batch, seqlen, nheads, head_dim), and values that its launches share."""

    a: Attention
    rows: dict[str, Tensor]  # by the names of BACKWARD_ROWS, dout in q's dtype
    wide_dout: Tensor | None  # the caller's dout, if it is float32 while q has 16 bits
    lse: Tensor
    statistics: Tensor
    rests: Tensor | np.uint64  # of a float32 lse, where that is coarse
    shape: np.ndarray[Any, Any]
    head_dims: tuple[int, int]  # HEAD_DIM, HEAD_DIM_V
    grads: str  # GRADS

    @property
    def wide_lse(self) -> bool:
        return bool(self.lse.dtype == np.float64)

    @property
    def starts(self) -> tuple[Tensor | np.uint64, Tensor | np.uint64]:
        """Starts of q's and k's sequences, if they are packed."""
        return tuple(self.a.cu_seqlens) if self.a.packed else (_NULL, _NULL)  # type: ignore[return-value]

    @property
    def rows_of_keys(self) -> int:
        """Rows of keys in the padded arrays."""
        return self.a.k.shape[0] * self.a.nheads_kv * int(self.shape["padded_head_k"])

    @property
    def options(self) -> tuple[Tensor | np.uint64, ...]:
        """alibi_slopes, bias, block_mask, seed."""
        visible = None if self.a.visible is None else self.a.visible.view(np.uint8)
        arrays = (self.a.alibi_slopes, self.a.bias, visible, self.a.seed)
        return tuple(_NULL if x is None else x for x in arrays)

    @property
    def dtype(self) -> str:
        return DTYPES[self.a.q.dtype.name]


_NULL = np.uint64(0)


def launch_raw(spec: Spec, builder: Builder) -> None:
    """Gradients of q, k and v, and of bias and sinks if arrays for them are passed."""
    a = Attention.of(spec)
    call = _prepare(spec, a, builder)
    options = a.packed + sum(x is not None for x in (a.alibi_slopes, a.bias, a.visible))
    sizes = a.q.itemsize, *call.head_dims, builder.smem_per_block_optin
    tile = select_tile(*sizes, options=options, wide_lse=call.wide_lse, arch=builder.arch)
    of_queries = (-(-a.seqlen_q // PAD), a.nheads, a.batch)
    _launch_statistics(call, builder, spec.get("delta"), of_queries)
    if spec["deterministic"]:
        _gradients_of_keys(call, builder, tile, None)
        _launch(call, builder, tile, keys=False)
    else:
        dq_sum = builder.zeros((call.statistics.shape[0], call.head_dims[0]), np.float32, "sums of dq")
        _gradients_of_keys(call, builder, tile, dq_sum)
        _add_parts(call, builder, "q", of_queries, dq_sum)
    dsinks, dbias = spec.get("dsinks"), spec.get("dbias")
    if dsinks is not None and a.sinks is not None:
        arguments = (call.statistics, call.rests, a.sinks, *call.starts, dsinks)
        _launch_rows(call, builder, "sinks", (a.nheads, 1, 1), arguments)
    if dbias is not None:
        _launch_bias(call, builder, dbias)


def _gradients_of_keys(call: _Call, builder: Builder, tile: BackwardTile, dq_sum: Tensor | None) -> None:
    """dk, dv and their share of dq. With few blocks, the query heads are divided into parts whose sums are added."""
    a = call.a
    blocks, tiles = -(-a.seqlen_k // tile.rows) * a.nheads_kv * a.batch, -(-a.seqlen_q // tile.columns)
    parts = head_parts(blocks, a.nheads // a.nheads_kv, tiles, builder.sms, causal=a.window()[1] == 0)
    call.shape["parts"], call.shape["part_heads"] = parts, a.nheads // a.nheads_kv // parts
    if parts == 1:
        _launch(call, builder, tile, keys=True, dq_sum=dq_sum)
        return
    call.shape["padded_part"] = rows = call.rows_of_keys
    sums = [
        builder.empty((parts * rows, columns), np.float32, f"sums of {name}")
        for name, columns in zip(("dk", "dv"), call.head_dims, strict=True)
    ]
    _launch(call, builder, tile, keys=True, dq_sum=dq_sum, sums=sums)
    for name, x in zip("kv", sums, strict=True):
        _add_parts(call, builder, name, (-(-a.seqlen_k // PAD), a.nheads_kv, a.batch), x)


def raw_unsupported(spec: Spec) -> str | None:
    """Reason why the CUDA C++ kernels cannot run this call; None when they can."""
    a = Attention.of(spec)
    dims = (a.head_dim, a.head_dim_v)
    if a.q.dtype.name not in DTYPES:
        return f"{a.q.dtype.name} has Numba kernels only"
    if max(dims) > MAX_HEAD_DIM or any(d % 8 for d in dims):
        return f"head_dim {dims[0]}/{dims[1]}: {a.q.dtype.name} wants multiples of 8 up to {MAX_HEAD_DIM}"
    for name, x in _tensors(spec).items():
        if not x.size:
            continue
        strides = [stride for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
        if math.gcd(_ALIGNMENT, address(x), *strides) < _ALIGNMENT:
            return f"address and strides {x.strides} of {name} are not all multiples of {_ALIGNMENT} bytes"
    if max(a.batch, a.nheads) > MAX_GRID[1]:
        return f"batch {a.batch}, {a.nheads} heads: a grid has at most {MAX_GRID[1]} blocks that way"
    return a.raw_positions_unsupported()


def _tensors(spec: Spec) -> dict[str, Tensor]:
    out = "dout" if spec.get("out") is None else "out"  # with delta, out is not read
    return {n: as_bshd(spec.tensor(out if n == "out" else n), spec["layout"]) for n in BACKWARD_ROWS}


def _padded_rows(a: Attention, x: Tensor, seqlen: int) -> tuple[int, int]:
    """Rows of the padded arrays per head of x, and per batch entry."""
    per_head = (x.shape[1] // PAD + a.batch if a.packed else -(-seqlen // PAD)) * PAD
    return per_head, 0 if a.packed else x.shape[2] * per_head


def _prepare(spec: Spec, a: Attention, builder: Builder) -> _Call:
    if a.lse is None:
        raise ValueError("attention backward needs lse")
    rows, wide_dout = _tensors(spec), None
    shape = np.zeros((), BACKWARD_SHAPE)
    if rows["dout"].dtype != a.q.dtype:
        wide_dout = rows["dout"]
        shape["wide_dout"] = strides_of(wide_dout)[:3]
        rows["dout"] = builder.empty(wide_dout.shape, a.q.dtype, "dout, rounded")
    for name, x in rows.items():
        shape[name] = strides_of(x)[:3]
    shape["lse"] = strides_of(a.lse)
    delta = spec.get("delta")
    if delta is not None:
        shape["delta"] = (0,) * (3 - delta.ndim) + strides_of(delta)
    wide_lse = a.lse.dtype == np.float64
    per_head, per_batch = _padded_rows(a, a.q, a.seqlen_q)
    shape["padded_head"], shape["padded_batch"] = per_head, per_batch
    numbers_per_row = 4 if wide_lse else 2
    statistics = builder.empty(
        (a.q.shape[0] * a.nheads * per_head, numbers_per_row), np.float32, "lse and delta"
    )
    rests = (
        _NULL if wide_lse else builder.empty(statistics.shape[:1], np.float32, "what a coarse lse leaves out")
    )
    shape["padded_head_k"], shape["padded_batch_k"] = _padded_rows(a, a.k, a.seqlen_k)
    for name, array in (("bias", a.bias), ("block_mask", a.visible), ("dbias", spec.get("dbias"))):
        if array is not None:
            shape[name] = strides_of(four_axes(array))
    if a.bias is not None:
        shape["bias_shape"] = four_axes(a.bias).shape
    if a.alibi_slopes is not None and a.alibi_slopes.ndim == 2:
        shape["alibi_batch"] = strides_of(a.alibi_slopes)[0]
    numbers = {
        "batch": a.batch,
        **a.cuda_sizes(),
        "scale": float32(a.softmax_scale),
        "scores": a.cuda_numbers(signed=True),
    }
    for name, value in numbers.items():
        shape[name] = value
    grads = "kAdded" if spec["accumulate"] else "kPlain" if rows["dq"].dtype == a.q.dtype else "kFloat"
    dims = head_dims(a.head_dim, a.head_dim_v)
    return _Call(a, rows, wide_dout, a.lse, statistics, rests, shape, dims, grads)


def _launch(
    call: _Call,
    builder: Builder,
    tile: BackwardTile,
    *,
    keys: bool,
    dq_sum: Tensor | None = None,
    sums: list[Tensor] | None = None,
) -> None:
    """A pass over all scores. ``sums``: sums of dk and dv, in parts."""
    a, rows = call.a, call.rows
    seqlen, heads = (a.seqlen_k, a.nheads_kv * int(call.shape["parts"])) if keys else (a.seqlen_q, a.nheads)
    macros = {**_features(a), "ADD_DQ": int(dq_sum is not None), "PARTS": int(sums is not None)}
    macros |= {"WIDE_LSE": int(call.wide_lse), "GRADS": "kPlain" if sums else call.grads}
    kernel = main_kernel(call.dtype, tile, call.head_dims, _mask(a), keys=keys, **macros)
    arguments = (
        *(rows[name] for name in ("q", "k", "v", "dout")),
        call.statistics,
        call.rests,
        *call.starts,
        *call.options,
        _NULL if dq_sum is None else dq_sum,
        rows["dq"],
        *(sums or (rows["dk"], rows["dv"])),
        a.with_seed(call.shape),
    )
    shared = shared_bytes(tile, a.q.itemsize, *call.head_dims, keys=keys, wide_lse=call.wide_lse)
    builder.launch(
        kernel, (-(-seqlen // tile.rows), heads, a.batch), (tile.threads, 1, 1), arguments, shared=shared
    )


def _launch_statistics(call: _Call, builder: Builder, delta: Any, grid: tuple[int, int, int]) -> None:
    a, rows = call.a, call.rows
    arrays = tuple(_NULL if x is None else x for x in (delta, call.wide_dout))
    alibi_slopes, bias, visible, _ = call.options
    arguments = (
        *(rows["out"], rows["dout"], call.lse, *arrays, rows["q"], rows["k"]),
        *(_NULL if a.sinks is None else a.sinks, *call.starts, alibi_slopes, bias, visible),
        *(call.statistics, call.rests, call.shape[()]),
    )
    macros = {**_features(a), "OUT": DTYPES[a.out.dtype.name], "DELTA": int(delta is not None)}
    macros |= {"WIDE_LSE": int(call.wide_lse), "WIDE_DOUT": int(call.wide_dout is not None)}
    kernel = statistics_kernel(call.dtype, _mask(a), **macros)
    builder.launch(kernel, grid, (ROW_THREADS, 1, 1), arguments)


def _add_parts(call: _Call, builder: Builder, of: str, grid: tuple[int, int, int], sums: Tensor) -> None:
    """dq, dk or dv from their sums."""
    columns = call.head_dims[1] if of == "v" else call.head_dims[0]
    arguments = (sums, *call.starts, call.rows[f"d{of}"])
    _launch_rows(
        call, builder, "rows", grid, arguments, ROWS=f"k{of.upper()}", COLUMNS=columns, GRADS=call.grads
    )


def _launch_rows(
    call: _Call, builder: Builder, what: str, grid: tuple[int, int, int], arguments: Any, **macros: str | int
) -> None:
    """A kernel of ``backward_rows.cu``."""
    split = int(call.wide_lse and what != "rows")
    kernel = rows_kernel(what, DTYPE=call.dtype, VARLEN=int(call.a.packed), WIDE_LSE=split, **macros)
    builder.launch(kernel, grid, (ROW_THREADS, 1, 1), (*arguments, call.shape[()]))


def _launch_bias(call: _Call, builder: Builder, dbias: Tensor) -> None:
    a = call.a
    tile = select_bias_tile(a.q.itemsize, *call.head_dims, builder.smem_per_block_optin)
    macros = {**_features(a), "WIDE_LSE": int(call.wide_lse)}
    kernel = bias_kernel(call.dtype, tile, call.head_dims, _mask(a), **macros)
    batches, heads, queries, keys = four_axes(dbias).shape
    grid = (-(-queries // tile.rows) * -(-keys // tile.columns), heads, batches)
    inputs = (call.rows[name] for name in ("q", "k", "v", "dout"))
    arguments = (*inputs, call.statistics, call.rests, *call.options, dbias, a.with_seed(call.shape))
    shared = bias_shared_bytes(tile, a.q.itemsize, *call.head_dims)
    builder.launch(kernel, grid, (tile.threads, 1, 1), arguments, shared=shared)


def _mask(a: Attention) -> str:
    left, right = a.window()
    return "kNone" if left == right == UNLIMITED else "kCausal" if left == UNLIMITED else "kLocal"


def _features(a: Attention) -> dict[str, str | int]:
    """Macros of the kernel that options decide."""
    return {**a.features(sinks=False).macros(a.q.dtype.name), "VARLEN": int(a.packed)}


ROW_THREADS = 256  # of backward_statistics.cu and _rows.cu


def main_kernel(
    dtype: str, tile: BackwardTile, dims: tuple[int, int], mask: str, *, keys: bool, **macros: str | int
) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": dtype,
        "HEAD_DIM": dims[0],
        "HEAD_DIM_V": dims[1],
        "ROWS": "kKeys" if keys else "kQueries",
        "BLOCK_M": tile.columns if keys else tile.rows,
        "BLOCK_N": tile.rows if keys else tile.columns,
        "WARPS_R": tile.warps_r,
        "WARPS_D": tile.warps_d,
        "STRIP": tile.strip,
        "STAGES": tile.stages,
        "MASK": mask,
        **PLAIN.macros(dtype),
        **dict.fromkeys(("VARLEN", "ADD_DQ", "PARTS", "WIDE_LSE"), 0),
        "GRADS": "kPlain",
        **macros,
    }
    return CudaKernel("attention/backward_sm80", "attention_backward", tuple(defines.items()))


def bias_kernel(
    dtype: str, tile: BackwardTile, dims: tuple[int, int], mask: str, **macros: str | int
) -> CudaKernel:
    kernel = main_kernel(dtype, tile, dims, mask, keys=False, **macros)
    return CudaKernel("attention/backward_bias", "attention_backward_bias", kernel.defines)


def statistics_kernel(dtype: str, mask: str, **macros: str | int) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": dtype,
        "OUT": dtype,
        "MASK": mask,
        **PLAIN.macros(dtype),
        **dict.fromkeys(("VARLEN", "WIDE_LSE", "DELTA", "WIDE_DOUT"), 0),
        **macros,
    }
    return CudaKernel(
        "attention/backward_statistics", "attention_backward_statistics", tuple(defines.items())
    )


def rows_kernel(what: str, **macros: str | int) -> CudaKernel:
    defines = {"VARLEN": 0, "WIDE_LSE": 0, "ROWS": "kQ", "COLUMNS": 32, "GRADS": "kPlain", **macros}
    return CudaKernel("attention/backward_rows", f"attention_backward_{what}", tuple(defines.items()))


def variants(arch: str) -> Iterator[Variant]:
    """Most commonly used kernels; all combinations of options would be thousands."""
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has neither bfloat16 nor cp.async
    smem_limit = smem_per_block_optin(arch)
    cases: tuple[tuple[str, int, str, dict[str, str | int]], ...] = (
        ("bf16", 64, "kCausal", {"ADD_DQ": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "VARLEN": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "VARLEN": 1, "PARTS": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "DROPOUT": 1}),
        ("bf16", 128, "kCausal", {}),  # dq of the deterministic pass
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "BIAS": "kSame"}),
        ("f16", 128, "kNone", {"ADD_DQ": 1}),
        ("bf16", 256, "kNone", {"ADD_DQ": 1}),
        ("f32", 64, "kCausal", {"ADD_DQ": 1}),
        ("f32", 128, "kNone", {"ADD_DQ": 1}),
    )
    for dtype, head_dim, mask, macros in cases:
        itemsize, dims, keys = 4 if dtype == "f32" else 2, (head_dim, head_dim), "ADD_DQ" in macros
        options = int("VARLEN" in macros or "BIAS" in macros)
        tile = select_tile(itemsize, *dims, smem_limit, options=options, arch=arch)
        kernel = main_kernel(dtype, tile, dims, mask, keys=keys, **macros)
        yield Variant(kernel, tile.threads, shared_bytes(tile, itemsize, *dims, keys=keys))
    tile = select_bias_tile(2, 128, 128, smem_limit)
    kernel = bias_kernel("bf16", tile, (128, 128), "kCausal", BIAS="kSame")
    yield Variant(kernel, tile.threads, bias_shared_bytes(tile, 2, 128, 128))
    rows = (rows_kernel(what, DTYPE="bf16", COLUMNS=128) for what in ("rows", "sinks"))
    of_statistics = (statistics_kernel("bf16", "kCausal", BIAS=bias) for bias in ("kNone", "kSame"))
    yield from (Variant(kernel, ROW_THREADS) for kernel in (*of_statistics, *rows))
