"""BitNet b1.58 from folders with packed ternary projections, in the format of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

import gpu_ops
from gpu_ops import inference, models
from gpu_ops.errors import FormatError, GpuOpsError, OptionError, ShapeError
from gpu_ops.models import LlamaConfig
from tests.models.test_load import tensors, write

CONFIG = LlamaConfig(
    vocab=31, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2, sub_norms=True, activation="relu2"
)
PACKED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}


@pytest.fixture
def folder(tmp_path, rng):
    """Folder of a model with packed projections, and their trits and scales by module."""
    weights = models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)
    models.save(tmp_path, weights, CONFIG)
    arrays, modules = tensors(tmp_path / "model.safetensors"), {}
    for name in [n for n in arrays if n.endswith("_proj.weight")]:
        module, scale = name.removesuffix(".weight"), rng.uniform(0.5, 2)
        t = rng.integers(-1, 2, arrays[name].shape).astype(np.int8)
        modules[module] = t, np.float32(scale)
        arrays[name] = gpu_ops.ternary_pack(t, "hf_bitnet")
        arrays[f"{module}.weight_scale"] = np.array([scale], np.float32)
    write(tmp_path / "model.safetensors", arrays)
    change(tmp_path, quantization_config=PACKED)
    return tmp_path, modules


def change(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


@pytest.mark.parametrize("kind", ["autobitlinear", "bitlinear"])
def test_projections_are_packed(kind, folder):
    """The scale of AutoBitLinear multiplies, that of BitLinear divides."""
    path, modules = folder
    change(path, quantization_config=PACKED | {"linear_class": kind})
    weights, config = models.load(path)
    assert config == CONFIG
    for i, layer in enumerate(weights.layers):
        for array, at, names in (
            (layer.qkv, "self_attn", ("q", "k", "v")),
            (layer.o, "self_attn", ("o",)),
            (layer.gate_up, "mlp", ("gate", "up")),
            (layer.down, "mlp", ("down",)),
        ):
            parts = [modules[f"model.layers.{i}.{at}.{name}_proj"] for name in names]
            expected = np.concatenate([t * (s if kind == "autobitlinear" else 1 / s) for t, s in parts])
            np.testing.assert_allclose(array.dequantize(), expected, rtol=1e-7)


def test_it_runs_and_its_norms_train(folder):
    weights, config = models.load(folder[0])
    text = [3, 1, 4, 1, 5]
    (text_out,) = inference.generate(weights, config, [text], max_new_tokens=4)
    for n, token in enumerate(text_out):
        assert models.logits(np.array([text + text_out[:n]]), weights, config)[0, -1].argmax() == token
    grads = {n: np.zeros(s, np.float32) for n, s in config.shapes().items() if n.endswith("norm")}
    nothing = dict.fromkeys(config.shapes())
    layers = [
        models.Block(**{p: (nothing | grads)[f"layers.{i}.{p}"] for p in config.block_shapes()})
        for i in range(config.nlayers)
    ]
    ids = np.array([text])
    models.loss_and_grads(
        ids, ids, weights, config, grads=models.Llama(None, layers, grads["norm"], None), policy="layer"
    )
    assert all(g.any() for g in grads.values())


def test_a_bias_that_the_scale_multiplies_is_refused(folder):
    arrays = tensors(folder[0] / "model.safetensors")
    for name in [n for n in arrays if "self_attn" in n and n.endswith("_proj.weight")]:
        arrays[name.replace("weight", "bias")] = np.ones(4 * len(arrays[name]), np.float32)
    write(folder[0] / "model.safetensors", arrays)
    change(folder[0], attention_bias=True)
    with pytest.raises(OptionError, match="bias"):
        models.load(folder[0])
    change(folder[0], quantization_config=PACKED | {"linear_class": "bitlinear"})
    assert models.load(folder[0])[1].biases == ("qkv", "o")


def without(name):
    return lambda arrays: arrays.pop(name)


Q, EMBED = "model.layers.0.self_attn.q_proj", "model.embed_tokens"


@pytest.mark.parametrize(
    ("quantization", "break_it", "kind", "words"),
    [
        ({"quant_method": "hqq"}, None, OptionError, "hqq"),
        ({"quantization_mode": "online"}, None, OptionError, "quantization_mode='online'"),
        ({"use_rms_norm": True}, None, OptionError, "use_rms_norm=True"),
        ({}, without(f"{Q}.weight_scale"), FormatError, "as a whole"),
        ({}, lambda a: a.update({f"{Q}.weight": a[f"{Q}.weight"][:4]}), ShapeError, "q_proj"),
        ({}, lambda a: a.update({f"{Q}.weight": a[f"{Q}.weight"] | 255}), FormatError, "q_proj"),
        ({}, lambda a: [a.pop(n) for n in list(a) if n.endswith("_scale")], FormatError, "none is"),
        (
            {},
            lambda a: a.update(
                {f"{EMBED}.weight": a[f"{Q}.weight"], f"{EMBED}.weight_scale": np.ones(1, np.float32)}
            ),
            FormatError,
            "embed",
        ),
        (
            {},
            lambda a: a.update(
                {f"{Q}s.weight": a[f"{Q}.weight"], f"{Q}s.weight_scale": np.ones(1, np.float32)}
            ),
            FormatError,
            "no part of a model",
        ),
    ],
)
def test_other_checkpoints_are_refused(quantization, break_it, kind, words, folder):
    path, _ = folder
    change(path, quantization_config=PACKED | quantization)
    if break_it is not None:
        arrays = tensors(path / "model.safetensors")
        break_it(arrays)
        write(path / "model.safetensors", arrays)
    with pytest.raises(kind, match=words) as error:
        models.load(path)
    assert isinstance(error.value, GpuOpsError)
