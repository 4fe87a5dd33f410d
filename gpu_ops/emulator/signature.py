"""Names and pointee types of a kernel's parameters, from its CUDA C++ or Python text and from its mangled name.

PTX has neither. Text that is not understood yields no names and no types, and no check against them.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# Bytes of an element, by type in C++.
_SIZES = {
    **dict.fromkeys(("char", "signed char", "unsigned char", "bool", "int8_t", "uint8_t", "void"), 1),
    **dict.fromkeys(("__nv_fp8_e4m3", "__nv_fp8_e5m2"), 1),
    **dict.fromkeys(("short", "unsigned short", "int16_t", "uint16_t"), 2),
    **dict.fromkeys(("half", "__half", "__nv_bfloat16", "nv_bfloat16"), 2),
    **dict.fromkeys(("int", "unsigned int", "unsigned", "float", "int32_t", "uint32_t"), 4),
    **dict.fromkeys(("long", "unsigned long", "long long", "unsigned long long", "size_t", "double"), 8),
    **dict.fromkeys(("int64_t", "uint64_t"), 8),
}
_VECTORS = {"char": 1, "uchar": 1, "short": 2, "ushort": 2, "int": 4, "uint": 4, "float": 4, "double": 8}
_VECTORS |= {"half": 2, "__half": 2, "__nv_bfloat16": 2, "nv_bfloat16": 2, "long": 8, "longlong": 8}
_UNKNOWN, _ADDRESS = (0, 0), (8, 8)
_QUALIFIERS = {"const", "volatile", "static", "extern", "__constant__", "__device__", "__managed__"}


@dataclass(frozen=True)
class Parameter:
    """Kernel parameter. ``element`` and ``scalar``: bytes of its pointee, and of one component of it; 0: unknown."""

    name: str
    type: str
    element: int = 0
    scalar: int = 0

    def accepts(self, dtype: np.dtype[Any]) -> bool:
        """Whether an array may be passed: its elements, or parts of complex numbers, have the right size."""
        if self.scalar in (0, 1) or dtype.fields is not None:
            return True
        if dtype.kind == "c":
            return dtype.itemsize == 2 * self.scalar
        return dtype.itemsize in (self.element, self.scalar)


def plain_name(name: str) -> str:
    """Name of a kernel in its source, without namespaces and template arguments."""
    return demangle(name).name


def signature(entry: str, source: str = "") -> tuple[Parameter, ...]:
    """Parameters of an entry; empty if they are unknown."""
    return _declared(plain_name(entry), source) or _mangled(entry)


def named_in_python(entry: str, known: tuple[Parameter, ...], files: Iterable[str]) -> tuple[Parameter, ...]:
    """Parameters with the names of a Numba kernel's function, if one of the files defines it."""
    candidates: set[tuple[str, ...]] = set()
    plain = plain_name(entry)
    for file in files:
        text = "".join(linecache.getlines(file)) if file.endswith(".py") or file.startswith("<") else ""
        if f"def {plain}(" in text:
            try:
                nodes = [
                    n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == plain
                ]
            except SyntaxError:
                continue
            candidates |= {tuple(a.arg for a in node.args.args) for node in nodes}
    names = candidates.pop() if len(candidates) == 1 else ()
    if known and len(names) != len(known):
        return known
    types = known or [Parameter("", "")] * len(names)
    return tuple(replace(p, name=name) for p, name in zip(types, names, strict=True))


def variable(name: str, source: str) -> Parameter | None:
    """Find a ``__constant__`` or ``__device__`` variable in CUDA C++ text. ``type`` ends with = if it has a value."""
    declarations = re.findall(
        rf"\b__(?:constant|device|managed)__\s([\w\s:]*?[\w*]\s*)\b{re.escape(name)}\s*(?:\[[^;=]*?\]\s*)*([;={{])",
        _without_comments(source),
    )
    if len(declarations) != 1:
        return None
    text, end = declarations[0]
    scalar = _pointee(text)
    return Parameter(name, text.strip() + ("" if end == ";" else " ="), scalar[0], scalar[1])


