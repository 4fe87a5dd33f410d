"""Engine with drafts: the same tokens as without drafts, in fewer passes."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest

from gpu_ops import models
from gpu_ops.errors import GpuOpsError
from gpu_ops.inference import (
    Engine,
    Sampling,
    cache_for,
    generate,
    prompt_lookup,
)
from gpu_ops.inference.requests import Sampler
from tests.inference.test_speculative import CONFIG, PROMPTS, SAMPLINGS, WEIGHTS


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
