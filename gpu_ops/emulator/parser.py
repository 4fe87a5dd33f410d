"""Parser of PTX text to a :class:`Module`: functions, variables and instructions, each with its line.

The parser makes one pass over the tokens and resolves names by scope: an inline-asm ``{ }`` opens a scope for
registers and labels, so names declared inside get a unique suffix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpu_ops.emulator import errors
from gpu_ops.emulator.errors import PtxError
from gpu_ops.emulator.syntax import (
    DTYPE,
    Address,
    CallOperands,
    Function,
    Immediate,
    Instruction,
    Label,
    Location,
    Module,
    Name,
    Negated,
    Operand,
    Pair,
    Variable,
    Vector,
)

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


_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_DECLARED = {".reg", *_SPACES}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}


def parse(text: str) -> Module:
    """Parse a PTX file; a :class:`PtxError` names the line that cannot be parsed."""
    return _Parser(text).module()


class _Parser(Operands):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.location: Location | None = None
        # Keys are file, line and column, because a caller may be inlined too.
        self.places: dict[tuple[str, ...], Location] = {}
        self.scopes = 0

    # ---- module --------------------------------------------------------------------------------------------

    def module(self) -> Module:
        module = Module(self.text)
        while self.peek():
            extern = False
            while self.peek() in _LINKAGE:
                extern |= self.next() == ".extern"
            word = self.next()
            if word in (".version", ".address_size"):
                self.next()
            elif word == ".target":
                module.target = self.next()
                while self.accept(","):
                    self.next()
            elif word == ".file":
                number = self.integer()
                module.files[number] = self.next().strip('"')
                while self.accept(","):
                    self.next()
            elif word == ".section":
                self.next()
                self.skip_braces()
            elif word == ".pragma":
                self.next()
                self.expect(";")
            elif word in (".entry", ".func"):
                function = self.function(entry=word == ".entry")
                if not (function.declared_only and function.name in module.functions):
                    module.functions[function.name] = function
            elif word in _SPACES:
                for variable in self.variables(word[1:], extern=extern):
                    module.variables[variable.name] = variable
            elif word in (".alias", ".callprototype"):
                self.skip_statement()
            else:
                self.at -= 1
                raise self.error(f"unexpected {word!r}")
        return module

    def variables(self, space: str, *, extern: bool = False, suffix: str = "") -> Iterator[Variable]:
        """Parse variables after their space: ``.align 4 .b8 a[16] = {...}, b;``."""
        for variable in self.declaration(space, suffix):
            variable.extern = extern
            yield variable
        self.expect(";")

    def declaration(self, space: str, suffix: str = "") -> Iterator[Variable]:
        align, ptx_type, width = 0, "", 1
        while self.peek().startswith("."):
            word = self.next()
            if word == ".align":
                align = self.integer()
            elif word in (".v2", ".v4"):
                width = int(word[2:])
            elif word == ".attribute":
                self.skip_parentheses()
            elif word not in (".ptr", ".global", ".shared", ".local", ".const"):
                ptx_type = word
        while True:
            name = self.next()
            count = width
            while self.accept("["):
                count *= 0 if self.peek() == "]" else self.integer()
                self.expect("]")
            size = self.size(ptx_type)
            variable = Variable(name + suffix, space, ptx_type[1:], max(align, size * width), count * size)
            if self.accept("="):
                variable.initial = list(self.initialiser())
            yield variable
            if space == "param" or not self.accept(","):
                return

    def initialiser(self) -> Iterator[Operand]:
        if self.accept("{"):
            while not self.accept("}"):
                yield from self.initialiser()
                self.accept(",")
        else:
            yield self.operand(Scope(None, ""))

    def size(self, ptx_type: str) -> int:
        if ptx_type in errors.HANDLES:
            return 8
        bits = ptx_type.lstrip(".bsuf")
        if bits not in _SIZES:
            raise self.error(f"{ptx_type!r} is not a type")
        return _SIZES[bits]

    # ---- functions -----------------------------------------------------------------------------------------

    def function(self, *, entry: bool) -> Function:
        results = list(self.parameters()) if self.peek() == "(" else []
        function = Function(self.next(), entry, results=results)
        if self.peek() == "(":
            function.parameters = list(self.parameters())
        while self.peek().startswith("."):  # .maxntid 128, 1, 1   .minnctapersm 2   .noreturn
            directive, numbers = self.next(), []
            while is_number(self.peek()):
                numbers.append(self.integer())
                self.accept(",")
            function.directives[directive] = tuple(numbers)
        if self.accept(";"):
            function.declared_only = True
            return function
        self.location = None
        self.expect("{")
        self.body(function, Scope(None, ""))
        return function

    def parameters(self) -> Iterator[Variable]:
        self.expect("(")
        while not self.accept(")"):
            word = self.next()
            if word == ".param":
                yield from self.declaration("param")
            elif word == ".reg":
                yield from self.declaration("reg")
            else:
                self.at -= 1
                raise self.error(f"expected a parameter, found {word!r}")
            self.accept(",")

    def body(self, function: Function, scope: Scope) -> None:
        """Parse statements up to and including the closing brace."""
        self.collect(scope)
        while not self.accept("}"):
            if self.accept("{"):
                self.scopes += 1
                self.body(function, Scope(scope, f"@{self.scopes}"))
                continue
            self.statement(function, scope)

    def collect(self, scope: Scope) -> None:
        """Read ahead to collect the names that this scope declares: a branch may go to a later label."""
        tokens, depth, at = self.tokens, 1, self.at
        while depth:
            token = tokens[at]
            if token == "{":
                depth += 1
            elif token == "}":
                depth -= 1
            elif not token:
                raise self.error("the body does not end")
            elif depth > 1:
                pass
            elif token == ":" and is_word(tokens[at - 1]):
                scope.names.add(tokens[at - 1])
            elif token in _DECLARED:
                while tokens[at] not in (";", ""):
                    at += 1
                    if is_word(tokens[at]) and not tokens[at].startswith("."):
                        scope.names.add(tokens[at])
                continue
            at += 1

    def statement(self, function: Function, scope: Scope) -> None:
        word = self.tokens[self.at]
        if is_word(word) and self.tokens[self.at + 1] == ":":
            self.at += 2
            if self.accept(".branchtargets"):
                function.tables[scope.resolve(word)] = [scope.resolve(self.next())]
                while self.accept(","):
                    function.tables[scope.resolve(word)].append(scope.resolve(self.next()))
                self.expect(";")
            elif self.peek() in (".callprototype", ".calltargets"):
                self.skip_statement()
            else:
                function.body.append(Label(scope.resolve(word)))
        elif word == ".reg":
            self.at += 1
            self.registers(function, scope)
        elif word in _SPACES:
            self.at += 1
            function.variables.extend(self.variables(word[1:], suffix=scope.suffix))
        elif word == ".loc":
            self.line_information()
        elif word == ".pragma":
            self.at += 2
            self.expect(";")
        else:
            function.body.append(self.instruction(scope))

    def line_information(self) -> None:
        """Parse ``.loc file line column {, function_name label, inlined_at file line column}`` to the line's end."""
        first = self.at
        while self.lines[self.at] == self.lines[first]:
            self.at += 1
        words = self.tokens[first + 1 : self.at]
        if not all(word.isdigit() for word in (*words[:3], *words[-3:])):
            raise self.error(f"line information is not understood: {' '.join(words)}")
        caller = None
        if "inlined_at" in words:
            place = tuple(words[words.index("inlined_at") + 1 :])
            caller = self.places.get(place) or Location(int(place[0]), int(place[1]))
        self.location = self.places[tuple(words[:3])] = Location(int(words[0]), int(words[1]), caller)

    def registers(self, function: Function, scope: Scope) -> None:
        ptx_type = self.next()
        if ptx_type[1:] not in DTYPE:
            raise self.error(f"{ptx_type!r} is not a type of a register")
        while True:
            name = self.next()
            if self.accept("<"):
                for i in range(self.integer()):
                    scope.names.add(f"{name}{i}")
                    function.registers[f"{name}{i}{scope.suffix}"] = ptx_type[1:]
                self.expect(">")
            else:
                function.registers[name + scope.suffix] = ptx_type[1:]
            if not self.accept(","):
                break
        self.expect(";")

    # ---- instructions --------------------------------------------------------------------------------------

    def instruction(self, scope: Scope) -> Instruction:
        line = self.lines[self.at]
        guard: Name | Negated | None = None
        if self.accept("@"):
            negated = self.accept("!")
            name = scope.resolve(self.next())
            guard = Negated(name) if negated else Name(name)
        token = self.tokens[self.at]
        if not is_word(token) or token.startswith("."):
            raise self.error(f"expected an instruction, found {token!r}")
        self.at += 1
        opcode, *modifiers = token.split(".")
        operands: list[Operand] = []
        if opcode == "call":
            operands.append(self.call(scope))
        elif errors.feature(opcode, modifiers):
            self.skip_statement()
            self.at -= 1
        elif self.peek() != ";":
            operands.append(self.operand(scope))
            while self.accept(","):
                operands.append(self.operand(scope))
        self.expect(";")
        return Instruction(line, self.location, guard, opcode, tuple(modifiers), tuple(operands))

    def call(self, scope: Scope) -> CallOperands:
        results = self.group(scope)
        if results:
            self.expect(",")
        callee = scope.resolve(self.next())
        arguments: tuple[Operand, ...] = ()
        while self.accept(","):
            if self.peek() == "(":
                arguments = self.group(scope)
            else:
                self.next()  # the prototype of an indirect call
        return CallOperands(results, callee, arguments)
