"""Paged cache: tables, prefixes, forks, windows and errors."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.errors import (
    DeviceError,
    DTypeError,
    OptionError,
    OutOfMemoryError,
    OutOfPages,
    ShapeError,
    StateError,
)
from gpu_ops.inference import PagedKVCache
from gpu_ops.inference.pages import PageArrays, PagePool
from gpu_ops.inference.sequences import CacheSequences
from gpu_ops.inference.step import filled
from tests.support.fake_cupy import FakeArray


def cache_of(num_pages=16, page_size=4, **options):
    return PagedKVCache(2, 1, 8, num_pages=num_pages, page_size=page_size, **options)


def prefill(cache, tokens):
    """Add a sequence of these tokens, and commit it."""
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


def test_a_second_request_computes_what_the_first_did_not():
    cache = cache_of(num_pages=200, page_size=16)
    prompt = np.random.default_rng(0).integers(0, 50, 1000).tolist()
    cache.free(prefill(cache, [*prompt, 1, 2, 3]))
    assert cache.length(cache.add([*prompt, 4, 5])) == 992  # 62 whole pages of 16
    assert cache.length(cache.add(prompt[:992])) == 976  # the logits of the last token are required
    assert cache.length(cache.add([*prompt[:500], 99, *prompt[501:]])) == 496
    assert (cache.stats.tokens_added, cache.stats.tokens_hit) == (1003 + 1002 + 992 + 1000, 992 + 976 + 496)


def test_equal_tokens_behind_other_ones_are_another_prefix():
    cache = cache_of()
    prefill(cache, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert cache.length(cache.add([2, 2, 2, 2, 3])) == 0
    assert cache.length(cache.add([1, 1, 1, 1, 2, 2, 2, 2, 2])) == 8


def test_pages_are_found_once_they_are_written():
    cache, prompt = cache_of(), [1, 2, 3, 4, 5]
    cache.reserve({cache.add(prompt): prompt})
    assert cache.length(cache.add(prompt)) == 0
    cache.rollback()
    assert cache.length(cache.add(prompt)) == 0
    cache.reserve({0: prompt})
    cache.commit()
    assert cache.length(cache.add(prompt)) == 4


def test_dropped_prefixes_are_found_no_more():
    """Dropped prefixes are not found again, nor are extensions of them by an older sequence."""
    cache = cache_of(page_size=2)
    old, short = prefill(cache, [1, 2, 3, 4]), prefill(cache, [9])
    cache.free(prefill(cache, [5, 6, 7]))
    cache.drop_prefixes()
    assert (cache.stats.used, cache.stats.cached) == (3, 0)
    cache.reserve({old: [5, 6], short: [8, 7, 6]})
    cache.commit()
    for text in ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5]):
        assert cache.length(cache.add(text)) == 0
    prefill(cache, [1, 2])
    assert cache.length(cache.add([1, 2, 3, 4, 5, 6, 7])) == 2


def test_freed_prefixes_live_longest():
    """The oldest prefixes are evicted first; within a sequence, the last pages."""
    cache = cache_of(num_pages=6)
    old, new = prefill(cache, [1] * 12), prefill(cache, [2] * 12)
    cache.free(old)
    cache.free(new)
    cache.reserve({cache.add(): [9]})
    cache.commit()
    lengths = {t: cache.length(cache.add([t] * 13)) for t in (1, 2)}
    assert lengths == {1: 8, 2: 12}


def test_a_fork_copies_the_last_page_when_it_grows():
    cache = cache_of(dtype="bfloat16")
    a = prefill(cache, [1, 2, 3, 4, 5, 6])
    for i, pages in enumerate((*cache.keys, *cache.values)):
        pages[1, :2] = i + 1
    b = cache.fork(a)
    assert cache.stats.used == 2
    step = cache.reserve({a: [7], b: [8]})
    assert step.block_table.tolist() == [[0, 2], [0, 1]]
    for i, pages in enumerate((*cache.keys, *cache.values)):
        assert (pages[2] == pages[1]).all()
        assert (pages[2, :2] == i + 1).all()
    cache.commit()
    cache.free(a)
    assert cache.stats.used == 2


def test_a_trimmed_page_that_is_written_again_is_found_no_more():
    cache = cache_of()
    a = prefill(cache, [1, 2, 3, 4, 5])
    cache.trim(a, 2)
    assert cache.length(cache.add([1, 2, 3, 4, 5])) == 4  # it still holds these
    cache.free(1)
    cache.reserve({a: [8]})
    cache.commit()
    assert cache.length(cache.add([1, 2, 3, 4, 5])) == 0
    assert cache.tokens(a) == [1, 2, 8]


@pytest.mark.parametrize("keep", [0, 5])
def test_a_window_keeps_resident_pages_constant(keep):
    cache = cache_of(num_pages=12, window=10, keep=keep)
    a, resident = prefill(cache, [1] * 20), []
    for token in range(100):
        cache.reserve({a: [token]})
        cache.commit()
        resident.append(cache.stats.used)
    assert max(resident) == 4 + (2 if keep else 0)  # the new token and 10 before it
    _, table, _ = cache.csr([a])
    kept = -(-keep // 4)
    assert (table[kept:-4] == 0).all()
    assert (table[:kept] > 0).all()
    with pytest.raises(OptionError, match="length has to be at least"):
        cache.trim(a, 60)
    cache.trim(a, 119)
    cache.free(a)
    assert cache.stats.used == 0


def test_csr_is_the_tables_in_flashinfers_form():
    cache = cache_of()
    prefill(cache, [1] * 8)
    prefill(cache, [2] * 5)
    cache.add()
    indptr, indices, last = cache.csr()
    assert indptr.tolist() == [0, 2, 4, 4]
    assert indices.tolist() == [0, 1, 2, 3]
    assert last.tolist() == [4, 1, 0]
    assert {x.dtype.name for x in (indptr, indices, last)} == {"int32"}
    assert cache.csr([1])[1].tolist() == [2, 3]


def test_defragment_moves_pages_to_the_front_with_what_they_hold():
    cache = cache_of(num_pages=8)
    a, b, c = (prefill(cache, [t] * 8) for t in range(3))
    for pages in (*cache.keys, *cache.values):
        pages[...] = np.arange(8).reshape(8, 1, 1, 1)
    cache.trim(a, 0)
    cache.reserve({a: [5] * 9})  # takes the free pages, then a cached one
    cache.commit()
    cache.free(b)
    before = {h: cache.keys[1][cache.csr([h])[1]].copy() for h in (a, c)}
    stats = cache.stats
    cache.defragment()
    assert cache.stats == stats
    assert max(cache.csr()[1]) < stats.used + stats.cached
    for handle, keys in before.items():
        assert (cache.keys[1][cache.csr([handle])[1]] == keys).all()
        assert (cache.values[0][cache.csr([handle])[1]] == keys).all()
    assert cache.length(cache.add([1] * 9)) == 8
    assert cache.defragment() == 0


def test_steps_of_fixed_shapes_stay_where_they_are():
    cache = cache_of()
    out = cache.empty_step(tokens=3, batch=3, width=4, max_seqlen_q=1)
    assert out.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    a, b = prefill(cache, [1] * 4), prefill(cache, [2])
    addresses = [x.ctypes.data for x in (out.tokens, out.block_table, out.slot_mapping)]
    assert cache.reserve({a: [3], b: [4]}, out=out) is out
    assert [x.ctypes.data for x in (out.tokens, out.block_table, out.slot_mapping)] == addresses
    assert out.tokens.tolist() == [3, 4, 0]
    assert out.slot_mapping.tolist() == [8, 5, -1]
    assert out.seqused_k.tolist() == [5, 2, 0]
    assert out.block_table.tolist() == [[0, 2, -1, -1], [1, -1, -1, -1], [-1] * 4]
    cache.commit()
    for new, message in (
        ({a: [1, 2]}, "max_seqlen_q=1, and this step needs 2"),
        ({a: [1] * 4}, "tokens=3, and this step needs 4"),
    ):
        with pytest.raises(OptionError, match=message):
            cache.reserve(new, out=out)
    assert cache.length(a) == 5
    full = cache.empty_step(tokens=4, batch=2)
    with pytest.raises(OptionError, match="2 tokens of padding, which 0 rows"):
        cache.reserve({a: [1], b: [1]}, out=full)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (OptionError, "page_size must lie in", {"page_size": 0}),
        (OptionError, "num_pages must lie in", {"num_pages": 0}),
        (OptionError, r"num_pages must lie in \[2", {"num_pages": 1, "window": 4}),
        (OptionError, "num_pages must be an integer", {"num_pages": 1.5}),
        (OptionError, "dtype='int4' is unknown", {"dtype": "int4"}),
        (OptionError, "did you mean 'cuda'", {"device": "gpu"}),
        (OptionError, "window must lie in", {"window": -2}),
        (OptionError, "without one, all tokens stay", {"keep": 4}),
        (DeviceError, "no usable", {"device": "cuda"}),
        (OutOfMemoryError, "PagedKVCache: no memory", {"num_pages": 2**31 - 1, "page_size": 2**20}),
    ],
)
def test_wrong_sizes(error, message, options, monkeypatch):
    monkeypatch.setattr("gpu_ops.core.state_arrays.cuda_missing", lambda: "none here")
    with pytest.raises(error, match=message):
        cache_of(**options)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (OptionError, "there is no sequence 7; there are: 0", lambda c: c.reserve({7: [1]})),
        (OptionError, "got bool True", lambda c: c.free(True)),
        (OptionError, "got str '0'", lambda c: c.length("0")),
        (OptionError, "leave it out of this step", lambda c: c.reserve({0: []})),
        (OptionError, "pass a dict of new tokens by sequence", lambda c: c.reserve([1, 2])),
        (OptionError, "pass a dict of new tokens by sequence", lambda c: c.reserve({})),
        (ShapeError, r"shape \(\), expected one axis", lambda c: c.reserve({0: 5})),
        (ShapeError, r"shape \(1, 2\), expected one axis", lambda c: c.add([[1, 2]])),
        (DTypeError, "token ids are float64", lambda c: c.add([1.0])),
        (DTypeError, "token ids are bool", lambda c: c.add([True])),
        (DTypeError, "neither a list of integers nor", lambda c: c.add(FakeArray(np.arange(3)))),
        (OptionError, r"token ids lie in \[0, 2147483647\], got -1", lambda c: c.add([4, -1])),
        (OptionError, "got 5 to 2147483648", lambda c: c.add([5, 2**31])),
        (OptionError, "length must lie in", lambda c: c.trim(0, 4)),
        (OptionError, "made by empty_step", lambda c: c.reserve({0: [1]}, out=np.zeros(3))),
        (OptionError, "batch must lie in", lambda c: c.empty_step(tokens=1, batch=0)),
        (OptionError, "no sequence 3", lambda c: c.csr([3])),
        (StateError, "no step is open", lambda c: c.commit()),
        (StateError, "no step is open", lambda c: c.rollback()),
    ],
)
def test_mistakes_change_nothing(error, message, call):
    cache = cache_of()
    prefill(cache, [1, 2, 3])
    before = cache.stats
    with pytest.raises(error, match=message):
        call(cache)
    assert cache.stats.used == before.used
    assert cache.handles == (0,)
    assert cache.tokens(0) == [1, 2, 3]


def test_a_copy_that_fails_leaves_all_as_it_was(monkeypatch):
    cache = cache_of()
    a = prefill(cache, [1, 2, 3, 4, 5])
    b = cache.fork(a)
    before = cache.stats, cache.csr()[1].tolist()

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(PageArrays, "copy", fail)
    for call in (lambda: cache.reserve({b: [6]}), cache.defragment):
        with pytest.raises(OutOfMemoryError):
            call()
    assert (cache.stats, cache.csr()[1].tolist()) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_a_gpu(cupy, dtype):
    """Arrays of a GPU, with a fake of CuPy; see fake_cupy.py."""
    cache = cache_of(device="cuda", dtype=dtype)
    assert isinstance(cache.keys[1], FakeArray)
    assert cache.values[1].dtype.name == dtype
    a = prefill(cache, [1, 2, 3, 4, 5])
    cache.keys[1].host[1] = 3
    step = cache.reserve({cache.fork(a): [7]})
    assert step.slot_mapping.host.tolist() == [9]
    assert (cache.keys[1].host[2] == 3).all()
    cache.commit()
    out = cache.empty_step(tokens=2, batch=2)
    cache.reserve({a: [9]}, out=out)
    assert out.tokens.host.tolist() == [9, 0]
    assert out.block_table.host[0, :3].tolist() == [0, 1, -1]
    assert cache.csr([a])[1].host.tolist() == [0, 1]
    cache.commit()
    step = cache.reserve({a: [5, 6, 7]}, parents={a: [-1, 0, 0]})
    assert step.positions.host.tolist() == [6, 7, 7]
    assert step.tree.bias.host[0, 0, 2].tolist() == [0, -np.inf, 0]
    cache.keys[1].host.reshape(-1, 8)[step.slot_mapping.host] = np.arange(3)[:, None]
    cache.accept({a: [0, 2]})
    assert (cache.keys[1].host.reshape(-1, 8)[step.slot_mapping.host[:2]] == [[0], [2]]).all()
    cache.reserve({a: [9]}, out=out)
    other = cache_of()
    other.add()
    with pytest.raises(DeviceError, match="another device"):
        other.reserve({0: [1]}, out=out)


def test_slots_past_the_31st_bit():
    """Compute slots without arrays, which would take gigabytes."""
    sequences = CacheSequences(PagePool(9, 2**28), window=-1, keep_pages=0)
    handles = [sequences.add([]) for _ in range(9)]
    plan = sequences.plan({handle: [5, 6] for handle in handles})
    sequences.extend(plan, lambda source, target: None)
    assert filled(sequences, plan, None).slot_mapping[-2:].tolist() == [2**31, 2**31 + 1]
