"""Dependencies between modules: lower layers never import higher ones, and no modules import each other in a cycle.

Imports inside functions and under ``TYPE_CHECKING`` count. ``from gpu_ops.core import device`` imports
``gpu_ops.core.device``; the preceding import of the module's package does not count.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "gpu_ops": "gpu_ops",
    "kernels": "gpu_ops.kernels",
    "reference": "gpu_ops.reference",
    "perf": "perf",
}

# Lowest layer first; the first prefix that fits decides. A module imports its own layer and lower ones.
LAYERS = (
    ("gpu_ops.errors", "gpu_ops.presets", "gpu_ops.memory_pool"),
    ("gpu_ops.reference", "gpu_ops.kernels.compiler"),
    ("gpu_ops.kernels",),
    ("gpu_ops.emulator",),
    ("gpu_ops.core",),
    ("gpu_ops.formats",),
    ("gpu_ops.ops",),
    ("gpu_ops.models", "gpu_ops.training"),
    ("gpu_ops.memory",),
    ("gpu_ops.inference",),
    ("gpu_ops.distributed",),
    ("gpu_ops",),  # gpu_ops/__init__.py, environment, warmup, __main__
    ("perf",),
)


@cache
def modules() -> dict[str, Path]:
    """File of every module. ``os.walk`` does not follow the links gpu_ops/kernels and gpu_ops/reference."""
    files = {}
    for folder, package in FOLDERS.items():
        for directory, _, names in os.walk(ROOT / folder):
            for path in (Path(directory, name) for name in names if name.endswith(".py")):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                files[".".join((package, *parts))] = path
    return files


@cache
def imports(name: str) -> set[str]:
    """Our modules that a module imports, anywhere in its file."""
    result = set()
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in modules() else base for a in node.names]
        else:
            continue
        for target in targets:
            if target in modules() and target != name:
                result.add(target)
    return result


def absolute(name: str, node: ast.ImportFrom) -> str:
    """Module that ``from ... import`` names, relative or not."""
    if not node.level:
        return node.module or ""
    is_package = modules()[name].name == "__init__.py"
    parts = name.split(".")
    package = parts[: len(parts) - node.level + is_package]
    return ".".join((*package, *([node.module] if node.module else [])))


def layer(name: str) -> int:
    return next(
        level
        for level, prefixes in enumerate(LAYERS)
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
    )


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], index[target])
        if lowest[node] == index[node]:
            position = stack.index(node)
            component = set(stack[position:])
            del stack[position:]
            if len(component) > 1:
                components.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return components


def test_no_module_imports_itself_through_others():
    graph = {name: imports(name) for name in modules()}
    for cycle in cycles(graph):
        links = {name: sorted(graph[name] & cycle) for name in sorted(cycle)}
        raise AssertionError(f"a cycle of imports: {links}")


def test_lower_layers_do_not_import_higher_ones():
    upward = {(name, target) for name in modules() for target in imports(name) if layer(target) > layer(name)}
    assert not upward


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
