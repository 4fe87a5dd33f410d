"""Model with a cache of int8 or e4m3: its logits against those of a float32 cache, and every way to request it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import inference, memory, models
from gpu_ops.__main__ import main
from gpu_ops.errors import DTypeError, GpuOpsError, OptionError
from gpu_ops.inference import command
from tests.inference.test_generate import Bytes
from tests.inference.test_inference import CONFIG, model, prompts
from tests.support.compare import naive_ops

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
    cache = inference.cache_for(
        weights, CONFIG, num_pages=5, page_size=8, dtype=dtype
    )  # so few that one waits
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
    monkeypatch.setattr(command, "load_tokenizer", lambda path: Bytes())
    arguments = ["--model", str(tmp_path), "--prompt", "abc", "--max-new-tokens", "4", "--kv-dtype", dtype]
    assert main(["generate", *arguments]) == 0
    (tokens,) = inference.generate(weights, config, [list(b"abc")], max_new_tokens=4, kv_dtype=dtype)
    assert capsys.readouterr().out == Bytes().decode(tokens) + "\n"
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
