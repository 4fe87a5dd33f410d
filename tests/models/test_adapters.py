"""Adapters in PEFT's format: files of our own, of other shapes and factors, and damaged ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpu_ops import models
from gpu_ops.errors import FormatError, GpuOpsError, MissingFileError, OptionError, ShapeError
from gpu_ops.formats.safetensors import NUMPY_DTYPES, header_of

CONFIG = models.LlamaConfig(vocab=96, hidden=64, ffn=96, nlayers=2, nheads=4, nheads_kv=2)
IDS = np.array([[5, 90, 17, 3, 40]])
MODULES = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.down_proj": (64, 96)}


def random_adapters(rank=4, dtype=np.float32, projections=models.projection.PROJECTIONS):
    rng = np.random.default_rng(0)
    shapes = models.lora_shapes(CONFIG, rank, projections)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, tensors, **entries):
    """Write files as PEFT does."""
    stored = {
        name: ({v: k for k, v in NUMPY_DTYPES.items()}[x.dtype], x.shape) for name, x in tensors.items()
    }
    data = header_of(stored, {}) + b"".join(np.ascontiguousarray(x).tobytes() for x in tensors.values())
    (folder / "adapter_model.safetensors").write_bytes(data)
    entries = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | entries
    (folder / "adapter_config.json").write_text(json.dumps(entries))


def peft_tensors(rank=4):
    rng, tensors = np.random.default_rng(1), {}
    for layer in range(2):
        for module, (rows, cols) in MODULES.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, cols)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((rows, rank)).astype(np.float32)
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_saved_adapters_are_loaded_again(dtype, tmp_path):
    adapters = random_adapters(
        dtype=NUMPY_DTYPES[{"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]]
    )
    models.save_adapters(tmp_path, adapters, CONFIG, base="some/model")
    loaded = models.load_adapters(tmp_path, CONFIG)
    assert loaded.keys() == adapters.keys()
    for name, x in adapters.items():
        assert loaded[name].dtype == x.dtype
        np.testing.assert_array_equal(loaded[name], x)
    assert (
        json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/model"
    )


def test_ranks_may_differ(tmp_path):
    adapters = random_adapters(4, projections=["qkv"]) | random_adapters(2, projections=["down"])
    models.save_adapters(tmp_path, adapters, CONFIG)
    entries = json.loads((tmp_path / "adapter_config.json").read_text())
    ranks = {f"model.layers.{i}.mlp.down_proj": 2 for i in range(2)}
    assert (entries["r"], entries["lora_alpha"]) == (4, 4)
    assert entries["rank_pattern"] == entries["alpha_pattern"] == ranks
    loaded = models.load_adapters(tmp_path, CONFIG)
    assert all(np.array_equal(loaded[name], x) for name, x in adapters.items())


@pytest.mark.parametrize(
    ("entries", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 3}, 0.75),
        (
            {"alpha_pattern": {"q_proj": 1, "v_proj": 1, "^layers.0.mlp.down_proj": 1, "1.mlp.down_proj": 1}},
            0.25,
        ),
    ],
)
def test_modules_of_a_joined_projection(entries, scale, tmp_path):
    tensors = peft_tensors()
    write(tmp_path, tensors, **entries)
    adapters = models.load_adapters(tmp_path, CONFIG, "float64")
    assert adapters["layers.0.qkv.a"].shape == (8, 64)  # k_proj has none
    for layer in range(2):
        base = f"base_model.model.model.layers.{layer}."
        qkv = adapters[f"layers.{layer}.qkv.b"] @ adapters[f"layers.{layer}.qkv.a"]
        for module, rows in {"q_proj": slice(0, 64), "v_proj": slice(96, 128)}.items():
            a, b = (tensors[f"{base}self_attn.{module}.lora_{half}.weight"] for half in "AB")
            np.testing.assert_allclose(qkv[rows], scale * b.astype(float) @ a.astype(float), rtol=1e-12)
        assert not qkv[64:96].any()
        a, b = (tensors[f"{base}mlp.down_proj.lora_{half}.weight"] for half in "AB")
        np.testing.assert_array_equal(adapters[f"layers.{layer}.down.b"], scale * b.astype(float))
    weights = models.Llama.of(models.initial_weights(CONFIG), CONFIG)
    loaded = models.load_adapters(tmp_path, CONFIG)
    changed = models.logits(IDS, models.with_lora(weights, loaded), CONFIG)
    assert abs(changed - models.logits(IDS, weights, CONFIG)).max() > 0.01


def without(name):
    return lambda tensors: {n: x for n, x in tensors.items() if name not in n}


@pytest.mark.parametrize(
    ("change", "entries", "error", "words"),
    [
        (dict, {"peft_type": "IA3"}, OptionError, "peft_type is 'IA3'"),
        (dict, {"use_dora": True}, OptionError, "use_dora=True"),
        (dict, {"bias": "all"}, OptionError, "bias='all'"),
        (dict, {"modules_to_save": ["lm_head"]}, OptionError, "modules_to_save"),
        (dict, {"lora_alpha": "8"}, FormatError, "no finite number"),
        (dict, {"lora_alpha": float("nan")}, FormatError, "no finite number"),
        (dict, {"alpha_pattern": {"(a+)+": 1}}, OptionError, "names of modules are read"),
        (dict, {"alpha_pattern": [1]}, FormatError, "alpha_pattern is no object"),
        (without("0.mlp.down_proj.lora_B"), {}, FormatError, "only one of lora_A and lora_B"),
        (without("lora"), {}, FormatError, "no adapters"),
        (
            lambda t: {n.replace("layers.1", "layers.2"): x for n, x in t.items()},
            {},
            FormatError,
            "2-layer model",
        ),
        (
            lambda t: {n.replace("lora_A", "lora_magnitude"): x for n, x in t.items()},
            {},
            FormatError,
            "no adapter",
        ),
        (lambda t: {n: x[:, :-1] for n, x in t.items()}, {}, ShapeError, "by the config"),
        (lambda t: {n: x.astype(np.int32) for n, x in t.items()}, {}, FormatError, "floats are loaded"),
    ],
)
def test_other_adapters_are_refused(change, entries, error, words, tmp_path):
    write(tmp_path, change(peft_tensors()), **entries)
    with pytest.raises(error, match=words.replace("(", r"\(")):
        models.load_adapters(tmp_path, CONFIG)


def test_damaged_files_are_typed_errors(tmp_path):
    with pytest.raises(MissingFileError):
        models.load_adapters(tmp_path, CONFIG)
    write(tmp_path, peft_tensors())
    data = (tmp_path / "adapter_model.safetensors").read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        (tmp_path / "adapter_model.safetensors").write_bytes(data[:size])
        with pytest.raises(GpuOpsError):
            models.load_adapters(tmp_path, CONFIG)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(OptionError, match="is a pickle"):
        models.load_adapters(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: {}, OptionError, "adapters is empty"),
        (lambda x: {"layers.9.o.a": x["layers.0.o.a"]}, OptionError, "is no adapter of this config"),
        (lambda x: {"layers.0.o.a": x["layers.0.o.a"]}, OptionError, "not the other array"),
        (
            lambda x: x | {"layers.0.o.a": x["layers.0.o.a"][:, 1:]},
            ShapeError,
            "layers.0.o has a and b of shapes",
        ),
        (lambda x: {n: y.astype(np.int8) for n, y in x.items()}, OptionError, "is int8"),
    ],
)
def test_adapters_that_are_not_saved(change, error, words, tmp_path):
    with pytest.raises(error, match=words):
        models.save_adapters(tmp_path / "new", change(random_adapters()), CONFIG)
    assert not (tmp_path / "new").exists()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT calls transformers
def test_peft_reads_our_adapters_and_we_read_its(tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft", reason="scripts/test_peers.sh installs it")
    import transformers

    weights = models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)
    models.save(tmp_path / "base", weights, CONFIG)
    models.save_adapters(tmp_path / "ours", random_adapters(), CONFIG, base=str(tmp_path / "base"))

    def check(adapted, where):
        with torch.no_grad():
            expected = adapted(torch.from_numpy(IDS)).logits.numpy()
        y = models.logits(IDS, models.with_lora(weights, models.load_adapters(where, CONFIG)), CONFIG)
        assert abs(y - expected).max() < 1e-5 * abs(expected).max()

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    check(peft.PeftModel.from_pretrained(base, tmp_path / "ours"), tmp_path / "ours")

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    lora = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "v_proj", "up_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
    )
    trained = peft.get_peft_model(base, lora)
    torch.manual_seed(0)
    for name, p in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.3)
    trained.save_pretrained(tmp_path / "theirs")
    check(trained, tmp_path / "theirs")
