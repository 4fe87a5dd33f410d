"""The attention of a step over a paged cache: in one call, or in two over disjoint keys that are merged by lse."""

from __future__ import annotations

from typing import Any, Unpack

from gpu_ops.errors import OptionError
from gpu_ops.inference.cascade import Cascade
from gpu_ops.inference.step import Step
from gpu_ops.inference.tree import Tree
from gpu_ops.ops.attention import attention
from gpu_ops.ops.attention_decode import attention_decode
from gpu_ops.ops.attention_merge import attention_merge
from gpu_ops.ops.attention_options import ScoreOptions
from gpu_ops.ops.attention_varlen import attention_varlen
from gpu_ops.ops.embedding import embedding

__all__ = ["attend", "check_tree"]

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
    """Causal attention of a step's queries over the keys and values of a layer, which hold the new ones too.

    Parameters
    ----------
    q : array (total, nheads, head_dim)
        Rotated.
    keys, values : arrays (num_pages, page_size, nheads_kv, head_dim)
        Of :class:`PagedKVCache`.
    step : Step
    k_scale, v_scale : float32 arrays (num_pages, page_size, nheads_kv), optional
        Of quantized pages.
    **options
        Of :func:`attention_varlen`, such as ``window_size``; but ``causal``, and ``alibi_slopes``, whose distances
        trees and shared pages would change.

    Returns
    -------
    array like q

    Raises
    ------
    OptionError
        Tokens branch, and lie beyond the window or in quantized pages.

    Notes
    -----
    The parts of a tree or a cascade have q's dtype: in 16 bits each is rounded before the merge.

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
    window, scales = options.get("window_size", _EVERYWHERE), {"k_scale": k_scale, "v_scale": v_scale}
    if step.tree is not None:
        check_tree("attend", step.tree, window[0], quantized=k_scale is not None)
        return _tree(q, keys, values, step, step.tree, options)
    if step.cascade is not None and window == _EVERYWHERE:
        return _cascade(q, keys, values, step, step.cascade, scales, options)
    return attention_varlen(
        q,
        keys,
        values,
        step.cu_seqlens_q,
        block_table=step.block_table,
        seqused_k=step.seqused_k,
        max_seqlen_q=step.max_seqlen_q,
        **scales,
        **_causal(options),
    )


def check_tree(op: str, tree: Tree | None, window: int, *, quantized: bool = False) -> None:
    """All nodes of a tree see all keys before it, and its own keys and values are arrays of q's dtype."""
    if tree is not None and quantized:
        raise OptionError(
            f"{op}: tokens that branch need pages of a float dtype: pass parents without branches, such as "
            "range(-1, n - 1)"
        )
    if tree is not None and 0 <= window < tree.last_position:
        raise OptionError(
            f"{op}: tokens that branch lie at positions up to {tree.last_position}, beyond the window of "
            f"{window}: pass parents without branches, such as range(-1, n - 1)"
        )


def _cascade(
    q: Any, keys: Any, values: Any, step: Step, c: Cascade, scales: dict[str, Any], options: ScoreOptions
) -> Any:
    own = attention_varlen(
        q,
        keys,
        values,
        step.cu_seqlens_q,
        block_table=c.own_block_table,
        seqused_k=c.own_seqused_k,
        max_seqlen_q=step.max_seqlen_q,
        return_lse=True,
        **scales,
        **_causal(options),
    )
    shared = attention_varlen(
        q,
        keys,
        values,
        c.cu_seqlens_q,
        block_table=c.block_table,
        seqused_k=c.seqused_k,
        max_seqlen_q=c.max_seqlen_q,
        return_lse=True,
        **scales,
        **_open(options),
    )
    return attention_merge(*own, *shared, out=own)[0]


def _tree(q: Any, keys: Any, values: Any, step: Step, tree: Tree, options: ScoreOptions) -> Any:
    q = _rows(tree.rows, q)
    options = {**options, "causal": False, "window_size": _EVERYWHERE}
    k, v = (_rows(tree.slots, x.reshape(-1, *x.shape[2:])) for x in (keys, values))
    own = attention(q, k, v, bias=tree.bias, return_lse=True, **options)
    before = attention_decode(
        q,
        keys,
        values,
        seqused_k=tree.seqused_k,
        block_table=step.block_table,
        return_lse=True,
        **_open(options),
    )
    out = attention_merge(*own, *before, out=own)[0]
    return _rows(tree.places, out.reshape(-1, *out.shape[2:]))


def _causal(options: ScoreOptions) -> ScoreOptions:
    return {**options, "causal": True}


def _open(options: ScoreOptions) -> ScoreOptions:
    """Of keys that all queries see. Sinks count in one part, which is the other one."""
    return {**options, "causal": False, "sinks": None}


def _rows(index: Any, x: Any) -> Any:
    """``x[index]``, whatever the dtype."""
    return embedding(index, x.reshape(x.shape[0], -1)).reshape(*index.shape, *x.shape[1:])
