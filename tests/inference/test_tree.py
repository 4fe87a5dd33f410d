"""Draft tokens in trees: each sees the tokens before the tree, its ancestors and itself; accepted tokens stay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops import inference, models
from gpu_ops.errors import GpuOpsError, OptionError, OutOfMemoryError, StateError
from gpu_ops.inference import PagedKVCache, cache_for, next_logits
from gpu_ops.inference.pages import PageArrays
from gpu_ops.inference.tree import depths

CONFIG = models.LlamaConfig(vocab=97, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)


def model(config=CONFIG):
    arrays = models.initial_weights(config, std=0.2)
    return models.Llama.of({name: x.astype(np.float64) for name, x in arrays.items()}, config)


WEIGHTS = model()


def dense(texts, weights=WEIGHTS, config=CONFIG):
    """Logits after each text, without a cache. All calls have the same shape: no token sees later ones."""
    ids = np.zeros((30, 36), np.int64)
    for row, text in zip(ids, texts, strict=False):
        row[: len(text)] = text
    all_logits = models.logits(ids, weights, config)
    return np.stack([all_logits[b, len(text) - 1] for b, text in enumerate(texts)])


def path_to(parents, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def random_tree(rng, count, roots=2):
    """Parents of ``count`` nodes, a few of which follow the sequence directly."""
    return [int(rng.integers(-1 if i < roots else 0, i)) if i else -1 for i in range(count)]


def read(cache, weights, config, new, **options):
    return next_logits(weights, config, cache, cache.reserve(new, **options))


class Batch:
    """Texts of these lengths in a cache, except for the last token of each."""

    def __init__(self, rng, lengths, config=CONFIG, **options):
        self.rng, self.config = rng, config
        self.weights = WEIGHTS if config is CONFIG else model(config)
        self.cache = cache_for(self.weights, config, num_pages=64, page_size=4, **options)
        self.texts = {}
        for n in lengths:
            handle, text = self.cache.add(), rng.integers(0, 97, n).tolist()
            if text:
                read(self.cache, self.weights, config, {handle: text})
                self.cache.commit()
            self.texts[handle] = text

    def run(self, parents):
        """Run random tokens with these parents, check the logits after each, and return the tokens."""
        new = {h: self.rng.integers(0, 97, len(nodes)).tolist() for h, nodes in parents.items()}
        step = self.cache.reserve(new, parents=parents)
        rows = next_logits(self.weights, self.config, self.cache, step)
        assert step.logit_rows.tolist() == list(range(len(rows)))
        paths = [(h, path_to(nodes, i)) for h, nodes in parents.items() for i in range(len(nodes))]
        texts = [self.texts[h] + [new[h][i] for i in path] for h, path in paths]
        assert step.positions.tolist() == [len(text) - 1 for text in texts]
        np.testing.assert_allclose(rows, dense(texts, self.weights, self.config), rtol=0, atol=1e-12)
        return new

    def accept(self, parents, new, ends):
        """Keep the tokens from the start of each tree to its node in ``ends``; check the next logits."""
        paths = {h: path_to(parents[h], end) for h, end in ends.items()}
        self.cache.accept(paths)
        for h, path in paths.items():
            self.texts[h] += [new[h][i] for i in path]
            assert self.cache.tokens(h) == self.texts[h]
        more = {h: [int(self.rng.integers(97))] for h in self.texts}
        rows = read(self.cache, self.weights, self.config, more)
        self.cache.rollback()
        expected = dense([text + more[h] for h, text in self.texts.items()], self.weights, self.config)
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-12)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(0, 11), min_size=1, max_size=3))
def test_random_trees_are_each_path_alone(seed, lengths):
    rng = np.random.default_rng(seed)
    batch = Batch(rng, lengths)
    for _ in range(2):
        parents = {h: random_tree(rng, int(rng.integers(1, 9))) for h in batch.texts}
        new = batch.run(parents)
        batch.accept(parents, new, {h: int(rng.integers(-1, len(nodes))) for h, nodes in parents.items()})
    for handle in batch.texts:
        batch.cache.free(handle)
    assert batch.cache.stats.used == 0


def test_a_tree_beside_a_prompt_and_a_chain(rng):
    """The prompt has one row of logits, the drafts one each; parents of a prompt are its tokens in order."""
    batch = Batch(rng, [9, 6, 0])
    tree, chain, prompt = batch.texts
    new = {tree: [1, 2, 3], chain: [4, 5], prompt: [6, 7, 8, 9, 10]}
    step = batch.cache.reserve(new, parents={tree: [-1, 0, 0], chain: range(-1, 1)})
    assert step.logit_rows.tolist() == [0, 1, 2, 3, 4, 9]
    rows = next_logits(WEIGHTS, CONFIG, batch.cache, step)
    texts = batch.texts
    expected = [
        *([*texts[tree], *path] for path in ([1], [1, 2], [1, 3])),
        *([*texts[chain], *path] for path in ([4], [4, 5])),
        new[prompt],
    ]
    np.testing.assert_allclose(rows, dense(expected), rtol=0, atol=1e-12)
    batch.cache.accept({tree: [0, 2], chain: []})
    assert batch.cache.tokens(tree) == [*texts[tree], 1, 3]
    assert batch.cache.tokens(chain) == texts[chain]
    assert batch.cache.tokens(prompt) == new[prompt]


def test_chains_pass_through_windows(rng):
    layers = (models.Layer(window=7), models.Layer(theta=None))
    batch = Batch(rng, [6], dataclasses.replace(CONFIG, layers=layers, qk_norm=True, softcap=5.0))
    for _ in range(3):
        parents = {0: range(-1, 3)}
        batch.accept(parents, batch.run(parents), {0: 2})


def test_trees_end_before_a_window_does(rng):
    """Every node sees all that is before the tree."""
    layers = (models.Layer(window=12), models.Layer(theta=None))
    batch = Batch(rng, [9], dataclasses.replace(CONFIG, layers=layers, qk_norm=True, softcap=5.0))
    parents = {0: [-1, 0, 0, 2]}
    batch.accept(parents, batch.run(parents), {0: 1})
    before = [x.copy() for x in batch.cache.keys]
    step = batch.cache.reserve({0: [1, 2, 3, 4]}, parents=parents)
    with pytest.raises(OptionError, match=r"next_logits: .* positions up to 13, beyond the window of 12"):
        next_logits(batch.weights, batch.config, batch.cache, step)
    assert all((x == y).all() for x, y in zip(before, batch.cache.keys, strict=True))


def test_a_cache_with_a_window_refuses_trees_beyond_it():
    cache = PagedKVCache(1, 1, 8, num_pages=9, page_size=2, window=4)
    a = cache.add()
    cache.reserve({a: [1, 2, 3, 4]})
    cache.commit()
    with pytest.raises(OptionError, match=r"reserve: .* positions up to 5, beyond the window of 4"):
        cache.reserve({a: [5, 6, 7]}, parents={a: [-1, 0, 0]})
    assert cache.length(a) == 4
    cache.reserve({a: [5, 6, 7]}, parents={a: [-1, 0, 1]})
    cache.accept({a: [0, 1]})
    assert cache.tokens(a) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantized_pages_take_chains(dtype):
    """Chains in quantized pages have the last logits of a prompt."""
    weights = models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)
    cache = cache_for(weights, CONFIG, num_pages=9, page_size=4, dtype=dtype)
    chain, plain = cache.add(), cache.add()
    tokens = [1, 2, 3, 4, 5]
    expected = read(cache, weights, CONFIG, {plain: tokens})[0]
    cache.rollback()
    rows = read(cache, weights, CONFIG, {chain: tokens}, parents={chain: range(-1, 4)})
    assert rows.shape == (5, 97)
    np.testing.assert_allclose(rows[-1], expected, rtol=0, atol=1e-5)
    cache.accept({chain: range(3)})
    assert cache.tokens(chain) == tokens[:3]


def test_a_branch_does_not_see_its_siblings_nor_what_they_wrote(rng):
    """NaN in the keys of one branch reaches only its descendants."""
    batch = Batch(rng, [6])
    new = {0: [1, 2, 3, 4]}
    step = batch.cache.reserve(new, parents={0: [-1, 0, 0, 1]})
    weights = model()
    weights.embed[2] = np.nan
    rows = next_logits(weights, CONFIG, batch.cache, step)
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, False, True]
    assert np.isfinite(rows[[0, 2]]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_rows_move_in_every_dtype(dtype):
    """Rows move from slots that other rows move to, across the end of a page, in all layers."""
    cache = PagedKVCache(3, 1, 3, num_pages=9, page_size=3, dtype=dtype)
    a = cache.add()
    cache.reserve({a: [9, 9]})
    cache.commit()
    parents = [-1, 0, 0, 2, 3, 4, 3]
    step = cache.reserve({a: list(range(7))}, parents={a: parents})
    for layer in range(3):
        for sign, pages in ((1, cache.keys[layer]), (-1, cache.values[layer])):
            pages.reshape(-1, 3)[step.slot_mapping] = (
                sign * (layer * 10 + np.arange(7))[:, None] + np.arange(3) / 4
            )
    cache.accept({a: [0, 2, 3, 6]})
    slots = cache.reserve({a: [1]}).block_table[0, np.arange(2, 6) // 3] * 3 + np.arange(2, 6) % 3
    for layer in range(3):
        for sign, pages in ((1, cache.keys[layer]), (-1, cache.values[layer])):
            expected = sign * (layer * 10 + np.array([0, 2, 3, 6]))[:, None] + np.arange(3) / 4
            assert (pages.reshape(-1, 3)[slots] == expected).all()


def test_a_move_that_fails_leaves_the_step_open(monkeypatch):
    cache = PagedKVCache(1, 1, 8, num_pages=3)
    a = cache.add()
    cache.reserve({a: [1, 2, 3]}, parents={a: [-1, 0, 0]})

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PageArrays, "move", fail)
        with pytest.raises(OutOfMemoryError):
            cache.accept({a: [0, 2]})
    assert cache.tokens(a) == [1, 2, 3]
    cache.accept({a: [0, 2]})
    assert cache.tokens(a) == [1, 3]


def test_accepted_pages_are_found_by_their_own_tokens():
    cache = PagedKVCache(1, 1, 8, num_pages=9, page_size=2)
    a = cache.add()
    cache.reserve({a: [1, 2, 3, 4, 5]}, parents={a: [-1, 0, 0, 2, 2]})
    cache.accept({a: [0, 2, 4]})
    assert cache.length(cache.add([1, 3, 5, 6, 7])) == 2
    assert cache.length(cache.add([1, 2, 3, 4, 5])) == 0


def test_depths():
    assert depths([-1, -1, 0, 2, 1, 3]) == [0, 0, 1, 2, 1, 3]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1]], "parents is list; pass a dict"),
        ({7: [-1]}, "parents has sequence 7, which gets no tokens"),
        ({0: [-1]}, r"parents\[0\] has 1 entries for 3 tokens"),
        ({0: [-1, 0, 2]}, r"parents\[0\]\[2\] is 2; the parent of token 2"),
        ({0: [-1, -2, 0]}, r"parents\[0\]\[1\] is -2"),
        ({0: [0, 0, 0]}, r"parents\[0\]\[0\] is 0"),
        ({0: [-1, 0.5, 0]}, r"parents\[0\]\[1\] must be an integer"),
        ({0: "abc"}, r"parents\[0\] is str, expected integers"),
        ({0: 3}, r"parents\[0\] is int, expected integers"),
    ],
)
def test_parents_that_are_refused(parents, message):
    cache = PagedKVCache(1, 1, 8, num_pages=3)
    handle = cache.add()
    with pytest.raises(GpuOpsError, match=message):
        cache.reserve({handle: [1, 2, 3]}, parents=parents)
    assert cache.stats.used == 0
    out = cache.empty_step(tokens=3, batch=1)
    with pytest.raises(OptionError, match="no place for parents"):
        cache.reserve({handle: [1, 2, 3]}, parents={handle: [-1, 0, 0]}, out=out)
    cache.reserve({handle: [1]})
    cache.commit()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0]], "paths is list; pass a dict"),
        ({}, r"for the sequences \[\], and the open step has parents for \[0\]"),
        ({0: [0], 1: [0]}, r"for the sequences \[0, 1\]"),
        ({0: [1]}, r"paths\[0\]\[0\] is 1, whose parent is 0 and not -1"),
        ({0: [0, 3]}, r"paths\[0\]\[1\] is 3, not in \[0, 3\)"),
        ({0: [0, -1]}, r"paths\[0\]\[1\] is -1, not in"),
        ({0: [0, 0]}, r"paths\[0\]\[1\] is 0, whose parent is -1 and not 0"),
        ({0: [0, 1, 2]}, r"paths\[0\]\[2\] is 2, whose parent is 0 and not 1"),
    ],
)
def test_paths_that_are_refused(paths, message):
    cache = PagedKVCache(1, 1, 8, num_pages=3)
    handles = [cache.add(), cache.add()]
    with pytest.raises(StateError, match="no step is open"):
        cache.accept({})
    cache.reserve({handles[0]: [1, 2, 3], handles[1]: [4]}, parents={handles[0]: np.array([-1, 0, 0])})
    with pytest.raises(OptionError, match=message):
        cache.accept(paths)
    with pytest.raises(StateError, match="accept"):
        cache.commit()
    cache.accept({handles[0]: [0, 1]})
    assert [cache.tokens(h) for h in handles] == [[1, 2], [4]]
    cache.reserve({handles[0]: [7]}, parents={})
    cache.commit()


def test_names_are_public():
    assert {"attend", "probabilities", "prompt_lookup", "verify"} <= set(inference.__all__)
