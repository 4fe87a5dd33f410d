"""GGUF files made of folders: the tensors and metadata of the model, the command, and what is refused."""

from __future__ import annotations

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, models
from gpu_ops.__main__ import main
from gpu_ops.errors import GpuOpsError, OptionError
from gpu_ops.formats.gguf_file import GGUFFile
from gpu_ops.models import LlamaConfig, gguf_export
from tests.models.model_files import CASES, INSTALL, SIZES, made, metadata, same, stored
from tests.models.test_load import shard

IDS = np.random.default_rng(1).integers(0, SIZES["vocab"], (2, 19))
WIDE = LlamaConfig(vocab=40, hidden=256, ffn=512, nlayers=2, nheads=4, nheads_kv=2, tied=True)
LLAMA3 = LlamaConfig(**SIZES, theta=500000.0, scaling=RopeScaling.llama3(8.0, 8192))
MODELS = {name: case for name, case in CASES.items() if "bitnet" not in name} | {
    "wide": ("llama", WIDE),
    "llama3": ("llama", LLAMA3),
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
}


def save(folder, config, seed=0, **entries):
    weights = made(config, seed)
    models.save(folder, weights, config, entries={"max_position_embeddings": 8192, **entries})
    return weights


def read(path):
    """Metadata and tensors of a file."""
    with path.open("rb") as file:
        contents = GGUFFile("test", path, file)
        return {key: contents.value(key) for key in contents.keys if "tokenizer" not in key}, contents.tensors


def packed_likewise(tensors, formats):
    """Tensors in these formats, by the public functions."""
    floats = {"float32": np.float32, "float16": np.float16}
    return {
        name: x.astype(floats[formats[name]])
        if formats[name] in floats
        else gpu_ops.quantize(x, formats[name])
        for name, x in tensors.items()
    }


