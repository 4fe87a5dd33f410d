"""Lists prose and names that break the house rules (CONTRIBUTING, "Rules"), per folder.

    python scripts/words.py                   a table: folders, and how often each rule is broken
    python scripts/words.py kernels/norm      every place below a folder or file, with its line

Rules: a docstring begins with a noun or a verb; no phrase of ``PHRASES``; no variable of ``VAGUE``.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gpu_ops", "kernels", "reference", "perf", "scripts", "tests")

FIRST_WORDS = re.compile(r"(Of|What|As|The same)\b")
PHRASES = re.compile(
    r"\b(beside|goes by|(?:is|are) asked for|of (?:its|their) own|as ever|so many|in vain|lies? on|stands? for)\b"
)
VAGUE = frozenset(
    {
        "apart",
        "found",
        "given",
        "kind",
        "lying",
        "most",
        "nothing",
        "one",
        "own",
        "there",
        "to",
        "turn",
        "wide",
    }
)


class Place(NamedTuple):
    rule: str  # "docstring", "phrase" or "name"
    line: int
    text: str


def places(source: str) -> Iterator[Place]:
    """Every place of a module that breaks a rule."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if FIRST_WORDS.match(text):
                yield Place("docstring", getattr(node, "lineno", 1), text.splitlines()[0])
        yield from (Place("name", line, name) for name, line in _bound(node) if name in VAGUE)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, text in enumerate(token.string.splitlines()):
                for phrase in PHRASES.findall(text):
                    yield Place("phrase", token.start[0] + number, f"{phrase}: {text.strip()}")


def _bound(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno


def files(start: Path) -> Iterator[Path]:
    """Python files below a folder; links are not followed."""
    if start.is_file():
        yield start
    for path in sorted(start.iterdir()) if start.is_dir() and not start.is_symlink() else ():
        if path.is_dir() and not path.name.startswith((".", "__")):
            yield from files(path)
        elif path.suffix == ".py":
            yield path


def counts() -> dict[str, collections.Counter[str]]:
    """Broken rules of each folder of the second level (``kernels/norm``)."""
    table: dict[str, collections.Counter[str]] = {}
    for folder in FOLDERS:
        for path in files(ROOT / folder):
            parts = path.relative_to(ROOT).parts
            row = table.setdefault("/".join(parts[: min(2, len(parts) - 1)]), collections.Counter())
            row.update(place.rule for place in places(path.read_text(encoding="utf-8")))
    return table


def main(arguments: list[str]) -> None:
    for argument in arguments:
        for path in files(Path(argument).resolve()):
            for place in sorted(places(path.read_text(encoding="utf-8")), key=lambda place: place.line):
                print(f"{path}:{place.line}: {place.rule}: {place.text}")
    if not arguments:
        table, total = counts(), collections.Counter[str]()
        for folder, row in sorted(table.items()):
            total.update(row)
            print(f"{folder:24}", *(f"{rule} {row[rule]:4}" for rule in ("docstring", "phrase", "name")))
        print(f"{'all':24}", *(f"{rule} {total[rule]:4}" for rule in ("docstring", "phrase", "name")))


if __name__ == "__main__":
    main(sys.argv[1:])
