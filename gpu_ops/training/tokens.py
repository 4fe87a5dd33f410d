"""Files of tokens.

A token file is a header of 32 bytes and the tokens, uint16 if the vocabulary fits, else uint32, all little endian. It
is read by the window, not mapped: if another process truncates the file, that is an error, where access to a mapped
page would end the process.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array, host_view
from gpu_ops.core.checks import integer
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, system_errors, write_file
from gpu_ops.kernels.compiler.progress import visible

__all__ = ["MOST_VOCAB", "TokenFile", "check_range", "is_numbers", "vector", "write_tokens"]

_HEADER = struct.Struct("<8sIIQQ")  # magic, version, bytes per token, tokens, vocab
_MAGIC, _VERSION = b"GPUOPTOK", 1
MOST_VOCAB = 1 << 31  # batches are int32


@typed_memory_errors("write_tokens")
def write_tokens(path: Any, tokens: Any, *, vocab: int) -> None:
    """Write tokens to a file for :class:`TokenFile`, atomically.

    Parameters
    ----------
    path : path
    tokens : array or iterable of arrays
        Vectors or lists of integers; each is checked and written before the next is requested.
    vocab : int
        All tokens are in [0, vocab). A token takes two bytes if vocab is at most 65536, else four.

    Raises
    ------
    OptionError
        A token is outside the vocabulary.
    ShapeError, DTypeError
        The tokens are not vectors of integers.
    FileError
        The file cannot be written; the old one is unchanged, as after any other error.

    Examples
    --------
    >>> import tempfile
    >>> from gpu_ops.training import TokenFile, write_tokens
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(f"{folder}/t", ([i, i + 1] for i in (5, 7)), vocab=256)
    ...     tokens = TokenFile(f"{folder}/t")
    >>> len(tokens), tokens[1:3]
    (4, array([6, 7], dtype=uint16))
    """
    op = "write_tokens"
    target = path_of(op, path)
    vocab = integer(op, "vocab", vocab, low=1, high=MOST_VOCAB)
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    count = 0

    def header() -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, count, vocab)

    def parts() -> Iterator[Any]:
        nonlocal count
        yield header()
        for i, part in enumerate(_parts_of(op, tokens)):
            view = vector(op, f"tokens[{i}]" if part is not tokens else "tokens", part)
            check_range(op, view, vocab, count)
            count += len(view)
            yield np.ascontiguousarray(view, dtype).view(np.uint8)

    with visible(f"gpu_ops: writing tokens to {target}"):
        write_file(op, target, parts(), head=header)


class TokenFile:
    """A vector of tokens on the disk, in a file of :func:`write_tokens`.

    ``len(tokens)`` is their number, ``tokens[start:stop]`` reads some into a new array, ``tokens.vocab`` and
    ``tokens.dtype`` are those of the file. Threads and forked processes may share one. FormatError if the file is
    damaged or another, FileError if it cannot be read.
    """

    def __init__(self, path: Any) -> None:
        op = "TokenFile"
        self.path = path_of(op, path)
        with opened(op, self.path) as file:
            total = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or header[:8] != _MAGIC:
                raise FormatError(
                    f"{op}: {self.path} is no file of write_tokens: it begins with {header[:8]!r}"
                )
            _, version, itemsize, count, vocab = _HEADER.unpack(header)
            if (
                version != _VERSION
                or itemsize not in (2, 4)
                or not 1 <= vocab <= min(256**itemsize, MOST_VOCAB)
            ):
                raise FormatError(
                    f"{op}: {self.path} has a header that is not read: version {version}, {itemsize} bytes per "
                    f"token, a vocabulary of {vocab}"
                )
            if total != _HEADER.size + count * itemsize:
                raise FormatError(
                    f"{op}: {self.path} should hold {count} tokens in {_HEADER.size + count * itemsize} bytes, "
                    f"and has {total}: it was cut off, or something was added"
                )
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.dtype = np.dtype(f"<u{itemsize}")
        self.vocab: int = vocab
        self._count: int = count

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies, such as those in another process, open the file themselves."""
        return TokenFile, (str(self.path),)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}: {self._count} tokens of {self.vocab}, {self.dtype})"

    def __getitem__(self, index: slice) -> Array:
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise OptionError(f"TokenFile: index {index!r:.80}; allowed: a slice [start:stop]")
        start, stop, _ = index.indices(self._count)
        return self.read(start, max(stop - start, 0))

    @typed_memory_errors("TokenFile")
    def read(self, start: int, count: int) -> Array:
        """Read ``count`` tokens from ``start`` on into a new array."""
        if start < 0 or count < 0 or start + count > self._count:
            raise OptionError(
                f"TokenFile: tokens [{start}, {start + count}) of {self.path}, which has {self._count}"
            )
        tokens = np.empty(count, self.dtype)
        left, position = tokens.view(np.uint8).data, _HEADER.size + start * self.dtype.itemsize
        with system_errors("TokenFile", self.path):
            while left:
                nbytes = os.preadv(self._descriptor, [left], position)
                if not nbytes:
                    raise FormatError(
                        f"TokenFile: {self.path} was cut off at {position} bytes after it was opened"
                    )
                left, position = left[nbytes:], position + nbytes
        if count and int(tokens.max()) >= self.vocab:
            i = int(np.argmax(tokens >= self.vocab))
            raise FormatError(
                f"TokenFile: {self.path} is damaged: token {start + i} is {tokens[i]}, not in [0, {self.vocab})"
            )
        return tokens


def _parts_of(op: str, tokens: Any) -> Iterable[Any]:
    if hasattr(type(tokens), "__dlpack__") or is_numbers(tokens):
        return [tokens]
    if not isinstance(tokens, Iterable):
        raise DTypeError(
            f"{op}: tokens is {type(tokens).__name__}; expected an array, or an iterable of arrays"
        )
    return tokens


def is_numbers(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and isinstance(x[0], (int, np.integer))


def vector(op: str, name: str, x: Any) -> Array:
    """Check a vector of integers and return it as an array."""
    if isinstance(x, (list, tuple)):
        try:
            x = np.asarray(x if x else np.empty(0, np.int64))
        except (ValueError, OverflowError) as error:
            raise DTypeError(f"{op}: {name} is a {type(x).__name__} that makes no array: {error}") from error
    view, _ = host_view(op, name, x)
    if view.dtype.kind not in "iu":
        raise DTypeError(f"{op}: {name} is {view.dtype}; expected integers")
    if view.ndim != 1:
        raise ShapeError(f"{op}: {name} has shape {view.shape}; expected one axis")
    return view


def check_range(op: str, tokens: Array, end: int, first: int) -> None:
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= end):
        i = int(np.argmax((tokens < 0) | (tokens >= end)))
        raise OptionError(f"{op}: token {first + i} is {tokens[i]}, not in [0, {end})")
