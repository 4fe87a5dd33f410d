"""Sequences divided among ranks: the tokens that a rank holds, and code shared by context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import cast, give
from gpu_ops.core.call import Call
from gpu_ops.distributed.comm import Comm
from gpu_ops.errors import OptionError, ShapeError, UnknownOptionError
from gpu_ops.ops.attention.options import read_inputs, read_options

__all__ = [
    "ContextOptions",
    "Piece",
    "Shards",
    "by_distance",
    "check_layout",
    "option_words",
    "pieces",
    "read_results",
    "read_shards",
    "selected_slopes",
    "sequence_positions",
]

Array = npt.NDArray[Any]

LAYOUTS = ("zigzag", "contiguous", "striped")


class ContextOptions(TypedDict, total=False):
    """Options that decide the scores; see :func:`gpu_ops.attention`."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Any


@dataclass(frozen=True)
class Piece:
    """Rows of a rank's array and the position of the first; if striped, rows are every ``size``-th token."""

    rows: slice
    start: int


@dataclass(frozen=True)
class Shards:
    """Checked q, k and v of a rank. ``library``: that of the caller's arrays; ``wide``: dtype of sums."""

    q: Array
    k: Array
    v: Array
    library: str | None
    wide: np.dtype[Any]

    def begin(self, op: str, comm: Comm, options: Mapping[str, Any], *words: str) -> None:
        """Compare the arrays, the options and these words with those of the other ranks."""
        comm.begin(op, self.q, self.k, self.v, *words, option_words(options))

    def grads(self, *sums: Any) -> tuple[Any, Any, Any]:
        """Gradients in q's dtype and in the caller's library."""
        dq, dk, dv = (give(cast(x, self.q.dtype), self.library) for x in sums)
        return dq, dk, dv


