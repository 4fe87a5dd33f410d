"""Code blocks of the README work as shown, each block alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
OUTPUT = re.findall(r"^```text\n(.*?)^```", TEXT, re.M | re.S)


@pytest.mark.parametrize("block", PYTHON, ids=[f"block {i}" for i in range(1, len(PYTHON) + 1)])
def test_each_example_runs_alone(block, capsys):
    """Run it as a reader types it into a new interpreter."""
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    following = TEXT[TEXT.index(block) + len(block) :]
    if shown := re.match(r"```\n\n```text\n(.*?)^```", following, re.M | re.S):
        # tiles depend on the machine
        lines = [line for line in shown[1].splitlines() if not line.startswith("  config ")]
        assert lines
        assert [line for line in lines if line not in printed] == []


def test_an_example_computes_gradients(capsys):
    namespace = {"__name__": "readme"}
    exec(compile(PYTHON[1], "README.md", "exec"), namespace)
    assert "of the float32 size" in capsys.readouterr().out
    assert namespace["out"].shape == namespace["q"].shape
    assert namespace["dk"].shape == namespace["k"].shape


def test_there_are_examples():
    assert len(PYTHON) >= 4
    assert OUTPUT
    assert "import gpu_ops" in PYTHON[0]


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 250


def paths_in(text):
    """Words that look like files of this repository."""
    return set(re.findall(r"\b(?:scripts|perf|gpu_ops|kernels|reference|tests)/[\w/]+\.(?:sh|py)\b", text))


def test_commands_name_files_that_exist():
    named = paths_in(TEXT) | paths_in((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert {"scripts/run.sh", "scripts/test.sh"} <= named
    missing = [p for p in named if not (ROOT / p).exists() and "/x.py" not in p and "_x.py" not in p]
    assert not missing


@pytest.mark.parametrize("script", ["scripts/run.sh", "scripts/test.sh", "scripts/setup.sh", ".ci/run"])
def test_scripts_are_executable(script):
    assert (ROOT / script).stat().st_mode & 0o111


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.peers
def test_from_a_folder_to_text(tmp_path, capsys):
    """The tokenizer is from the tokenizers package."""
    tokenizers = pytest.importorskip("tokenizers")
    from gpu_ops import models

    config = models.LlamaConfig(vocab=64, hidden=32, ffn=48, nlayers=1, nheads=2)
    models.save(tmp_path, models.Llama.of(models.initial_weights(config), config), config)
    words = {"Once": 0} | {f"w{i}": i for i in range(1, 64)}
    model = tokenizers.models.WordLevel(words, unk_token="w1")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (block,) = re.findall(r"^```py\n(.*?)^```", TEXT, re.M | re.S)
    exec(compile(block, "README.md", "exec"), {"FOLDER": str(tmp_path)})
    assert len(capsys.readouterr().out.split()) == 128
