"""Models from folders and saved to folders: shards and casts; folders that do not match their config are refused."""

from __future__ import annotations

import dataclasses
import json
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, models
from gpu_ops.errors import FormatError, GpuOpsError, MissingFileError, OptionError, ShapeError
from gpu_ops.formats.safetensors import NUMPY_DTYPES, SafetensorsFile, header_of
from gpu_ops.models import Layer, LlamaConfig
from tests.formats.test_file_mutations import mutant
from tests.formats.test_files import POINTER

CONFIG = LlamaConfig(vocab=31, hidden=24, ffn=20, nlayers=2, nheads=4, nheads_kv=2)


def made(config=CONFIG, dtype=np.float32):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in config.shapes().items()}
    return models.Llama.of(arrays, config)


@pytest.fixture
def folder(tmp_path):
    """Folder of a saved model."""
    models.save(tmp_path, made(), CONFIG)
    return tmp_path


def same(a, b):
    a, b = a.arrays(), b.arrays()
    return a.keys() == b.keys() and all(
        x.dtype == b[n].dtype and x.tobytes() == b[n].tobytes() for n, x in a.items()
    )


def tensors(path):
    with path.open("rb") as file:
        contents = SafetensorsFile("test", path, file)
        return {name: contents.read(name) for name in contents.tensors}


def write(path, arrays):
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    header = header_of({n: (names[x.dtype], x.shape) for n, x in arrays.items()}, {})
    path.write_bytes(header + b"".join(x.tobytes() for x in arrays.values()))


