"""LlamaConfig from Hugging Face configs, and the configs that it refuses."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import RopeScaling
from gpu_ops.errors import FileError, OptionError
from gpu_ops.models import PRESETS, Layer, LlamaConfig
from gpu_ops.models.config_hf import FAMILIES

LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}


SLIDING = ["sliding_attention", "full_attention"]


def test_llama_3():
    config = LlamaConfig.from_hf(LLAMA_3)
    assert (config.nheads_kv, config.head_dim, config.theta, config.tied) == (8, 128, 500000.0, False)
    assert config.scaling.kind == "llama3"
    assert config.parameters == 8_030_261_248  # as published


def test_mistrals_window_counts_the_query_itself():
    config = LlamaConfig.from_hf(LLAMA_3 | {"model_type": "mistral", "sliding_window": 4096})
    assert config.window_size == (4095, 0)


def test_a_mistral_with_layer_types_slides_where_they_say_so():
    entries = LLAMA_3 | {"sliding_window": 4096, "layer_types": SLIDING * 16}
    config = LlamaConfig.from_hf(entries | {"model_type": "mistral"})
    assert [layer.window for layer in config.layers] == [4095, -1] * 16
    assert config == LlamaConfig.from_hf(entries | {"model_type": "ministral"})
    assert (config.to_hf()["model_type"], config.to_hf()["layer_types"]) == ("ministral", SLIDING * 16)
    for entry in ({"model_type": "ministral"}, {"model_type": "mistral", "layer_types": None}):
        assert LlamaConfig.from_hf(LLAMA_3 | {"sliding_window": 4096} | entry).window == 4095


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_by_its_architecture(family):
    named, bare = LLAMA_3 | {"model_type": family}, {n: x for n, x in LLAMA_3.items() if n != "model_type"}
    config = LlamaConfig.from_hf(named)
    assert LlamaConfig.from_hf(bare | {"architectures": [FAMILIES[family].architecture]}) == config
    assert LlamaConfig.from_hf(bare | {"architectures": ["LLaMAForCausalLM"]}) == LlamaConfig.from_hf(LLAMA_3)


ONE_ROPE = [family for family in FAMILIES if family != "gemma3_text"]


@pytest.mark.parametrize("family", ONE_ROPE)
def test_rope_scaling_replaces_rope_parameters(family):
    """transformers 5 writes rope_parameters, and users add rope_scaling, as model cards advise."""
    plain = LLAMA_3 | {"model_type": family}
    scaled = LlamaConfig.from_hf(plain)
    assert (scaled.by_layer[0].theta, scaled.by_layer[0].scaling.kind) == (5e5, "llama3")
    for other in ({"rope_theta": 5e5}, {"rope_type": "linear", "factor": 2.0}, {}):
        assert LlamaConfig.from_hf(plain | {"rope_parameters": other}) == scaled
    moved = {n: x for n, x in plain.items() if n != "rope_theta"}
    part = {
        "rope_scaling": plain["rope_scaling"] | {"rope_theta": 5e5},
        "rope_parameters": {"rope_theta": 1e6},
    }
    with pytest.raises(OptionError, match="Remove rope_scaling, or write rope_theta into it"):
        LlamaConfig.from_hf(moved | part)
    assert LlamaConfig.from_hf(moved | part | {"rope_parameters": {"rope_theta": 5e5}}) == scaled


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_rotated_whole(family):
    plain = LLAMA_3 | {"model_type": family, "rope_scaling": None}
    whole = LlamaConfig.from_hf(plain)
    assert LlamaConfig.from_hf(plain | {"partial_rotary_factor": 0.5}) == whole
    entries = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    if family == "gemma3_text":
        entries = dict.fromkeys(SLIDING, entries)
        plain |= {"rope_local_base_freq": 5e5}
    assert LlamaConfig.from_hf(plain | {"rope_parameters": entries}) == LlamaConfig.from_hf(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_without_a_rope_entry(family):
    """Configs without a rope entry, as those of the first LLaMA, have defaults."""
    bare = {n: x for n, x in LLAMA_3.items() if not n.startswith("rope_")}
    config = LlamaConfig.from_hf(bare | {"model_type": family, "type": "x", "rotary_emb_base": 500})
    full = [layer for layer in config.by_layer if layer.window < 0] or config.by_layer
    right = {"smollm3": 2e6, "bitnet": 5e5, "gemma3_text": 1e6}.get(family, 1e4)
    assert {layer.theta for layer in full} - {None} == {right}
    assert LlamaConfig.from_hf(bare | {"model_type": family, "rope_theta": None}) == config
    scaled = LlamaConfig.from_hf(
        bare | {"model_type": family, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}
    )
    lengths = {"mistral": 131072, "ministral": 131072, "gemma2": 8192, "gemma3_text": 131072}
    lengths |= dict.fromkeys(("qwen2", "qwen3", "smollm3"), 32768)
    maxima = {layer.scaling.original_max_position for layer in scaled.by_layer if layer.scaling}
    assert maxima == {lengths.get(family, 2048)}


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2"])
def test_entries_of_biases_that_a_family_ignores(family):
    plain = LLAMA_3 | {"model_type": family}
    ignored = [name for name in ("attention_bias", "mlp_bias") if name not in FAMILIES[family].reads]
    assert LlamaConfig.from_hf(plain | dict.fromkeys(ignored, True)) == LlamaConfig.from_hf(plain)


def test_from_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3))
    assert LlamaConfig.from_hf(tmp_path) == LlamaConfig.from_hf(LLAMA_3)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OptionError, match="is no JSON"):
        LlamaConfig.from_hf(tmp_path)
    with pytest.raises(FileError):
        LlamaConfig.from_hf(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"sliding_window": 5}, "sliding_window=5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 with rope type 'llama3'"),
        (
            {"rope_parameters": {"rope_theta": 1e6}},
            "replaces rope_parameters, and with it rope_theta=1000000.0",
        ),
        ({"rope_parameters": "default"}, "rope_parameters must be a dict, got str"),
        ({"rope_parameters": {"full_attention": 5, "x": {}}}, "rope parameters per layer type"),
        (
            {"model_type": "mistral", "sliding_window": None, "layer_types": SLIDING * 16},
            "there is no window",
        ),
        (
            {"model_type": "smollm3", "sliding_window": 5, "layer_types": SLIDING * 16},
            "use_sliding_window=None",
        ),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_key_value_heads": 5}, "no multiple of nheads_kv=5"),
        ({"hidden_size": 4096.5}, "hidden"),
    ],
)
def test_what_a_llama_does_not_have_is_refused(change, words):
    with pytest.raises(OptionError, match=words):
        LlamaConfig.from_hf(LLAMA_3 | change)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 0},
        {"nheads": 3},
        {"head_dim": 7},
        {"window": -2},
        {"activation": "relu"},
        {"theta": 0},
        {"biases": ("q",)},
        {"qk_norm": 1},
        {"sub_norms": 1},
        {"post_norms": "yes"},
        {"softcap": -1.0},
        {"logits_softcap": float("nan")},
        {"softmax_scale": 0},
        {"embedding_scale": 0},
        {"residual_scale": None},
        {"logits_scaling": -1.0},
        {"weight_offset": None},
        {"layers": ("full_attention",)},
        {"layers": (Layer(),) * 2},
    ],
)
def test_impossible_sizes(change):
    with pytest.raises(OptionError):
        LlamaConfig(**({"vocab": 8, "hidden": 32, "ffn": 8, "nlayers": 1, "nheads": 4} | change))


QWEN_3 = LLAMA_3 | {"model_type": "qwen3", "rope_scaling": None, "sliding_window": 9}


def test_qwen_3():
    config = LlamaConfig.from_hf(QWEN_3 | {"hidden_size": 2560})
    assert (config.head_dim, config.qk_norm, config.biases, config.window) == (128, True, (), -1)
    config = LlamaConfig.from_hf(QWEN_3 | {"use_sliding_window": True})
    assert [layer.window for layer in config.layers] == [-1] * 28 + [8] * 4


def test_qwen_2_has_biases():
    config = LlamaConfig.from_hf(LLAMA_3 | {"model_type": "qwen2"})
    assert config.biases == ("qkv",)
    assert config.block_shapes()["qkv_bias"] == (6144,)


def test_smollm_3_rotates_where_no_rope_layers_is_1():
    config = LlamaConfig.from_hf(LLAMA_3 | {"model_type": "smollm3", "tie_word_embeddings": None})
    assert [layer.theta for layer in config.layers[:5]] == [5e5, 5e5, 5e5, None, 5e5]
    config_without_rope = LlamaConfig.from_hf(LLAMA_3 | {"model_type": "smollm3", "no_rope_layers": [0] * 32})
    assert (config_without_rope.theta, config_without_rope.scaling, config_without_rope.layers) == (
        None,
        None,
        (),
    )


def test_equal_models_are_equal_configs():
    sizes = {"vocab": 8, "hidden": 32, "ffn": 8, "nlayers": 2, "nheads": 4}
    assert LlamaConfig(**sizes, layers=(Layer(5e5, None, 3),) * 2) == LlamaConfig(
        **sizes, theta=5e5, window=3
    )
    layers = Layer(window=1), Layer(None)
    assert LlamaConfig(**sizes, theta=None, layers=layers) == LlamaConfig(**sizes, window=7, layers=layers)


def test_a_family_is_chosen_by_options():
    config = LlamaConfig.from_hf(LLAMA_3)
    assert config.to_hf()["model_type"] == "llama"
    assert config.to_hf("mistral")["sliding_window"] is None
    with pytest.raises(OptionError, match="qwen3 cannot have"):
        config.to_hf("qwen3")
    with pytest.raises(OptionError, match="model_type"):
        config.to_hf("gemma")


GEMMA = LLAMA_3 | {"model_type": "gemma2", "rope_scaling": None, "rope_theta": 1e4, "hidden_size": 3584}
GEMMA_3 = GEMMA | {"model_type": "gemma3_text", "rope_theta": 1e6, "sliding_window": 512}


def test_gemma_2():
    config = LlamaConfig.from_hf(GEMMA | {"query_pre_attn_scalar": 224, "sliding_window_pattern": 7})
    assert (config.softcap, config.logits_softcap, config.softmax_scale) == (50.0, 30.0, 224**-0.5)
    assert (config.weight_offset, config.post_norms, config.activation) == (1.0, True, "gelu_tanh")
    assert [layer.window for layer in config.layers[:3]] == [4095, -1, 4095]
    assert config.to_hf()["query_pre_attn_scalar"] == 224
    assert config.embedding_factor("float32") == np.float32(3584**0.5)
    assert config.embedding_factor(ml_dtypes.bfloat16) == 59.75
    none = LlamaConfig.from_hf(GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (none.softcap, none.logits_softcap, none.softmax_scale) == (0.0, 0.0, None)


ROPE = {"rope_type": "linear", "factor": 8.0}
OF_TYPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": ROPE | {"rope_theta": 1e6},
}


def test_presets_are_what_the_published_configs_say():
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes += ("num_key_value_heads",)
    gemma = {"rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
    published = {
        "bitnet-b1.58-2b": {"model_type": "bitnet", "hidden_act": "relu2", "rms_norm_eps": 1e-5}
        | {"rope_theta": 5e5, "tie_word_embeddings": True}
        | dict(zip(sizes, (128256, 2560, 6912, 30, 20, 5), strict=True)),
        "gemma-2-2b": {**gemma, "model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}
        | dict(zip(sizes, (256000, 2304, 9216, 26, 8, 4), strict=True)),
        "gemma-3-1b": {**gemma, "model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512}
        | {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None}
        | dict(zip(sizes, (262144, 1152, 6912, 26, 4, 1), strict=True)),
    }
    for name, entries in published.items():
        assert LlamaConfig.from_hf(entries) == PRESETS[name], name


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_local_base_freq": 1e4, "rope_scaling": ROPE},
        {"rope_local_base_freq": None, "rope_theta": None, "rope_scaling": ROPE},
        {"rope_theta": None, "rope_parameters": OF_TYPES},
        {"rope_parameters": {"full_attention": ROPE}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_scaling": ROPE},
        {"rope_parameters": OF_TYPES, "rope_scaling": {"factor": 8.0}},
    ],
    ids=["old", "defaults", "new", "a part", "both", "both, merged"],
)
def test_gemma_3_rotates_by_the_type_of_the_layer(rope):
    rope = {name: x for name, x in rope.items() if x is not None}
    entries = {n: x for n, x in GEMMA_3.items() if n != "rope_theta" or "rope_theta" not in rope}
    config = LlamaConfig.from_hf(entries | rope)
    assert [layer.window for layer in config.layers[:7]] == [511] * 5 + [-1, 511]
    assert [(layer.theta, layer.scaling) for layer in config.layers[4:6]] == [
        (1e4, None),
        (1e6, RopeScaling.linear(8.0)),
    ]
    assert LlamaConfig.from_hf(config.to_hf("gemma3_text")) == config


def test_granite_and_bitnet():
    multipliers = {"attention_multiplier": 0.1, "embedding_multiplier": 12.0, "residual_multiplier": 0.25}
    granite = LLAMA_3 | multipliers | {"model_type": "granite", "logits_scaling": 8.0, "rms_norm_eps": 1e-6}
    config = LlamaConfig.from_hf(granite)
    assert (config.softmax_scale, config.embedding_scale, config.residual_scale) == (0.1, 12.0, 0.25)
    assert (config.logits_scaling, config.stream_eps) == (8.0, 1.6e-5)
    assert config.embedding_factor("bfloat16") == 48.0
    config = LlamaConfig.from_hf(LLAMA_3 | {"model_type": "bitnet", "hidden_act": "relu2"})
    assert (config.sub_norms, config.activation) == (True, "relu2")
    assert config.block_shapes()["ffn_sub_norm"] == (14336,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must hold"),
        ({"rope_parameters": {"full_attention": 5}}, "full_attention must be a dict"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "type='linear', which transformers 5 ignores"),
        ({"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu'"),
    ],
)
def test_what_a_gemma_3_does_not_have_is_refused(change, words):
    with pytest.raises(OptionError, match=words):
        LlamaConfig.from_hf(GEMMA_3 | change)
