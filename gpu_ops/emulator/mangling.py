"""Reader of mangled names (Itanium C++ ABI): the name of a kernel or variable, and the types of its parameters."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

# Builtin types, as C++ spells them.
_LETTERS = {
    **{"v": "void", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char", "w": "wchar_t"},
    **{"s": "short", "t": "unsigned short", "i": "int", "j": "unsigned", "f": "float", "d": "double"},
    **dict.fromkeys("lx", "long long"),
    **dict.fromkeys("my", "unsigned long long"),
    **{"n": "__int128", "o": "unsigned __int128", "e": "long double", "g": "__float128", "z": "..."},
    **{"Dh": "half", "Dn": "nullptr_t", "Di": "char32_t", "Ds": "char16_t", "Du": "char8_t", "Da": "auto"},
}


class Mangled(NamedTuple):
    """Demangled ``name``, its last component only, and ``types`` of the parameters; None if they are unknown."""

    name: str
    types: tuple[str, ...] | None = None


class _Unread(Exception):
    """Error: the name has a production that this reader does not know."""


@lru_cache(maxsize=4096)
def demangle(name: str) -> Mangled:
    """Demangle a name; text that is no mangled name is returned whole."""
    if not re.match(r"_Z[\dNLZS]", name):
        return Mangled(name)
    reader = _Reader(name)
    try:
        types = reader.encoding()
    except (_Unread, IndexError):
        types = None
    return Mangled(reader.last or name, types)


class _Reader:
    """Recursive-descent reader; each production is a method. ``known``: the meanings of S_, S0_, ..."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 2
        self.known: list[str] = []
        self.last = ""  # last component of the name so far
        self.shown = ""  # latest nested name

    def accept(self, pattern: str) -> re.Match[str] | None:
        match = re.compile(pattern).match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def expect(self, pattern: str) -> re.Match[str]:
        match = self.accept(pattern)
        if match is None:
            raise _Unread(self.text[self.at :])
        return match

    # -- names ----------------------------------------------------------------------------------

    def encoding(self) -> tuple[str, ...] | None:
        """Read ``<name> {<type>}`` up to the end of the text or an E. A template's types begin with its result."""
        template = self.name(of_entity=True)
        types = []
        while self.at < len(self.text) and not self.accept(r"(?=[E.$])"):
            types.append(self.type())
        return None if template else () if types == ["void"] else tuple(types)

    def name(self, *, of_entity: bool = False) -> bool:
        """Read a name; return whether it ends with template arguments. An entity's name is not a known type."""
        if self.accept("Z"):  # a name in a function
            self.encoding()
            self.expect("E")
            template = bool(self.accept("s")) or self.name(of_entity=of_entity)
            self.accept(r"__\d+_|_\d")
            return template
        if self.accept("N"):
            self.accept(r"r?V?K?[RO]?")
            return self.components(of_entity)
        if self.accept("St"):
            shown = "std::" + self.component()
        else:
            shown = self.component()
        template = self.accept("(?=I)") is not None
        if of_entity:
            self.last = shown.rpartition(":")[2]
        if template or not of_entity:
            self.known.append(shown)
        if template:
            shown += self.arguments()
            if not of_entity:
                self.known.append(shown)
        return template

    def components(self, of_entity: bool) -> bool:
        """Read ``{<prefix>} <name> E`` of a nested name. Each prefix becomes known, and a type's whole name too."""
        shown, template, fresh = "", False, False
        while not self.accept("E"):
            if fresh:
                self.known.append(shown)
            template, fresh = False, True
            if self.accept("St"):
                shown, fresh = "std", False
            elif self.accept(r"S(?=[0-9A-Z_absiod])"):
                shown, fresh = self.substitution(), False
            elif self.accept("(?=I)"):
                shown, template = shown + self.arguments(), True
            elif self.accept(r"T(?=\d*_)"):
                shown = self.parameter()
            else:
                last = self.component()
                shown = f"{shown}::{last}" if shown else last
                if of_entity:
                    self.last = last
        if fresh and not of_entity:
            self.known.append(shown)
        self.shown = shown
        return template

    def component(self) -> str:
        """Read an identifier with its tags, an unnamed type or a lambda, a constructor, or an operator."""
        self.accept("L")  # internal linkage
        if length := self.accept(r"\d+"):
            end = self.at + int(length.group())
            if end > len(self.text):
                raise _Unread(length.group())
            shown, self.at = self.text[self.at : end], end
        elif self.accept("Ul"):
            while not self.accept("E"):
                self.type()
            shown = self.expect(r"\d*_") and "lambda"
        else:
            shown = self.expect(r"Ut\d*_|[CD]\d|cv(?=.)|[a-z][a-zA-Z]").group()
            if shown == "cv":
                self.type()
        while self.accept("B(?=[0-9])"):
            self.component()
        return shown

    def substitution(self) -> str:
        """Read the rest of ``S_``, ``S0_`` ... or ``Ss``."""
        if short := self.accept("[absiod]"):
            return f"std::{short.group()}"
        number = self.expect(r"([0-9A-Z]*)_").group(1)
        return self.known[int(number, 36) + 1 if number else 0]

    def parameter(self) -> str:
        """Read the rest of ``T_``, ``T0_`` ...: a parameter of the template."""
        return "T" + self.expect(r"\d*_").group()

    def arguments(self) -> str:
        """Read template arguments, ``I {<argument>} E``."""
        self.expect("[IJ]")
        arguments = []
        while not self.accept("E"):
            arguments.append(self.argument())
        return f"<{', '.join(arguments)}>"

    def argument(self) -> str:
        if self.accept("(?=J)"):
            return self.arguments()
        if self.accept("X"):
            while not self.accept("E"):
                self.expression()
            return "..."
        return self.literal() if self.accept("L") else self.type()

    def literal(self) -> str:
        """Read the rest of ``Li3E``, a number, or ``L_Z1fvE``, a function."""
        if self.accept("_Z"):
            last = self.last
            self.encoding()
            self.last = last
        else:
            self.type()
            self.expect(r"[0-9a-fn_]*")
        self.expect("E")
        return "..."

    def expression(self) -> None:
        if self.accept("L"):
            self.literal()
        elif self.accept(r"T(?=\d*_)"):
            self.parameter()
        elif not self.accept(r"f[pL]\d*_|[a-z][a-zA-Z]"):
            self.type()

    # -- types ----------------------------------------------------------------------------------

    def type(self) -> str:
        if self.accept("[PRO]"):
            return self.learn(self.type() + "*")
        if self.accept(r"(?=[rVK])"):
            self.expect(r"r?V?K?")
            return self.learn(self.type())
        if array := self.accept(r"5ArrayI(Dh|[a-z])Li\dE1[ACF]7\w+?7alignedE"):  # array of Numba
            return f"an array of {_LETTERS.get(array.group(1), '?')}"
        if self.accept(r"F"):
            self.accept("Y")
            while not self.accept("[RO]?E"):
                self.type()
            return self.learn("a function")
        if self.accept("M"):
            self.type()
            return self.learn(self.type() + " of a class")
        if self.accept(r"A\d*_"):
            return self.learn(self.type() + "[]")
        if self.accept("Dp"):
            return self.learn(self.type() + "...")
        if self.accept("D[tT]"):
            while not self.accept("E"):
                self.expression()
            return self.learn("decltype")
        if self.accept(r"T(?=\d*_)"):
            return self.with_arguments(self.learn(self.parameter()))
        if self.accept(r"S(?=[0-9A-Z_absiod])"):
            return self.with_arguments(self.substitution())
        if letter := self.accept(r"DF\d+[_bx]|D[a-z]|[a-z]"):
            if letter.group() not in _LETTERS and not letter.group().startswith("DF"):
                raise _Unread(letter.group())
            return _LETTERS.get(letter.group(), letter.group())
        nested = self.accept("(?=[NZ])") is not None
        self.name()
        return self.shown if nested else self.known[-1]

    def with_arguments(self, shown: str) -> str:
        return self.learn(shown + self.arguments()) if self.accept("(?=I)") else shown

    def learn(self, shown: str) -> str:
        self.known.append(shown)
        return shown
