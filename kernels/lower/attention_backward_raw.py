"""How the CUDA C++ kernels run attention backward.

Three launches: statistics of the rows, all gradients with dq in float32 by atomics, and dq from it; or, with
``deterministic``, dk and dv, then dq by a second pass over the keys, in a fixed order. One more each for the gradients
of sinks and bias, whose sums always have one. The kernels are ``cuda/attention_bwd_sm80.cu``, ``_rows.cu`` and
``_bias.cu``; :mod:`.attention_backward_config` says which tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, address, float32, strides_of
from gpu_ops.kernels.lower.attention_backward_config import (
    MAX_HEAD_DIM,
    PAD,
    Tile,
    bias_shared_bytes,
    head_dims,
    select_bias_tile,
    select_tile,
    shared_bytes,
)
from gpu_ops.kernels.lower.attention_problem import Attention, as_bshd
from gpu_ops.kernels.lower.attention_shape import UNLIMITED
from gpu_ops.kernels.program import Builder, Spec, Tensor

__all__ = ["BACKWARD_SHAPE", "backward", "raw_unsupported", "variants"]

_LOG2E = math.log2(math.e)
_ALIGNMENT = 16  # of every address and stride: what cp.async copies at a time
_MAX_GRID_YZ = 65535
_THREADS = 256  # of attention_bwd_rows.cu
_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

_ROW_STRIDES = np.dtype([("batch", "i8"), ("row", "i8"), ("head", "i8")], align=True)

# BackwardShape of cuda/include/attention_bwd_shape.cuh.
BACKWARD_SHAPE = np.dtype(
    [
        *[(name, _ROW_STRIDES) for name in _ROWS],
        ("lse", "i8", (3,)),
        *[(name, "i8", (4,)) for name in ("bias", "dbias", "block_mask")],
        *[(name, "i8") for name in ("alibi_batch", "padded_batch", "padded_head")],
        ("batch", "i4"),
        ("bias_shape", "i4", (4,)),
        *[(name, "i4") for name in ("seqlen_q", "seqlen_k", "nheads", "group", "head_dim", "head_dim_v")],
        *[(name, "i4") for name in ("window_left", "window_right", "block_q", "block_k")],
        *[(name, "f4") for name in ("scale", "scale_log2", "softcap_in", "softcap_log2")],
    ],
    align=True,
)


@dataclass(frozen=True)
class _Call:
    """A call's arrays as (batch, seqlen, nheads, head_dim), and what its launches share."""

    a: Attention
    rows: dict[str, Tensor]  # by the names of _ROWS
    lse: Tensor
    statistics: Tensor
    shape: np.ndarray[Any, Any]
    head_dims: tuple[int, int]  # HEAD_DIM, HEAD_DIM_V

    @property
    def starts(self) -> tuple[Tensor | np.uint64, Tensor | np.uint64]:
        """Of q's and of k's sequences, if they lie end to end."""
        return tuple(self.a.cu_seqlens) if self.a.packed else (_NULL, _NULL)  # type: ignore[return-value]

    @property
    def options(self) -> tuple[Tensor | np.uint64, ...]:
        """alibi_slopes, bias, block_mask."""
        visible = None if self.a.visible is None else self.a.visible.view(np.uint8)
        return tuple(_NULL if x is None else x for x in (self.a.alibi_slopes, self.a.bias, visible))

    @property
    def dtype(self) -> str:
        return DTYPES[self.a.q.dtype.name]


_NULL = np.uint64(0)


