"""Validation of the attention family: shapes, dtypes and options, in one place.

Every public attention function builds one :class:`Problem` from its arguments before anything is
allocated or written; the backends read it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.block_mask import BlockMask

__all__ = ["Options", "Problem", "cu_seqlens", "expect", "longest_of", "options", "sequences", "swap"]

INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class Options:
    """What decides the scores, checked. Arrays stay as the caller shaped them."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float
    softcap: float
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    bias: Array | None = None
    block_mask: BlockMask | None = None

    def given(self, *, dense: bool) -> dict[str, Any]:
        """Keyword arguments for the reference; bias and block masks exist for dense sequences only."""
        names = ("causal", "window_size", "softmax_scale", "softcap", "sinks", "alibi_slopes")
        return {name: getattr(self, name) for name in (*names, *(("bias", "block_mask") if dense else ()))}

    def __str__(self) -> str:
        words = [f"scale {self.softmax_scale:.4g}"]
        words += ["causal"] if self.causal else []
        words += [f"window {self.window_size}"] if self.window_size != (-1, -1) else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        names = {"sinks": "sinks", "alibi_slopes": "ALiBi", "bias": "bias", "block_mask": "block mask"}
        words += [word for name, word in names.items() if getattr(self, name) is not None]
        return ", ".join(words)


@dataclass(frozen=True)
class Problem:
    """One checked call. ``q``, ``k``, ``v`` are (batch, seqlen, nheads, head_dim) views whatever the layout."""

    q: Array
    k: Array
    v: Array
    options: Options
    dtype: str
    batch: int
    seqlen_q: int  # the longest of the batch, as is seqlen_k; of lengths that lie on a GPU a bound
    seqlen_k: int
    offsets: tuple[Array, ...] = ()  # varlen: cu_seqlens of q and k; q, k, v have one batch entry for all
    seqused_k: Array | None = None
    block_table: Array | None = None

    @property
    def packed(self) -> bool:
        return bool(self.offsets)

    @property
    def like(self) -> Problem:
        """The same without what the arrays hold: for later calls, so that this one's can be freed."""
        return replace(
            _without_values(self),
            options=_without_values(self.options),
            offsets=tuple(map(_without_value, self.offsets)),
        )

    @cached_property
    def sequences(self) -> Array:
        """int64 (batch, 4): q start, q length, k start, k length. For problems in host memory."""
        return sequences(self.batch, self.seqlen_q, self.seqlen_k, self.offsets, self.seqused_k)

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        return checks.computing_dtype(self.dtype)

    @property
    def nheads(self) -> int:
        return int(self.q.shape[2])

    @property
    def nheads_kv(self) -> int:
        return int(self.k.shape[2])

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, seqlen {self.seqlen_q} x {self.seqlen_k}, heads {self.nheads}/{self.nheads_kv}, "
            f"head_dim {self.q.shape[3]}/{self.v.shape[3]}, {self.dtype}, {self.options}"
        )


def sequences(
    batch: int, seqlen_q: int, seqlen_k: int, offsets: tuple[Array, ...] = (), seqused_k: Array | None = None
) -> Array:
    """:attr:`Problem.sequences`."""
    table = np.zeros((batch, 4), np.int64)
    table[:, 1], table[:, 3] = seqlen_q, seqlen_k
    for column, x in zip((0, 2), offsets, strict=False):
        table[:, column], table[:, column + 1] = x[:-1], x[1:] - x[:-1]
    if seqused_k is not None:
        table[:, 3] = seqused_k
    return table


_Fields = TypeVar("_Fields", Options, Problem)


def _without_values(of: _Fields) -> _Fields:
    found = {field.name: getattr(of, field.name) for field in fields(of)}
    kept: dict[str, Any] = {name: _without_value(x) for name, x in found.items() if isinstance(x, np.ndarray)}
    mask = found.get("block_mask")
    if mask is not None:
        kept["block_mask"] = replace(mask, visible=_without_value(mask.visible))
    return replace(of, **kept)


def _without_value(x: Array) -> Array:
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def swap(x: Array, layout: str) -> Array:
    """ "bhsd" to "bshd" and back: a view."""
    return x.swapaxes(1, 2) if layout == "bhsd" else x


def expect(op: str, axes: checks.Axes) -> None:
    """Relations between axes that names alone cannot say."""
    heads, heads_kv = axes["nheads"], axes["nheads_kv"]
    if heads_kv == 0 or heads == 0 or heads % heads_kv:
        raise ShapeError(
            f"{op}: nheads={heads} of q must be a positive multiple of nheads_kv={heads_kv} of k and v"
        )
    for name in ("head_dim", "head_dim_v"):
        if axes[name] == 0:
            raise ShapeError(f"{op}: {name} is 0; it must be at least 1")


