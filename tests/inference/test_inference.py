"""Generation with a paged cache: the same tokens in any batch, and the logits of the model without a cache."""

from __future__ import annotations

import contextlib
import dataclasses

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import inference, memory, models
from gpu_ops.__main__ import main
from gpu_ops.errors import DTypeError, GpuOpsError, OptionError, OutOfPages
from gpu_ops.inference import Engine, Sampling, cache_for, generate, next_logits, text_model
from gpu_ops.inference.requests import Sampler
from gpu_ops.reference.sampling.sample import sample
from tests.inference.test_generate import Bytes
from tests.support.compare import naive_ops
from tests.support.compilers import needs_nvrtc

CONFIG = models.LlamaConfig(vocab=97, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)

GEMMA = {"weight_offset": 1.0, "post_norms": True, "embedding_scale": None, "tied": True}


def model(config=CONFIG, dtype=np.float32, seed=0):
    arrays = models.initial_weights(config, seed=seed, std=0.2)
    return models.Llama.of({name: x.astype(dtype) for name, x in arrays.items()}, config)


def prompts(rng, *lengths):
    return [rng.integers(0, CONFIG.vocab, n).tolist() for n in lengths]


def greedy_dense(weights, config, prompt, count):
    """Greedy tokens without a cache: the whole text is computed again for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(models.logits(np.array([ids]), weights, config)[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("part", [1, 3, 7, 40])
def test_logits_are_those_without_a_cache(window, part, rng):
    """Prompts of 20 and 9 tokens are read in parts of any size, in one ragged batch."""
    config = dataclasses.replace(CONFIG, window=window)
    weights = model(config, np.float64)
    texts = prompts(rng, 20, 9)
    cache = cache_for(weights, config, num_pages=16, page_size=4)
    handles = [cache.add() for _ in texts]
    for start in range(0, 20, part):
        new = {
            h: t[start : start + part] for h, t in zip(handles, texts, strict=True) if t[start : start + part]
        }
        logits = next_logits(weights, config, cache, cache.reserve(new))
        cache.commit()
        for h, row in zip(new, logits, strict=True):
            text = texts[handles.index(h)][: start + part]
            expected = models.logits(np.array([text]), weights, config)[0, -1]
            np.testing.assert_allclose(row, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"biases": ("qkv", "o", "gate_up", "down"), "qk_norm": True, "head_dim": 16},
        {"layers": (models.Layer(window=4), models.Layer(theta=None, window=6)), "tied": True},
        {"layers": (models.Layer(window=4), models.Layer(theta=None)), "activation": "gelu_tanh"},
        {"embedding_scale": 3.0, "residual_scale": 0.4, "logits_scaling": 6.0, "softmax_scale": 0.5},
        {"sub_norms": True, "activation": "relu2"},
        {**GEMMA, "softcap": 2.0, "logits_softcap": 1.5, "softmax_scale": 0.3},
        {**GEMMA, "qk_norm": True, "layers": (models.Layer(100.0, window=4), models.Layer())},
    ],
    ids=[
        "biases and qk_norm",
        "windows",
        "a layer without rotation",
        "granite",
        "bitnet",
        "gemma2",
        "gemma3",
    ],
)
def test_every_family_is_that_without_a_cache(changes, rng):
    config = dataclasses.replace(CONFIG, **changes)
    arrays = models.initial_weights(config, std=0.2)
    arrays = {n: rng.normal(1 if x.ndim == 1 else 0, 0.2, x.shape) for n, x in arrays.items()}
    weights, (text,) = models.Llama.of(arrays, config), prompts(rng, 23)
    cache = cache_for(weights, config, num_pages=12, page_size=4)
    handle = cache.add()
    for start in range(0, 23, 9):
        logits = next_logits(weights, config, cache, cache.reserve({handle: text[start : start + 9]}))
        cache.commit()
        expected = models.logits(np.array([text[: start + 9]]), weights, config)[:, -1]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@needs_nvrtc
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("raw", np.float16), pytest.param("numba", np.float32, marks=pytest.mark.slow)],
)
def test_gpu_kernels_generate_what_the_cpu_does(kernels, dtype, rng, monkeypatch):
    """A prompt in two parts and a text of one token on the emulator: logits close to the CPU, and equal tokens."""
    config = dataclasses.replace(CONFIG, nlayers=1, qk_norm=True, biases=("qkv",), head_dim=16)
    arrays = models.initial_weights(config, std=0.2)
    weights = models.Llama.of({n: x.astype(dtype) for n, x in arrays.items()}, config)
    texts = prompts(rng, 7, 1)

    def run():
        engine = Engine(weights, config, cache_for(weights, config, num_pages=8, page_size=4), max_tokens=5)
        for i, text in enumerate(texts):
            engine.submit(text, max_new_tokens=2, sampling=Sampling(temperature=float(i), seed=1))
        return sorted(engine.run(), key=lambda token: token.request)

    expected = run()
    monkeypatch.setenv("GPU_OPS_DEVICE", "emulator")
    monkeypatch.setenv("GPU_OPS_BACKEND", kernels)
    tokens = run()
    assert [(t.request, t.token, t.finished) for t in tokens] == [
        (t.request, t.token, t.finished) for t in expected
    ]
    room = 4 * np.finfo(dtype).eps * 8
    assert np.allclose([t.logprob for t in tokens], [t.logprob for t in expected], rtol=0, atol=room)


def test_greedy_tokens_are_those_without_a_cache(rng):
    weights, texts = model(), prompts(rng, 1, 17, 33)
    tokens = generate(weights, CONFIG, texts, max_new_tokens=8)
    assert tokens == [greedy_dense(weights, CONFIG, text, 8) for text in texts]


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 5}, {"max_requests": 2}, {"num_pages": 7}], ids=str)
def test_a_request_does_not_depend_on_the_others(settings, rng):
    """Requests read in parts, waiting for others, or preempted when pages run out have the same tokens as alone."""
    weights, texts = model(), prompts(rng, 9, 3, 14, 1, 11)
    drawn = [Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=i) for i in range(4)]
    drawn.append(Sampling(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2, seed=9))
    pages = settings.pop("num_pages", 64)
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=pages, page_size=4), **settings)
    numbers = [
        engine.submit(text, max_new_tokens=10, sampling=sampling)
        for text, sampling in zip(texts, drawn, strict=True)
    ]
    results = {number: [] for number in numbers}
    for token in engine.run():
        results[token.request].append(token.token)
    alone = [
        generate(weights, CONFIG, [text], max_new_tokens=10, sampling=sampling)[0]
        for text, sampling in zip(texts, drawn, strict=True)
    ]
    assert list(results.values()) == alone
    assert engine.unfinished == 0
    assert engine.cache.stats.used == 0


def test_the_first_draw_counts_the_prompt(rng):
    """The repetition penalty applies to tokens of the prompt, the other penalties do not."""
    weights = model()
    options = {"repetition_penalty": 30.0, "frequency_penalty": 2.0, "presence_penalty": 3.0}
    penalised = 0
    for text in prompts(rng, *[60] * 6):
        logits = models.logits(np.array([text]), weights, CONFIG)[0, -1]
        counts = np.where(np.isin(np.arange(CONFIG.vocab), text), -1, 0).astype(np.int32)
        expected = int(sample(logits, temperature=0.0, seed=0, counts=counts, **options))
        penalised += expected != logits.argmax()
        (tokens,) = generate(weights, CONFIG, [text], max_new_tokens=1, sampling=Sampling(**options))
        assert tokens == [expected]
    assert penalised >= 2


def test_a_shared_prefix_is_computed_once(rng):
    weights, (prefix, tail_a, tail_b) = model(), prompts(rng, 32, 3, 5)
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=16, page_size=8))
    engine.submit(prefix + tail_a, max_new_tokens=2)
    list(engine.run())
    handle = engine.cache.add(prefix + tail_b)
    assert engine.cache.length(handle) == 32
    engine.cache.free(handle)
    engine.submit(prefix + tail_b, max_new_tokens=4)
    assert [t.token for t in engine.run()] == greedy_dense(weights, CONFIG, prefix + tail_b, 4)


def test_stop_tokens_and_cancelled_requests(rng):
    weights, (text,) = model(), prompts(rng, 6)
    tokens = greedy_dense(weights, CONFIG, text, 6)
    stop = next(t for i, t in enumerate(tokens) if i and t not in tokens[:i])
    assert generate(weights, CONFIG, [text], max_new_tokens=6, stop=[stop]) == [tokens[: tokens.index(stop)]]
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=16), max_requests=1)
    running, waiting = engine.submit(text, max_new_tokens=9), engine.submit(text, max_new_tokens=3)
    first = engine.step()
    assert [t.request for t in first] == [running]
    engine.cancel(running)
    assert [t.token for t in engine.run()] == tokens[:3]
    assert engine.cache.stats.used == 0
    with pytest.raises(OptionError, match=f"request {waiting} neither runs nor waits"):
        engine.cancel(waiting)


def test_log_probabilities_are_the_models(rng):
    weights, (text,) = model(dtype=np.float64), prompts(rng, 6)
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=8))
    engine.submit(text, max_new_tokens=1, sampling=Sampling(temperature=0.5, seed=3))
    (token,) = engine.run()
    z = models.logits(np.array([text]), weights, CONFIG)[0, -1]
    assert token.logprob == pytest.approx(
        z[token.token] - np.log(np.exp(z - z.max()).sum()) - z.max(), abs=1e-9
    )


def test_logits_that_are_not_finite_end_a_request(rng):
    weights, (text,) = model(), prompts(rng, 6)
    weights.norm[3] = np.nan
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=8))
    engine.submit(text, max_new_tokens=4)
    (token,) = engine.run()
    assert (token.token, token.finished, engine.unfinished) == (-1, "error", 0)
    with pytest.raises(OptionError, match="are not finite"):
        generate(weights, CONFIG, [text])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scaling_by_length_does_not_depend_on_the_batch(kind, rng):
    """Frequencies are those of max_seqlen, whatever is in a pass; generate() uses the number of tokens read."""
    scaling = gpu_ops.RopeScaling.dynamic(4.0, 16)
    if kind == "longrope":
        scaling = gpu_ops.RopeScaling.longrope((1.0,) * 4, (2.0, 3.0, 4.0, 5.0), 16)
    config = dataclasses.replace(CONFIG, scaling=scaling)
    weights, texts = model(config), prompts(rng, 5, 40)

    def run(texts, **options):
        engine = Engine(weights, config, cache_for(weights, config, num_pages=16), max_seqlen=64, **options)
        for text in texts:
            engine.submit(text, max_new_tokens=6)
        results = [[] for _ in texts]
        for token in engine.run():
            results[token.request].append(token.token)
        return results

    together = run(texts)
    assert run(texts, max_tokens=7) == together
    assert [run([text])[0] for text in texts] == together
    reads_16 = generate(weights, config, texts[:1], max_new_tokens=12)
    assert reads_16 == [greedy_dense(weights, config, texts[0], 12)]


def test_a_long_prompt_passes_through_a_small_window(rng):
    """A prompt may exceed the cache: the window frees pages as it moves."""
    config = dataclasses.replace(CONFIG, window=8)
    weights, (text,) = model(config), prompts(rng, 60)
    cache = cache_for(weights, config, num_pages=8, page_size=4)
    assert generate(weights, config, [text], max_new_tokens=3, cache=cache) == [
        greedy_dense(weights, config, text, 3)
    ]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"nlayers": 3}, "weights have 2 layers, and the config has 3"),
        ({"window": 9}, "a layer has window=9, and the cache window=5"),
        ({"window": 5, "qk_norm": True}, "lack k_norm, q_norm"),
        ({"window": 5, "nheads_kv": 4}, "the cache has heads of"),
    ],
)
def test_weights_config_and_cache_belong_together(changes, error):
    weights = model()
    cache = cache_for(weights, dataclasses.replace(CONFIG, window=5), num_pages=4)
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(GpuOpsError, match=error):
        Engine(weights, config, cache)
    handle = cache.add()
    with pytest.raises(GpuOpsError, match=error):
        next_logits(weights, config, cache, cache.reserve({handle: [1]}))


@pytest.mark.parametrize(
    ("owner", "part"), [(inference.engine, "next_logits"), (Sampler, "__call__")], ids=["logits", "draws"]
)
def test_a_pass_that_fails_runs_again(owner, part, rng, monkeypatch):
    weights, (text,) = model(), prompts(rng, 9)
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=8, page_size=4))
    engine.submit(text, max_new_tokens=5)
    whole, calls = getattr(owner, part), []

    def failing(*args, **options):
        calls.append(part)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return whole(*args, **options)

    monkeypatch.setattr(owner, part, failing)
    text_out = []
    while engine.unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            text_out += [token.token for token in engine.step()]
    assert text_out == greedy_dense(weights, CONFIG, text, 5)


def test_an_error_leaves_nothing_in_the_cache(rng):
    weights, (text,) = model(), prompts(rng, 9)
    cache = cache_for(weights, CONFIG, num_pages=32)
    with pytest.raises(OptionError, match=r"prompt\[1\] is 97"):
        generate(weights, CONFIG, [text, [1, 97]], cache=cache)
    weights.norm[0] = np.inf
    with pytest.raises(OptionError, match="after prompt 0 and 0 tokens are not finite"):
        generate(weights, CONFIG, [text, text], cache=cache)
    assert cache.handles == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e39),
        ("frequency_penalty", 1e300),
        ("repetition_penalty", 1e-60),
        ("temperature", -1),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("seed", -1),
        ("repetition_penalty", 0),
    ],
)
def test_sampling_is_checked_at_once(name, value):
    with pytest.raises(OptionError, match=f"Sampling: {name}"):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1.5], {}, r"prompt\[0\] must be an integer, got float 1.5"),
        ([3, 97], {}, r"prompt\[1\] is 97, not in \[0, 97\)"),
        ([3, -1], {}, r"prompt\[1\] is -1"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens must lie in"),
        ([3], {"max_new_tokens": 33}, "more than max_seqlen=32"),
        ([[1], [2, 3]], {}, r"prompt\[0\] must be an integer, got list"),
        ([3], {"stop": "ab"}, "stop must be a sequence, got str"),
        ([3], {"sampling": {}}, "sampling must be a Sampling, got dict"),
    ],
)
def test_requests_that_are_refused(prompt, options, message):
    weights = model()
    engine = Engine(weights, CONFIG, cache_for(weights, CONFIG, num_pages=4, page_size=8))
    with pytest.raises(OptionError, match=message):
        engine.submit(prompt, **options)
    assert engine.unfinished == 0


def test_pages_that_others_hold(rng):
    """Pages that the engine cannot preempt raise an error; the request stays and continues when pages are free."""
    weights, (text,) = model(), prompts(rng, 12)
    cache = cache_for(weights, CONFIG, num_pages=4, page_size=4)
    mine = cache.add()
    cache.reserve({mine: [0] * 12})
    cache.commit()
    engine = Engine(weights, CONFIG, cache)
    engine.submit(text, max_new_tokens=2)
    with pytest.raises(OutOfPages):
        list(engine.run())
    cache.free(mine)
    assert [t.token for t in engine.run()] == greedy_dense(weights, CONFIG, text, 2)


def test_all_names_are_public():
    assert all(hasattr(inference, name) for name in inference.__all__)


# Model with a cache of int8 or e4m3: its logits against those of a float32 cache, and every way to request it.

DTYPES = ("int8", "float8_e4m3fn")
# Bound of the largest error of a logit, in standard deviations of the logits: cache_for cites measured errors of
# three models.
BOUND = {"int8": 0.05, "float8_e4m3fn": 0.25}


def logits(weights, dtype, texts):
    """Logits after prompts in two parts, the second of which reads the pages of the first."""
    cache = inference.cache_for(weights, CONFIG, num_pages=32, page_size=4, dtype=dtype)
    handles = [cache.add() for _ in texts]
    for part in (slice(0, 15), slice(15, None)):
        new = {h: text[part] for h, text in zip(handles, texts, strict=True)}
        result = inference.next_logits(weights, CONFIG, cache, cache.reserve(new))
        cache.commit()
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_weights", [np.float32, ml_dtypes.bfloat16])
def test_logits_are_close_to_those_of_the_unquantized_cache(dtype, of_weights, rng):
    weights, texts = model(dtype=of_weights), prompts(rng, 40, 16, 33)
    expected = logits(model(), None, texts)
    with naive_ops():
        textbook = logits(weights, None, texts)
    plain, quantized = (
        np.abs(x.astype(float) - expected) / expected.std() for x in (textbook, logits(weights, dtype, texts))
    )
    assert quantized.max() > 0
    assert quantized.max() <= 2 * plain.max() + BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_generate_is_the_engine_over_such_a_cache(dtype, rng):
    weights, texts = model(), prompts(rng, 20, 9)
    texts_out = inference.generate(weights, CONFIG, texts, max_new_tokens=6, kv_dtype=dtype)
    # so few that one waits
    cache = inference.cache_for(weights, CONFIG, num_pages=5, page_size=8, dtype=dtype)
    assert cache.keys[0].dtype == {"int8": np.int8}.get(dtype, np.uint8)
    engine, tokens = inference.Engine(weights, CONFIG, cache), [[], []]
    for text in texts:
        engine.submit(text, max_new_tokens=6)
    for token in engine.run():
        tokens[token.request].append(token.token)
    assert tokens == texts_out


def test_mistakes(rng):
    weights, texts = model(), prompts(rng, 3)
    cache = inference.cache_for(weights, CONFIG, num_pages=4)
    with pytest.raises(OptionError, match="kv_dtype is for the cache that generate makes"):
        inference.generate(weights, CONFIG, texts, cache=cache, kv_dtype="int8")
    with pytest.raises(DTypeError, match="float8_e4m3fn"):
        inference.cache_for(weights, CONFIG, num_pages=4, dtype="fp8")
    float64_model = model(dtype=np.float64)
    with pytest.raises(GpuOpsError, match="quantized pages take float16, bfloat16 or float32"):
        inference.generate(float64_model, CONFIG, texts, kv_dtype="int8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_command(dtype, tmp_path, monkeypatch, capsys):
    config = models.LlamaConfig(vocab=256, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)
    weights = models.Llama.of(models.initial_weights(config, std=0.2), config)
    models.save(tmp_path, weights, config)
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(text_model, "load_tokenizer", lambda path: Bytes())
    arguments = ["--model", str(tmp_path), "--prompt", "abc", "--max-new-tokens", "4", "--kv-dtype", dtype]
    assert main(["generate", *arguments]) == 0
    (tokens,) = inference.generate(weights, config, [list(b"abc")], max_new_tokens=4, kv_dtype=dtype)
    assert capsys.readouterr().out == "abc" + Bytes().decode(tokens) + "\n"
    assert main(["generate", *arguments[:-1], "int4"]) == 2
    assert "int4" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes(dtype):
    config = models.PRESETS["llama-3-8b"]
    size = memory.kv_cache_bytes(config, batch=2, seqlen=32, dtype=dtype)
    assert size == 2 * 32 * 2 * config.nlayers * config.nheads_kv * (config.head_dim + 4)
    small = models.LlamaConfig(vocab=97, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)
    cache = inference.PagedKVCache(2, 2, 8, num_pages=4, page_size=16, dtype=dtype)
    held = sum(x.nbytes for x in (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales))
    assert held == memory.kv_cache_bytes(small, batch=1, seqlen=64, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_weights", [np.float32, ml_dtypes.bfloat16])
def test_drafts_in_a_tree_are_each_path_alone(dtype, of_weights, rng):
    """Drafts match each path alone, before and after the accepted rows and their scales move to their final slots."""
    weights, (text, new) = model(dtype=of_weights), prompts(rng, 13, 6)
    parents, paths = [-1, 0, 0, 2, -1, 4], ([0], [0, 1], [0, 2], [0, 2, 3], [4], [4, 5])
    cache = inference.cache_for(weights, CONFIG, num_pages=32, page_size=4, dtype=dtype)

    def after(handle, tokens, **options):
        return inference.next_logits(
            weights, CONFIG, cache, cache.reserve({handle: tokens}, **options)
        ).astype(np.float32)

    tree = cache.add()
    after(tree, text)
    cache.commit()
    alone = [cache.fork(tree) for _ in paths]
    actual = after(tree, new, parents={tree: parents})
    cache.accept({tree: paths[3]})
    more = [after(tree, [17]), cache.rollback()][0]
    expected = []
    for handle, path in zip(alone, paths, strict=True):
        expected.append(after(handle, [new[i] for i in path])[0])
        cache.commit()
    close = {"rtol": 0, "atol": (1e-5 if of_weights is np.float32 else 0.05) * np.std(expected)}
    np.testing.assert_allclose(actual, expected, **close)
    np.testing.assert_allclose(more, after(alone[3], [17]), **close)
