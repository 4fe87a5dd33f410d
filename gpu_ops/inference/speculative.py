"""Speculative decoding: drafts by lookup in the text; those of a tree that the model itself would have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, on_cuda
from gpu_ops.core.state_arrays import StateArray
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.inference.requests import Sampler, SamplerRow, Sampling
from gpu_ops.inference.sequences import token_ids
from gpu_ops.inference.tree import parent_list
from gpu_ops.reference.sampling.sample import adjusted_logits, kept_tokens, random_number, token_weights

__all__ = ["probabilities", "prompt_lookup", "verify"]

_FIRST_ROW = 1 << 31  # first row of random numbers; `sample`, which may have drawn the drafts, uses others


def verify(
    logits: Any,
    tokens: Sequence[int],
    parents: Sequence[int],
    *,
    sampling: Sampling | None = None,
    step: int = 0,
    counts: Any = None,
    draft_probs: Any = None,
) -> tuple[list[int], int]:
    """Walk down a tree of drafts as far as the model agrees, and draw the next token.

    Without ``draft_probs`` a token of the model is drawn after each node, and the walk continues at the child with
    this token: from the same logits, :func:`~gpu_ops.sample` draws the same tokens one by one. With ``draft_probs``,
    drafts are accepted at random, as often as possible without changing the distribution of the tokens. Both are the
    same for greedy sampling.

    Parameters
    ----------
    logits : array (nodes, vocab)
        Logits after each node: the rows of :func:`next_logits` for this sequence.
    tokens, parents : sequences of int
        Nodes as passed to :meth:`PagedKVCache.reserve`. Node 0 is the last token of the text, already drawn but not
        yet in the cache; all others descend from it.
    sampling : Sampling, optional
        Default: greedy.
    step : int
        Number of tokens of the text drawn so far, as in :func:`~gpu_ops.sample`.
    counts : int array (vocab,), optional
        Number of times each token was drawn, negative for tokens only in the prompt, as for :func:`~gpu_ops.sample`.
        Penalties need it.
    draft_probs : array (nodes, vocab), optional
        Row i is the distribution from which the children of node i were drawn, one after the other in this order and
        without replacement, by random numbers other than those of ``sampling.seed``. Rows of nodes without children
        are ignored.

    Returns
    -------
    path : list of int
        Nodes whose tokens are kept, from node 0 on, for :meth:`PagedKVCache.accept`.
    token : int
        Next token, which becomes the next node 0; -1 if the logits are not finite.

    Raises
    ------
    ShapeError, DTypeError, OptionError

    Notes
    -----
    With p of the model and q of the draft, a child t is accepted with probability min(1, p(t) / q(t)). Otherwise
    p = max(p - q, 0), q(t) = 0, both divided by their sums, and the next child is tried; after the last one the token
    is drawn from p. Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; for
    several children Jeong et al., "Recursive Speculative Decoding", 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops.inference import verify
    >>> logits = np.eye(4)[[2, 1, 3]]  # the model says 2 after node 0, 1 after node 1, and 3 after node 2
    >>> verify(logits, [0, 1, 2], [-1, 0, 0])
    ([0, 2], 3)
    """
    ids, above, x = _tree(logits, tokens, parents)
    sampling = sampling or Sampling()
    row = SamplerRow(
        sampling, checks.integer("verify", "step", step, low=0), _counts(sampling, counts, x.shape[1])
    )
    below: list[list[int]] = [[] for _ in ids]
    for node, parent in enumerate(above[1:], start=1):
        below[parent].append(node)
    if draft_probs is None or sampling.temperature == 0:
        return _drawn(logits, ids, above, below, row)
    return _accepted(x.copied(), ids, below, row, _draft_probs(draft_probs, ids, below, x.shape))


def probabilities(logits: Any, sampling: Sampling, counts: Any = None) -> Array:
    """Distributions that :func:`~gpu_ops.sample` draws from, row by row.

    Parameters
    ----------
    logits : array (..., vocab)
    sampling : Sampling
    counts : int array (..., vocab), optional
        Number of times each token was drawn, negative for tokens only in the prompt; penalties need it.

    Returns
    -------
    float64 array (..., vocab) in host memory; NaN in rows without a distribution

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops.inference import Sampling, probabilities
    >>> probabilities(np.log([[1.0, 6.0, 3.0]]), Sampling(temperature=1.0, top_k=2)).round(9)
    array([[0.        , 0.66666667, 0.33333333]])
    """
    x = StateArray("probabilities", "logits", logits).copied()
    checks.float_dtype("probabilities", logits=x)
    if sampling.counts_tokens and counts is None:
        raise OptionError("probabilities: penalties need counts=, how often each token was drawn")
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if not x.ndim or not x.shape[-1]:
        raise ShapeError(f"probabilities: logits have shape {x.shape}, expected (..., vocab)")
    totals = None
    if counts is not None:
        totals = StateArray("probabilities", "counts", counts).copied()
        if totals.dtype.kind not in "iu" or totals.shape not in (x.shape, x.shape[-1:]):
            raise ShapeError(
                f"probabilities: counts are {totals.dtype} of shape {totals.shape}, expected integers of shape "
                f"{x.shape}"
            )
        totals = np.broadcast_to(totals, x.shape)
    with np.errstate(all="ignore"):
        z = adjusted_logits(x, None, totals, *penalties)
        distributions = [_distribution(row, sampling) for row in z.reshape(-1, z.shape[-1])]
    return np.array(distributions).reshape(x.shape)


def _distribution(z: Array, sampling: Sampling) -> Array:
    if not np.isfinite(z.max()):
        return np.full(len(z), np.nan)
    if sampling.temperature == 0:
        return np.asarray(np.arange(len(z)) == z.argmax(), np.float64)
    weights = token_weights(z, np.float32(sampling.temperature))
    if (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1.0, 0.0):  # it sorts
        top_p, min_p = (float(np.float32(x)) for x in (sampling.top_p, sampling.min_p))
        weights[~kept_tokens(z, weights, top_k=sampling.top_k, top_p=top_p, min_p=min_p)] = 0
    p = weights.astype(np.float64)
    return np.asarray(p / p.sum())


def _drawn(
    logits: Any, ids: list[int], above: list[int], below: list[list[int]], row: SamplerRow
) -> tuple[list[int], int]:
    """Walk by tokens drawn after every node."""
    rows = [row]
    for node in range(1, len(ids)):
        rows.append(rows[above[node]].after(ids[node]))
    tokens, _ = Sampler("cuda" if on_cuda(logits) else "cpu")(logits, rows)
    path = [0]
    while True:
        token = int(tokens[path[-1]])
        child = next((node for node in below[path[-1]] if ids[node] == token), None)
        if child is None:
            return path, token
        path.append(child)


def _accepted(
    logits: Array, ids: list[int], below: list[list[int]], row: SamplerRow, draft: Array
) -> tuple[list[int], int]:
    """Walk by random acceptance."""
    path = [0]
    while True:
        node = path[-1]
        p = probabilities(logits[node], row.sampling, row.counts)
        if np.isnan(p[0]):
            return path, -1
        q = draft[node].astype(np.float64)
        numbers = (_number(row, i) for i in range(len(below[node]) + 1))
        accepted = None
        for child, number in zip(below[node], numbers, strict=False):
            token = ids[child]
            q /= q.sum()
            if number * q[token] < p[token]:
                accepted = child
                break
            rest = np.maximum(p - q, 0)
            p = rest / rest.sum() if rest.any() else p  # all 0 if p was q, up to rounding
            q[token] = 0
        if accepted is None:
            reached = np.cumsum(p)
            return path, int(np.searchsorted(reached, next(numbers) * reached[-1], "right"))
        path.append(accepted)
        row = row.after(ids[accepted])


def _number(row: SamplerRow, i: int) -> float:
    """Random number i of a step, in [0, 1)."""
    return (random_number(row.sampling.seed, row.step, _FIRST_ROW + i) >> 11) * 2.0**-53


def _tree(logits: Any, tokens: Any, parents: Any) -> tuple[list[int], list[int], StateArray]:
    x = StateArray("verify", "logits", logits)
    ids = token_ids("verify", tokens)
    if len(x.shape) != 2 or not ids or x.shape[0] != len(ids):
        raise ShapeError(
            f"verify: logits have shape {x.shape}, expected (nodes, vocab) for {len(ids)} tokens"
        )
    if max(ids) >= x.shape[1]:
        raise OptionError(f"verify: a token is {max(ids)}, not in [0, {x.shape[1]})")
    above = parent_list("verify", "parents", parents, len(ids))
    if -1 in above[1:]:
        raise OptionError(f"verify: parents[{above.index(-1, 1)}] is -1; all nodes descend from node 0")
    return ids, above, x


def _counts(sampling: Sampling, counts: Any, vocab: int) -> Array | None:
    if not sampling.counts_tokens:
        return None
    count_array = np.asarray(counts) if counts is not None else np.empty(0)
    if count_array.shape != (vocab,) or count_array.dtype.kind not in "iu":
        raise OptionError(f"verify: penalties need counts=, {vocab} integers: how often each token was drawn")
    return count_array.astype(np.int32)


def _draft_probs(draft_probs: Any, ids: list[int], below: list[list[int]], shape: tuple[int, ...]) -> Array:
    draft = StateArray("verify", "draft_probs", draft_probs).copied()
    if draft.shape != shape:
        raise ShapeError(f"verify: draft_probs have shape {draft.shape}, expected {shape}, as logits")
    for node, children in enumerate(below):
        drafts = [ids[child] for child in children]
        if len(set(drafts)) < len(drafts):
            raise OptionError(f"verify: two children of node {node} have one token; drafts of a node differ")
        q = draft[node]
        if drafts and not (np.isfinite(q).all() and (q >= 0).all() and (q[drafts] > 0).all()):
            raise OptionError(
                f"verify: draft_probs[{node}] are no probabilities from which {drafts} were drawn: "
                f"{q[drafts].tolist()} of them"
            )
    return draft


def prompt_lookup(tokens: Sequence[int], *, ngram: int = 3, most: int = 8) -> list[int]:
    """Guess the next tokens of a text that repeats itself or its prompt: summaries, code, answers from documents.

    The last ``ngram`` tokens are looked up in the text, else the last ``ngram - 1``, ... down to 1. Of several
    occurrences, the last one that ``most`` tokens follow is used, or else the first one.

    Parameters
    ----------
    tokens : sequence of int
        The text.
    ngram, most : int
        At least 1.

    Returns
    -------
    list of int
        At most ``most`` tokens; none if the last token occurs nowhere else.

    Notes
    -----
    Pass it to an :class:`Engine` as ``draft=prompt_lookup``, with other numbers as
    ``functools.partial(prompt_lookup, most=4)``. Source: Saxena, "Prompt Lookup Decoding", 2023.

    Examples
    --------
    >>> from gpu_ops.inference import prompt_lookup
    >>> prompt_lookup([7, 1, 2, 3, 4, 5, 9, 1, 2], most=3)
    [3, 4, 5]
    """
    ngram = checks.integer("prompt_lookup", "ngram", ngram, low=1)
    most = checks.integer("prompt_lookup", "most", most, low=1)
    ids = np.array(token_ids("prompt_lookup", tokens), np.int32)
    for n in range(min(ngram, len(ids) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)
        starts = np.flatnonzero((windows == ids[-n:]).all(axis=1)) + n  # starts of the tokens that follow
        if starts.size:
            whole = starts[starts <= len(ids) - most]
            start = whole[-1] if whole.size else starts[0]
            return token_ids("prompt_lookup", ids[start : start + most])
    return []