def options(
    op: str,
    arrays: Arrays,
    q: Array,
    axes: checks.Axes,
    *,
    causal: Any,
    window_size: Any,
    softmax_scale: Any,
    softcap: Any,
    sinks: Any,
    alibi_slopes: Any,
    bias: Any = None,
    block_mask: Any = None,
) -> Options:
    """Check every option against the shapes."""
    batch, heads = axes["batch"], axes["nheads"]
    if softmax_scale is None:
        softmax_scale = axes["head_dim"] ** -0.5
    sinks_ = None if sinks is None else arrays.read("sinks", sinks)
    if sinks_ is not None:
        checks.exactly(op, "sinks", sinks_, (heads,), np.dtype(np.float32))
    slopes = None if alibi_slopes is None else arrays.read("alibi_slopes", alibi_slopes)
    if slopes is not None:
        shape = (batch, heads) if slopes.ndim == 2 else (heads,)
        checks.exactly(op, "alibi_slopes", slopes, shape, np.dtype(np.float32))
    return Options(
        causal=checks.flag(op, "causal", causal),
        window_size=checks.window(op, window_size),
        softmax_scale=_computable(op, "softmax_scale", checks.number(op, "softmax_scale", softmax_scale), q),
        softcap=_computable(op, "softcap", checks.number(op, "softcap", softcap, low=0.0), q, inverse=True),
        sinks=sinks_,
        alibi_slopes=slopes,
        bias=None if bias is None else _bias(op, arrays.read("bias", bias), q, axes),
        block_mask=None if block_mask is None else _block_mask(op, arrays, block_mask, axes),
    )


def _computable(op: str, name: str, value: float, q: Array, *, inverse: bool = False) -> float:
    """An option that kernels take to float32 (or its inverse too), where float64 is not what they compute in."""
    least = 1e-38 if inverse else 0.0
    if value and q.dtype != np.float64 and not least <= abs(value) <= 1e38:
        bounds = f"0 or between {least:g} and 1e+38" if inverse else "at most 1e+38 in size"
        raise OptionError(
            f"{op}: {name} must be {bounds}, for {q.dtype} is computed in float32; got {value:g}"
        )
    return value


def cu_seqlens(op: str, arrays: Arrays, name: str, x: Any, total: int) -> Array:
    """Offsets of sequences laid end to end: int32, from 0, never falling, to ``total`` exactly.

    Those on a GPU are taken on trust: looking would wait for it.
    """
    offsets = arrays.read(name, x)
    if offsets.dtype != INT32:
        raise DTypeError(f"{op}: {name} is {offsets.dtype}, expected int32; cast it: {name}.astype('int32')")
    if offsets.ndim != 1 or offsets.size == 0:
        raise ShapeError(f"{op}: {name} has shape {offsets.shape}, expected (batch + 1,)")
    if not arrays.on_cuda:
        longest_of(op, name, offsets, total)
    return offsets


def longest_of(op: str, name: str, offsets: Array, total: int) -> int:
    """The length of the longest sequence, after a look at all offsets."""
    # Python's numbers: NumPy would take longer for as many sequences as there mostly are
    starts = offsets.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] != total or min(lengths, default=0) < 0:
        raise OptionError(
            f"{op}: {name} must start at 0, never fall, and end at the total {total}; "
            f"got {np.array2string(offsets, threshold=8)}"
        )
    return max(lengths, default=0)


def _bias(op: str, bias: Array, q: Array, axes: checks.Axes) -> Array:
    if bias.dtype not in (q.dtype, np.float32):
        allowed = "float32, as q is" if q.dtype == np.float32 else f"q's {q.dtype} or float32"
        cast = "cast it: bias.astype('float32')"
        if bias.dtype == np.bool_:
            cast = "make one of a mask (True: visible) by np.where(mask, 0, -np.inf).astype('float32')"
        raise DTypeError(f"{op}: bias is {bias.dtype}, expected {allowed}; {cast}")
    full = (axes["batch"], axes["nheads"], axes["seqlen_q"], axes["seqlen_k"])
    if not _broadcasts(bias.shape, full):
        raise ShapeError(
            f"{op}: bias has shape {bias.shape}, not broadcastable to "
            f"(batch, nheads, seqlen_q, seqlen_k) = {full}"
        )
    return bias


def _block_mask(op: str, arrays: Arrays, mask: Any, axes: checks.Axes) -> BlockMask:
    if not isinstance(mask, BlockMask):
        raise DTypeError(
            f"{op}: block_mask is {type(mask).__name__}; pass gpu_ops.BlockMask(visible, block_q, block_k)"
        )
    blocks = (-(-axes["seqlen_q"] // mask.block_q), -(-axes["seqlen_k"] // mask.block_k))
    full = (axes["batch"], axes["nheads"], *blocks)
    if not _broadcasts(mask.visible.shape, full):
        raise ShapeError(
            f"{op}: block_mask.visible has shape {mask.visible.shape}, expected (batch, nheads, "
            f"ceil(seqlen_q / {mask.block_q}), ceil(seqlen_k / {mask.block_k})) = {full}; "
            "any of them may be 1, batch and nheads may be left out"
        )
    return replace(mask, visible=arrays.read("block_mask.visible", mask.visible))


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) > len(to):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))
