"""Byte pair encoding: merges and tokens by the definition, and round trips of any bytes; published tokenizers."""

from __future__ import annotations

import json
import re
import sys
import types
from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import (
    DTypeError,
    FormatError,
    MissingFileError,
    MissingPackageError,
    OptionError,
    ShapeError,
)
from gpu_ops.kernels.compiler import progress
from gpu_ops.kernels.text.cpu import bpe as kernels
from gpu_ops.training import BytePairEncoding, load_tokenizer
from gpu_ops.training import tokenizer as tokenizer_module

W, L, D, S = rb"[ \t-\r]", rb"[A-Za-z\x80-\xff]", rb"[0-9]", rb"[^ \t-\rA-Za-z\x80-\xff0-9]"
WORD = re.compile(
    rb"(?: |%b)%b{1,127}|%b{1,128}" % (S, L, L)
    + b"".join(rb"| %b{1,127}|%b{1,128}" % (chars, chars) for chars in (D, S))
    + rb"|%b{1,127}(?= [^ \t-\r])|%b{1,128}" % (W, W),
    re.DOTALL,
)


def words_of(text):
    words = WORD.findall(text)
    assert b"".join(words) == text
    return words


def replaced(tokens, pair, new):
    """Replace a pair from the left."""
    result, i = [], 0
    while i < len(tokens):
        hit = tuple(tokens[i : i + 2]) == pair
        result.append(new if hit else tokens[i])
        i += 2 if hit else 1
    return result


def merges_of(documents, vocab):
    words = Counter(word for text in documents for word in words_of(text))
    tokens, merges = {word: list(word) for word in words}, []
    while len(merges) < vocab - 256:
        counts = Counter()
        for word, count in words.items():
            for pair in pairwise(tokens[word]):
                counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        tokens = {word: replaced(t, best, 256 + len(merges)) for word, t in tokens.items()}
        merges.append(best)
    return merges


def tokens_of(text, merges):
    number, ids = {tuple(pair): 256 + i for i, pair in enumerate(merges)}, []
    for word in words_of(text):
        tokens = list(word)
        while pairs := [number[pair] for pair in pairwise(tokens) if pair in number]:
            tokens = replaced(tokens, tuple(merges[min(pairs) - 256]), min(pairs))
        ids += tokens
    return ids


ENGLISH = b"""It was the best of times, it was the worst of times; it was 1859 (or 1775?).
    def it_was(self, the_best=0x1F): return self.times[the_best]  # the worst
\tna\xc3\xafve caf\xc3\xa9s\r\n\r\n   aaaaaaaa aaaa aaa ...... !!! == != <<=   \n"""
TEXTS = {
    "english": ENGLISH * 2,
    "one letter": b"a" * 700,
    "two letters": b"abaabbbabaabab" * 30 + b"ba" * 100,
    "spaces": b" " * 300 + b"x" + b" " * 128 + b"y" + b" " * 129 + b"z \n \n  w",
    "few kinds": bytes(np.random.default_rng(1).choice(np.frombuffer(b"ab .1\n", np.uint8), 3000)),
    "any bytes": np.random.default_rng(2).bytes(3000),
    "ties": b"ab cd ef gh " * 3,
    "empty": b"",
    "one byte": b"x",
}


@pytest.mark.parametrize("name", TEXTS)
def test_words_are_those_of_the_definition(name):
    text = TEXTS[name]
    ends = kernels.split(np.frombuffer(text, np.uint8)).tolist()
    assert [text[a:b] for a, b in pairwise([0, *ends])] == words_of(text)
    assert max(map(len, words_of(text)), default=0) <= tokenizer_module._MOST_TOKEN == kernels.MOST_WORD


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("vocab", [256, 257, 300, 420])
def test_merges_are_those_of_the_definition(name, vocab):
    tokenizer = BytePairEncoding.train(TEXTS[name], vocab, progress=False)
    assert tokenizer.merges.tolist() == [list(pair) for pair in merges_of([TEXTS[name]], vocab)]
    assert tokenizer.vocab <= vocab


@given(
    text=st.lists(st.sampled_from(["a", "b", "ab", "aa", " ", "."])).map("".join), vocab=st.integers(256, 280)
)
def test_merges_of_runs_and_overlaps(text, vocab):
    tokenizer = BytePairEncoding.train(text, vocab, progress=False)
    assert tokenizer.merges.tolist() == [list(pair) for pair in merges_of([text.encode()], vocab)]


def test_documents_are_apart():
    documents = [b"abab", b"ab", "ab\u00e9", bytearray(b"cab"), memoryview(b"abc")]
    plain = [bytes(d) if not isinstance(d, str) else d.encode() for d in documents]
    for data in (documents, tuple(documents), iter(documents)):
        assert BytePairEncoding.train(data, 300, progress=False).merges.tolist() == [
            list(pair) for pair in merges_of(plain, 300)
        ]
    assert not BytePairEncoding.train([b"a", b"b"] * 9, 300, progress=False).merges.size
    assert BytePairEncoding.train([], 300, progress=False).vocab == 256


