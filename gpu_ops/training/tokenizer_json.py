"""Tokenizers of published models, through the package tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_ops.errors import FormatError, MissingPackageError
from gpu_ops.formats.files import opened, path_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["load_tokenizer"]


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