@pytest.mark.parametrize("format", ["q4_k_m", "q8_0", "f16"])
@pytest.mark.parametrize("case", MODELS)
def test_a_file_has_the_model_of_its_folder(case, format, tmp_path):
    arch, config = MODELS[case]
    weights, path = save(tmp_path, config), tmp_path / "a.gguf"
    formats = models.export_gguf(tmp_path, path, format)
    keys, tensors = read(path)
    dtypes = {"float32": "f32", "float16": "f16"}
    assert {name: tensor.dtype.lower() for name, tensor in tensors.items()} == {
        name: dtypes.get(chosen, chosen) for name, chosen in formats.items()
    }
    expected = metadata(config, arch) | ({f"{arch}.context_length": 128} if "yarn" in case else {})
    assert keys.items() >= expected.items()
    assert keys["general.architecture"] == arch
    assert ("rope_freqs.weight" in tensors) == (case == "llama3")

    by_hand = packed_likewise(stored(weights, config, arch), formats)
    if case == "llama3":
        plain, scaled = (
            s.inv_freq(config.head_dim, 500000.0) for s in (RopeScaling("default"), config.scaling)
        )
        by_hand["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    gpu_ops.write_gguf(tmp_path / "b.gguf", by_hand, keys)
    (loaded, read_config), (expected, _) = (models.load(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert read_config == config
    np.testing.assert_array_equal(models.logits(IDS, loaded, config), models.logits(IDS, expected, config))
    assert same(*(models.load(tmp_path / name, dtype="float32")[0] for name in ("a.gguf", "b.gguf")))


def test_float32_is_the_model(tmp_path):
    weights = save(tmp_path, WIDE)
    models.export_gguf(tmp_path, tmp_path / "a.gguf", "f32")
    assert same(models.load(tmp_path / "a.gguf")[0], weights)


@pytest.mark.parametrize("format", ["tq1_0", "tq2_0"])
def test_ternary_projections_lose_nothing(format, tmp_path, rng):
    weights = made(WIDE)
    for layer in weights.layers:
        for part in models.projection.PROJECTIONS:
            shape, scale = getattr(layer, part).shape, np.float32(rng.integers(1, 8) / 64)
            setattr(layer, part, rng.integers(-1, 2, shape).astype(np.float32) * scale)
    models.save(tmp_path, weights, WIDE)
    formats = models.export_gguf(tmp_path, tmp_path / "a.gguf", format)
    loaded, config = models.load(tmp_path / "a.gguf")
    assert config == WIDE
    for layer, right in zip(loaded.layers, weights.layers, strict=True):
        for part in models.projection.PROJECTIONS:
            packed, expected = getattr(layer, part), getattr(right, part)
            assert packed.formats == ((len(expected), format),)
            np.testing.assert_array_equal(packed.dequantize(), expected)
    assert formats["token_embd.weight"] == "q6_k"  # the output layer too
    assert read(tmp_path / "a.gguf")[0]["general.file_type"] == {"tq1_0": 36, "tq2_0": 37}[format]
    expected = models.load(tmp_path / "a.gguf", dtype="float32")[0]
    np.testing.assert_array_equal(models.logits(IDS, loaded, WIDE), models.logits(IDS, expected, WIDE))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_and_pieces_do_not_show(dtype, tmp_path, monkeypatch):
    """Pieces of two heads, of a folder in two shards, give the file of one piece."""
    arrays = {name: x.astype(ml_dtypes.bfloat16).astype(dtype) for name, x in made(WIDE).arrays().items()}
    models.save(tmp_path, models.Llama.of(arrays, WIDE), WIDE)
    models.export_gguf(tmp_path, tmp_path / "a.gguf")
    shard(tmp_path)
    monkeypatch.setattr(gguf_export, "_PIECE", 2 * 64 * 256)
    models.export_gguf(tmp_path, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_memory_is_that_of_some_pieces(tmp_path, monkeypatch):
    config = LlamaConfig(vocab=40000, hidden=256, ffn=512, nlayers=1, nheads=4)
    save(tmp_path, config)
    monkeypatch.setattr(gguf_export, "_PIECE", 1 << 15)
    models.export_gguf(tmp_path, tmp_path / "a.gguf", "q8_0")  # imports and caches
    tracemalloc.start()
    try:
        models.export_gguf(tmp_path, tmp_path / "a.gguf", "q8_0")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * config.vocab * config.hidden / 4


def test_the_package_reads_the_file(tmp_path):
    gguf = pytest.importorskip("gguf", reason=INSTALL)
    weights = save(tmp_path, WIDE)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    formats = models.export_gguf(tmp_path, tmp_path / "a.gguf", "q8_0")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    tensors = stored(weights, WIDE, "llama")
    assert [tensor.name for tensor in reader.tensors] == list(formats) == list(tensors)
    for tensor in reader.tensors:
        matrix = tensor.tensor_type.name == "Q8_0"
        expected = (
            gguf.quants.quantize(tensors[tensor.name], tensor.tensor_type) if matrix else tensors[tensor.name]
        )
        assert tensor.data.tobytes() == np.ascontiguousarray(expected).tobytes()
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["tokenizer.ggml.tokens"][:4] == ["a", "b", "ab", "[PAD3]"]
    assert len(fields["tokenizer.ggml.tokens"]) == WIDE.vocab
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert fields["general.file_type"] == 7


# ---- the command -------------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    save(tmp_path, WIDE)
    arguments = ["quantize", "--model", str(tmp_path), "-o", str(tmp_path / "a.gguf")]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "tensors: " in printed.out
    assert "q4_k" in printed.out
    assert "a.gguf written: " in printed.out
    assert "there is no tokenizer.json" in printed.err
    assert "llama.cpp will not load it" in printed.err
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert main([*arguments, "--format", "f16"]) == 0
    printed = capsys.readouterr()
    assert "tokenizer" not in printed.err
    assert "a.gguf replaced: " in printed.out
    before = (tmp_path / "a.gguf").read_bytes()
    for mistake in (["--format", "q9"], ["--model", "nowhere"], ["-o", str(tmp_path)], ["-o", "a/b/c.gguf"]):
        assert main([*arguments, *mistake]) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        assert error.startswith("quantize: ")
    assert (tmp_path / "a.gguf").read_bytes() == before
    assert main([*arguments, "--model", str(tmp_path / "a.gguf")]) == 2
    assert "--model must be a folder with config.json" in capsys.readouterr().err


def test_the_command_says_why_a_tensor_has_another_format(tmp_path, capsys):
    save(tmp_path, LlamaConfig(**SIZES))
    arguments = ["quantize", "--model", str(tmp_path), "-o", str(tmp_path / "a.gguf")]
    assert main(arguments) == 0
    assert "; q5_0 and q8_0 where 256 does not divide the rows" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--format", "f16"]) == 0
    assert "256" not in capsys.readouterr().out


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlamaConfig(**SIZES, window=7), "has no window"),
        (LlamaConfig(**SIZES, biases=("qkv", "o"), qk_norm=True), "qwen3 of llama.cpp has no biases"),
        (LlamaConfig(**SIZES, head_dim=24, biases=("qkv",)), "has no heads of 96"),
        (LlamaConfig(**SIZES, scaling=RopeScaling.dynamic(4.0, 32)), "dynamic"),
        (LlamaConfig(**SIZES, scaling=RopeScaling.yarn(4.0, 32, attention_factor=2.0)), "usual attention"),
        (LlamaConfig(**SIZES, logits_scaling=2.0), "a granite is not written"),
    ],
)
def test_models_that_the_file_cannot_express(config, words, tmp_path):
    save(tmp_path, config)
    with pytest.raises(OptionError, match=words):
        models.export_gguf(tmp_path, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_quantised_folders_are_refused(tmp_path):
    save(tmp_path, WIDE, quantization_config={"quant_method": "gptq"})
    with pytest.raises(OptionError, match="quantised already"):
        models.export_gguf(tmp_path, tmp_path / "a.gguf")


@pytest.mark.parametrize(("value", "format"), [(np.nan, "q4_k_m"), (1e6, "f16")])
def test_an_error_on_the_way_leaves_the_old_file(value, format, tmp_path):
    weights = save(tmp_path, WIDE)
    weights.layers[1].down[3, 5] = value
    models.save(tmp_path, weights, WIDE)
    (tmp_path / "a.gguf").write_bytes(b"old")
    with pytest.raises(GpuOpsError, match=r"blk\.1\.ffn_down\.weight"):
        models.export_gguf(tmp_path, tmp_path / "a.gguf", format)
    assert (tmp_path / "a.gguf").read_bytes() == b"old"
    assert not list(tmp_path.glob(".gpu_ops-*"))
