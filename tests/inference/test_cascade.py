"""Pages of common prefixes are read once for all sequences: groups of sequences, and the same attention."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import inference, models
from gpu_ops.inference import PagedKVCache, attend, cache_for, captured, next_logits
from gpu_ops.inference import step as step_module
from gpu_ops.reference.attention.forward import attention
from tests.support.compare import assert_close, random
from tests.support.compilers import needs_numba_cuda, needs_nvrtc

CONFIG = models.LlamaConfig(vocab=97, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)
# prefixes of two groups, with four and seven whole pages of 4
PREFIX = [
    list(range(1, 18)),
    list(range(30, 60)),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lower the limits: three sequences with 8 common tokens are a group."""
    monkeypatch.setattr(step_module, "MIN_SEQUENCES", 3)
    monkeypatch.setattr(step_module, "MIN_TOKENS", 8)


def without(step):
    return dataclasses.replace(step, cascade=None)


class Forks:
    """Sequences of a few prefixes, each followed by 0 to 5 separate tokens, in a cache whose tokens are keys."""

    def __init__(self, cache, prefixes, counts, prefill):
        rng, self.handles, self.cache = np.random.default_rng(3), [], cache
        for prefix, count in zip(prefixes, counts, strict=True):
            first = cache.add()
            prefill(cache.reserve({first: prefix}))
            self.handles.append([first] + [cache.fork(first) for _ in range(count - 1)])
        suffixes = {
            h: rng.integers(0, 50, n % 6).tolist() for n, h in enumerate(itertools.chain(*self.handles))
        }
        prefill(cache.reserve({h: tokens for h, tokens in suffixes.items() if tokens}))


def forks(cache, prefixes, counts):
    def prefill(step):
        cache.commit()

    return Forks(cache, prefixes, counts, prefill).handles


def test_groups_of_a_step():
    """Neighbours that share enough tokens: two groups, a sequence between them, and a group that is too small."""
    cache = PagedKVCache(1, 1, 8, num_pages=99, page_size=4)
    a, b, c, d = forks(cache, [*PREFIX, [7] * 9, [8] * 20], [4, 3, 1, 2])
    step = cache.reserve({h: [1] * (1 + h % 2) for h in [*a, *c, *b, *d]})
    groups = step.cascade
    ends = np.cumsum([1 + h % 2 for h in [*a, *c, *b, *d]])
    assert groups.cu_seqlens_q.tolist() == [0, ends[3], ends[4], ends[7], ends[9]]
    assert groups.seqused_k.tolist() == [16, 0, 28, 0]
    assert groups.max_seqlen_q == ends[3]
    shared = np.repeat([4, 0, 7, 0], [4, 1, 3, 2])
    for row, n in enumerate(shared):
        group = np.repeat([0, 1, 2, 3], [4, 1, 3, 2])[row]
        pages = [*groups.block_table[group, :n], *groups.own_block_table[row]]
        used = step.block_table[row][step.block_table[row] >= 0].tolist()
        assert pages[: len(used)] == used
        assert set(pages[len(used) :]) <= {-1}
    assert (groups.own_seqused_k == step.seqused_k - shared * 4).all()
    cache.rollback()
    interleaved = [h for pair in itertools.zip_longest(a, b) for h in pair if h is not None]
    assert cache.reserve({h: [1] for h in interleaved}).cascade is None


@pytest.mark.parametrize(
    ("new", "options"),
    [
        ({0: [1], 1: [1]}, {}),  # two sequences
        ({0: [1], 1: [1], 2: [1] * 33}, {}),  # a prompt
        ({0: [1], 1: [1], 2: [1, 2]}, {"parents": {2: [-1, -1]}}),  # a tree
    ],
)
def test_steps_without_groups(new, options):
    cache = PagedKVCache(1, 1, 8, num_pages=99, page_size=4)
    forks(cache, [PREFIX[0]], [4])
    assert cache.reserve({0: [1], 1: [1], 2: [1] * 32}).cascade is not None
    cache.rollback()
    assert cache.reserve(new, **options).cascade is None
    cache.rollback()
    out = cache.empty_step(tokens=8, batch=8)
    assert cache.reserve({0: [1], 1: [1], 2: [1]}, out=out).cascade is None


