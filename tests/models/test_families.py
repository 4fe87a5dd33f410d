"""Families of models against Hugging Face transformers: its folders read and written, logits, and gradients."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import models
from perf.torch_llama import torch_loss

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
OF_TYPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
CASES = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "smollm2": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "ministral": ("Ministral", {"sliding_window": 6, "layer_types": TYPES, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-sliding": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, **SLIDING}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-sliding": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 7},
    ),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        | {"logits_scaling": 8.0, "attention_bias": True, "mlp_bias": True},
    ),
    "bitnet": ("BitNet", {}),
    "bitnet-biases": ("BitNet", {"attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 6, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 6, "layer_types": TYPES, "rope_parameters": OF_TYPES},
    ),
}
EVERY = pytest.mark.parametrize("case", CASES)


def made(case, dtype=torch.float32):
    """Model of transformers with random weights, norms and biases."""
    name, options = CASES[case]
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        **SIZES | options
    )
    return randomised(getattr(transformers, f"{name}ForCausalLM")(config), dtype)


def randomised(model, dtype=torch.float32):
    norm_mean = 0.0 if "gemma" in model.config.model_type else 1.0
    torch.manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(0.3 * torch.randn_like(p) + (0.0 if key.endswith("bias") else norm_mean))
            else:
                p.copy_(0.1 * torch.randn_like(p))
            p.data = p.data.to(dtype)  # model.to() would round the rotary frequencies
    return model.eval()


def ids(batch=2, seqlen=40):
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (batch, seqlen)).astype(np.int64)


def theirs(model):
    with torch.no_grad():
        return model(torch.tensor(ids())).logits.double().numpy()


def ours(folder, dtype):
    weights, config = models.load(folder, dtype=dtype)
    return models.logits(ids(), weights, config).astype(np.float64)


@EVERY
def test_logits_are_those_of_transformers(case, tmp_path):
    model = made(case)
    model.save_pretrained(tmp_path)
    right = theirs(model)
    assert np.abs(ours(tmp_path, "float32") - right).max() < 2e-5 * max(1.0, np.abs(right).max())


BOTH = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}
HALF = {"partial_rotary_factor": 0.5, "rope_theta": 5e3}
RAW = {
    **{f"{name}, two rope parts": (name, BOTH) for name in ("llama", "qwen3", "granite", "gemma2")},
    **{f"{name}, half heads": (name, HALF) for name in ("mistral", "qwen2", "smollm3", "gemma3_text")},
    "no rope entry": ("llama", {"rms_norm_eps": 1e-6, "max_position_embeddings": None}),
    "mistral with layer types": ("mistral", {"layer_types": TYPES, "sliding_window": 5, "head_dim": 16}),
    "biases of others": ("qwen2", {"attention_bias": True, "mlp_bias": True}),
    "gemma3, two rope parts": (
        "gemma3_text",
        {
            "rope_parameters": OF_TYPES,
            "rope_scaling": {"factor": 2.0},
            "layer_types": TYPES,
            "sliding_window": 6,
        },
    ),
}


@pytest.mark.parametrize("case", RAW)
def test_entries_mean_what_they_do_in_transformers(case, tmp_path):
    """Entries of real config.json files that a config class of transformers would not write."""
    model_type, more = RAW[case]
    entries = {"model_type": model_type, "rms_norm_eps": 1e-5, "head_dim": 16, **SIZES, **more}
    entries = {name: x for name, x in entries.items() if x is not None or name == "pad_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = randomised(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(entries))
    right = theirs(model)
    assert np.abs(ours(tmp_path, "float32") - right).max() < 2e-5 * max(1.0, np.abs(right).max())


@pytest.mark.parametrize("prefix", ["model.", "", "model.model."])
@pytest.mark.parametrize("head", ["none", "alone", "a copy", "rounded"])
def test_tied_tensors_are_found_as_transformers_finds_them(head, prefix, tmp_path):
    from safetensors.torch import load_file, save_file

    model = made("smollm2")
    model.save_pretrained(tmp_path)
    parts = load_file(tmp_path / "model.safetensors")
    table = parts["model.embed_tokens.weight"]
    if head != "none":
        parts["lm_head.weight"] = table.bfloat16() if head == "rounded" else table.clone()
    if head == "alone":
        del parts["model.embed_tokens.weight"]
    parts = {n.replace("model.", prefix, 1) if n.startswith("model.") else n: x for n, x in parts.items()}
    save_file(parts, tmp_path / "model.safetensors", metadata={"format": "pt"})
    auto = transformers.AutoModelForCausalLM
    right = theirs(auto.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval())
    assert np.abs(ours(tmp_path, "float32") - right).max() < 2e-5 * max(1.0, np.abs(right).max())


@EVERY
def test_bfloat16_is_as_near_to_float64_as_transformers(case, tmp_path):
    model = made(case, torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    exact = ours(tmp_path, "float64")
    off, allowed = (np.abs(x - exact) for x in (ours(tmp_path, None), theirs(model)))
    assert off.max() <= 2 * allowed.max()
    assert off.mean() <= 1.1 * allowed.mean()


@EVERY
def test_transformers_reads_what_is_saved(case, tmp_path):
    model = made(case, torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    weights, config = models.load(tmp_path / "theirs")
    assert weights.embed.dtype == ml_dtypes.bfloat16
    entries = json.loads((tmp_path / "theirs" / "config.json").read_text())
    models.save(tmp_path / "ours", weights, config, entries=entries)
    auto = transformers.AutoModelForCausalLM
    again, report = auto.from_pretrained(
        tmp_path / "ours", dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(again) is type(model)
    parts = again.state_dict()
    assert all(torch.equal(parts[name], x) for name, x in model.state_dict().items())
    np.testing.assert_array_equal(theirs(again), theirs(model))
    assert models.load(tmp_path / "ours")[1] == config


@EVERY
def test_gradients_in_float64_are_torchs(case, tmp_path):
    made(case).save_pretrained(tmp_path)
    weights, config = models.load(tmp_path, dtype="float64")
    plain = tuple(dataclasses.replace(layer, scaling=None) for layer in config.layers)
    config = dataclasses.replace(config, scaling=None, layers=plain)  # the peer rotates without scaling
    tokens, targets = ids(), np.roll(ids(), -1, 1)
    p = {name: torch.tensor(x, requires_grad=True) for name, x in weights.arrays().items()}
    loss = torch_loss(p, config, torch.tensor(tokens), torch.tensor(targets))
    loss.backward()
    grads = {name: np.zeros(x.shape) for name, x in weights.arrays().items()}
    actual = models.loss_and_grads(tokens, targets, weights, config, grads=models.Llama.of(grads, config))
    assert abs(float(actual) - loss.item()) < 1e-12 * loss.item()
    for name, x in p.items():
        right = x.grad.numpy()
        assert np.abs(grads[name] - right).max() < 1e-12 * np.abs(right).max(), name


@pytest.mark.parametrize("kind", ["autobitlinear", "bitlinear"])
def test_packed_bitnet_is_that_of_transformers(kind, tmp_path, monkeypatch):
    """Logits agree except where the last bit of a norm decides how an activation is rounded to int8."""
    monkeypatch.setattr(torch, "compile", lambda function: function)  # which would need a C++ compiler
    monkeypatch.delitem(sys.modules, "transformers.integrations.bitnet", raising=False)
    bitnet = importlib.import_module("transformers.integrations.bitnet")
    model = made("bitnet")
    quantization = transformers.BitNetQuantConfig(
        linear_class=kind, quantization_mode="offline" if kind == "autobitlinear" else "online"
    )
    bitnet.replace_with_bitnet_linear(model, ["lm_head"], quantization)
    parts, packed = {**model.state_dict()}, {}
    rng = np.random.default_rng(1)
    for name in [n for n in parts if n.endswith("weight_scale")]:
        weight = name.removesuffix("_scale")
        shape = model.get_submodule(weight.removesuffix(".weight"))
        t = torch.tensor(rng.integers(-1, 2, (shape.out_features, shape.in_features)), dtype=torch.float32)
        packed[weight] = bitnet.pack_weights(t.clone())
        parts[weight] = t if kind == "autobitlinear" else packed[weight]
        parts[name] = torch.tensor(
            [rng.uniform(0.05, 0.1) if kind == "autobitlinear" else rng.uniform(10, 20)]
        )
    for name, x in parts.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(x, requires_grad=False))
    for module in model.modules():
        if isinstance(module, bitnet.BitLinear):
            module.dtype = torch.float32
    from safetensors.torch import save_file

    save_file({n: x.contiguous() for n, x in (parts | packed).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(
            model.config.to_dict()
            | {"quantization_config": {**quantization.to_dict(), "quantization_mode": "offline"}}
        )
    )
    right = theirs(model)
    off = np.abs(ours(tmp_path, "float32") - right)
    assert np.median(off) < 2e-6 * np.abs(right).max()
    assert off.max() < 2e-2 * np.abs(right).max()