def backward(spec: Spec, on: Builder) -> None:
    """Gradients of q, k and v, and of bias and sinks where there are arrays for them."""
    a = Attention.of(spec)
    call = _prepare(spec, a, on)
    deterministic = dict(spec.options).get("deterministic", False)
    lean = a.bias is None and a.visible is None and not (a.packed and a.alibi_slopes is not None)
    tile = select_tile(a.q.itemsize, *call.head_dims, on.smem_per_block_optin, lean=lean)
    grid = (-(-a.seqlen_q // PAD), a.nheads, a.batch)
    out, dout, lse = call.rows["out"], call.rows["dout"], call.lse
    arguments = (out, dout, lse, *call.starts, call.statistics, call.shape[()])
    on.launch(_rows_kernel("statistics", call), grid, (_THREADS, 1, 1), arguments)
    if deterministic:
        _launch(call, on, tile, keys=True)
        _launch(call, on, tile, keys=False)
    else:
        padded = call.statistics.shape[0]
        dq_sum = on.zeros((padded, call.head_dims[0]), np.float32, "sums of dq")
        _launch(call, on, tile, keys=True, dq_sum=dq_sum)
        arguments = (dq_sum, *call.starts, call.rows["dq"], call.shape[()])
        on.launch(_rows_kernel("dq", call), grid, (_THREADS, 1, 1), arguments)
    dsinks = spec.get("dsinks")
    if dsinks is not None:
        arguments = (call.statistics, a.sinks, *call.starts, dsinks, call.shape[()])
        on.launch(_rows_kernel("sinks", call), (a.nheads, 1, 1), (_THREADS, 1, 1), arguments)
    dbias = spec.get("dbias")
    if dbias is not None:
        _launch_bias(call, on, dbias)


def raw_unsupported(spec: Spec) -> str | None:
    """Why the CUDA C++ kernels cannot run this call; None when they can."""
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
    if max(a.batch, a.nheads) > _MAX_GRID_YZ:
        return f"batch {a.batch}, {a.nheads} heads: a grid has at most {_MAX_GRID_YZ} blocks that way"
    seqlen = max(a.seqlen_q, a.seqlen_k)
    if seqlen >= UNLIMITED:
        return f"sequences of {seqlen}: at most {UNLIMITED - 1} tokens"
    return None


def _tensors(spec: Spec) -> dict[str, Tensor]:
    return {name: as_bshd(spec.tensor(name), spec["layout"]) for name in _ROWS}


def _prepare(spec: Spec, a: Attention, on: Builder) -> _Call:
    if a.lse is None:
        raise ValueError("attention backward needs lse")
    rows = _tensors(spec)
    shape = np.zeros((), BACKWARD_SHAPE)
    for name, x in rows.items():
        shape[name] = strides_of(x)[:3]
    shape["lse"] = strides_of(a.lse)
    if a.packed:
        per_head = (a.q.shape[1] // PAD + a.batch) * PAD
        heads, shape["padded_batch"] = a.nheads, 0
    else:
        per_head = -(-a.seqlen_q // PAD) * PAD
        heads, shape["padded_batch"] = a.batch * a.nheads, a.nheads * per_head
    shape["padded_head"] = per_head
    statistics = on.empty((heads * per_head, 2), np.float32, "lse and delta")
    for name, x in (("bias", a.bias), ("block_mask", a.visible), ("dbias", spec.get("dbias"))):
        if x is not None:
            shape[name] = strides_of(_four_axes(x))
    if a.bias is not None:
        shape["bias_shape"] = _four_axes(a.bias).shape
    if a.alibi_slopes is not None and a.alibi_slopes.ndim == 2:
        shape["alibi_batch"] = strides_of(a.alibi_slopes)[0]
    left, right = a.window(UNLIMITED)
    numbers = {
        "batch": a.batch,
        "seqlen_q": a.seqlen_q,
        "seqlen_k": a.seqlen_k,
        "nheads": a.nheads,
        "group": a.nheads // a.nheads_kv,
        "head_dim": a.head_dim,
        "head_dim_v": a.head_dim_v,
        "window_left": left,
        "window_right": right,
        "block_q": a.block_q,
        "block_k": a.block_k,
        "scale": float32(a.softmax_scale),
        "scale_log2": float32(a.softmax_scale * _LOG2E),
    }
    if a.softcap > 0:
        numbers["softcap_in"] = float32(a.softmax_scale / a.softcap)
        numbers["softcap_log2"] = float32(a.softcap * _LOG2E)
    for name, value in numbers.items():
        shape[name] = value
    return _Call(a, rows, a.lse, statistics, shape, head_dims(a.head_dim, a.head_dim_v))


def _launch(call: _Call, on: Builder, tile: Tile, *, keys: bool, dq_sum: Tensor | None = None) -> None:
    a, rows = call.a, call.rows
    seqlen, heads = (a.seqlen_k, a.nheads_kv) if keys else (a.seqlen_q, a.nheads)
    kernel = _kernel(call.dtype, tile, call.head_dims, _mask(a), keys, dq_sum is not None, **_features(a))
    arguments = (
        *(rows[name] for name in ("q", "k", "v", "dout")),
        call.statistics,
        *call.starts,
        *call.options,
        _NULL if dq_sum is None else dq_sum,
        *(rows[name] for name in ("dq", "dk", "dv")),
        call.shape[()],
    )
    shared = shared_bytes(tile, a.q.itemsize, *call.head_dims, keys=keys)
    on.launch(kernel, (-(-seqlen // tile.rows), heads, a.batch), (tile.threads, 1, 1), arguments, shared=shared)


def _launch_bias(call: _Call, on: Builder, dbias: Tensor) -> None:
    a = call.a
    tile = select_bias_tile(a.q.itemsize, *call.head_dims, on.smem_per_block_optin)
    kernel = _kernel(call.dtype, tile, call.head_dims, _mask(a), False, False, **_features(a))
    kernel = CudaKernel("attention_bwd_bias", "attention_backward_bias", kernel.defines)
    batches, heads, queries, keys = _four_axes(dbias).shape
    grid = (-(-queries // tile.rows) * -(-keys // tile.columns), heads, batches)
    inputs = (call.rows[name] for name in ("q", "k", "v", "dout"))
    arguments = (*inputs, call.statistics, *call.options, dbias, call.shape[()])
    shared = bias_shared_bytes(tile, a.q.itemsize, *call.head_dims)
    on.launch(kernel, grid, (tile.threads, 1, 1), arguments, shared=shared)


def _four_axes(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]


def _mask(a: Attention) -> str:
    left, right = a.window(UNLIMITED)
    return "kNone" if left == right == UNLIMITED else "kCausal" if left == UNLIMITED else "kLocal"


def _features(a: Attention) -> dict[str, str | int]:
    """Macros of the kernel that options decide."""
    return {
        "SOFTCAP": int(a.softcap > 0),
        "ALIBI": int(a.alibi_slopes is not None),
        "BIAS": "kNone" if a.bias is None else "kSame" if a.bias.dtype == a.q.dtype else "kFloat",
        "BLOCK_MASK": int(a.visible is not None),
        "VARLEN": int(a.packed),
    }


def _kernel(
    dtype: str,
    tile: Tile,
    dims: tuple[int, int],
    mask: str,
    keys: bool,
    add_dq: bool,
    **features: str | int,
) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": dtype,
        "HEAD_DIM": dims[0],
        "HEAD_DIM_V": dims[1],
        "ROWS": "kKeys" if keys else "kQueries",
        "ADD_DQ": int(add_dq),
        "BLOCK_M": tile.columns if keys else tile.rows,
        "BLOCK_N": tile.rows if keys else tile.columns,
        "WARPS_R": tile.warps_r,
        "WARPS_D": tile.warps_d,
        "STRIP": tile.strip,
        "STAGES": tile.stages,
        "MASK": mask,
        **{"SOFTCAP": 0, "ALIBI": 0, "BIAS": "kNone", "BLOCK_MASK": 0, "VARLEN": 0},
        **features,
    }
    return CudaKernel("attention_bwd_sm80", "attention_backward", tuple(defines.items()))


def _rows_kernel(what: str, call: _Call) -> CudaKernel:
    defines = {"DTYPE": call.dtype, "HEAD_DIM": call.head_dims[0], "VARLEN": int(call.a.packed)}
    return CudaKernel("attention_bwd_rows", f"attention_backward_{what}", tuple(defines.items()))


def variants(arch: str) -> Iterator[Variant]:
    """The commonest of the kernels; all options would be thousands."""
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has neither bfloat16 nor cp.async
    most = smem_per_block_optin(arch)
    cases = (
        ("bf16", 64, "kCausal", True),
        ("bf16", 128, "kCausal", True),
        ("f16", 128, "kNone", True),
        ("bf16", 128, "kCausal", False),
        ("bf16", 256, "kNone", True),
        ("f32", 64, "kCausal", True),
        ("f32", 128, "kNone", True),
    )
    for dtype, head_dim, mask, keys in cases:
        itemsize, dims = 4 if dtype == "f32" else 2, (head_dim, head_dim)
        tile = select_tile(itemsize, *dims, most)
        kernel = _kernel(dtype, tile, dims, mask, keys, keys)
        yield Variant(kernel, tile.threads, shared_bytes(tile, itemsize, *dims, keys=keys))
