"""Decoding by CUDA graphs, on the fake CuPy (fake_cupy.py): one graph for each size, and the same tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gpu_ops import models
from gpu_ops.errors import OptionError
from gpu_ops.inference import Engine, Sampling, cache_for, captured
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

CONFIG = models.LlamaConfig(vocab=48, hidden=32, ffn=48, nlayers=2, nheads=2, nheads_kv=1)


def model(config=CONFIG, of=lambda x: x):
    arrays = models.initial_weights(config, std=0.2)
    return models.Llama.of({name: of(x) for name, x in arrays.items()}, config)


def tokens_of(engine, prompts, most):
    """Tokens by request; those of the second request are sampled."""
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, max_new_tokens=most[i], sampling=Sampling(temperature=float(i == 1), seed=3))
    texts = [[] for _ in prompts]
    for token in engine.run():
        texts[token.request].append(token.token)
    return texts


def engine_of(weights, config=CONFIG, **options):
    return Engine(weights, config, cache_for(weights, config, num_pages=16, page_size=4), **options)


@needs_nvrtc
def test_a_pass_of_single_tokens_replays_the_graph_of_its_size(cupy):
    prompts, limits = [[5, 6, 7], [9], [11, 12]], [7, 4, 6]
    expected = tokens_of(engine_of(model()), prompts, limits)
    engine = engine_of(model(of=FakeArray))
    launched, passes = [], []
    reserve = engine.cache.reserve

    def counted(parts, *, out=None):
        passes.append([len(part) for part in parts.values()])
        launched.append((len(cupy.launched), len(cupy.graphs)))
        return reserve(parts, out=out)

    engine.cache.reserve = counted
    assert tokens_of(engine, prompts, limits) == expected
    # three sequences in a graph of four, then two, then one; each with tables of one, two and four pages
    sizes = engine._graphs._kept
    assert {batch for batch, _ in sizes} == {4, 2, 1}
    decodes = [p for p in passes if max(p) == 1]
    assert len(cupy.graphs) == len(decodes) - len(sizes) > 0
    assert len(set(map(id, cupy.graphs))) <= len(sizes)
    launched.append((len(cupy.launched), len(cupy.graphs)))
    replayed = [
        after[0] - before[0] for before, after in itertools.pairwise(launched) if after[1] > before[1]
    ]
    assert len(replayed) == len(cupy.graphs)
    assert max(replayed) <= 2  # in addition to the graph: the kernels that draw


@needs_nvrtc
def test_without_capture_and_where_it_fails_tokens_are_the_same(cupy, monkeypatch):
    prompts, limits, config = [[5, 6], [9]], [3, 2], replace(CONFIG, nlayers=1)
    engine = engine_of(model(config, FakeArray), config, capture=False)
    expected = tokens_of(engine, prompts, limits)
    assert not cupy.graphs

    class Refuses(captured.Arena):
        def allocate(self, *arguments):
            raise RuntimeError("no such allocation")

    monkeypatch.setattr(captured, "Arena", Refuses)
    engine = engine_of(model(config, FakeArray), config)
    with pytest.warns(UserWarning, match="without CUDA graphs: no such allocation"):
        assert tokens_of(engine, prompts, limits) == expected
    assert not cupy.graphs
    assert not cupy.capturing


def test_a_layer_without_rotation_is_not_captured(cupy):
    config = replace(CONFIG, nlayers=1, layers=(models.Layer(theta=None),))
    engine = engine_of(model(config, FakeArray), config)
    handle = engine.cache.add()
    assert engine._graphs.step_for({handle: [1]}) is None
    assert engine_of(model(of=FakeArray))._graphs.step_for({0: [1, 2]}) is None


def test_sizes_of_graphs_are_powers_of_two():
    assert [captured._padded(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_a_cpu_records_passes():
    assert isinstance(engine_of(model())._graphs, captured.Recordings)
    assert engine_of(model(), capture=False)._graphs is None
    with pytest.raises(OptionError, match="capture must be True or False"):
        engine_of(model(), capture="yes")
