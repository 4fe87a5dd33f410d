"""Drafts without a second model: the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_ops.core import checks
from gpu_ops.inference.sequences import token_ids

__all__ = ["prompt_lookup"]


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