@cache
def trained(name, vocab=420):
    return BytePairEncoding.train(TEXTS[name], vocab, progress=False)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("by", ["english", "few kinds", "any bytes", "one letter", "empty"])
def test_tokens_are_those_of_the_definition(name, by):
    ids = trained(by).encode(TEXTS[name])
    assert ids.dtype == np.int32
    assert ids.tolist() == tokens_of(TEXTS[name], trained(by).merges.tolist())
    assert trained(by).decode(ids) == TEXTS[name]


@given(text=st.binary(max_size=400), by=st.sampled_from(["english", "few kinds", "any bytes", "one letter"]))
def test_any_bytes_come_back(text, by):
    ids = trained(by).encode(text)
    assert ids.tolist() == tokens_of(text, trained(by).merges.tolist())
    assert trained(by).decode(ids) == text


@given(text=st.text(max_size=300))
def test_any_text_comes_back(text):
    tokenizer = trained("english")
    assert tokenizer.decode(tokenizer.encode(text)).decode() == text


def test_text_that_utf8_cannot_hold_is_refused():
    for use in (trained("english").encode, BytePairEncoding.train):
        with pytest.raises(OptionError, match=r"data cannot be encoded as UTF-8: .*; pass bytes"):
            use("a\ud800")


@pytest.mark.parametrize(("task", "piece"), [(1, 1), (7, 3), (100, 1), (1 << 16, 64)])
def test_cuts_change_nothing(task, piece, monkeypatch):
    text = b"".join(TEXTS.values())
    expected, merges = trained("english").encode(text), trained("few kinds").merges
    monkeypatch.setattr(tokenizer_module, "_TASK", task)
    monkeypatch.setattr(tokenizer_module, "_PIECE", piece)
    np.testing.assert_array_equal(trained("english").encode(text), expected)
    again = BytePairEncoding.train(TEXTS["few kinds"], 420, progress=False)
    np.testing.assert_array_equal(again.merges, merges)


def test_more_pairs_than_there_was_room_for():
    """Exceed 65536 pairs of bytes and as many of new tokens: with random bytes, every merge makes new pairs."""
    rng = np.random.default_rng(0)
    words = rng.integers(128, 256, (4000, 100), np.uint8)
    data = b"\n".join(word.tobytes() for word in words)
    tokenizer = BytePairEncoding.train(data, 3000, progress=False)
    assert tokenizer.vocab == 3000
    text = data[:5000]
    assert tokenizer.encode(text).tolist() == tokens_of(text, tokenizer.merges.tolist())
    counts = Counter()  # of the first merge and of the last
    for word in words_of(data):
        counts.update(pairwise(word))
    assert tuple(tokenizer.merges[0]) == min(counts, key=lambda pair: (-counts[pair], pair))


def test_training_is_compression():
    text = b"".join(b"%d bottles of beer on the wall, " % i for i in range(99, 0, -1)) * 2
    sizes = [
        len(BytePairEncoding.train(text, vocab, progress=False).encode(text)) for vocab in (256, 280, 400)
    ]
    assert sizes[0] == len(text)
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[2]


@pytest.mark.parametrize("by", ["english", "empty", "any bytes"])
def test_what_is_saved_is_loaded(by, tmp_path):
    trained(by).save(tmp_path / "t.json")
    read = BytePairEncoding.load(tmp_path / "t.json")
    np.testing.assert_array_equal(read.merges, trained(by).merges)
    assert read.vocab == trained(by).vocab
    np.testing.assert_array_equal(read.encode(ENGLISH), trained(by).encode(ENGLISH))
    read.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "t.json").read_bytes()


def saved(**changes):
    return json.dumps(
        {"gpu_ops.kind": "BytePairEncoding 1", "merges": [[97, 98], [256, 97]]} | changes
    ).encode()


