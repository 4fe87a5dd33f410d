"""The tokens of PTX text, and a cursor on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpu_ops.emulator.errors import PtxError

__all__ = ["Cursor", "Token"]

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


def _tokens(text: str) -> Iterator[Token]:
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


class Cursor:
    """A place in the tokens of a text."""

    def __init__(self, text: str) -> None:
        self.tokens = list(_tokens(text))
        self.tokens.append(Token("end", "", self.tokens[-1].line if self.tokens else 1))
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at].text

    def next(self) -> str:
        token = self.tokens[self.at]
        if token.kind == "end":
            raise self.error("the text ends too early")
        self.at += 1
        return token.text

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"expected {text!r}, found {self.peek()!r}")

    def error(self, what: str) -> PtxError:
        line = self.tokens[min(self.at, len(self.tokens) - 1)].line
        return PtxError(f"PTX line {line}: {what}")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        try:
            return sign * int(self.next().rstrip("U"), 0)
        except ValueError:
            self.at -= 1
            raise self.error(f"expected a number, found {self.peek()!r}") from None

    def skip_braces(self) -> None:
        self.expect("{")
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self.next(), 0)

    def skip_parentheses(self) -> None:
        self.expect("(")
        while not self.accept(")"):
            self.next()

    def skip_statement(self) -> None:
        while not self.accept(";"):
            self.next()
