"""Decoding on the CPU by recorded passes: the bits of passes that run as usual, in every option of a model."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, inference, models
from gpu_ops.core.allocator import use_allocator
from gpu_ops.core.defaults import use_defaults
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.inference import Engine, Sampling, cache_for, captured
from gpu_ops.inference.forward import next_logits
from gpu_ops.kernels import recording
from gpu_ops.kernels.common.cpu.replay import Replay
from gpu_ops.memory import Trace

CONFIG = models.LlamaConfig(vocab=96, hidden=64, ffn=128, nlayers=2, nheads=4, nheads_kv=2)


def model(config=CONFIG, dtype=np.float32, of=lambda name, x: x):
    arrays = {name: x.astype(dtype) for name, x in models.initial_weights(config, std=0.2).items()}
    return models.Llama.of({name: of(name, x) for name, x in arrays.items()}, config)


def packed(format, activations="native"):
    def of(name, x):
        projection = x.ndim == 2 and name != "embed"
        return gpu_ops.quantize(x, format).with_activations(activations) if projection else x

    return of


def ternary(name, x):
    return gpu_ops.ternary_quantize(x) if x.ndim == 2 and "layers" in name else x


def adapted(config=CONFIG):
    rng = np.random.default_rng(4)
    shapes = models.lora_shapes(config, 4)
    adapters = {
        name: rng.standard_normal(shape).astype(np.float32) * np.float32(0.1)
        for name, shape in shapes.items()
    }
    return models.with_lora(model(), adapters)


CASES = {
    "float32": (CONFIG, lambda: model(), {}),
    "bfloat16": (CONFIG, lambda: model(dtype=ml_dtypes.bfloat16), {}),
    "float64": (CONFIG, lambda: model(dtype=np.float64), {}),
    "packed floats": (CONFIG, lambda: models.with_packed(model(dtype=ml_dtypes.bfloat16)), {}),
    "biases, norms of heads": (
        replace(CONFIG, biases=("qkv", "o"), qk_norm=True),
        lambda: model(replace(CONFIG, biases=("qkv", "o"), qk_norm=True)),
        {},
    ),
    "a window": (
        replace(CONFIG, window=9),
        lambda: model(replace(CONFIG, window=9)),
        {"num_pages": 64},
    ),
    "post norms, a scaled table": (
        replace(CONFIG, post_norms=True, embedding_scale=1.5),
        lambda: model(replace(CONFIG, post_norms=True, embedding_scale=1.5)),
        {},
    ),
    "residual scale, a softcap": (
        replace(CONFIG, residual_scale=0.5, logits_scaling=2.0, logits_softcap=3.0),
        lambda: model(replace(CONFIG, residual_scale=0.5, logits_scaling=2.0)),
        {},
    ),
    "scaled positions": (
        replace(CONFIG, scaling=RopeScaling.yarn(4.0, 16)),
        lambda: model(replace(CONFIG, scaling=RopeScaling.yarn(4.0, 16))),
        {},
    ),
    "pages of int8": (CONFIG, lambda: model(), {"dtype": "int8"}),
    "nf4": (CONFIG, lambda: model(of=packed("nf4")), {}),
    "q8_0 in int8": (CONFIG, lambda: model(of=packed("q8_0", "int8")), {}),
    "nf4 in bfloat16": (CONFIG, lambda: model(dtype=ml_dtypes.bfloat16, of=packed("nf4")), {}),
    "ternary": (
        replace(CONFIG, sub_norms=True),
        lambda: model(replace(CONFIG, sub_norms=True), of=ternary),
        {},
    ),
    "adapters": (CONFIG, adapted, {}),
}


class Watched(Engine):
    """Engine that keeps the logits of its passes."""

    def _logits(self, step, count):
        logits = super()._logits(step, count)
        self.seen.append(np.array(logits))
        return logits


def passes(weights, config, prompts, limits, **options):
    """Logits and tokens of all passes, and the engine."""
    sizes = {"page_size": 4, "num_pages": 80, **options.pop("cache", {})}
    engine = Watched(weights, config, cache_for(weights, config, **sizes), **options)
    engine.seen = []
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        sampling = Sampling(temperature=1.0, seed=i)
        engine.submit(prompt, max_new_tokens=limit, sampling=sampling)
    tokens = [(t.request, t.token) for t in engine.run()]
    return engine.seen, tokens, engine


def repeated(engine):
    """Number of kept recordings that were compared and found equal."""
    return sum(p.replay is not None and p.tokens is None for p in engine._graphs._kept.values())


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_logits_have_the_same_bits(case):
    """One text over several sizes of its table, then three texts that end one after the other."""
    config, make, cache = CASES[case]
    weights = make()
    for prompts, limits in (([[5, 6, 7]], [40]), ([[5, 6], [9], [11, 12, 13]], [7, 22, 12])):
        options = {"cache": cache}
        right, tokens, _ = passes(weights, config, prompts, limits, capture=False, **options)
        logits, ours, engine = passes(weights, config, prompts, limits, **options)
        assert ours == tokens
        assert same(logits, right)
        assert engine._graphs._enabled
        assert repeated(engine) >= 1


def test_logits_of_many_texts_have_the_same_bits():
    prompts, limits = [[i + 1, i] for i in range(13)], [9] * 11 + [4, 6]
    weights = model(of=packed("q8_0", "int8"))
    right, tokens, _ = passes(weights, CONFIG, prompts, limits, capture=False)
    logits, ours, engine = passes(weights, CONFIG, prompts, limits)
    assert ours == tokens
    assert same(logits, right)
    assert any(
        p.replay is not None and p.tokens is None and p.cost == 11 for p in engine._graphs._kept.values()
    )


def test_a_pass_is_the_recorded_launches(monkeypatch):
    """After two passes of a size, a pass calls no op."""
    weights = model()
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=8, page_size=32))
    engine.submit(list(range(9)), max_new_tokens=7)
    for _ in range(4):
        engine.step()
    assert repeated(engine) == 1
    monkeypatch.setattr(captured, "next_logits", None)
    for _ in range(3):
        assert len(engine.step()) == 1


def test_what_is_not_recorded_is_noticed(monkeypatch):
    """An array that is converted behind the recorder's back: a warning, and the tokens of usual passes."""
    weights = model()
    _, right, _ = passes(weights, CONFIG, [[5, 6]], [12], capture=False)
    monkeypatch.setattr("gpu_ops.kernels.rows.embedding.as_int64", lambda ids: ids.astype(np.int64))
    with pytest.warns(UserWarning, match="without recordings"):
        _, tokens, engine = passes(weights, CONFIG, [[5, 6]], [12])
    assert tokens == right
    assert not engine._graphs._enabled


