"""Streaming text from token ids, up to a stop string."""

from __future__ import annotations

import pytest

from gpu_ops.errors import OptionError
from gpu_ops.inference import TextStream
from gpu_ops.training import BytePairEncoding


class Bytes:
    """Tokenizer whose tokens are bytes."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class Whole(str):
    """Tokenizer with the text as token 0."""

    def decode(self, ids):
        return self * len(ids)


def test_text_comes_in_whole_characters():
    stream = TextStream(Bytes())
    assert [stream.add(b) for b in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert stream.finish() == ""
    assert stream.add("é".encode()[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one END two", ["END"], "one "),
        ("one EN", ["END"], "one EN"),
        ("aab", ["ab"], "a"),
        ("xyz", ["z", "yz"], "x"),
        ("xyz", [""], "xyz"),
        ("abcd", ["abcd", "bc"], "a"),
    ],
)
def test_stop_strings(text, stop, shown):
    stream = TextStream(Bytes(), stop)
    pieces = [stream.add(b) for b in text.encode()]
    assert "".join(pieces) + stream.finish() == shown
    whole = TextStream(Whole(text), stop)
    assert whole.add(0) + whole.finish() == shown  # whatever the tokens are
    assert all(word not in "".join(pieces[: i + 1]) for i in range(len(pieces)) for word in stop if word)


def test_the_first_space_of_a_text_stays():
    class Stripping(Bytes):  # as the decoders of Llama 2 do
        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    stream = TextStream(Stripping(), prompt=list(b"Once"))
    assert "".join(stream.add(b) for b in b" upon") == " upon"
    with pytest.raises(OptionError, match="stop must be a sequence, got str"):
        TextStream(Bytes(), stop="END")


def test_a_tokenizer_that_decodes_to_bytes():
    text = "aé€ ab"
    tokenizer = BytePairEncoding.train(text.encode(), vocab=256)
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode(text)] == [*"a", "", "é", "", "", "€", *" ab"]


@pytest.mark.parametrize("tokenizer", [None, 3, "x", object(), {}, Bytes, bytes])
def test_what_cannot_decode_is_refused_at_once(tokenizer):
    with pytest.raises(
        OptionError, match=r"tokenizer must have a method decode\(ids\), got .*load_tokenizer"
    ):
        TextStream(tokenizer)


def test_a_tokenizer_that_decodes_to_no_text():
    class Lists(Bytes):
        def decode(self, ids):
            return ids

    with pytest.raises(OptionError, match="decode returned list; expected a str or bytes"):
        TextStream(Lists()).add(1)


class Fallback(Bytes):
    """Tokenizer that decodes like Llama 2: bytes that are not valid UTF-8 become one replacement character each."""

    def decode(self, ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(ids)


@pytest.mark.parametrize(
    "tokenizer", [Bytes(), Fallback()], ids=["a sign for a character", "a sign for a byte"]
)
@pytest.mark.parametrize("text", ["Hi 中!", "中é中", "é😀é!"])
def test_a_character_that_begins_in_the_prompt_is_text(tokenizer, text):
    whole = text.encode()
    for cut in range(len(whole) + 1):
        stream = TextStream(tokenizer, prompt=list(whole[:cut]))
        shown = "".join(stream.add(b) for b in whole[cut:]) + stream.finish()
        assert shown == text[len(whole[:cut].decode(errors="ignore")) :], cut


@pytest.mark.parametrize("end", ["é".encode()[:1], "\N{REPLACEMENT CHARACTER}".encode()])
def test_a_sign_that_stays_in_the_prompt_is_not_repeated(end):
    stream = TextStream(Bytes(), prompt=list(b"Hi " + end))
    assert [stream.add(b) for b in b"ab"] == ["a", "b"]


def test_a_stop_string_in_the_last_token_of_a_text():
    class Words:  # the last token ends in half a character
        def decode(self, ids):
            return "".join({1: "EN", 2: "D\N{REPLACEMENT CHARACTER}"}[i] for i in ids)

    stream = TextStream(Words(), stop=["END"])
    assert [stream.add(1), stream.add(2), stream.finish()] == ["", "", ""]
    assert stream.stopped