def test_what_is_shared_has_to_be_long_enough(monkeypatch):
    cache = PagedKVCache(1, 1, 8, num_pages=99, page_size=4)
    forks(cache, [PREFIX[0]], [4])
    for least, shared in ((16, [16]), (17, None)):
        monkeypatch.setattr(step_module, "MIN_TOKENS", least)
        groups = cache.reserve({h: [1] for h in range(4)}).cascade
        assert (groups and groups.seqused_k.tolist()) == shared
        cache.rollback()


def test_a_group_shares_what_all_of_it_has():
    """A group shares three pages, though some neighbours share five."""
    cache = PagedKVCache(1, 1, 8, num_pages=99, page_size=4)
    a = cache.add()
    cache.reserve({a: [1] * 12})
    cache.commit()
    b = cache.fork(a)
    cache.reserve({b: [2] * 8})
    cache.commit()
    step = cache.reserve({h: [3] for h in (b, cache.fork(b), a)})
    assert step.cascade.seqused_k.tolist() == [12]
    assert step.cascade.own_seqused_k.tolist() == [9, 9, 1]


def test_a_window_has_no_shared_pages():
    cache = PagedKVCache(1, 1, 8, num_pages=99, page_size=4, window=64)
    forks(cache, [PREFIX[0]], [4])
    assert cache.reserve({h: [1] for h in range(4)}).cascade is None


@pytest.mark.parametrize("layers", [(), (models.Layer(window=6), models.Layer())], ids=["all", "a window"])
def test_logits_are_those_without(layers):
    """Single tokens, parts of prompts and chains of drafts, in two groups and one sequence alone."""
    config = dataclasses.replace(CONFIG, layers=layers, softcap=5.0)
    arrays = models.initial_weights(config, std=0.2)
    weights = models.Llama.of({n: x.astype(np.float64) for n, x in arrays.items()}, config)
    cache = cache_for(weights, config, num_pages=99, page_size=4)

    def prefill(step):
        next_logits(weights, config, cache, step)
        cache.commit()

    a, b, c = Forks(cache, [*PREFIX, [7] * 9], [4, 3, 1], prefill).handles
    new = {h: [h, 2, 5][: 1 + h % 3] for h in [*a, *b, *c]}
    for _ in range(3):
        step = cache.reserve(new, parents={a[1]: range(-1, len(new[a[1]]) - 1)})
        assert step.cascade is not None
        actual = next_logits(weights, config, cache, step)
        expected = next_logits(weights, config, cache, without(step))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
        cache.accept({a[1]: range(len(new[a[1]]))})


def written(device, dtype, rng):
    """Cache of one layer with random keys and values, and forks of two prefixes in it."""
    cache = PagedKVCache(1, 2, 16, num_pages=64, page_size=4, dtype=dtype, device=device)
    for x in (*cache.keys, *cache.values):
        x[...] = random(rng, x.shape, x.dtype)
    return cache, list(itertools.chain(*forks(cache, PREFIX, [3, 4])))


def exact(q, cache, step, sees, options):
    """Attention of each token to the keys that it sees, in float64 and step by step in its dtype."""
    results = []
    for precision in ("float64", "naive"):
        rows = []
        for row, slots in zip(q, sees, strict=True):
            k, v = (x.reshape(-1, *x.shape[2:])[slots][None] for x in (cache.keys[0], cache.values[0]))
            rows.append(attention(row[None, None], k, v, precision=precision, **options))
        results.append(np.concatenate(rows)[:, 0])
    return results


