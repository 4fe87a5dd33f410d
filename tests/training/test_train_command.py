"""Command ``train``: runs that go on, adapters, and what it refuses."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from gpu_ops import models
from gpu_ops.__main__ import main

TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(400))
SIZES = (
    "--hidden",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--vocab",
    "300",
    "--batch",
    "2",
    "--seqlen",
    "16",
)
OFTEN = ("--save-every", "2", "--sample-every", "2")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def train(text, out, steps, *options, status=0):
    arguments = ("--text", str(text), "--out", str(out), "--steps", str(steps), *OFTEN, *options)
    assert main(["train", *arguments]) == status


def losses(out):
    with (out / "losses.csv").open(newline="") as file:
        return [(row["step"], row["loss"], row["learning_rate"]) for row in csv.DictReader(file)]


def same_model(a, b):
    (x, config), (y, other) = models.load(a), models.load(b)
    assert config == other
    return all(np.array_equal(x.arrays()[name], y.arrays()[name]) for name in x.arrays())


def test_a_run_goes_on_with_the_same_bits(text, tmp_path, capsys, monkeypatch):
    train(text, tmp_path / "whole", 6, *SIZES)
    shown = capsys.readouterr().out
    assert [row[0] for row in losses(tmp_path / "whole")] == list("123456")
    for words in (
        "step 6 of 6, loss ",
        " tokens/s, ",
        " MiB, 0 s left",
        "sample: 'The ",
        "the first sample and step compile their kernels",
        "gpu-ops generate --model",
    ):
        assert words in shown
    step, calls = models.loss_and_grads, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(models, "loss_and_grads", interrupted)
        train(text, tmp_path / "parts", 6, *SIZES, status=130)
    assert "stopped after step 3, saved 2; the same command goes on" in capsys.readouterr().out
    train(text, tmp_path / "parts", 6, *SIZES)
    assert "goes on after step 2" in capsys.readouterr().out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_model(tmp_path / "parts", tmp_path / "whole")
    train(text, tmp_path / "parts", 8, *SIZES)  # more steps of the same run
    assert losses(tmp_path / "parts")[:6] == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "parts")) == 8
    capsys.readouterr()
    assert (
        main(["generate", "--model", str(tmp_path / "whole"), "--prompt", "3 times", "--max-new-tokens", "3"])
        == 0
    )
    assert capsys.readouterr().out.startswith("3 times")


def test_adapters_of_a_packed_model(text, tmp_path, capsys):
    base, out = tmp_path / "base", tmp_path / "adapters"
    train(text, base, 1, *SIZES, "--hidden", "64")
    _, config = models.load(base)
    options = (
        "--model",
        str(base),
        "--lora",
        "--rank",
        "2",
        "--base-format",
        "nf4",
        "--batch",
        "2",
        "--seqlen",
        "16",
    )
    train(text, out, 4, *options)
    adapters = models.load_adapters(out, config)
    assert adapters["layers.0.qkv.a"].shape == (2, 64)
    assert adapters["layers.0.down.b"].any()
    assert float(losses(out)[0][2]) == pytest.approx(2e-4 / 30, rel=1e-3)
    capsys.readouterr()
    arguments = ["--adapters", str(out), "--format", "nf4", "--prompt", "3 times", "--max-new-tokens", "3"]
    assert main(["generate", "--model", str(base), *arguments]) == 0
    train(text, tmp_path / "tuned", 2, "--model", str(base), "--batch", "2", "--seqlen", "16")
    assert (tmp_path / "tuned" / "tokenizer.json").exists()
    assert not same_model(tmp_path / "tuned", base)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lora",), "pass --model"),
        (("--base-format", "nf4"), "add --lora"),
        (("--text", "none.txt"), "No such file"),
        (("--dtype", "int8"), "--dtype"),
        (("--model", "none"), "none"),
        (("--model", __file__), "add --lora"),
        (("--seqlen", "100000"), "tokens"),
        (("--policy", "all"), "policy"),
        (("--heads", "5"), "--hidden 32 is not a multiple of --heads 5"),
    ],
)
def test_mistakes_are_one_line(options, words, text, tmp_path, capsys):
    train(text, tmp_path / "out", 2, *SIZES, *options, status=2)
    error = capsys.readouterr().err
    assert error.startswith("train: ")
    assert error.count("\n") == 1
    assert words in error


def test_a_folder_with_other_contents_is_not_written_to(text, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").touch()
    train(text, out, 2, *SIZES, status=2)
    assert "holds no run; choose another --out" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    train(text, tmp_path / "run", 2, *SIZES)
    capsys.readouterr()
    train(text, tmp_path / "run", 2, *SIZES, "--lr", "0.5", status=2)
    assert "a run with another --lr" in capsys.readouterr().err
    text.write_bytes(b"\xff")
    train(text, tmp_path / "run", 2, *SIZES, status=2)
    assert "is not UTF-8" in capsys.readouterr().err


def test_a_new_model_reads_a_tokenizer_file_and_chats(text, tmp_path, capsys):
    """The folder of a new model is like a published one: quantised with its tokens, run as a chat with a template."""
    first, second = tmp_path / "first", tmp_path / "second"
    train(text, first, 1, *SIZES)
    file = first / "tokenizer.json"
    train(text, second, 1, *SIZES, "--vocab", "400", "--tokenizer", str(file))
    assert (second / "tokenizer.json").read_bytes() == file.read_bytes()
    assert models.load(second)[1].vocab == models.load(first)[1].vocab == 300
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    packed = tmp_path / "first.gguf"
    assert main(["quantize", "--model", str(first), "--format", "q8_0", "-o", str(packed)]) == 0
    chat = ("--chat", "--chat-template", str(template), "--prompt", "3 times", "--max-new-tokens", "20")
    for model in (str(first), str(packed)):
        capsys.readouterr()
        assert main(["generate", "--model", model, "--tokenizer", str(file), *chat]) == 0
        assert "trained for 16" in capsys.readouterr().err  # 7 tokens of the prompt, and 19
    assert main(["generate", "--model", str(first), *chat[1:]]) == 2
    assert "--chat-template is the template of --chat" in capsys.readouterr().err
