"""Command ``generate``, with a small model and a tokenizer of bytes."""

from __future__ import annotations

import io
import json
import sys

import pytest

import gpu_ops
from gpu_ops import inference, models
from gpu_ops.__main__ import main
from gpu_ops.errors import OptionError
from gpu_ops.inference import text_model
from tests.models.model_files import metadata, stored

CONFIG = models.LlamaConfig(vocab=256, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)


class Bytes:
    def encode(self, text):
        return type("Encoding", (), {"ids": list(text.encode())})

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


def weights():
    return models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)


def text_of(prompt, count):
    (tokens,) = inference.generate(weights(), CONFIG, [list(prompt.encode())], max_new_tokens=count)
    return Bytes().decode(tokens)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    models.save(tmp_path, weights(), CONFIG)
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(text_model, "load_tokenizer", lambda path: Bytes())
    return tmp_path


def test_generate(folder, capsys):
    assert main(["generate", "--model", str(folder), "--prompt", "abc", "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "abc" + text_of("abc", 9) + "\n"
    assert printed.err.startswith("3 prompt tokens, first token after ")


def test_generate_packs_floats(folder, monkeypatch):
    packed = []
    monkeypatch.setattr(
        text_model, "with_packed", lambda weights: packed.append(models.with_packed(weights)) or packed[-1]
    )
    assert main(["generate", "--model", str(folder), "--prompt", "abc", "--max-new-tokens", "3"]) == 0
    assert isinstance(packed[0].embed, gpu_ops.PackedMatrix)


def test_generate_passes_on_how_weights_are_packed(folder, capsys, monkeypatch):
    config = models.LlamaConfig(vocab=256, hidden=32, ffn=64, nlayers=1, nheads=4)
    models.save(folder, models.Llama.of(models.initial_weights(config, std=0.2), config), config)
    loaded = []
    monkeypatch.setattr(
        text_model,
        "load",
        lambda *args, **options: loaded.append(models.load(*args, **options)) or loaded[-1],
    )
    arguments = ["--prompt", "abc", "--max-new-tokens", "2", "--format", "q4_0", "--activations", "int8"]
    assert main(["generate", "--model", str(folder), *arguments]) == 0
    ((packed, _),) = loaded
    assert packed.layers[0].qkv.formats == ((96, "q4_0"),)
    assert packed.layers[0].qkv.activations == "int8"
    assert main(["generate", "--model", str(folder), "--prompt", "abc", "--format", "q9"]) == 2
    assert "format='q9' is unknown" in capsys.readouterr().err


def test_generate_for_several_prompts_up_to_a_stop_string(folder, capsys):
    stop = text_of("abc", 9)[4]
    options = ["--prompt", "abc", "--prompt", "xy", "--max-new-tokens", "9", "--stop", stop]
    assert main(["generate", "--model", str(folder), *options]) == 0
    texts = [f"{prompt}{text_of(prompt, 9).partition(stop)[0]}" for prompt in ("abc", "xy")]
    assert capsys.readouterr().out == "".join(f"{text}\n\n" for text in texts)


def test_ends_of_a_text(folder):
    for entries, ends in (({"eos_token_id": 7}, [7]), ({"eos_token_id": [7, 9]}, [7, 9]), ({}, [])):
        (folder / "generation_config.json").write_text(json.dumps(entries))
        assert text_model.open_model(folder).ends == ends


def test_generate_from_a_gguf_file(folder, capsys):
    path, tensors = folder / "a.gguf", stored(weights(), CONFIG, "llama")
    keys = {"general.architecture": "llama", **metadata(CONFIG, "llama"), "tokenizer.ggml.eos_token_id": 7}
    gpu_ops.write_gguf(path, tensors, keys)
    arguments = ["generate", "--model", str(path), "--prompt", "abc", "--max-new-tokens", "9"]
    (folder / "tokenizer.json").unlink()
    assert main(arguments) == 2
    assert "the vocabulary within a GGUF file is not read: pass --tokenizer FILE" in capsys.readouterr().err
    for tokenizer in (["--tokenizer", str(folder / "other.json")], []):
        (folder / "tokenizer.json").touch()  # in the folder of the file
        assert main([*arguments, *tokenizer]) == 0
        assert capsys.readouterr().out == "abc" + text_of("abc", 9) + "\n"
    assert text_model.open_model(path).ends == [7]
    more = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 8}
    gpu_ops.write_gguf(path, tensors, keys | more)
    assert text_model.open_model(path).ends == [7, 9, 8]
    gpu_ops.write_gguf(path, tensors, {**keys, "tokenizer.ggml.eos_token_id": -1})
    with pytest.raises(OptionError, match="eos_token_id"):
        text_model.open_model(path)


def test_mistakes_are_one_line(tmp_path, folder, capsys):
    (folder / "model.safetensors").unlink()
    assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("generate: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "-"), "standard input is not UTF-8"),
        (("--prompt", ""), "--prompt is empty, and this tokenizer adds no token"),
        (("--prompt", "a", "--adapters", "nowhere"), "--adapters must be a folder with adapter_config.json"),
        (("--prompt", "a", "--kv-dtype", "int9"), "--kv-dtype='int9' is unknown; did you mean 'int8'?"),
        (("--prompt", "a", "--dtype", "bf17"), "--dtype='bf17' is unknown"),
        (("--prompt", "a", "--max-new-tokens", "1" + "0" * 30), "generate: num_pages must lie in"),
        (("--prompt", "a", "--temperature", "nan"), "temperature must be finite"),
        (("--prompt", "a", "--model", "a" * 300), "File name too long"),
        (("--prompt", "a", "--model", "a\0b"), "it holds a NUL"),
    ],
)
def test_absurd_arguments_are_one_line(folder, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    assert main(["generate", "--model", str(folder), *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n"), error.count("generate: ")) == ("", 1, 1)
    assert words in error