def slots_of(cache, step, parents):
    """Slots that each token of a step sees."""
    slots, size = [], cache.page_size
    for b, (start, end) in enumerate(itertools.pairwise(step.cu_seqlens_q)):
        step_parents = parents.get(b, range(-1, end - start - 1))
        before = np.arange(step.seqused_k[b] - (end - start))
        before = step.block_table[b, before // size] * size + before % size
        paths = []
        for i, parent in enumerate(step_parents):
            paths.append([*(paths[parent] if parent >= 0 else []), step.slot_mapping[start + i]])
        slots += [np.array([*before, *path], np.int64) for path in paths]
    return slots


BACKENDS = [
    ("cpu", None, np.float32),
    ("cpu", None, ml_dtypes.bfloat16),
    ("cpu", None, np.float64),
    ("cpu", "reference", np.float32),
    pytest.param("emulator", "raw", np.float16, marks=needs_nvrtc),
    pytest.param("emulator", "numba", np.float32, marks=[needs_numba_cuda, pytest.mark.slow]),
]


@pytest.mark.parametrize(("device", "kernels", "dtype"), BACKENDS)
@pytest.mark.parametrize("kind", ["cascade", "tree"])
def test_attention_is_that_of_the_keys_seen(kind, device, kernels, dtype, rng, monkeypatch):
    """Options must reach both parts, and sinks count in one of them."""
    monkeypatch.setenv("GPU_OPS_DEVICE", device)
    if kernels:
        monkeypatch.setenv("GPU_OPS_BACKEND", kernels)
    cache, handles = written(device, np.dtype(dtype), rng)
    parents = {h: [-1, 0, 0, 1][: 1 + h % 4] for h in handles} if kind == "tree" else None
    new = {h: [1] * (1 + h % 4) for h in handles}
    step = cache.reserve(new, parents=parents)
    assert (step.tree is not None, step.cascade is not None) == (kind == "tree", kind == "cascade")
    q = random(rng, (len(step.tokens), 4, 16), dtype)
    options = {"softcap": 3.0, "softmax_scale": 0.4, "sinks": rng.standard_normal(4).astype(np.float32)}
    actual = attend(q, cache.keys[0], cache.values[0], step, **options)
    by_row = {b: parents[h] for b, h in enumerate(handles)} if parents else {}
    expected, naive = exact(q, cache, step, slots_of(cache, step, by_row), options)
    assert actual.dtype == q.dtype
    if dtype == np.float64:  # the parts are rounded too
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-14)
    else:
        assert_close(actual, expected, naive, dtype)


def test_an_engine_puts_equal_prompts_side_by_side(monkeypatch):
    """Alternating requests with two cached prompts form two groups in each pass."""
    monkeypatch.setattr(inference.engine, "MIN_TOKENS", 8)
    arrays = models.initial_weights(CONFIG, std=0.2)
    weights = models.Llama.of(arrays, CONFIG)
    steps, whole = [], captured.next_logits

    def seen(weights, config, cache, step, **options):
        steps.append(step)
        return whole(weights, config, cache, step, **options)

    monkeypatch.setattr(captured, "next_logits", seen)
    prompts = [PREFIX[n % 2] + [n] for n in range(8)]
    engine = inference.Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=99, page_size=4))
    for prompt in PREFIX:
        engine.submit(prompt, max_new_tokens=1)
    list(engine.run())
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=5)
    texts = {}
    for token in engine.run():
        texts.setdefault(token.request - 2, []).append(token.token)
    assert list(texts) == list(range(8))
    assert [sorted(step.cascade.seqused_k.tolist()) for step in steps[1:]] == [[16, 28]] * 5
    monkeypatch.setattr(step_module, "MIN_SEQUENCES", 99)
    assert list(texts.values()) == inference.generate(weights, CONFIG, prompts, max_new_tokens=5)


def test_a_cache_of_several_models_shares_no_prefix_among_them():
    """Prefixes differ by weights, by a rotation for another length, and by weights changed in place."""
    scaling = gpu_ops.RopeScaling.dynamic(4.0, 16)
    stretched = dataclasses.replace(CONFIG, scaling=scaling)
    model_a, model_b = (
        models.Llama.of(models.initial_weights(CONFIG, seed=i, std=0.3), CONFIG) for i in range(2)
    )
    cache, prompt = cache_for(model_a, CONFIG, num_pages=40, page_size=4), PREFIX[0]

    def hits(weights, config, new=4):
        before = cache.stats.tokens_hit
        texts = inference.generate(weights, config, [prompt], max_new_tokens=new, cache=cache)
        assert texts == inference.generate(weights, config, [prompt], max_new_tokens=new)
        return cache.stats.tokens_hit - before

    calls = [
        (model_a, CONFIG),
        (model_a, CONFIG),
        (model_b, CONFIG),
        (model_a, CONFIG),
        (model_a, stretched),
        (model_a, stretched, 9),
    ]
    assert [hits(*call) for call in calls] == [0, 16, 0, 0, 0, 0]
    model_a.layers[0].qkv[:] = model_b.layers[0].qkv
    cache.drop_prefixes()
    assert hits(model_a, stretched, 9) == 0
