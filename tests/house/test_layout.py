"""House rules that a reader relies on: everything about an op is found by its name, and nothing leaks."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import gpu_ops
from tests.support.calls import OPS
from tests.support.processes import ROOT, python

ROOMS = ("attention", "gemm", "loss", "norm", "rope", "rows", "sampling", "weights")
PUBLIC = [name for name in gpu_ops.__all__ if name not in ("__version__", "errors")]
CODE = ("gpu_ops", "kernels", "reference", "tests", "perf", "scripts")
MAX_PARAMETERS = 14
MAX_LINES = {".py": 500, ".cu": 500, ".cuh": 500}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def sources(*folders):
    """Source files below the given folders of the repository; links are not followed."""
    for folder in folders:
        for directory, _, names in os.walk(ROOT / folder):
            if "__pycache__" not in directory:
                yield from (Path(directory, n) for n in sorted(names) if Path(n).suffix in MAX_LINES)


def modules():
    """Names of all modules of the package, kernels and references included."""
    return sorted(
        m.name
        for m in pkgutil.walk_packages(gpu_ops.__path__, "gpu_ops.")
        if not m.name.endswith(".__main__") and not m.ispkg
    )


def room_of(op):
    """Room of an op: ``gpu_ops.ops.norm.rmsnorm`` is in ``norm``."""
    return getattr(gpu_ops, op).__module__.split(".")[2]


def reference_of(op):
    """Reference function of a public op: the same name, in the same room."""
    for module in modules():
        if module.startswith(f"gpu_ops.reference.{room_of(op)}."):
            function = vars(importlib.import_module(module)).get(op)
            if function is not None:
                return function
    return None


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_in_one_room(op):
    assert room_of(op) in ROOMS
    assert reference_of(op) is not None, f"no reference function named {op} in reference/{room_of(op)}/"
    assert re.search(rf"`{op}`", README), f"README's table has no row for {op}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_its_folders(room):
    for folder in ("gpu_ops/ops", "reference", "kernels", "tests"):
        assert list((ROOT / folder / room).glob("*.py")), f"{folder}/{room}"
    for backend in ("cpu", "numba_cuda"):
        assert len(list((ROOT / "kernels" / room / backend).glob("*.py"))) > 1
    assert list((ROOT / "kernels" / room).glob("*.cu"))


def test_no_op_is_outside_the_rooms():
    for folder in ("gpu_ops/ops", "reference", "kernels"):
        rooms = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
        assert rooms - {"common", "compiler", "text"} == set(ROOMS), folder


def test_lines_per_room():
    """Print a table (with ``-rP``) that shows growing rooms; no number is a limit."""
    for room in ROOMS:
        folders = [ROOT / part / room for part in ("gpu_ops/ops", "reference", "kernels", "tests")]
        lines = [sum(len(p.read_text(encoding="utf-8").splitlines()) for p in sources(f)) for f in folders]
        print(f"{room:12}", *(f"{n:8,}" for n in lines), f"{sum(lines):9,}")
        assert all(lines), room


@pytest.mark.parametrize("op", OPS)
def test_public_signature_is_the_references_plus_where_to_run(op):
    public = inspect.signature(getattr(gpu_ops, op)).parameters
    reference = dict(inspect.signature(reference_of(op)).parameters)
    reference.pop("precision", None)
    if op.startswith("ternary_matmul"):  # a TernaryMatrix is the reference's trits and scale in one object
        del reference["trits"], reference["scale"]
        public = {name: p for name, p in public.items() if name != "w"}
    if op == "linear":  # of packed weights, which have their own reference
        public = {name: p for name, p in public.items() if name != "activations"}
    missing = [name for name in reference if name not in public]
    assert not missing, f"{op} lacks {missing}"
    # none changes what is computed
    how = {"device", "backend", "workspace", "out", "residual_out", "grads"}
    how |= {"accumulate", "deterministic", "return_extra", "num_splits", "check", "chunk"}
    assert set(public) - set(reference) <= how
    for name, parameter in reference.items():
        assert public[name].kind == parameter.kind, f"{op}: {name} is {public[name].kind}"
        assert public[name].default == parameter.default, f"{op}: default of {name}"
    shared = [name for name in public if name in reference]
    positional = [n for n in shared if public[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [n for n in reference if n in positional], f"{op}: order of the arrays"


@pytest.mark.parametrize("link", ["kernels", "reference"])
def test_links_are_relative(link):
    path = ROOT / "gpu_ops" / link
    assert path.is_symlink(), f"{path} is not a link: check out with core.symlinks=true"
    assert path.readlink() == Path("..", link)


@pytest.mark.parametrize(
    "statement", ["import reference", "from kernels import compiler", "import kernels; kernels.compiler"]
)
def test_top_level_import_is_refused(statement):
    """Otherwise every module would exist twice, with two kernel caches."""
    code = f"try:\n    {statement}\nexcept ImportError as error: print(error)"
    assert re.search("write `from gpu_ops import (reference|kernels)`", python("-c", code))


def test_the_folder_kernels_is_no_package_of_this_name():
    """transformers would import it from a checkout's root and read its version, but it would be empty."""
    tried = "try: import kernels.compiler\nexcept ImportError: print('none')"
    code = f"import kernels; print(kernels.__version__)\n{tried}"
    assert python("-c", code).splitlines() == ["0", "none"]


