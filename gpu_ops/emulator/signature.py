"""Names and pointee types of a kernel's parameters, from its CUDA C++ or Python text and from its mangled name.

PTX has neither. Text that is not understood yields no names and no types, and no check against them.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu_ops.emulator.mangling import demangle

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


# -- mangled names --------------------------------------------------------------------------------


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
