"""Tokenizer of a published model: settings of its file, and requirements for reading it."""

from __future__ import annotations

import sys
import types

import pytest

from gpu_ops.errors import FormatError, MissingFileError, MissingPackageError
from gpu_ops.training import load_tokenizer


def test_without_the_package_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingPackageError, match=r"pip install tokenizers") as caught:
        load_tokenizer(__file__)
    assert isinstance(caught.value, ImportError)


def test_the_file_comes_before_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingFileError):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123\n"
    )
    with pytest.raises(FormatError, match="pointer of git LFS"):
        load_tokenizer(tmp_path / "tokenizer.json")


class Tokenizer:
    """Fake tokenizer of the package: settings that training of a model enabled stay on."""

    def __init__(self):
        self.state = ["truncation", "padding"]
        self.model = types.SimpleNamespace(dropout=0.1)

    @classmethod
    def from_buffer(cls, text):
        if text != b"{}":
            raise Exception("expected value at line 1")
        return cls()

    def no_truncation(self):
        self.state.remove("truncation")

    def no_padding(self):
        self.state.remove("padding")


def test_with_the_package_tokenizers(monkeypatch, tmp_path):
    """A fake replaces the package: the test needs neither the package nor a model file."""
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Tokenizer))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.state, loaded.model.dropout) == ([], None)
    (tmp_path / "tokenizer.json").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"load_tokenizer: .*tokenizer.json: expected value at line 1"):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match="load_tokenizer"):
        load_tokenizer(tmp_path / "nothing")


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["BPE", "WordLevel", "Unigram"])
def test_all_tokens_of_a_text_and_no_others(kind, tmp_path):
    """The package has dropout in BPE only."""
    package = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["?", "a", "b", "ab", "[PAD]", "<s>"])}
    model = {
        "BPE": lambda: package.models.BPE(words, [("a", "b")], dropout=0.5),
        "WordLevel": lambda: package.models.WordLevel(words, unk_token="?"),
        "Unigram": lambda: package.models.Unigram([(word, -1.0) for word in words], unk_id=0),
    }[kind]()
    tokenizer = package.Tokenizer(model)
    tokenizer.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = package.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", words["<s>"])]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64, pad_id=words["[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode("ab " * 42).ids == [words["<s>"]] + [words["ab"]] * 42
    assert [each.ids for each in loaded.encode_batch(["a", "a b"])] == [[5, 1], [5, 1, 2]]
