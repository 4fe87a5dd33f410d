"""Growing text from token ids: whole characters only, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_ops.core import checks
from gpu_ops.errors import OptionError

__all__ = ["TextStream"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders return it for the first bytes of a character
_MOST_BYTES = 4  # maximum bytes of a character


class TextStream:
    """Text of one request, piece by piece.

    Parameters
    ----------
    tokenizer : object with ``decode(ids)``, a str or UTF-8 bytes
        For example a ``tokenizers.Tokenizer``, from :func:`gpu_ops.training.load_tokenizer`, or a
        :class:`gpu_ops.training.BytePairEncoding`.
    stop : strings
        Strings that end the text: it ends before the first complete one; of several that end together, before the
        longest. Text that may begin a stop string is held back.
    prompt : sequence of int
        Token ids before the text. Some decoders omit a leading space of a text.

    Examples
    --------
    >>> from gpu_ops.inference import TextStream
    >>> class Letters:
    ...     def decode(self, ids):
    ...         return "".join(map(chr, ids))
    >>> stream = TextStream(Letters(), stop=["END"])
    >>> [stream.add(ord(letter)) for letter in "a EEND!"]
    ['a', ' ', '', 'E', '', '', '']
    >>> stream.stopped
    True
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        if not isinstance(stop, (list, tuple)) or not all(isinstance(word, str) for word in stop):
            raise OptionError("TextStream: stop must be a list of strings")
        if isinstance(tokenizer, type) or not callable(getattr(tokenizer, "decode", None)):
            shown = (
                f"the class {tokenizer.__name__}" if isinstance(tokenizer, type) else type(tokenizer).__name__
            )
            raise OptionError(
                f"TextStream: tokenizer must have a method decode(ids), got {shown}; training.load_tokenizer(path) "
                "makes one of a tokenizer.json"
            )
        self._tokenizer, self._stop = tokenizer, [word for word in stop if word]
        self._ids = list(prompt)
        # ids from _start on are decoded together; those before _read have been returned
        self._start, self._read = 0, len(self._ids)
        self._held = ""
        self.stopped = False
        """Whether a stop string has occurred."""

    def add(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        if self.stopped:
            return ""
        self._ids.append(checks.integer("TextStream.add", "token", token, low=0))
        new, whole = self._decoded()
        return self._shown(new) if new and whole else ""

    def finish(self) -> str:
        """Return the text still held back, at the end of a text that no stop string ended."""
        if self.stopped:
            return ""
        rest = self._shown(self._decoded()[0])
        rest, self._held = rest + self._held, ""
        return rest

    def _decoded(self) -> tuple[str, bool]:
        """Decode the text that has not been returned, and whether it ends with a whole character."""
        # A decoder may strip a leading space, so new ids are decoded after those of the previous piece.
        text, before = self._text(len(self._ids)), self._text(self._read)
        if before.endswith(_INCOMPLETE) and not text.startswith(before):
            # The prompt ended within a character that later tokens completed: it belongs to the new text.
            for read in range(self._read - 1, max(self._start, self._read - _MOST_BYTES) - 1, -1):
                if not (part := self._text(read)).endswith(_INCOMPLETE):
                    self._read, before = read, part
                    break
        return text[len(before) :], not text.endswith(_INCOMPLETE)

    def _text(self, end: int) -> str:
        text = self._tokenizer.decode(self._ids[self._start : end])
        if isinstance(text, bytes):
            return text.decode(errors="replace")
        if not isinstance(text, str):
            raise OptionError(
                f"TextStream: the tokenizer's decode returned {type(text).__name__}; expected a str or bytes"
            )
        return text

    def _shown(self, new: str) -> str:
        """Return held-back text and ``new``, up to a stop string, and hold back text that may begin one."""
        self._start, self._read = self._read, len(self._ids)
        text = self._held + new
        ends = [(i + len(word), i) for word in self._stop if (i := text.find(word)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        hold = max(
            (n for word in self._stop for n in range(1, len(word)) if text.endswith(word[:n])), default=0
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
