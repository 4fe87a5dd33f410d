"""Token files: they are read as written, and damage is detected."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gpu_ops.errors import DeviceError, DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.training import TokenFile, write_tokens
from tests.support.fake_cupy import ForeignDLPack


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, "<u2"), (256, "<u2"), (65536, "<u2"), (65537, "<u4"), (2**31, "<u4")]
)
def test_what_is_written_is_read(vocab, dtype, tmp_path, rng):
    tokens = rng.integers(0, vocab, 1009)
    tokens[-1] = vocab - 1
    write_tokens(tmp_path / "t", tokens, vocab=vocab)
    file = TokenFile(tmp_path / "t")
    assert (len(file), file.vocab, file.dtype) == (1009, vocab, np.dtype(dtype))
    assert (tmp_path / "t").stat().st_size == 32 + 1009 * file.dtype.itemsize
    np.testing.assert_array_equal(file[:], tokens)
    for cut in (
        slice(0, 0),
        slice(5, 5),
        slice(9, 3),
        slice(1008, None),
        slice(-3, None),
        slice(2, 7),
        slice(0, 10**9),
    ):
        np.testing.assert_array_equal(file[cut], tokens[cut])
    assert str(vocab) in repr(file)


def test_parts_of_every_kind_follow_each_other(tmp_path, rng):
    x = rng.integers(0, 99, 60)
    parts = [x.astype(np.uint8), x[::-3], x.astype(">i4"), [5, 6], (), [], x[:0], (7,), x.astype(np.uint64)]
    expected = np.concatenate([np.asarray(part, np.int64) for part in parts])
    for i, given_ in enumerate((parts, tuple(parts), iter(parts), (part for part in parts))):
        write_tokens(tmp_path / f"{i}", given_, vocab=99)
        np.testing.assert_array_equal(TokenFile(tmp_path / f"{i}")[:], expected)
    write_tokens(tmp_path / "list", [3, 4], vocab=9)
    write_tokens(tmp_path / "empty", [], vocab=9)
    assert TokenFile(tmp_path / "list")[:].tolist() == [3, 4]
    assert len(TokenFile(tmp_path / "empty")) == 0


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([0, 9], OptionError, r"token 1 is 9, not in \[0, 9\)"),
        ([[0, 1], np.array([2, -1])], OptionError, r"token 3 is -1, not in"),
        (np.array([2**63], np.uint64), OptionError, "token 0 is 9223372036854775808"),
        (np.ones(3), DTypeError, "tokens is float64; expected integers"),
        (np.ones(3, bool), DTypeError, "tokens is bool"),
        (np.ones((3, 3), int), ShapeError, r"tokens has shape \(3, 3\)"),
        (np.array(3), ShapeError, r"shape \(\)"),
        ([np.ones(3, int), 5], DTypeError, r"tokens\[1\] is int, not an array"),
        ([[1], [[1], [1, 2]]], DTypeError, r"tokens\[1\] is a list that makes no array"),
        ([["a"]], DTypeError, r"tokens\[0\] is <U1"),
        (b"abc", DTypeError, r"tokens\[0\] is int, not an array"),
        (5, DTypeError, "tokens is int; expected an array, or an iterable"),
        (None, DTypeError, "tokens is NoneType"),
    ],
)
def test_bad_tokens_are_refused_and_nothing_is_written(tokens, error, message, tmp_path):
    with pytest.raises(error, match=message):
        write_tokens(tmp_path / "t", tokens, vocab=9)
    assert not list(tmp_path.iterdir())


def test_cuda_arrays_are_refused(tmp_path):
    with pytest.raises(DeviceError, match="tokens is on device"):
        write_tokens(tmp_path / "t", ForeignDLPack(np.zeros(3, np.int32)), vocab=9)


@pytest.mark.parametrize("vocab", [0, -1, 2**31 + 1, 1.5, None, True])
def test_bad_vocabularies_are_refused(vocab, tmp_path):
    with pytest.raises(OptionError, match="write_tokens: vocab must"):
        write_tokens(tmp_path / "t", [0], vocab=vocab)


def test_what_the_source_raises_is_passed_on(tmp_path):
    write_tokens(tmp_path / "t", [1, 2], vocab=9)

    def source():
        yield [1]
        raise FileNotFoundError("a document")

    with pytest.raises(FileNotFoundError, match="a document"):
        write_tokens(tmp_path / "t", source(), vocab=9)
    assert TokenFile(tmp_path / "t")[:].tolist() == [1, 2]


def test_damaged_and_foreign_files(tmp_path):
    path = tmp_path / "t"
    write_tokens(path, np.arange(100), vocab=100)
    whole = path.read_bytes()
    cases = {
        "is no file of write_tokens": [b"", whole[:31], b"PK" + whole[2:], bytes(500)],
        "should hold 100 tokens in 232 bytes, and has": [whole[:-1], whole + b"\0", whole[:32]],
        "has a header that is not read": [
            whole[:8] + b"\2" + whole[9:],  # version
            whole[:12] + b"\3" + whole[13:],  # bytes per token
            whole[:24] + bytes(8) + whole[32:],  # vocab
            whole[:24] + b"\xff" * 8 + whole[32:],
        ],
        "should hold 18446744073709551615 tokens": [whole[:16] + b"\xff" * 8 + whole[24:]],
    }
    for message, files in cases.items():
        for data in files:
            path.write_bytes(data)
            with pytest.raises(FormatError, match=message):
                TokenFile(path)
    path.write_bytes(whole[:-1] + b"\1")
    tokens = TokenFile(path)
    np.testing.assert_array_equal(tokens[:99], np.arange(99))
    with pytest.raises(FormatError, match=r"is damaged: token 99 is 355, not in \[0, 100\)"):
        tokens[90:]


def test_a_file_that_is_cut_off_while_it_is_open(tmp_path):
    """An array mapped to the file would kill the process."""
    write_tokens(tmp_path / "t", np.arange(90_000) % 9, vocab=9)
    tokens = TokenFile(tmp_path / "t")
    os.truncate(tmp_path / "t", 1000)
    assert tokens[:100].sum() == (np.arange(100) % 9).sum()
    with pytest.raises(FormatError, match="was cut off at 1000 bytes after it was opened"):
        tokens[:]


def test_a_file_that_is_replaced_stays_as_it_was_opened(tmp_path):
    write_tokens(tmp_path / "t", [1, 2, 3], vocab=9)
    tokens = TokenFile(tmp_path / "t")
    write_tokens(tmp_path / "t", [4, 5], vocab=9)
    assert tokens[:].tolist() == [1, 2, 3]


def test_reads_outside_are_refused(tmp_path):
    write_tokens(tmp_path / "t", [1, 2, 3], vocab=9)
    tokens = TokenFile(tmp_path / "t")
    for start, count in ((-1, 2), (0, 4), (3, 1), (0, -1)):
        with pytest.raises(OptionError, match=r"of .*, which has 3"):
            tokens.read(start, count)
    for index in (0, slice(0, 3, 2), slice(None, None, -1), [0], None, ...):
        with pytest.raises(OptionError, match="allowed: a slice"):
            tokens[index]


def test_descriptors_are_closed(tmp_path):
    write_tokens(tmp_path / "t", [1, 2, 3], vocab=9)
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(20):
        TokenFile(tmp_path / "t")
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 1