def test_passes_that_are_not_recorded():
    """Texts that share pages, more than 16 texts, other backends and allocators run as usual."""
    weights = model()
    cache = cache_for(weights, CONFIG, num_pages=64, page_size=4)
    recordings = captured.Recordings(weights, CONFIG, cache, 256)
    first = cache.add()
    cache.reserve({first: [1, 2, 3, 4, 5]})
    cache.commit()
    second, others = cache.fork(first), [cache.add() for _ in range(17)]
    assert recordings.step_for({first: [1]}) is not None
    assert recordings.step_for({first: [1], second: [2]}) is None
    assert recordings.step_for({first: [1, 2]}) is None
    assert recordings.step_for({handle: [1] for handle in others}) is None
    assert recordings.step_for({handle: [1] for handle in others[:16]}) is not None
    with use_defaults({"GPU_OPS_BACKEND": "reference"}):
        assert recordings.step_for({first: [1]}) is None
    with use_allocator(Trace("cpu")):
        assert recordings.step_for({first: [1]}) is None


def test_recordings_are_dropped():
    weights = model()
    cache = cache_for(weights, CONFIG, num_pages=64, page_size=4)
    recordings = captured.Recordings(weights, CONFIG, cache, 256)
    handles = [cache.add() for _ in range(16)]
    for count, length in itertools.product(range(1, 17), (1, 9)):
        assert recordings.step_for({handle: [1] for handle in handles[:count]}) is not None
        sequences = sum(len(p.step.tokens) for p in recordings._kept.values())
        assert sequences <= 64
        assert sequences > 64 - count or count < 12
        cache.reserve({handles[0]: [3] * length})
        cache.rollback()


def test_launches_of_other_threads_are_not_recorded():
    x, weight = np.ones((4, 64), np.float32), np.ones(64, np.float32)

    def other():
        gpu_ops.rmsnorm(x, weight)

    with recording.recorded() as outer:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not outer.steps
        with recording.recorded() as inner:
            y = gpu_ops.rmsnorm(x, weight)
        assert len(inner.steps) == 1
        assert not outer.steps
    gpu_ops.rmsnorm(x, weight)
    assert len(inner.steps) == 1
    x *= np.arange(64, dtype=np.float32)
    right = gpu_ops.rmsnorm(x, weight)
    assert not np.array_equal(y, right)
    Replay(inner)()
    np.testing.assert_array_equal(y, right)


def test_conversions_are_repeated():
    ids, table = np.array([1, 2], np.int32), np.arange(12, dtype=np.float32).reshape(4, 3)
    with recording.recorded() as steps:
        rows = gpu_ops.embedding(ids, table)
    ids[:] = 3, 0
    Replay(steps)()
    np.testing.assert_array_equal(rows, table[[3, 0]])


def test_a_pass_that_may_not_be_repeated(rng):
    """Long and short sequences together: which are short is known from their lengths alone."""
    weights = model()
    cache = cache_for(weights, CONFIG, num_pages=64)
    step = cache.reserve({cache.add(): list(range(40)), cache.add(): [7]})
    with recording.recorded() as steps:
        next_logits(weights, CONFIG, cache, step)
    cache.commit()
    assert "short" in steps.refused


def test_a_pass_with_other_ranks_is_not_repeated():
    with recording.recorded() as steps:
        SingleProcess().all_reduce(np.ones(3, np.float32))
    assert steps.refused == "all_reduce with other ranks"


def test_generate_takes_them():
    """``generate`` decodes by recordings, and a text does not depend on them."""
    weights = model()
    ((*text,),) = inference.generate(weights, CONFIG, [[4, 5, 6]], max_new_tokens=30)
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=8), capture=False)
    engine.submit([4, 5, 6], max_new_tokens=30)
    assert text == [token.token for token in engine.run()]
