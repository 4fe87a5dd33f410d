"""Attention of a step over a paged cache: in one call, or in two over disjoint keys that are merged by lse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Unpack

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import cast, on_cuda
from gpu_ops.core.state_arrays import to_device
from gpu_ops.errors import OptionError
from gpu_ops.inference.sequences import CacheSequences
from gpu_ops.inference.step import Cascade, Step, Tree, cascade_of, written
from gpu_ops.inference.tree import planted
from gpu_ops.ops.attention.decode import attention_decode
from gpu_ops.ops.attention.dense import attention
from gpu_ops.ops.attention.merge import attention_merge
from gpu_ops.ops.attention.options import ScoreOptions
from gpu_ops.ops.attention.varlen import attention_varlen
from gpu_ops.ops.rows.embedding import embedding

__all__ = ["attend", "check_window", "numbers", "on_device"]

_EVERYWHERE = (-1, -1)


def attend(
    q: Any,
    keys: Any,
    values: Any,
    step: Step,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    **options: Unpack[ScoreOptions],
) -> Any:
    """Causal attention of a step's queries over the keys and values of a layer, including the new ones.

    Parameters
    ----------
    q : array (total, nheads, head_dim)
        Rotated queries.
    keys, values : arrays (num_pages, page_size, nheads_kv, head_dim)
        Pages of :class:`PagedKVCache`.
    step : Step
    k_scale, v_scale : float32 arrays (num_pages, page_size, nheads_kv), with pages of int8 or e4m3
        Scales from ``key_scales`` and ``value_scales`` of the cache.
    **options
        Options of :func:`~gpu_ops.attention_varlen`, such as ``window_size``; except ``causal``, and
        ``alibi_slopes``, whose distances trees and shared pages would change.

    Returns
    -------
    array like q

    Raises
    ------
    OptionError
        Tokens branch beyond the window.

    Notes
    -----
    The partial results of a tree or a cascade have q's dtype: in 16 bits each is rounded before the merge.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops.inference import PagedKVCache, attend
    >>> cache = PagedKVCache(1, 2, 8, num_pages=4)
    >>> step = cache.reserve({cache.add(): [5, 6, 7]})
    >>> q = np.ones((3, 4, 8), np.float32)
    >>> attend(q, cache.keys[0], cache.values[0], step, window_size=(2, 0)).shape
    (3, 4, 8)
    """
    options["causal"] = True
    window = options.get("window_size", _EVERYWHERE)
    pages = _Pages(keys, values, {"k_scale": k_scale, "v_scale": v_scale})
    if step.tree is not None:
        check_window("attend", step.tree, window[0])
        return _tree(q, pages, step, step.tree, options)
    if step.cascade is not None and window == _EVERYWHERE:
        return _cascade(q, pages, step, step.cascade, options)
    return attention_varlen(
        q,
        keys,
        values,
        step.cu_seqlens_q,
        **pages.scales,
        block_table=step.block_table,
        seqused_k=step.seqused_k,
        max_seqlen_q=step.max_seqlen_q,
        **options,
    )


def on_device(sequences: CacheSequences, step: Step, out: Step | None, device: str) -> Step:
    """Copy the open step from host memory to the device, with the tree or cascade that :func:`attend` reads."""
    more: dict[str, Any] = {}
    if sequences.parents:
        more = planted(step, sequences.parents, list(sequences.opened("reserve")), device)
        check_window("reserve", more.get("tree"), sequences.window)
    if out is None and sequences.window < 0 and more.get("tree") is None:
        more["cascade"] = cascade_of(step, sequences.pool.page_size, device)
    step = written(step, out, device)
    return replace(step, **more) if more else step


def check_window(op: str, tree: Tree | None, window: int) -> None:
    """Check that all nodes of a tree see all keys before it."""
    if tree is not None and 0 <= window < tree.last_position:
        raise OptionError(
            f"{op}: tokens that branch lie at positions up to {tree.last_position}, beyond the window of "
            f"{window}: pass parents without branches, such as range(-1, n - 1)"
        )


@dataclass(frozen=True)
class _Pages:
    keys: Any
    values: Any
    scales: dict[str, Any]
    """Scales, by their names as arguments of ops."""

    def rows(self, slots: Any, dtype: Any) -> tuple[Any, Any]:
        """Keys and values in these slots, in ``dtype``."""
        each = zip((self.keys, self.values), self.scales.values(), strict=True)
        k, v = (
            _rows(slots, x.reshape(-1, *x.shape[2:])) if scale is None else numbers(slots, x, scale, dtype)
            for x, scale in each
        )
        return k, v


def _cascade(q: Any, pages: _Pages, step: Step, c: Cascade, options: ScoreOptions) -> Any:
    suffix = attention_varlen(
        q,
        pages.keys,
        pages.values,
        step.cu_seqlens_q,
        **pages.scales,
        block_table=c.own_block_table,
        seqused_k=c.own_seqused_k,
        max_seqlen_q=step.max_seqlen_q,
        return_lse=True,
        **options,
    )
    shared = attention_varlen(
        q,
        pages.keys,
        pages.values,
        c.cu_seqlens_q,
        **pages.scales,
        block_table=c.block_table,
        seqused_k=c.seqused_k,
        max_seqlen_q=c.max_seqlen_q,
        return_lse=True,
        **_open(options),
    )
    return attention_merge(*suffix, *shared, out=suffix)[0]


def _tree(q: Any, pages: _Pages, step: Step, tree: Tree, options: ScoreOptions) -> Any:
    q = _rows(tree.rows, q)
    options = {**options, "causal": False, "window_size": _EVERYWHERE}
    k, v = pages.rows(tree.slots, q.dtype)
    tree_part = attention(q, k, v, bias=tree.bias, return_lse=True, **options)
    before = attention_decode(
        q,
        pages.keys,
        pages.values,
        **pages.scales,
        seqused_k=tree.seqused_k,
        block_table=step.block_table,
        return_lse=True,
        **_open(options),
    )
    out = attention_merge(*tree_part, *before, out=tree_part)[0]
    return _rows(tree.places, out.reshape(-1, *out.shape[2:]))


def _open(options: ScoreOptions) -> ScoreOptions:
    """Options for keys that all queries see. Sinks count only once, in the other part."""
    return {**options, "causal": False, "sinks": None}


def _rows(index: Any, x: Any) -> Any:
    """Compute ``x[index]`` for any dtype."""
    return embedding(index, x.reshape(x.shape[0], -1)).reshape(*index.shape, *x.shape[1:])


def numbers(slots: Any, pages: Any, scale: Any, dtype: Any) -> Any:
    """Numbers of the pages in these slots, in ``dtype``, rounded once.

    Parameters
    ----------
    slots : int64 array (...,)
        Slots, page * page_size + row.
    pages : int8 or uint8 (bits of e4m3) array (num_pages, page_size, nheads_kv, head_dim)
    scale : float32 array (num_pages, page_size, nheads_kv)

    Returns
    -------
    array (..., nheads_kv, head_dim), on the device of the pages
    """
    page, row = slots // pages.shape[1], slots % pages.shape[1]
    codes = pages[page, row]
    if codes.dtype == np.int8:
        decoded = codes.astype(np.float32)
    else:
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        decoded = to_device(every, "cuda" if on_cuda(pages) else "cpu")[codes]
    return cast(decoded * scale[page, row][..., None], np.dtype(dtype))
