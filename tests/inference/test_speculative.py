"""Speculative decoding: the same tokens as without drafts, or tokens sampled from the same distribution."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import models
from gpu_ops.errors import GpuOpsError, OptionError
from gpu_ops.inference import (
    Engine,
    Sampling,
    cache_for,
    generate,
    next_logits,
    probabilities,
    prompt_lookup,
    speculative,
    verify,
)
from gpu_ops.inference.requests import Sampler

CONFIG = models.LlamaConfig(vocab=97, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)
WEIGHTS = models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [27, 18, 28]]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=4),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=9),
    Sampling(temperature=0.0, presence_penalty=0.4),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_tree_gives_the_tokens_without_one(sampling):
    """Trees that contain the right token give the tokens of one-by-one decoding, in fewer rounds."""
    prompt, number = PROMPTS[0], SAMPLINGS.index(sampling)
    expected = generate(WEIGHTS, CONFIG, [prompt], max_new_tokens=20, sampling=sampling)[0]
    cache = cache_for(WEIGHTS, CONFIG, num_pages=16, page_size=4)
    handle, rounds, rng = cache.add(), 0, np.random.default_rng(number)
    first = next_logits(WEIGHTS, CONFIG, cache, cache.reserve({handle: prompt[:-1]}))
    assert first.shape == (1, 97)
    cache.commit()
    text = list(prompt)
    while len(text) < len(prompt) + 20:
        done = len(text) - len(prompt)
        tokens, parents, last = [text[-1]], [-1], 0
        for i in range(3):  # a wrong and the right child of each right node
            right = expected[min(done + i, 19)]
            for token in rng.permutation([right, (right + 1) % 97]).tolist():
                tokens.append(token)
                parents.append(last)
            last = len(tokens) - 2 + (tokens[-1] == right)
        logits = next_logits(
            WEIGHTS, CONFIG, cache, cache.reserve({handle: tokens}, parents={handle: parents})
        )
        counts = np.bincount(text[len(prompt) :], minlength=97)
        counts[[t for t in prompt if not counts[t]]] = -1
        path, token = verify(logits, tokens, parents, sampling=sampling, step=done, counts=counts)
        cache.accept({handle: path})
        text += [tokens[node] for node in path[1:]] + [token]
        rounds += 1
        assert cache.tokens(handle) == text[:-1]
    assert text[len(prompt) :][:20] == expected
    assert rounds == 5


def chi_square(counts, p):
    """Chi-square over its 99.99 % bound, for tokens with p > 0; check that no others were drawn."""
    counts, p = np.ravel(counts), np.ravel(p)
    assert not counts[p == 0].any()
    counts, p = counts[p > 0], p[p > 0]
    expected = p * counts.sum()
    degrees = len(p) - 1
    # Wilson and Hilferty's approximation of the bound
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3
    return ((counts - expected) ** 2 / expected).sum() / bound


def drawn_without_replacement(rng, q, count):
    return rng.choice(len(q), count, replace=False, p=q).tolist()


PLAIN, FILTERED = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3, top_p=0.9)
MANY = [(PLAIN, 0), (PLAIN, 2), (PLAIN, 4), (FILTERED, 1), (FILTERED, 3)]


@pytest.mark.parametrize(
    ("sampling", "children"),
    [(PLAIN, 1), (FILTERED, 2), *(pytest.param(*seeded, marks=pytest.mark.slow) for seeded in MANY)],
)
def test_two_tokens_have_the_models_distribution(sampling, children):
    """Trees of two levels have drafts from another distribution; the second token depends on the first."""
    vocab, runs = 4, 1500
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1.2, (vocab + 1, vocab))  # of the root, and after each token
    p = probabilities(logits, sampling)
    q = rng.dirichlet(np.ones(vocab), vocab + 1)
    counts = np.zeros((vocab, vocab))
    for run in range(runs):
        tokens, parents = [0], [-1]
        for parent in range(1 + children):
            after = 0 if parent == 0 else 1 + tokens[parent]
            tokens += drawn_without_replacement(rng, q[after], children)
            parents += [parent] * children
        after = [0, *(1 + token for token in tokens[1:])]
        seeded = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=run)
        path, token = verify(logits[after], tokens, parents, sampling=seeded, draft_probs=q[after])
        text = [tokens[node] for node in path[1:]] + [token]
        if len(text) == 1:  # the next round's first token
            (_, token) = verify(logits[[1 + token]], [token], [-1], sampling=seeded, step=1)
            text.append(token)
        counts[tuple(text[:2])] += 1
    assert chi_square(counts, p[0][:, None] * p[1:]) < 1


def test_every_threshold_is_that_of_the_formula(rng, monkeypatch):
    """Check just below and above the threshold of three successive drafts, and of the token if none is accepted."""
    numbers, gap = [0.0] * 4, 1e-9
    monkeypatch.setattr(speculative, "_number", lambda row, i: numbers[i])

    def first(place, number):
        """Second node of the path, and the token, for this number at ``place`` and rejecting numbers before it."""
        numbers[:] = [1.0] * place + [number] + [0.0] * (3 - place)
        path, token = verify(logits, tokens, [-1, 0, 0, 0], sampling=PLAIN, draft_probs=draft)
        return [*path, 0][1], token

    rejected = 0
    for _ in range(40):
        logits, draft = rng.normal(0, 1, (4, 6)), rng.dirichlet(np.ones(6), 4)
        tokens = [0, *drawn_without_replacement(rng, draft[0], 3)]
        p, q = probabilities(logits[0], PLAIN), draft[0].copy()
        for place, token in enumerate(tokens[1:]):
            threshold = p[token] / q[token]
            if threshold >= 1:
                break
            assert first(place, threshold - gap)[0] == place + 1
            assert first(place, threshold + gap)[0] != place + 1
            p = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
            q = np.where(np.arange(6) == token, 0, q) / (1 - q[token])
        else:
            rejected += 1
            for token, edge in enumerate(np.cumsum(p)[:-1]):
                if p[token]:
                    assert first(3, edge - gap) == (0, token)
                assert first(3, edge + gap)[1] > token
    assert rejected > 3


def test_drafts_of_the_model_itself_are_all_accepted():
    logits = np.random.default_rng(0).normal(size=(3, 8))
    sampling = Sampling(temperature=0.8, seed=5)
    p = probabilities(logits, sampling)
    tokens = [0, int(p[0].argmin()), int(p[1].argmin())]
    assert verify(logits, tokens, [-1, 0, 1], sampling=sampling, draft_probs=p)[0] == [0, 1, 2]


def test_acceptance_is_as_often_as_possible():
    """The acceptance rate of one draft is sum(min(p, q))."""
    rng, runs = np.random.default_rng(2), 1500
    logits, q = rng.normal(size=(2, 6)), rng.dirichlet(np.ones(6), 2)
    p = probabilities(logits, Sampling(temperature=1.0))[0]
    accepted = 0
    for run in range(runs):
        tokens = [0, *drawn_without_replacement(rng, q[0], 1)]
        sampling = Sampling(temperature=1.0, seed=run)
        accepted += len(verify(logits, tokens, [-1, 0], sampling=sampling, draft_probs=q)[0]) - 1
    rate = np.minimum(p, q[0]).sum()
    assert abs(accepted / runs - rate) < 4 * np.sqrt(rate * (1 - rate) / runs)


@pytest.mark.parametrize("draft_probs", [None, np.full((3, 4), 0.25)])
def test_logits_that_are_not_finite(draft_probs):
    logits = np.zeros((3, 4), np.float32)
    logits[1] = np.nan
    logits[0, 2] = 99
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        result = verify(logits, [0, 2, 1], [-1, 0, 1], sampling=sampling, draft_probs=draft_probs)
        assert result == ([0, 1], -1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_probabilities_are_what_sample_draws_from(dtype):
    logits = np.random.default_rng(4).normal(0, 2, 7).astype(dtype)
    counts = np.array([2, 0, 1, 0, -1, 3, 0], np.int32)
    options = {
        "temperature": 0.8,
        "top_p": 0.95,
        "min_p": 0.02,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
    }
    p = probabilities(logits, Sampling(**options), counts)
    assert p.sum() == pytest.approx(1)
    rows = np.broadcast_to(logits, (4000, 7))
    tokens = gpu_ops.sample(rows, **options, counts=np.broadcast_to(counts, rows.shape), seed=1)
    assert chi_square(np.bincount(tokens, minlength=7), p) < 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.zeros((2, 4)), [1, 2, 3], [-1, 0, 0]), {}, r"shape \(2, 4\), expected \(nodes, vocab\) for 3"),
        ((np.zeros(4), [1], [-1]), {}, "expected .nodes, vocab."),
        ((np.zeros((0, 4)), [], []), {}, "for 0 tokens"),
        ((np.zeros((2, 4)), [1, 4], [-1, 0]), {}, r"a token is 4, not in \[0, 4\)"),
        ((np.zeros((2, 4)), [1, 2], [-1, -1]), {}, r"verify: parents\[1\] is -1; all nodes"),
        ((np.zeros((2, 4)), [1, 2], [-1, 1]), {}, r"verify: parents\[1\] is 1; the parent"),
        ((np.zeros((1, 4)), [1], [-1]), {"step": -1}, "step must"),
        ((np.zeros((1, 4)), [1], [-1]), {"sampling": SAMPLINGS[3]}, "penalties need counts="),
        ((np.zeros((1, 4), int), [1], [-1]), {}, "logits"),
    ],
)
def test_verify_refuses(arguments, options, message):
    with pytest.raises(GpuOpsError, match=message):
        verify(*arguments, **options)


@pytest.mark.parametrize(
    ("tokens", "probs", "message"),
    [
        ([1, 2, 2], np.full((3, 4), 0.25), "two children of node 0 have one token"),
        ([1, 2, 3], np.full((2, 4), 0.25), r"draft_probs have shape \(2, 4\), expected \(3, 4\)"),
        ([1, 2, 3], np.eye(4)[[2, 0, 0]], r"draft_probs\[0\] are no probabilities"),
        ([1, 2, 3], np.full((3, 4), np.nan), r"draft_probs\[0\] are no probabilities"),
    ],
)
def test_draft_probabilities_that_are_refused(tokens, probs, message):
    with pytest.raises(GpuOpsError, match=message):
        verify(np.zeros((3, 4)), tokens, [-1, 0, 0], sampling=Sampling(temperature=1.0), draft_probs=probs)


@settings(max_examples=200)
@given(tokens=st.lists(st.integers(0, 2), max_size=30), ngram=st.integers(1, 4), most=st.integers(1, 5))
def test_lookup_is_what_followed_the_longest_match(tokens, ngram, most):
    result = prompt_lookup(tokens, ngram=ngram, most=most)
    expected = []
    for n in range(ngram, 0, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]]
        if ends:
            whole = [e for e in ends if e + most <= len(tokens)]
            expected = tokens[(end := whole[-1] if whole else ends[0]) : end + most]
            break
    assert result == expected
    assert all(type(token) is int for token in result)


@pytest.mark.parametrize("options", [{"ngram": 0}, {"most": 0}, {"ngram": 1.5}])
def test_lookup_refuses(options):
    with pytest.raises(OptionError, match="prompt_lookup: "):
        prompt_lookup([1, 2], **options)


# Engine with drafts: the same tokens as without drafts, in fewer passes.


@functools.cache
def plain():
    return generate(WEIGHTS, CONFIG, PROMPTS, max_new_tokens=24, sampling=SAMPLINGS)


def oracle(tokens, wrong=lambda n: False):
    """Draft of the next tokens; those at indices ``wrong`` differ."""
    for prompt, text in zip(PROMPTS, plain(), strict=True):
        if tokens[: len(prompt)] == prompt:
            at = len(tokens) - len(prompt)
            return [(t + wrong(at + i)) % 97 for i, t in enumerate(text[at : at + 6])]
    return []


DRAFTS = {
    "right": oracle,
    "every third wrong": functools.partial(oracle, wrong=lambda n: n % 3 == 0),
    "all wrong": functools.partial(oracle, wrong=lambda n: True),
    "by lookup": functools.partial(prompt_lookup, ngram=2, most=3),
    "none": lambda tokens: [],
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_are_those_without_drafts(draft):
    """Texts are equal, greedy and sampled, with filters and penalties, whatever the drafts."""
    texts = generate(WEIGHTS, CONFIG, PROMPTS, max_new_tokens=24, sampling=SAMPLINGS, draft=DRAFTS[draft])
    assert texts == plain()


@pytest.mark.parametrize("draft", [None, lambda tokens: tokens[:3]], ids=["alone", "draft"])
def test_the_prompt_counts_for_the_repetition_penalty_alone(draft):
    """The other penalties are for tokens that were drawn, as in the OpenAI API."""
    prompt = list(range(96))
    z = models.logits(np.array([prompt]), WEIGHTS, CONFIG)[0, -1]
    repeated = np.append(np.where(z < 0, z * 1e3, z / 1e3)[:96], z[96])
    for name, first in (("presence", z), ("frequency", z), ("repetition", repeated)):
        sampling = Sampling(**{f"{name}_penalty": 1e3})
        text = generate(WEIGHTS, CONFIG, [prompt], max_new_tokens=9, sampling=sampling, draft=draft)[0]
        assert text[0] == first.argmax()
        assert len(set(text)) == 9 or name == "repetition"


@pytest.mark.parametrize("options", [{}, {"max_tokens": 5}, {"num_pages": 11}, {"max_requests": 2}], ids=str)
def test_drafts_take_what_room_there_is(options):
    """Drafts use spare room of a pass and of the cache: no request waits or is preempted for them."""
    pages = options.pop("num_pages", 64)

    def run(draft):
        engine = Engine(
            WEIGHTS, CONFIG, cache_for(WEIGHTS, CONFIG, num_pages=pages, page_size=4), draft=draft, **options
        )
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
            engine.submit(prompt, max_new_tokens=24, sampling=sampling)
        texts, passes = [[] for _ in PROMPTS], 0
        while engine.unfinished:
            passes += 1
            for token in engine.step():
                texts[token.request].append(token.token)
        assert texts == plain()
        assert engine.cache.stats.used == 0
        return engine, passes

    alone, without = run(None)
    engine, passes = run(oracle)
    assert passes < without
    assert 0 < engine.accepted == engine.drafted
    engine, passes = run(DRAFTS["all wrong"])
    assert engine.accepted == 0 < engine.drafted
    assert (passes, engine.cache.stats.tokens_added) == (without, alone.cache.stats.tokens_added)


def test_a_right_draft_takes_a_pass_for_all_its_tokens():
    """No draft runs beyond the end of the text."""
    cache = cache_for(WEIGHTS, CONFIG, num_pages=64)
    engine = Engine(WEIGHTS, CONFIG, cache, draft=lambda tokens: (oracle(tokens) + [0] * 6)[:6])
    engine.submit(PROMPTS[0], max_new_tokens=24)
    counts = []
    while engine.unfinished:
        counts.append(len(engine.step()))
    assert counts == [1, 7, 7, 7, 2]
    assert engine.drafted == 6 + 6 + 6 + 1


def test_a_stop_token_among_the_guesses_ends_the_text():
    text = plain()[0]
    stop = next(t for i, t in enumerate(text) if i > 3 and t not in text[:i])
    engine = Engine(WEIGHTS, CONFIG, cache_for(WEIGHTS, CONFIG, num_pages=64), draft=oracle)
    engine.submit(PROMPTS[0], max_new_tokens=24, stop=[stop])
    tokens = list(engine.run())
    assert [t.token for t in tokens] == text[: text.index(stop) + 1]
    assert [t.finished for t in tokens if t.finished] == ["stop"]
    assert engine.cache.stats.used == 0


def test_a_pass_with_drafts_that_fails_runs_again(monkeypatch):
    whole, calls = Sampler.__call__, []

    def failing(*args):
        calls.append(args)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(Sampler, "__call__", failing)
    engine = Engine(WEIGHTS, CONFIG, cache_for(WEIGHTS, CONFIG, num_pages=64), draft=oracle)
    engine.submit(PROMPTS[0], max_new_tokens=24)
    text = []
    while engine.unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            text += [token.token for token in engine.step()]
    assert text == plain()[0]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("abc", "draft must be a function, got str"),
        (lambda tokens: [97], r"Engine: draft guessed 97, not in \[0, 97\)"),
        (lambda tokens: [0.5], "Engine: draft: token ids are float64"),
        (lambda tokens: [[1]], "Engine: draft: token ids have shape"),
        (lambda tokens: [-1], "Engine: draft: token ids lie in"),
    ],
)
def test_drafts_that_are_refused(draft, message):
    with pytest.raises(GpuOpsError, match=message):
        generate(WEIGHTS, CONFIG, [[1, 2]], max_new_tokens=3, draft=draft)
