"""Attention of a few new queries over a key/value cache, contiguous or paged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.dispatch import Plan, choose, op
from gpu_ops.errors import OptionError
from gpu_ops.ops import attention_launch
from gpu_ops.ops.attention_problem import INT32, Problem, expect, options

__all__ = ["attention_decode"]


@op(cuda=True)
def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seqused_k: Any,
    block_table: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """:func:`attention` over the used part of a cache: the last query sits on the last used key.

    Parameters
    ----------
    q : array (batch, seqlen_q, nheads, head_dim)
    k_cache, v_cache : arrays (batch, max_seqlen, nheads_kv, head_dim or head_dim_v)
        With ``block_table``: pages, (num_pages, page_size, nheads_kv, ...). What lies past the used
        part is never read.
    seqused_k : int32 array (batch,)
        How many keys of each sequence are in use.
    block_table : int32 array (batch, max_pages), optional
        Key j of sequence b is in page ``block_table[b, j // page_size]``. Entries past the need are
        ignored and may be -1.
    num_splits : int
        Parts into which the keys are cut, to give every thread work; 0: chosen.
    causal, window_size, softmax_scale, softcap, sinks, alibi_slopes, return_lse, out
        As in :func:`attention`, with seqlen_k = seqused_k[b].
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    out : array (batch, seqlen_q, nheads, head_dim_v)
    lse : array (batch, nheads, seqlen_q), float32 (float64 for float64), only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 1, 8, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 512, 2, 64), dtype=np.float32)
    >>> gpu_ops.attention_decode(q, k, v, seqused_k=np.array([300, 17], np.int32)).shape
    (2, 1, 8, 64)
    """
    name = "attention_decode"
    arrays = Arrays(name)
    problem = _problem(
        name, arrays, q, k_cache, v_cache, seqused_k, block_table,
        causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    num_splits = checks.integer(name, "num_splits", num_splits, low=0, high=1024)
    return_lse = checks.flag(name, "return_lse", return_lse)
    shape = (problem.batch, problem.seqlen_q, problem.nheads, problem.v.shape[3])
    out_ = arrays.write("out", out, shape, problem.q.dtype)
    choice = choose(name, device, backend, arrays, cannot=lambda: attention_launch.cannot(problem, out_))

    def by_reference() -> Any:
        from gpu_ops.reference import attention as reference

        return reference.attention_decode(
            problem.q, problem.k, problem.v, seqused_k=problem.sequences[:, 3],
            block_table=problem.block_table, **problem.options.given(dense=False), return_lse=True,
        )  # fmt: skip

    lse_shape = (problem.batch, problem.nheads, problem.seqlen_q)
    return attention_launch.plan(
        arrays, problem, choice, by_reference,
        shape=shape, lse_shape=lse_shape, as_bshd=lambda x: x,
        out=out, view=out_, return_lse=return_lse, num_splits=num_splits,
        again=lambda call: _again(call, problem.like),
    )  # fmt: skip


def _again(call: Callable[..., Any], like: Problem) -> Callable[..., Any]:
    """Which keys are used, and the pages they are in, may change from call to call."""
    from gpu_ops.kernels.numba_cpu.lengths import cached

    name, seqlen_q = "attention_decode", like.seqlen_q
    num_pages, page_size = like.k.shape[:2]
    capacity = page_size * (1 if like.block_table is None else like.block_table.shape[1])
    found_of = cached(seqlen_q=seqlen_q, new=0, page_size=page_size, num_pages=num_pages)

    def again(
        q: Array,
        k_cache: Array,
        v_cache: Array,
        *,
        seqused_k: Array,
        out: Array | None = None,
        **options: Any,
    ) -> Any:
        table = options.get("block_table")
        found = found_of(seqused_k, table)
        _, longest, sound, _ = found[-1].tolist()
        if not sound:  # it has to say where
            _longest(name, seqused_k, capacity)
            assert table is not None
            _pages_exist(name, table, seqused_k, page_size, num_pages)
        return call((seqlen_q, longest), found[:-1], q, k_cache, v_cache, out, options)

    return again


def _problem(
    op: str,
    arrays: Arrays,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqused_k: Any,
    block_table: Any,
    **given: Any,
) -> Problem:
    q_ = arrays.read("q", q)
    k_, v_ = arrays.read("k_cache", k_cache), arrays.read("v_cache", v_cache)
    axes = checks.Axes(op)
    axes.bind("q", q_, "batch seqlen_q nheads head_dim")
    rows = "batch max_seqlen" if block_table is None else "num_pages page_size"
    axes.bind("k_cache", k_, f"{rows} nheads_kv head_dim")
    axes.bind("v_cache", v_, f"{rows} nheads_kv head_dim_v")
    expect(op, axes)
    dtype = checks.float_dtype(op, q=q_, k_cache=k_, v_cache=v_)
    used = arrays.read("seqused_k", seqused_k)
    checks.exactly(op, "seqused_k", used, (axes["batch"],), INT32)
    table = None if block_table is None else arrays.read("block_table", block_table)
    if table is None:
        capacity = axes["max_seqlen"]
    else:
        axes.bind("block_table", table, "batch max_pages")
        checks.exactly(op, "block_table", table, table.shape, INT32)
        capacity = axes["max_pages"] * axes["page_size"]
    longest = capacity  # a bound: what lies on a GPU is taken on trust, since looking would wait for it
    if not arrays.on_cuda:
        longest = _longest(op, used, capacity)
        if table is not None:
            _pages_exist(op, table, used, axes["page_size"], axes["num_pages"])
    return Problem(
        q=q_,
        k=k_,
        v=v_,
        options=options(op, arrays, q_, axes, **given),
        dtype=dtype,
        batch=axes["batch"],
        seqlen_q=axes["seqlen_q"],
        seqlen_k=longest,
        seqused_k=used,
        block_table=table,
    )


def _longest(op: str, used: Array, capacity: int) -> int:
    """The largest of ``used``, of which all are checked."""
    lengths = used.tolist()
    if lengths and not 0 <= min(lengths) <= max(lengths) <= capacity:
        raise OptionError(
            f"{op}: seqused_k must lie in [0, {capacity}], what the cache holds; "
            f"got {np.array2string(used, threshold=8)}"
        )
    return max(lengths, default=0)


def _pages_exist(op: str, table: Array, used: Array, page_size: int, num_pages: int) -> None:
    if not (table.view(np.uint32) >= num_pages).any():  # -1 is large too
        return
    needed = np.arange(table.shape[1]) < -(-used[:, None] // max(page_size, 1))
    bad = np.argwhere(needed & ((table < 0) | (table >= num_pages)))
    if len(bad):
        b, page = (int(i) for i in bad[0])
        raise OptionError(
            f"{op}: block_table[{b}, {page}] is {int(table[b, page])}, not a page in [0, {num_pages}), "
            f"but seqused_k[{b}] = {int(used[b])} needs it"
        )