def sequence_positions(comm: Comm, seqlen: int, layout: str = "zigzag") -> npt.NDArray[np.int64]:
    """Positions of the tokens that this rank holds, in the order of its rows.

    ``x[:, sequence_positions(comm, seqlen)]`` is this rank's shard of x, and ``positions=`` of :func:`gpu_ops.rope`.

    Parameters
    ----------
    comm : Comm
    seqlen : int
        Length of the whole sequence; a multiple of ``comm.size``, and of twice that for zigzag.
    layout : {"zigzag", "contiguous", "striped"}
        zigzag: of 2 p equal chunks, rank r of p holds chunks r and 2 p - 1 - r; with a causal mask all ranks have
        equal work. contiguous: one run of tokens; the last rank has the most work. striped: every p-th token, from
        r on.

    Raises
    ------
    OptionError, ShapeError

    Notes
    -----
    Source: zigzag: Zhu, ring-flash-attention, 2024; striped: Brandon et al., 2023.

    Examples
    --------
    >>> from gpu_ops import distributed
    >>> distributed.sequence_positions(distributed.world(), 4)
    array([0, 1, 2, 3])
    """
    op = "sequence_positions"
    checks.instance(op, "comm", comm, Comm)
    layout = checks.one_of(op, "layout", layout, LAYOUTS)
    seqlen = checks.integer(op, "seqlen", seqlen, low=0, high=2**40)
    chunks = comm.size * (2 if layout == "zigzag" else 1)
    if seqlen % chunks:
        raise ShapeError(
            f"{op}: {layout} over {comm.size} ranks makes {chunks} equal chunks; {seqlen} tokens do not divide: "
            f"pad to {-(-seqlen // chunks) * chunks}"
        )
    step = comm.size if layout == "striped" else 1
    positions = [
        piece.start + step * np.arange(piece.rows.stop - piece.rows.start)
        for piece in pieces(comm.rank, comm.size, seqlen // comm.size, layout)
    ]
    return np.concatenate(positions)


def pieces(rank: int, size: int, length: int, layout: str) -> list[Piece]:
    """Pieces of a rank that holds ``length`` tokens; zigzag requires an even number."""
    if layout == "striped":
        return [Piece(slice(0, length), rank)]
    if layout == "contiguous":
        return [Piece(slice(0, length), rank * length)]
    half = length // 2
    mirrored = 2 * size - 1 - rank
    return [Piece(slice(0, half), rank * half), Piece(slice(half, length), mirrored * half)]


def read_shards(
    op: str,
    comm: Comm,
    arrays: tuple[Any, Any, Any],
    options: Mapping[str, Any],
    documents: int | None = None,
) -> Shards:
    """Check arguments as attention would, before anything is sent. ``documents``: number of packed ones; None: a
    batch."""
    checks.instance(op, "comm", comm, Comm)
    for name in options:
        if name not in ContextOptions.__annotations__:
            known = ", ".join(ContextOptions.__annotations__)
            raise UnknownOptionError(f"{op}: unknown option {name!r}; options: {known}")
    views = [comm.movable(op, x, name) for name, x in zip("qkv", arrays, strict=True)]
    call, axes = Call(op), "batch seqlen"
    if documents is None:
        call.kernels = "attention"
    else:
        call.axes.set("batch", documents, "cu_seqlens")
        axes = "tokens"
    inputs = dict(zip("qkv", (view for view, _ in views), strict=True))
    dtype = read_inputs(
        call,
        q=(inputs["q"], f"{axes} nheads head_dim"),
        k=(inputs["k"], f"{axes} nheads_kv head_dim"),
        v=(inputs["v"], f"{axes} nheads_kv head_dim_v"),
    )
    read_options(call, dtype, **options)
    return Shards(**inputs, library=views[0][1], wide=checks.computing_dtype(dtype))


def read_results(
    op: str,
    comm: Comm,
    shards: Shards,
    results: tuple[Any, Any, Any],
    lse_shape: tuple[int, ...],
    lse_dtype: np.dtype[Any],
) -> tuple[Array, Array, Array]:
    """Check dout, out and lse and return them. dout and out are in q's dtype, or in that of the sums."""
    dout, out, lse = (
        comm.movable(op, x, name)[0] for name, x in zip(("dout", "out", "lse"), results, strict=True)
    )
    shape = (*shards.q.shape[:-1], shards.v.shape[-1])
    for name, x in (("dout", dout), ("out", out)):
        checks.exactly(op, name, x, shape, shards.wide if x.dtype == shards.wide else shards.q.dtype)
    checks.exactly(op, "lse", lse, lse_shape, lse_dtype)
    return dout, out, lse


def check_layout(op: str, layout: str, options: Mapping[str, Any], length: int) -> str:
    """Check a layout against these options and a rank's number of tokens, and return it."""
    layout = checks.one_of(op, "layout", layout, LAYOUTS)
    if layout == "zigzag" and length % 2:
        raise ShapeError(
            f"{op}: zigzag wants an even number of tokens on each rank, got {length}; pad the sequence"
        )
    if layout == "striped" and by_distance(options):
        raise OptionError(
            f"{op}: layout='striped' has no window_size and no alibi_slopes; use zigzag or contiguous"
        )
    return layout


def by_distance(options: Mapping[str, Any]) -> bool:
    """Whether scores depend on the distance of key and query, in addition to the causal mask."""
    window = tuple(options.get("window_size", (-1, -1)))
    return window != (-1, -1) or options.get("alibi_slopes") is not None


def selected_slopes(
    op: str, comm: Comm, options: Mapping[str, Any], select: Callable[[Array], Array]
) -> dict[str, Any]:
    """Options with the ALiBi slopes that this rank uses, if there are slopes."""
    result = dict(options)
    if result.get("alibi_slopes") is not None:
        result["alibi_slopes"] = select(comm.movable(op, result["alibi_slopes"], "alibi_slopes")[0])
    return result


def option_words(options: Mapping[str, Any]) -> str:
    """Text of all options except arrays, for ranks to compare."""
    return ", ".join(f"{name}={x!r}" for name, x in sorted(options.items()) if name != "alibi_slopes")
