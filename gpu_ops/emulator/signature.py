"""What a kernel's parameters are called and point to: from its CUDA C++ or Python text, and from its mangled name.

PTX has neither. Whatever is not understood is left open: no names, no types, and no check against them.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

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
_QUALIFIERS = {"const", "volatile", "static", "extern", "__constant__", "__device__", "__managed__"}
# Builtin types in mangled names: as they are written, and their bytes.
_LETTERS = {
    **{
        "v": ("void", 1),
        "b": ("bool", 1),
        "c": ("char", 1),
        "a": ("signed char", 1),
        "h": ("unsigned char", 1),
    },
    **{"s": ("short", 2), "t": ("unsigned short", 2), "i": ("int", 4), "j": ("unsigned", 4)},
    **{"f": ("float", 4), "d": ("double", 8)},
    **dict.fromkeys("lx", ("long long", 8)),
    **dict.fromkeys("my", ("unsigned long long", 8)),
    "Dh": ("half", 2),
}


@dataclass(frozen=True)
class Parameter:
    """``element`` and ``scalar``: bytes of what a pointer points to, and of one component of it; 0: not known."""

    name: str
    type: str
    element: int = 0
    scalar: int = 0

    def accepts(self, dtype: np.dtype[Any]) -> bool:
        """Whether an array may be passed: its elements, or the parts of complex numbers, have the right size."""
        if self.scalar in (0, 1) or dtype.fields is not None:
            return True
        if dtype.kind == "c":
            return dtype.itemsize == 2 * self.scalar
        return dtype.itemsize in (self.element, self.scalar)


def plain_name(name: str) -> str:
    """A kernel's name as in its source: Numba mangles it with its module and types."""
    plain, rest = name, name.removeprefix("_ZN" if name.startswith("_ZN") else "_Z")
    while rest != name and (found := re.match(r"\d+", rest)):
        end = found.end() + int(found.group())
        plain, rest = rest[found.end() : end], rest[end:]
    return plain


def signature(entry: str, source: str = "") -> tuple[Parameter, ...]:
    """The parameters of an entry; empty if they are not known."""
    return _declared(plain_name(entry), source) or _mangled(entry)


def named_in_python(entry: str, known: tuple[Parameter, ...], files: Iterable[str]) -> tuple[Parameter, ...]:
    """The parameters with the names that a Numba kernel's function has, if one of the files defines it."""
    found: set[tuple[str, ...]] = set()
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
            found |= {tuple(a.arg for a in node.args.args) for node in nodes}
    names = found.pop() if len(found) == 1 else ()
    if known and len(names) != len(known):
        return known
    types = known or [Parameter("", "")] * len(names)
    return tuple(replace(p, name=name) for p, name in zip(types, names, strict=True))


def variable(name: str, source: str) -> Parameter | None:
    """A ``__constant__`` or ``__device__`` variable of a CUDA C++ text. ``type`` ends with = if it has a value."""
    found = re.findall(
        rf"\b__(?:constant|device|managed)__\s([\w\s:]*?[\w*]\s*)\b{re.escape(name)}\s*(?:\[[^;=]*?\]\s*)*([;={{])",
        _without_comments(source),
    )
    if len(found) != 1:
        return None
    text, end = found[0]
    scalar = _pointee(text)
    return Parameter(name, text.strip() + ("" if end == ";" else " ="), scalar[0], scalar[1])


def _without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)


def _declared(name: str, source: str) -> tuple[Parameter, ...]:
    """From CUDA C++ text, if it declares one kernel of this name."""
    text = _without_comments(source)
    found: set[tuple[Parameter, ...]] = set()
    defined: set[tuple[Parameter, ...]] = set()
    for match in re.finditer(rf"__global__\b[^;{{}}]*?\b{re.escape(name)}\s*\(", text):
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        known = defined if text[at:].lstrip().startswith("{") else found
        known.add(tuple(_parameter(p) for p in _split(text[match.end() : at - 1]) if p.strip() != "void"))
    found = defined or found
    return found.pop() if len(found) == 1 else ()


def _split(text: str) -> Iterator[str]:
    """The pieces between the commas that are in no brackets."""
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
    found = re.fullmatch(r"(.+?)([A-Za-z_]\w*)", text.strip(), re.DOTALL)
    if found is None:
        return Parameter("", " ".join(text.split()))
    words, name = found.groups()
    shown = " ".join(words.replace("*", " * ").split()).replace(" *", "*")
    return Parameter(name, shown, *(_pointee(words.partition("*")[0]) if words.count("*") == 1 else (0, 0)))


def _pointee(text: str) -> tuple[int, int]:
    """(bytes of the type, bytes of a component), zeros if the type is not known."""
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


# -- mangled names --------------------------------------------------------------------------------


def _mangled(entry: str) -> tuple[Parameter, ...]:
    """From a mangled name (Itanium ABI), as far as pointers, numbers and Numba arrays go."""
    head = re.match(r"_ZN?", entry)
    if head is None:
        return ()
    rest = entry[head.end() :]
    while (length := re.match(r"B?(\d+)", rest)) is not None:  # the name, with Numba's tags
        rest = rest[length.end() + int(length.group(1)) :]
    if head.group() == "_ZN":
        if not rest.startswith("E"):
            return ()
        rest = rest[1:]
    found: list[Parameter] = []
    known: list[Parameter] = []  # what S_, S0_, ... stand for
    while rest:
        taken = _type(rest, known)
        if taken is None:
            return ()
        found.append(taken[0])
        rest = taken[1]
    return () if [p.type for p in found] == ["void"] else tuple(found)


def _type(text: str, known: list[Parameter]) -> tuple[Parameter, str] | None:
    """(the first type of a mangled list, the rest of the list)."""
    if array := re.match(r"5ArrayI(Dh|[a-z])Li\dE1[ACF]7\w+?7alignedE", text):
        shown, size = _LETTERS.get(array.group(1), ("?", 0))
        return Parameter("", f"an array of {shown}", size, size), text[array.end() :]
    if again := re.match(r"S([0-9A-Z]*)_", text):
        number = int(again.group(1), 36) + 1 if again.group(1) else 0
        return (known[number], text[again.end() :]) if number < len(known) else None
    if text[:1] == "P":
        pointee = _type(text[1:], known)
        if pointee is None:
            return None
        to = pointee[0]
        sizes = (0, 0) if to.type.endswith("*") else _pointee(to.type)
        known.append(Parameter("", f"{to.type}*", *sizes))
        return known[-1], pointee[1]
    if qualified := re.match(r"r?V?K", text):
        inner = _type(text[qualified.end() :], known)
        if inner is not None:
            known.append(inner[0])
        return inner
    if named := re.match(r"\d+", text):
        end = named.end() + int(named.group())
        known.append(Parameter("", text[named.end() : end]))
        return known[-1], text[end:]
    letter = _LETTERS.get(text[:1])
    return (Parameter("", letter[0]), text[1:]) if letter else None


_NUMBA_ARGUMENT = re.compile(r"5ArrayI.+?Li(?P<axes>\d+)E1[ACF]\d(?:mutable|readonly)7alignedE|Dh|[a-z]")


def numba_arguments(entry: str) -> list[int] | None:
    """The arguments of a Numba kernel, by its mangled name: an array's number of axes, -1 for a number.

    None for other kernels, and where an argument is neither.
    """
    _, kernel, types = entry.partition("cw51c")
    types = types.partition("_3dE")[2]
    found, at = [], 0
    while kernel and at < len(types):
        one = _NUMBA_ARGUMENT.match(types, at)
        if one is None:
            return None
        found.append(int(one["axes"] or -1))
        at = one.end()
    return found or None