def _without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)


def _declared(name: str, source: str) -> tuple[Parameter, ...]:
    """Parameters from CUDA C++ text, if it declares one kernel of this name."""
    text = _without_comments(source)
    declared: set[tuple[Parameter, ...]] = set()
    defined: set[tuple[Parameter, ...]] = set()
    for match in re.finditer(rf"__global__\b[^;{{}}]*?\b{re.escape(name)}\s*\(", text):
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        known = defined if text[at:].lstrip().startswith("{") else declared
        known.add(tuple(_parameter(p) for p in _split(text[match.end() : at - 1]) if p.strip() != "void"))
    declared = defined or declared
    return declared.pop() if len(declared) == 1 else ()


def _split(text: str) -> Iterator[str]:
    """Split a text at the commas outside brackets."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if text[start:].strip():
        yield text[start:]


def _parameter(text: str) -> Parameter:
    text = re.sub(r"\b__(restrict|grid_constant)__\b|\brestrict\b|__align__\s*\([^)]*\)", " ", text)
    text = re.sub(r"(\w+)\s*\[[^\]]*\]\s*$", r"* \1", text)  # float x[] is a pointer
    match = re.fullmatch(r"(.+?)([A-Za-z_]\w*)", text.strip(), re.DOTALL)
    if match is None:
        return Parameter("", " ".join(text.split()))
    words, name = match.groups()
    shown = " ".join(words.replace("*", " * ").split()).replace(" *", "*")
    stars = words.rpartition(">")[2].count("*")  # not those of template arguments
    sizes = (_UNKNOWN, _pointee(words.rpartition("*")[0]), _ADDRESS)[min(stars, 2)]
    return Parameter(name, shown, *sizes)


def _pointee(text: str) -> tuple[int, int]:
    """Bytes of a type and of a component; zeros if the type is unknown."""
    words = [w for w in re.sub(r"\bstd::|\bcuda::", "", text).split() if w not in _QUALIFIERS]
    if words[-1:] == ["int"] and len(words) > 1 and words != ["unsigned", "int"]:
        words = words[:-1]  # long int
    base = " ".join(words)
    if base in _SIZES:
        return _SIZES[base], _SIZES[base]
    vector = re.fullmatch(r"(\w+?)([1-4])", base)
    if vector and vector.group(1) in _VECTORS:
        size = _VECTORS[vector.group(1)]
        return size * int(vector.group(2)), size
    return 0, 0


# ---- mangled names -----------------------------------------------------------------------------------------


def _mangled(entry: str) -> tuple[Parameter, ...]:
    """Parameters from a mangled name, for pointers, numbers and Numba arrays."""
    return tuple(_of_type(shown) for shown in demangle(entry).types or ())


def _of_type(shown: str) -> Parameter:
    if shown.startswith("an array of "):
        return Parameter("", shown, *_pointee(shown.removeprefix("an array of ")))
    sizes = (_UNKNOWN, _pointee(shown[:-1]), _ADDRESS)[min(len(shown) - len(shown.rstrip("*")), 2)]
    return Parameter("", shown, *sizes)


_NUMBA_ARGUMENT = re.compile(r"5ArrayI.+?Li(?P<axes>\d+)E1[ACF]\d(?:mutable|readonly)7alignedE|Dh|[a-z]")


def numba_arguments(entry: str) -> list[int] | None:
    """Arguments of a Numba kernel, by its mangled name: an array's number of axes, -1 for a number.

    None for other kernels, and if an argument is neither.
    """
    _, kernel, types = entry.partition("cw51c")
    types = types.partition("_3dE")[2]
    axes, at = [], 0
    while kernel and at < len(types):
        match = _NUMBA_ARGUMENT.match(types, at)
        if match is None:
            return None
        axes.append(int(match["axes"] or -1))
        at = match.end()
    return axes or None


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

    # ---- names ---------------------------------------------------------------------------------------------

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

    # ---- types ---------------------------------------------------------------------------------------------

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
