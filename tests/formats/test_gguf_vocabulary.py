"""Tokenizers of folders as metadata of GGUF files: both kinds, special tokens, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest

from gpu_ops.errors import FormatError, OptionError
from gpu_ops.formats.gguf_vocabulary import read_vocabulary

DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {**WORDS, "use_regex": False}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_PAIRS = {
    "added_tokens": [
        {"id": 3, "content": "<|begin|>", "special": True},
        {"id": 4, "content": "<tool>", "special": False},
    ],
    "normalizer": None,
    "pre_tokenizer": WORDS,
    "post_processor": WORDS,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}
PREPEND = {"type": "Prepend", "prepend": "▁"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PIECES = {
    "added_tokens": [
        {"id": 0, "content": "<unk>", "special": True},
        {"id": 1, "content": "<s>", "special": True},
        {"id": 8, "content": "▁▁x", "special": False},
    ],
    "normalizer": {"type": "Sequence", "normalizers": [PREPEND, SPACES]},
    "pre_tokenizer": None,
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    },
    "model": {
        "type": "BPE",
        "unk_token": "<unk>",
        "byte_fallback": True,
        "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "▁a": 5, "aa": 6, "▁aa": 7},
        "merges": [["▁", "a"], ["a", "a"], ["▁", "aa"], ["▁a", "a"]],
    },
}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def changed(tokenizer, **parts):
    """Copy with other parts; those of the model are called model_NAME."""
    result = copy.deepcopy(tokenizer)
    for name, part in parts.items():
        owner = result["model"] if name.startswith("model_") else result
        owner[name.removeprefix("model_")] = part
    return result


def entries(folder, tokenizer, size=10, **files):
    for name, contents in {"tokenizer": tokenizer, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))
    read = read_vocabulary("test", folder, size)
    return {name.removeprefix("tokenizer.").removeprefix("ggml."): value for name, value in read.items()}


def test_a_folder_without_tokenizer_has_no_entries(tmp_path):
    assert read_vocabulary("test", tmp_path, 10) == {}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "expected"),
    [
        (None, WORDS, "gpt-2"),
        (None, sequence(DIGITS, WORDS), "smollm"),
        (None, sequence(split(LLAMA3), BYTES), "llama-bpe"),
        ({"type": "NFC"}, sequence(split(QWEN2), BYTES), "qwen2"),
        (None, sequence(split(QWEN2), BYTES), "qwen2"),
        (None, sequence(split(TEKKEN), BYTES), "tekken"),
    ],
)
def test_byte_pairs(normalizer, pre_tokenizer, expected, tmp_path):
    read = entries(tmp_path, changed(BYTE_PAIRS, normalizer=normalizer, pre_tokenizer=pre_tokenizer), size=6)
    assert read.pop("token_type").tolist() == [1, 1, 1, 3, 4, 5]
    assert read == {
        "model": "gpt2",
        "pre": expected,
        "tokens": ["a", "b", "ab", "<|begin|>", "<tool>", "[PAD5]"],
        "merges": ["a b"],
        "add_space_prefix": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        (PIECES["normalizer"], None, True),
        (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, True),
        (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}, False),
        (SPACES, None, False),
        (
            SPACES,
            {**split(""), "pattern": {"String": " "}, "behavior": "MergedWithPrevious"},
            False,
        ),
    ],
)
def test_pieces(normalizer, pre_tokenizer, prefix, tmp_path):
    read = entries(tmp_path, changed(PIECES, normalizer=normalizer, pre_tokenizer=pre_tokenizer), size=9)
    assert (read["model"], read["pre"], read["add_space_prefix"]) == ("llama", "default", prefix)
    assert read["tokens"] == ["<unk>", "<s>", "<0x0A>", "▁", "a", "▁a", "aa", "▁aa", "  x"]
    assert read["token_type"].tolist() == [2, 3, 6, 1, 1, 1, 1, 1, 4]
    assert read["scores"].tolist() == [0, 0, 0, 0, 0, 0, -1, -2, 0]
    assert (read["bos_token_id"], read["add_bos_token"], read["add_eos_token"]) == (1, True, False)
    assert "merges" not in read


def test_special_tokens(tmp_path):
    files = {
        "tokenizer_config": {
            "bos_token": {"content": "<|begin|>"},
            "eos_token": "ab",
            "pad_token": None,
            "chat_template": [{"name": "default", "template": "{{ x }}"}, {"name": "tools", "template": ""}],
        },
        "config": {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 1},
        "generation_config": {"eos_token_id": [2, 4, 0]},
    }
    read = entries(tmp_path, BYTE_PAIRS, **files)
    ids = {name: value for name, value in read.items() if name.endswith("_token_id")}
    assert ids == {
        "bos_token_id": 3,
        "eos_token_id": 2,
        "padding_token_id": 1,
        "eot_token_id": 4,
        "eom_token_id": 0,
    }
    assert read["chat_template"] == "{{ x }}"
    (tmp_path / "chat_template.jinja").write_text("{{ y }}")
    assert entries(tmp_path, BYTE_PAIRS, tokenizer_config={})["chat_template"] == "{{ y }}"


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (changed(BYTE_PAIRS, model_type="Unigram"), "its model is 'Unigram'"),
        (changed(BYTE_PAIRS, pre_tokenizer=sequence(split(r"\d"), BYTES)), "no name in llama.cpp is known"),
        (changed(BYTE_PAIRS, pre_tokenizer={**WORDS, "add_prefix_space": True}), "no name in llama.cpp"),
        (changed(BYTE_PAIRS, normalizer={"type": "Lowercase"}), "no name in llama.cpp"),
        (changed(BYTE_PAIRS, pre_tokenizer=None), "'empty'"),
        (changed(BYTE_PAIRS, model_byte_fallback=True), "byte_fallback=True"),
        (changed(BYTE_PAIRS, model_ignore_merges=True), "ignore_merges"),
        (changed(BYTE_PAIRS, model_end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (changed(BYTE_PAIRS, model_merges=["a c"]), "no pair of tokens"),
        (changed(BYTE_PAIRS, model_vocab={"a": 0, "b": 1, "ab": 1}), "two tokens have the same id"),
        (changed(BYTE_PAIRS, model_vocab={"a": 0, "b": 1, "ab": "2"}), "is no tokenizer.json that is known"),
        (changed(BYTE_PAIRS, model_vocab={"a": 0, "b": 1, "ab": 10}), "it has a token of id 10"),
        (changed(BYTE_PAIRS, post_processor={"type": "BertProcessing"}), "BertProcessing"),
        (changed(PIECES, model_merges=PIECES["model"]["merges"][:3]), "no merge says so"),
        (
            changed(PIECES, model_merges=PIECES["model"]["merges"][2:] + PIECES["model"]["merges"][:3]),
            "two places",
        ),
        (changed(PIECES, model_byte_fallback=False), "byte_fallback=False"),
        ({"model": {}}, "'empty'"),
        ({}, "is no tokenizer.json that is known"),
        ([], "holds no JSON object"),
    ],
)
def test_what_llama_cpp_would_read_otherwise_is_refused(tokenizer, words, tmp_path):
    with pytest.raises((OptionError, FormatError), match=words):
        entries(tmp_path, tokenizer)
