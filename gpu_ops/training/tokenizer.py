"""Byte pair encoding: a tokenizer trained in seconds, which gives back the exact bytes; those of published models."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import flag, integer
from gpu_ops.errors import DTypeError, FormatError, MissingPackageError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, write_file
from gpu_ops.kernels.compiler.progress import steps, visible
from gpu_ops.training.tokens import check_range, vector

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BytePairEncoding", "load_tokenizer"]

_KIND, _ENCODING = "gpu_ops.kind", "BytePairEncoding 1"  # with the version of this layout
_MOST_VOCAB, _MOST_FILE = 1 << 20, 1 << 26
_MOST_TOKEN = 128  # bytes, also of a word
_TASK, _PIECE = 1 << 16, 64  # bytes of a task; tasks between checks for interrupts and progress
_LONG, _LONG_IDS = 16, 1 << 23  # pieces to encode, tokens to decode: about a second
_AT_ONCE = 64  # merges between checks for interrupts and progress
_WORD_BEGINS = re.compile(rb"(?<=[^ \t\n\v\f\r])[ \t\n\v\f\r]")


class BytePairEncoding:
    """A tokenizer of bytes: 256 tokens of one byte each, and one for each merge of two tokens.

    Text is cut into words: runs of letters, of digits, of other signs or of white space, of at most 128 bytes. The
    last space before another run belongs to that run, and so does a single sign before letters; all bytes from 128 on
    are letters. Within each word the pair of the earliest merge is replaced, leftmost first, until none is left.
    Tokens do not cross words.

    Parameters
    ----------
    merges : sequence of (int, int)
        Merge i makes token 256 + i from two earlier ones.

    Attributes
    ----------
    vocab : int
        256 + the number of merges.
    merges : int32 array (vocab - 256, 2)

    Raises
    ------
    OptionError
        A merge of a token that does not exist yet, a repeated merge, or a token of more than 128 bytes.

    Notes
    -----
    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016), on bytes.

    Examples
    --------
    >>> from gpu_ops.training import BytePairEncoding
    >>> tokenizer = BytePairEncoding.train(b"low lower lowest", vocab=260)
    >>> ids = tokenizer.encode("lower than low")
    >>> len(ids), tokenizer.decode(ids)
    (9, b'lower than low')
    """

    def __init__(self, merges: Any) -> None:
        op = "BytePairEncoding"
        pairs = np.asarray(merges)
        if pairs.size == 0:
            pairs = np.empty((0, 2), np.int32)
        if pairs.dtype.kind not in "iu" or pairs.ndim != 2 or pairs.shape[1] != 2:
            raise ShapeError(
                f"{op}: merges have shape {pairs.shape} and {pairs.dtype}; expected pairs of integers"
            )
        if len(pairs) > _MOST_VOCAB - 256:
            raise OptionError(f"{op}: {len(pairs)} merges; at most {_MOST_VOCAB - 256}")
        self._tokens = [bytes([byte]) for byte in range(256)]
        known = set[tuple[int, int]]()
        for i, (left, right) in enumerate(pairs.tolist()):
            if not (0 <= left < 256 + i and 0 <= right < 256 + i):
                raise OptionError(
                    f"{op}: merge {i} is of {left} and {right}; tokens before it are [0, {256 + i})"
                )
            token = self._tokens[left] + self._tokens[right]
            if len(token) > _MOST_TOKEN or (left, right) in known:
                wrong = "is there twice" if (left, right) in known else f"makes a token of {len(token)} bytes"
                raise OptionError(f"{op}: merge {i}, of {left} and {right}, {wrong}")
            known.add((left, right))
            self._tokens.append(token)
        self.merges = pairs.astype(np.int32)
        self.merges.flags.writeable = False
        self._table: Array | None = None

    @property
    def vocab(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"BytePairEncoding(vocab {self.vocab})"

    @classmethod
    @typed_memory_errors("BytePairEncoding.train")
    def train(cls, data: Any, vocab: int = 1024, *, progress: bool = True) -> BytePairEncoding:
        """Train a tokenizer: every merge is the most frequent pair of tokens, or the pair of lower tokens in a tie.

        Parameters
        ----------
        data : bytes or str, or iterable of these
            A text, or documents. An iterable is read once, and only distinct words are kept in memory.
        vocab : int
            Number of tokens, 256 to 1048576. The result has fewer if no pair occurs twice any more.
        progress : bool
            Whether to show progress on stderr after a second.

        Raises
        ------
        DTypeError, OptionError
            Data that are neither bytes nor text; distinct words of 2 GiB and more.
        """
        op = "BytePairEncoding.train"
        max_merges = integer(op, "vocab", vocab, low=256, high=_MOST_VOCAB) - 256
        show = flag(op, "progress", progress)
        from gpu_ops.kernels.text.cpu.bpe import Learner

        with visible(f"gpu_ops: counting words for {vocab} tokens") if show else contextlib.nullcontext():
            counts = Counter[bytes]()
            for document in _documents(op, data):
                counts.update(_words(document))
            words = [word for word in counts if len(word) > 1]
            if not words or not max_merges:
                return cls(())
            lengths = np.fromiter(map(len, words), np.int64, len(words))
            if lengths.sum() >= 1 << 31:
                raise OptionError(
                    f"{op}: different words take {lengths.sum()} bytes; train on a sample of the text"
                )
            symbols = np.frombuffer(b"".join(words), np.uint8)
            learner = Learner(symbols, lengths, np.array([counts[word] for word in words]), max_merges)
        calls = -(-max_merges // _AT_ONCE)
        message = f"gpu_ops: learning {max_merges} merges from {len(words)} words"
        with steps(message, calls) if show else contextlib.nullcontext(lambda: None) as advance:
            while learner.learn(_AT_ONCE):
                advance()
        return cls(learner.merges)

    @typed_memory_errors("BytePairEncoding.encode")
    def encode(self, data: Any) -> Array:
        """Encode bytes, or a str in UTF-8, as an int32 vector of tokens.

        Raises
        ------
        DTypeError, OptionError
            Data that are neither, or a str that UTF-8 cannot hold.
        """
        text = _bytes_of("BytePairEncoding.encode", "data", data)
        from gpu_ops.kernels.text.cpu import bpe

        if self._table is None:
            self._table = bpe.table_of(self.merges)
        cuts = _cuts(text, _TASK)
        pieces = [cuts[i : i + _PIECE + 1] for i in range(0, len(cuts) - 1, _PIECE)]
        long = len(pieces) > _LONG
        message = f"gpu_ops: encoding {len(text) / 1e6:.0f} MB"
        parts = [np.empty(0, np.int32)]
        with steps(message, len(pieces)) if long else contextlib.nullcontext(lambda: None) as advance:
            for piece in pieces:
                part = np.frombuffer(text, np.uint8, piece[-1] - piece[0], piece[0])
                parts.append(bpe.encode(part, np.array(piece) - piece[0], self._table))
                advance()
        return np.concatenate(parts)

    def decode(self, ids: Any) -> bytes:
        """Return the bytes of a vector or list of tokens.

        Raises
        ------
        OptionError
            A number that is not a token.
        ShapeError, DTypeError
            The ids are not a vector of integers.
        """
        op = "BytePairEncoding.decode"
        tokens = vector(op, "ids", ids)
        check_range(op, tokens, self.vocab, 0)
        long = len(tokens) > _LONG_IDS
        with visible(f"gpu_ops: decoding {len(tokens)} tokens") if long else contextlib.nullcontext():
            return b"".join([self._tokens[i] for i in tokens.tolist()])

    def save(self, path: Any) -> None:
        """Write the merges to a JSON file, atomically. Raises FileError."""
        op = "BytePairEncoding.save"
        text = json.dumps({_KIND: _ENCODING, "merges": self.merges.tolist()}, separators=(",", ":"))
        write_file(op, path_of(op, path), [text.encode()])

    @classmethod
    def load(cls, path: Any) -> BytePairEncoding:
        """Read a file of :meth:`save`. Raises FormatError if it is damaged or another file, and FileError."""
        op = "BytePairEncoding.load"
        where = path_of(op, path)
        with opened(op, where) as file:
            text = file.read(_MOST_FILE + 1)
        try:
            return cls(_merges_in(text))
        except (ValueError, RecursionError) as error:  # OptionError and ShapeError are ValueErrors
            raise FormatError(f"{op}: {where} is no file of BytePairEncoding.save: {error}") from error


def _merges_in(text: bytes) -> Any:
    if len(text) > _MOST_FILE:
        raise ValueError(f"it has more than {_MOST_FILE} bytes")
    contents = json.loads(text)
    if not isinstance(contents, dict) or contents.keys() != {_KIND, "merges"} or contents[_KIND] != _ENCODING:
        raise ValueError(f"expected {_KIND!r}: {_ENCODING!r} and 'merges'")
    merges = contents["merges"]
    if not isinstance(merges, list) or not all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(i) is int and 0 <= i < _MOST_VOCAB for i in pair)
        for pair in merges
    ):
        raise ValueError("its merges are no pairs of tokens")
    return merges


def _bytes_of(op: str, name: str, data: Any) -> bytes:
    if isinstance(data, str):
        try:
            return data.encode()
        except UnicodeEncodeError as error:
            raise OptionError(f"{op}: {name} cannot be encoded as UTF-8: {error}; pass bytes") from error
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise DTypeError(f"{op}: {name} is {type(data).__name__}; expected bytes or a str")


def _documents(op: str, data: Any) -> Iterator[bytes]:
    if isinstance(data, (str, bytes, bytearray, memoryview)) or not isinstance(data, Iterable):
        yield _bytes_of(op, "data", data)
        return
    for i, document in enumerate(data):
        yield _bytes_of(op, f"data[{i}]", document)


def _cuts(text: bytes, step: int) -> list[int]:
    """Positions to cut text: 0, the end, and places about ``step`` bytes apart where a word starts in any context."""
    cuts = [0]
    while (match := _WORD_BEGINS.search(text, cuts[-1] + step)) is not None:
        cuts.append(match.start())
    return [*cuts, len(text)] if text else cuts


def _words(text: bytes) -> Iterator[bytes]:
    from gpu_ops.kernels.text.cpu.bpe import split

    cuts = _cuts(text, _TASK)
    for start, end in pairwise(cuts):
        part, position = text[start:end], 0
        for stop in split(np.frombuffer(part, np.uint8)).tolist():
            yield part[position:stop]
            position = stop


def load_tokenizer(path: Any) -> Tokenizer:
    """Load a ``tokenizers.Tokenizer`` from the tokenizer.json of a model.

    ``load_tokenizer(path).encode(text).ids`` is a list that :func:`write_tokens` takes: all tokens of the text, the
    same in each call. Truncation, padding and the dropout of merges, which a tokenizer.json may have from the
    training of its model, are switched off.

    Raises
    ------
    MissingPackageError
        The package tokenizers is not installed: ``pip install tokenizers``.
    FormatError
        The package cannot read the file.
    FileError
        The file cannot be read; MissingFileError if there is none.
    """
    op = "load_tokenizer"
    where = path_of(op, path)
    with opened(op, where) as file:
        text = file.read()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingPackageError(
            f"{op}: a tokenizer.json takes the package tokenizers: pip install tokenizers ({error})"
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # the package raises Exception itself
        raise FormatError(f"{op}: {where}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer
