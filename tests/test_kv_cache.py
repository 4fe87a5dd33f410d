"""The paged cache: tables, prefixes, forks, windows and errors; attention through its steps."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.errors import OutOfPages, StateError
from gpu_ops.inference import PagedKVCache


def cache_of(num_pages=16, page_size=4, **options):
    return PagedKVCache(2, 1, 8, num_pages=num_pages, page_size=page_size, **options)


def prefill(cache, tokens):
    """A sequence of these tokens, committed."""
    handle = cache.add(tokens)
    cache.reserve({handle: tokens[cache.length(handle) :]})
    cache.commit()
    return handle


def test_a_step_of_prompts_and_single_tokens():
    cache = cache_of()
    a = prefill(cache, [1, 2, 3, 4, 5])
    b = cache.add()
    step = cache.reserve({b: [7] * 9, a: np.array([6])})
    assert step.tokens.tolist() == [7] * 9 + [6]
    assert step.positions.tolist() == [*range(9), 5]
    assert step.cu_seqlens_q.tolist() == [0, 9, 10]
    assert step.seqused_k.tolist() == [9, 6]
    assert step.block_table.tolist() == [[2, 3, 4], [0, 1, -1]]
    assert step.slot_mapping.tolist() == [*range(8, 17), 5]
    assert step.max_seqlen_q == 9
    dtypes = {name: getattr(step, name).dtype.name for name in ("tokens", "block_table", "slot_mapping")}
    assert dtypes == {"tokens": "int32", "block_table": "int32", "slot_mapping": "int64"}


def test_out_of_pages_says_who_holds_them_and_changes_nothing():
    cache = cache_of(num_pages=4)
    a, b = prefill(cache, [1] * 9), prefill(cache, [2])
    before = cache.stats
    with pytest.raises(
        OutOfPages, match=r"needs 2 pages of 4 tokens, and 0 of 4 .* 0 holds 3, sequence 1"
    ) as error:
        cache.reserve({a: [1] * 4, b: [2] * 7})
    assert (error.value.needed, error.value.free, error.value.held) == (2, 0, {a: 3, b: 1})
    assert cache.stats == before
    assert (cache.length(a), cache.length(b)) == (9, 1)
    cache.reserve({b: [2, 2, 2]})
    with pytest.raises(StateError, match=r"call commit\(\)"):
        cache.free(a)
    cache.rollback()
    assert cache.length(b) == 1
    cache.free(a)
    assert cache.stats.free + cache.stats.cached == 3
