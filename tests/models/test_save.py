"""Models saved to folders: they load unchanged; a save is complete or writes nothing."""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import RopeScaling, models
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.models import Layer
from tests.models.test_load import CONFIG, made, same

YARN, LLAMA3 = RopeScaling.yarn(4.0, 64, truncate=False), RopeScaling.llama3(8.0, 128)
LONG = RopeScaling.longrope([1.0] * 3, [2.0] * 3, 64, factor=4.0)
SLIDING = (Layer(), Layer(window=3))
GEMMA = dataclasses.replace(
    CONFIG,
    weight_offset=1.0,
    post_norms=True,
    embedding_scale=None,
    activation="gelu_tanh",
    layers=SLIDING[::-1],
)
CONFIGS = {
    "llama": CONFIG,
    "tied": dataclasses.replace(CONFIG, tied=True, activation="gelu_tanh"),
    "no layers": dataclasses.replace(CONFIG, nlayers=0),
    "mistral": dataclasses.replace(CONFIG, window=7),
    "biases": dataclasses.replace(CONFIG, biases=("qkv", "o", "gate_up", "down"), scaling=LLAMA3),
    "qwen2": dataclasses.replace(CONFIG, biases=("qkv",), theta=1e6, scaling=YARN),
    "qwen2 sliding": dataclasses.replace(CONFIG, biases=("qkv",), layers=SLIDING),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, head_dim=16, layers=SLIDING[::-1]),
    "smollm3": dataclasses.replace(CONFIG, layers=(Layer(None), Layer(2e6))),
    "smollm3 sliding": dataclasses.replace(CONFIG, layers=(Layer(5e5, LLAMA3), Layer(None, None, 3))),
    "granite": dataclasses.replace(
        CONFIG, embedding_scale=12.0, residual_scale=0.3, logits_scaling=6.0, softmax_scale=0.1
    ),
    "bitnet": dataclasses.replace(CONFIG, sub_norms=True, activation="relu2", theta=5e5),
    "gemma2": dataclasses.replace(GEMMA, softcap=50.0, logits_softcap=30.0, softmax_scale=224**-0.5),
    "gemma3": dataclasses.replace(GEMMA, qk_norm=True, layers=(Layer(1e4, None, 3), Layer(1e6, YARN))),
    "no rotation": dataclasses.replace(CONFIG, theta=None),
    "linear": dataclasses.replace(CONFIG, scaling=RopeScaling.linear(2.0)),
    "dynamic": dataclasses.replace(CONFIG, scaling=RopeScaling.dynamic(2.0, 64)),
    "longrope": dataclasses.replace(CONFIG, scaling=LONG),
    "longrope, two": dataclasses.replace(
        CONFIG, scaling=dataclasses.replace(LONG, factor=1.0, long_attention_factor=1.5)
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_comes_back(name, tmp_path):
    config = CONFIGS[name]
    weights = made(config)
    models.save(tmp_path / "a" / "b", weights, config)
    weights_read, read = models.load(tmp_path / "a" / "b")
    assert read == config
    assert same(weights_read, weights)
    assert (weights_read.lm_head is weights_read.embed) == config.tied
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]


def test_lengths_are_where_transformers_4_reads_them():
    """transformers 4 reads the factor of YaRN and the original length of LongRoPE outside the rope entry."""
    for scaling in (YARN, LONG):
        entries = dataclasses.replace(CONFIG, scaling=scaling).to_hf()
        part = entries["rope_scaling"]
        lengths = scaling.original_max_position, round(scaling.factor * scaling.original_max_position)
        assert (part["original_max_position_embeddings"], entries["max_position_embeddings"]) == lengths
        assert scaling is YARN or entries["original_max_position_embeddings"] == lengths[0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(dtype, tmp_path):
    weights = made(dtype=dtype)
    models.save(tmp_path, weights, CONFIG)
    assert same(models.load(tmp_path)[0], weights)
    for expected in ("float32", np.float64, ml_dtypes.bfloat16):
        arrays = models.load(tmp_path, dtype=expected)[0].arrays()
        for name, x in weights.arrays().items():
            assert arrays[name].dtype == expected
            np.testing.assert_array_equal(arrays[name], x.astype(expected))


def test_strided_weights_are_saved(tmp_path):
    weights = made()
    weights.layers[0].o = np.asfortranarray(weights.layers[0].o)
    weights.norm = np.repeat(weights.norm, 2)[::2]
    models.save(tmp_path, weights, CONFIG)
    assert same(models.load(tmp_path)[0], weights)


def test_other_entries_are_kept(tmp_path):
    entries = {"max_position_embeddings": 4096, "eos_token_id": [1, 2], "hidden_size": 99, "dtype": "float16"}
    models.save(tmp_path, made(), CONFIG, entries=entries)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["max_position_embeddings"], saved["eos_token_id"]) == (4096, [1, 2])
    assert (saved["hidden_size"], saved["torch_dtype"]) == (24, "float32")
    assert models.load(tmp_path)[1] == CONFIG
    models.save(tmp_path, made(), CONFIG, entries={"model_type": "mistral"})
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert models.load(tmp_path)[1] == CONFIG
    sliding = dataclasses.replace(CONFIG, layers=(Layer(window=3), Layer()))
    entries = {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]}
    models.save(tmp_path, made(), sliding, entries=entries)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ministral"
    assert models.load(tmp_path)[1] == sliding


def test_what_cannot_be_saved(tmp_path):
    weights = made()
    ntk = dataclasses.replace(CONFIG, scaling=RopeScaling.ntk(2.0))
    part = dataclasses.replace(CONFIG, scaling=RopeScaling("default", partial_rotary_factor=0.5))
    mixed = dataclasses.replace(CONFIG, qk_norm=True, biases=("down",))
    lora = models.with_lora(weights, models.initial_lora(models.lora_shapes(CONFIG, 2, ["o"])))
    untied = dataclasses.replace(CONFIG, tied=True)
    for model, config, options, error, words in (
        (weights, ntk, {}, OptionError, "transformers has no 'ntk'"),
        (weights, part, {}, OptionError, "partial_rotary_factor=0.5; .* rotate whole heads"),
        (weights, mixed, {}, OptionError, "cannot have these options together"),
        (lora, CONFIG, {}, OptionError, r"layers\.0\.o is a Lora"),
        (weights, untied, {}, OptionError, "another array than embed"),
        (weights, dataclasses.replace(CONFIG, ffn=21), {}, ShapeError, r"layers\.0\.gate_up has shape"),
        (weights, CONFIG, {"entries": [1]}, OptionError, "entries"),
        (weights, CONFIG, {"entries": {"eos_token_id": {1}}}, OptionError, "JSON"),
        (weights, CONFIG, {"entries": {"model_type": "qwen2"}}, OptionError, "qwen2 cannot have"),
        (weights, CONFIG, {"entries": {"logits_scaling": 2.0}}, OptionError, "logits_scaling"),
        (made(dtype=np.int32), CONFIG, {}, OptionError, "embed is int32"),
    ):
        with pytest.raises(error, match=words):
            models.save(tmp_path / "new", model, config, **options)
    assert not (tmp_path / "new").exists()


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    models.save(tmp_path, made(), CONFIG)
    weights = made()
    weights.norm = np.full_like(weights.norm, 7)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpu_ops.models.checkpoint.StateArray.copied", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.save(tmp_path, weights, CONFIG)
    assert same(models.load(tmp_path)[0], made())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