BAD = {
    "empty": (b"", "Expecting value"),
    "cut off": (saved()[:-5], "BytePairEncoding.save: "),
    "no text": (b"\xff\xfe\xfd", "codec|Expecting"),
    "a list": (b"[]", "expected 'gpu_ops.kind'"),
    "deep": (b"[" * 99_999, "recursion"),
    "another kind": (saved(**{"gpu_ops.kind": "BytePairEncoding 2"}), "expected 'gpu_ops.kind'"),
    "a key more": (saved(x=1), "expected 'gpu_ops.kind'"),
    "no pairs": (saved(merges=5), "no pairs of tokens"),
    "triples": (saved(merges=[[1, 2, 3]]), "no pairs of tokens"),
    "floats": (saved(merges=[[1.0, 2]]), "no pairs of tokens"),
    "booleans": (saved(merges=[[True, 2]]), "no pairs of tokens"),
    "negative": (saved(merges=[[-1, 2]]), "no pairs of tokens"),
    "endless": (saved(merges=[[10**30, 2]]), "no pairs of tokens"),
    "of later tokens": (
        saved(merges=[[97, 256]]),
        r"merge 0 is of 97 and 256; tokens before it are \[0, 256\)",
    ),
    "twice": (saved(merges=[[1, 2], [1, 2]]), "merge 1, of 1 and 2, is there twice"),
    "doubling": (saved(merges=[[97, 97], *([256 + i] * 2 for i in range(60))]), "makes a token of 256 bytes"),
}


@pytest.mark.parametrize("what", BAD)
def test_other_files_are_refused(what, tmp_path):
    data, message = BAD[what]
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        BytePairEncoding.load(tmp_path / "t")
    assert len(str(caught.value)) < 1000


def test_a_file_that_is_too_long(tmp_path, monkeypatch):
    (tmp_path / "t").write_bytes(saved())
    monkeypatch.setattr(tokenizer_module, "_MOST_FILE", 50)
    with pytest.raises(FormatError, match="more than 50 bytes"):
        BytePairEncoding.load(tmp_path / "t")


@pytest.mark.parametrize(
    ("merges", "error", "message"),
    [
        ([[1.0, 2.0]], ShapeError, "float64; expected pairs of integers"),
        ([1, 2], ShapeError, r"shape \(2,\)"),
        ([[1, 300]], OptionError, "merge 0 is of 1 and 300"),
        (np.zeros((1 << 20, 2), np.int32), OptionError, "at most 1048320"),
    ],
)
def test_bad_merges_are_refused(merges, error, message):
    with pytest.raises(error, match=message):
        BytePairEncoding(merges)


def test_bad_arguments_are_refused():
    tokenizer = BytePairEncoding([(97, 98)])
    for data in (5, None, np.zeros(3, np.uint8), ["a"]):
        with pytest.raises(DTypeError, match=r"encode: data is .*; expected bytes or a str"):
            tokenizer.encode(data)
    for data, name in ((5, "data"), ([b"a", 5], r"data\[1\]"), (None, "data")):
        with pytest.raises(DTypeError, match=f"train: {name} is .*; expected bytes or a str"):
            BytePairEncoding.train(data)
    for vocab in (255, 1 << 21, 1e3, None, True):
        with pytest.raises(OptionError, match="vocab must"):
            BytePairEncoding.train(b"x", vocab)
    with pytest.raises(OptionError, match="progress must"):
        BytePairEncoding.train(b"x", progress="no")
    with pytest.raises(OptionError, match=r"decode: token 1 is 257, not in \[0, 257\)"):
        tokenizer.decode([0, 257])
    with pytest.raises(OptionError, match="token 0 is -1"):
        tokenizer.decode(np.array([-1]))
    with pytest.raises(DTypeError, match="expected integers"):
        tokenizer.decode([0.5])
    with pytest.raises(ShapeError, match="one axis"):
        tokenizer.decode([[1]])
    assert tokenizer.decode([]) == b""
    assert tokenizer.decode([256, 99]) == b"abc"
    with pytest.raises(ValueError, match="read-only"):
        tokenizer.merges[0, 0] = 5


def test_progress_is_shown_after_a_while(monkeypatch, capsys):
    BytePairEncoding.train(ENGLISH, 300)  # compiles
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    capsys.readouterr()
    BytePairEncoding.train(ENGLISH, 300)
    assert capsys.readouterr().err == ""
    seen = []
    monkeypatch.setattr(tokenizer_module, "steps", recorded(seen, tokenizer_module.steps))
    monkeypatch.setattr(tokenizer_module, "visible", recorded(seen, tokenizer_module.visible))
    BytePairEncoding.train(ENGLISH, 300)
    assert [message.split()[1] for message in seen] == ["counting", "learning"]
    monkeypatch.setattr(tokenizer_module, "_TASK", 10)
    monkeypatch.setattr(tokenizer_module, "_PIECE", 1)
    trained("english").encode(ENGLISH * 9)
    assert seen.pop().split()[1] == "encoding"
    BytePairEncoding.train(ENGLISH, 300, progress=False)
    trained("english").encode(ENGLISH[:40])
    assert len(seen) == 2


def recorded(seen, function):
    def record(message, *rest):
        seen.append(message)
        return function(message, *rest)

    return record


def test_an_interrupt_ends_training():
    def documents():
        yield b"abab"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BytePairEncoding.train(documents(), progress=False)


# Tokenizer of a published model: settings of its file, and requirements for reading it.


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
