"""Tokens of PTX text, and a reader of their operands."""

from __future__ import annotations

import re

from gpu_ops.emulator.errors import PtxError
from gpu_ops.emulator.syntax import Address, Immediate, Name, Negated, Operand, Pair, Vector

_COMMENTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# Directives may touch: `{.reg.b16 h;`. A match of the last alternative is no token.
_TOKENS = re.compile(
    r"""
    "(?:\\.|[^"\\])*"
  | 0[fF][0-9a-fA-F]{8} | 0[dD][0-9a-fA-F]{16} | 0[xX][0-9a-fA-F]+U? | [0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | [0-9]+U?
  | \.(?:[\w$%]|::)* | [A-Za-z_$%](?:[\w$%.]|::)*
  | [^ \t\r]
    """,
    re.VERBOSE,
)
_WORD = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_$%.")
_DIGITS = frozenset("0123456789")
_PUNCTUATION = frozenset("-+{}[]();,:|!@=<>")


def is_word(token: str) -> bool:
    """Whether a token is a name, an opcode or a directive."""
    return token[:1] in _WORD


def is_number(token: str) -> bool:
    return token[:1] in _DIGITS


def _tokens(text: str) -> tuple[list[str], list[int]]:
    """Tokens of a text, and the line of each."""
    text = text.rstrip("\0 \n\t")  # compilers end the text with NUL
    if "/" in text:
        text = _COMMENTS.sub(lambda m: m[0] if m[0][0] == '"' else " " + "\n" * m[0].count("\n"), text)
    tokens: list[str] = []
    lines: list[int] = []
    rows = text.split("\n")
    for line, row in enumerate(rows, 1):
        row_tokens = _TOKENS.findall(row)
        tokens += row_tokens
        lines += [line] * len(row_tokens)
    known = _WORD | _DIGITS | _PUNCTUATION
    odd = [token for token in set(tokens) if len(token) == 1 and token not in known]
    if odd:
        first = min(map(tokens.index, odd))
        row = rows[lines[first] - 1]
        raise PtxError(f"PTX line {lines[first]}: unexpected {row[row.index(tokens[first]) :][:20]!r}")
    return tokens, lines


class Cursor:
    """Tokens of a text, and a position among them. The last token is empty."""

    def __init__(self, text: str) -> None:
        self.tokens, self.lines = _tokens(text)
        self.tokens.append("")
        self.lines.append(self.lines[-1] if self.lines else 1)
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at]

    def next(self) -> str:
        token = self.tokens[self.at]
        if not token:
            raise self.error("the text ends too early")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.at] == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"expected {text!r}, found {self.peek()!r}")

    def error(self, what: str) -> PtxError:
        return PtxError(f"PTX line {self.lines[min(self.at, len(self.lines) - 1)]}: {what}")

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


class Scope:
    """Names declared in one ``{ }``.

    An inline-asm block may declare registers and labels that the function also has, so each scope has a suffix that
    makes its names unique.
    """

    def __init__(self, outer: Scope | None, suffix: str) -> None:
        self.outer, self.suffix = outer, suffix
        self.names: set[str] = set()

    def resolve(self, name: str) -> str:
        """Return the name with the suffix of the innermost scope that declares it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return name + scope.suffix
            scope = scope.outer
        return name


class Operands(Cursor):
    """Reader of operands. A register has one :class:`Name`, however often it is read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.names: dict[str, Name] = {}

    def group(self, scope: Scope) -> tuple[Operand, ...]:
        parts: list[Operand] = []
        if self.accept("("):
            while not self.accept(")"):
                parts.append(self.operand(scope))
                self.accept(",")
        return tuple(parts)

    def operand(self, scope: Scope) -> Operand:
        first = self.single(scope)
        return Pair(first, self.single(scope)) if self.accept("|") else first

    def single(self, scope: Scope) -> Operand:
        token = self.tokens[self.at]
        if is_word(token):
            self.at += 1
            name = scope.resolve(token)
            if self.accept("("):  # generic(symbol), in initialisers
                name = scope.resolve(self.next())
                self.expect(")")
            if self.peek() == "+" and is_number(self.tokens[self.at + 1]):
                self.at += 1
                return Address(name, self.integer())  # symbol + offset, in initialisers and mov
            return self.names.get(name) or self.names.setdefault(name, Name(name))
        if is_number(token):
            self.at += 1
            return Immediate(token)
        if self.accept("["):
            base, offset = "", 0
            if is_word(self.peek()):
                base = scope.resolve(self.next())
                if self.accept("+") or self.peek() == "-":
                    offset = self.integer()
            else:
                offset = self.integer()
            self.expect("]")
            return Address(base, offset)
        if self.accept("{"):
            parts: list[Operand] = []
            while not self.accept("}"):
                parts.append(self.single(scope))
                self.accept(",")
            return Vector(tuple(parts))
        if self.accept("!"):
            return Negated(scope.resolve(self.next()))
        if self.accept("-"):
            return Immediate("-" + self.next())
        raise self.error(f"expected an operand, found {token!r}")