def test_every_folder_of_modules_is_a_package():
    """The finder packs folders without __init__.py too, but import systems and checkers treat them differently."""
    for path in sources("gpu_ops", "kernels", "reference"):
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


def test_files_stay_short():
    lines = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in sources(*CODE)}
    too_long = {str(p.relative_to(ROOT)): n for p, n in lines.items() if n > MAX_LINES[p.suffix]}
    assert not too_long, "split by job"


def parameters(function):
    a = function.args
    return len(a.posonlyargs + a.args + a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)


def test_options_travel_as_records():
    """Public functions (ops, emulator.launch) list their options; compiled ones have flat arguments."""
    long = {}
    for path in sources("gpu_ops", "kernels", "reference", "perf", "scripts"):
        if path.suffix != ".py" or {"cpu", "numba_cuda"} & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and parameters(node) > MAX_PARAMETERS:
                decorators = {ast.unparse(d).partition("(")[0] for d in node.decorator_list}
                if not decorators & {"op", "loop"} and node.name != "launch":
                    long[f"{path.relative_to(ROOT)}:{node.lineno}"] = node.name
    assert not long


def imports(path):
    """Imports in a file, nested ones included, as (line, top-level module or gpu_ops.<package>)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module] if node.module != "gpu_ops" else [f"gpu_ops.{a.name}" for a in node.names]
        for name in names:
            parts = name.split(".")
            yield node.lineno, ".".join(parts[:2]) if parts[0] == "gpu_ops" else parts[0]


# kernels/compiler/jit.py and its parts: CuPy and cuda.bindings inside functions.
GPU_COMPILER = {"cupy", "cuda"}
# The errors import nothing, and the memory pool only the errors.
SHARED = {"gpu_ops.errors", "gpu_ops.memory_pool"}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("reference", {"numpy", "ml_dtypes", "gpu_ops.reference"}),
        (
            "kernels",
            {"numpy", "ml_dtypes", "numba", "llvmlite", "rich", "gpu_ops.kernels"} | GPU_COMPILER | SHARED,
        ),
        # CuPy and Numba inside functions only, for their arrays; tokenizers, jinja2, argcomplete, matplotlib too;
        # mpi4py and nccl in the modules that several ranks import.
        (
            "gpu_ops",
            {
                "numpy",
                "ml_dtypes",
                "rich",
                "pynvml",
                "cupy",
                "numba",
                "tokenizers",
                "jinja2",
                "argcomplete",
                "matplotlib",
                "mpi4py",
                "nccl",
                "gpu_ops",
            },
        ),
        # The emulator's loops over lanes are compiled.
        ("gpu_ops/emulator", {"numpy", "ml_dtypes", "numba", "llvmlite", "rich"}),
    ],
)
def test_dependencies_point_one_way(folder, allowed):
    for path in sources(folder):
        if path.suffix != ".py" or (folder == "gpu_ops" and "emulator" in path.parts):
            continue
        for line, name in imports(path):
            inside = folder.startswith("gpu_ops") and name.startswith("gpu_ops.")
            if name not in sys.stdlib_module_names and name not in allowed and not inside:
                pytest.fail(f"{path.relative_to(ROOT)}:{line} imports {name}")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    thing = getattr(gpu_ops, name)
    text = inspect.getdoc(thing)
    assert text, f"{name} has no docstring"
    if name not in OPS:
        return
    forward = getattr(gpu_ops, name.removesuffix("_backward"))  # a backward's options are its forward's
    sections = ["Parameters", "Returns", "Raises", "Examples"] if thing is forward else ["Examples"]
    for section in sections:
        assert re.search(rf"^{section}\n-+$", text, re.M), f"{name}: no section {section}"
    known = {"device", "backend"} | (
        set() if thing is forward else set(inspect.signature(forward).parameters)
    )
    missing = [
        p for p in inspect.signature(thing).parameters if p not in known and not re.search(rf"\b{p}\b", text)
    ]
    assert not missing, f"{name} does not mention {missing}"


WITH_EXAMPLES = [
    name for name in modules() if ">>> " in Path(find_spec(name).origin).read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_run(module):
    imported = importlib.import_module(module)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in finder.find(imported, module):
        test.globs.setdefault("np", np)
        report = []
        runner.run(test, out=report.append)
        assert runner.failures == 0, "".join(report)


def test_public_functions_have_a_running_example():
    """A docstring's example counts only if doctest sees it: ``op`` wraps functions, which can hide them."""
    for op in OPS:
        function = getattr(gpu_ops, op)
        module = importlib.import_module(function.__module__)
        tests = {t.name.rpartition(".")[2]: t for t in doctest.DocTestFinder().find(module, module.__name__)}
        assert op in tests, f"doctest does not find {op}"
        assert tests[op].examples, f"{op} has no example"


@pytest.mark.parametrize("op", OPS)
def test_docstrings_say_what_a_manual_says(op):
    text = inspect.getdoc(getattr(gpu_ops, op))
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert text.count(f"\n{section}\n{'-' * len(section)}\n") == 1, f"{op}: {section}"
    assert "\ndevice, backend : str, optional\n" in text.partition("\nReturns\n")[0]


def test_version_is_the_changelogs():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{gpu_ops.__version__}]" in changelog