def shard(folder):
    """Replace the file by two files and their index."""
    arrays = tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(arrays)
    listed = {n: f"model-0000{1 + (i >= 7)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(listed.values()):
        write(folder / file, {n: arrays[n] for n in names if listed[n] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return listed


def configured(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_rows_are_joined_in_order(folder):
    stored, layer = tensors(folder / "model.safetensors"), models.load(folder)[0].layers[1]
    at = "model.layers.1."
    joined = [stored[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"]
    assert [x.shape[0] for x in joined] == [24, 12, 12]
    np.testing.assert_array_equal(layer.qkv, np.concatenate(joined))
    joined = [stored[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")]
    np.testing.assert_array_equal(layer.gate_up, np.concatenate(joined))


def test_shards(folder):
    shard(folder)
    assert same(models.load(folder)[0], made())


def test_loading_takes_the_models_memory_and_a_piece(tmp_path):
    config = LlamaConfig(vocab=4096, hidden=1024, ffn=1024, nlayers=2, nheads=8)
    models.save(tmp_path, made(config, np.float16), config)
    tracemalloc.start()
    models.load(tmp_path, dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * config.parameters + 3 * 2**24


def test_an_output_layer_beside_a_tied_table(folder):
    """Some files have an output layer that is a copy of the table."""
    arrays = tensors(folder / "model.safetensors")
    configured(folder, tie_word_embeddings=True)
    with pytest.raises(FormatError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        models.load(folder)
    write(
        folder / "model.safetensors", arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"].copy()}
    )
    weights, config = models.load(folder)
    assert config.tied
    assert weights.lm_head is weights.embed


def renamed(arrays, prefix):
    """Tensors with the names that other packages write."""
    return {n.replace("model.", prefix, 1) if n.startswith("model.") else n: x for n, x in arrays.items()}


@pytest.mark.parametrize("prefix", ["model.", "", "model.model."])
@pytest.mark.parametrize("head", ["none", "alone", "a copy"])
def test_a_tied_model_by_the_names_of_other_packages(head, prefix, folder):
    arrays = tensors(folder / "model.safetensors")
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    for name in {"none": ["lm_head.weight"], "alone": ["model.embed_tokens.weight"]}.get(head, ()):
        del arrays[name]
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    write(folder / "model.safetensors", renamed(arrays | inv_freq, prefix))
    configured(folder, tie_word_embeddings=True)
    weights, config = models.load(folder)
    assert config.tied
    right = made()
    right.lm_head = right.embed
    assert same(weights, right)


def test_a_base_model_has_no_output_layer(folder):
    arrays = tensors(folder / "model.safetensors")
    del arrays["lm_head.weight"]
    write(folder / "model.safetensors", renamed(arrays, ""))
    with pytest.raises(FormatError, match=r"no 'lm_head.weight', .* set tie_word_embeddings"):
        models.load(folder)


@pytest.mark.parametrize("table", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("head", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_the_head_of_a_tied_model_in_another_dtype(head, table, folder):
    """An exact copy of the table is tied; a rounded head is used as stored, as in transformers 5."""
    arrays = tensors(folder / "model.safetensors")
    embed = "model.embed_tokens.weight"
    exact = np.random.default_rng(0).standard_normal(arrays[embed].shape)
    configured(folder, tie_word_embeddings=True)
    few = exact.astype(ml_dtypes.float8_e4m3fn)  # values that all dtypes hold
    write(
        folder / "model.safetensors", arrays | {embed: few.astype(table), "lm_head.weight": few.astype(head)}
    )
    weights, config = models.load(folder)
    assert config.tied
    assert weights.embed.dtype == table
    stored = arrays | {embed: exact.astype(table), "lm_head.weight": exact.astype(head)}
    write(folder / "model.safetensors", stored)
    if {head, table} == {np.float16, ml_dtypes.bfloat16}:  # neither is the other, rounded
        with pytest.raises(FormatError, match="differs from"):
            models.load(folder)
    elif head != table:
        weights, config = models.load(folder, dtype=np.float32)
        assert not config.tied
        np.testing.assert_array_equal(weights.lm_head, exact.astype(head).astype(np.float32))
        np.testing.assert_array_equal(weights.embed, exact.astype(table).astype(np.float32))


def test_frequencies_in_early_files_are_computed_anew(folder):
    arrays = tensors(folder / "model.safetensors")
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    write(folder / "model.safetensors", arrays | inv_freq)
    assert same(models.load(folder)[0], made())


O_PROJ = "model.layers.1.self_attn.o_proj.weight"
DAMAGED = {
    "missing": (lambda a: a.pop(O_PROJ), FormatError, f"no '{O_PROJ}', of shape (24, 24)"),
    "no head": (lambda a: a.pop("lm_head.weight"), FormatError, "set tie_word_embeddings"),
    "shape": (
        lambda a: a.update({O_PROJ: np.zeros((24, 23), np.float32)}),
        ShapeError,
        f"model.safetensors: {O_PROJ} has shape (24, 23), and (24, 24) by the config",
    ),
    "extra": (
        lambda a: a.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32)}),
        FormatError,
        "'model.layers.0.self_attn.q_proj.bias' is no part",
    ),
    "a layer more": (
        lambda a: a.update({"model.layers.2.mlp.up_proj.weight": np.zeros((20, 24), np.float32)}),
        FormatError,
        "'model.layers.2.mlp.up_proj.weight' is no part of a 2-layer model",
    ),
    "dtype": (
        lambda a: a.update({O_PROJ: np.zeros((24, 24), np.int8)}),
        FormatError,
        f"{O_PROJ} is I8; F16, BF16, F32, F64 are loaded",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_another_model_than_the_configs_is_refused(name, folder):
    change, error, words = DAMAGED[name]
    arrays = tensors(folder / "model.safetensors")
    change(arrays)
    write(folder / "model.safetensors", arrays)
    with pytest.raises(error, match=re.escape(words)):
        models.load(folder)


def test_numbers_that_the_dtype_cannot_hold(tmp_path):
    weights = made()
    weights.layers[1].down[3, 4] = 1e6
    weights.layers[0].down[3, 4] = np.inf  # inf is kept
    models.save(tmp_path, weights, CONFIG)
    with pytest.raises(OptionError, match=r"layers\.1\.mlp\.down_proj\.weight holds numbers beyond"):
        models.load(tmp_path, dtype="float16")
    assert np.isinf(models.load(tmp_path, dtype="bfloat16")[0].layers[0].down[3, 4])


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda m, i: m.clear(), FormatError, "weight_map is no object with an entry"),
        (lambda m, i: i.pop("weight_map"), FormatError, "is no index"),
        (lambda m, i: m.update({O_PROJ: "../model.safetensors"}), FormatError, "in the same folder"),
        (lambda m, i: m.update({O_PROJ: 3}), FormatError, "in the same folder"),
        (lambda m, i: m.update({O_PROJ: "other.safetensors"}), MissingFileError, "other.safetensors"),
        (lambda m, i: m.update(z="model-00001-of-00002.safetensors"), FormatError, "there is no 'z'"),
    ],
)
def test_an_index_that_is_wrong(change, kind, words, folder):
    index = {"weight_map": shard(folder)}
    change(index["weight_map"], index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(kind, match=words):
        models.load(folder)


def test_a_tensor_in_two_shards(folder):
    shard(folder)
    first, second = sorted(folder.glob("model-*"))
    arrays = tensors(first)
    name = next(iter(arrays))
    write(second, tensors(second) | {name: arrays[name]})
    with pytest.raises(FormatError, match=f"{name!r} is in {first.name} as well"):
        models.load(folder)


def test_folders_that_are_none(folder, tmp_path):
    with pytest.raises(MissingFileError, match=r"No such file or directory: '.*missing'"):
        models.load(tmp_path / "missing")
    with pytest.raises(FormatError, match=r"config\.json cannot be read as a GGUF file"):
        models.load(folder / "config.json")
    (folder / "empty").mkdir()
    with pytest.raises(MissingFileError, match=r"config\.json"):
        models.load(folder / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        MissingFileError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"
    ):
        models.load(folder)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_hidden_layers": 60000}, "60000 layers, and the files 21 tensors"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"model_type": "mistral", "sliding_window": "7"}, "sliding_window"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": [1, 2]}, "layer_types has 1"),
        ({"vocab_size": 1 << 62}, r"embed_tokens.weight has shape \(31, 24\)"),
    ],
)
def test_configs_that_are_refused(entries, words, folder):
    configured(folder, **entries)
    with pytest.raises(GpuOpsError, match=words):
        models.load(folder)


def test_options(folder):
    with pytest.raises(OptionError, match="dtype"):
        models.load(folder, dtype="int8")
    with pytest.raises(OptionError, match="dtype"):
        models.load(folder, dtype=np.int32)
    with pytest.raises(OptionError, match="device"):
        models.load(folder, device="tpu")
    assert isinstance(models.load(folder, device="emulator")[0].embed, np.ndarray)


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "model.safetensors.index.json", SHARD])
def test_a_pointer_of_git_lfs_is_named(file, folder):
    if file != "model.safetensors":
        shard(folder)
    (folder / file).write_bytes(POINTER)
    with pytest.raises(FormatError, match=rf"{file} is a pointer of git LFS, .*'git lfs pull'"):
        models.load(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_damaged_files_are_refused_or_read_soundly(file, folder):
    if file.endswith("index.json"):
        shard(folder)
    whole = (folder / file).read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        (folder / file).write_bytes(mutant(whole, rng))
        try:
            weights, config = models.load(folder)
        except GpuOpsError:
            refused += 1
        else:
            models.Llama.of(weights.arrays(), config)
    assert refused > 100


# Models saved to folders: they load unchanged; a save is complete or writes nothing.

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projections_are_packed_as_they_are_read(dtype, tmp_path):
    config = models.LlamaConfig(vocab=96, hidden=64, ffn=128, nlayers=2, nheads=4)
    models.save(tmp_path, models.Llama.of(models.initial_weights(config), config), config)
    packed, _ = models.load(tmp_path, dtype=dtype, format="nf4")
    plain, _ = models.load(tmp_path, dtype=dtype)
    for name, x in plain.arrays().items():
        mine = packed.arrays()[name]
        if name.endswith((".qkv", ".o", ".gate_up", ".down")):
            np.testing.assert_array_equal(mine.blocks()[0], gpu_ops.quantize(x, "nf4").blocks()[0])
            assert mine.dtype == x.dtype
        else:
            np.testing.assert_array_equal(mine, x)
    assert models.logits(np.array([[1, 2, 3]]), packed, config).dtype == plain.embed.dtype
    fast, _ = models.load(tmp_path, dtype=dtype, format="q8_0", activations="int8")
    assert fast.layers[0].qkv.activations == "int8"
    for options, words in (({"format": "q2_k"}, "q4_k"), ({"format": "q4_k"}, "qkv.*multiple of 256")):
        with pytest.raises((OptionError, ShapeError), match=words):
            models.load(tmp_path, **options)
    with pytest.raises(OptionError, match="with format="):
        models.load(tmp_path, activations="int8")
    floats, _ = models.load(tmp_path, dtype=dtype, format="bfloat16")
    assert floats.layers[0].qkv.formats == ((192, "bfloat16"),)
    assert floats.layers[0].qkv.dtype == plain.embed.dtype
