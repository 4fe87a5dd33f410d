"""The tokens of PTX text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpu_ops.emulator.errors import PtxError

__all__ = ["Token", "tokens"]

_PATTERN = re.compile(
    r"""
    (?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/)
  | (?P<newline>\n)
  | (?P<string>"(?:\\.|[^"\\])*")
  | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
  | (?P<word>(?:[A-Za-z_$%.])(?:[\w$%.]|::)*)
  | (?P<punctuation>[-+{}\[\]();,:|!@=<>])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str
    line: int


def tokens(text: str) -> Iterator[Token]:
    line, position = 1, 0
    while position < len(text):
        match = _PATTERN.match(text, position)
        if match is None:
            if not text[position:].strip("\0 \n\t"):  # compilers end the text with NUL
                return
            raise PtxError(f"PTX line {line}: unexpected {text[position : position + 20]!r}")
        kind = match.lastgroup or ""
        if kind not in ("skip", "newline"):
            yield Token(kind, match.group(), line)
        line += match.group().count("\n")
        position = match.end()
