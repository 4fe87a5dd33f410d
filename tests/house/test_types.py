"""Types of the public functions: ``gpu_ops/__init__.pyi`` is current, complete and correct."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

import gpu_ops
from scripts import stubs
from tests.support.calls import OPS, VARIANTS, call
from tests.support.processes import PATIENCE, ROOT

TREE = ast.parse(stubs.STUB.read_text(encoding="utf-8"))
DEFINITIONS = defaultdict(list)
for node in TREE.body:
    if isinstance(node, ast.FunctionDef):
        DEFINITIONS[node.name].append(node)


def test_the_stub_is_current():
    assert stubs.STUB.read_text(encoding="utf-8") == stubs.stub(), "run: python scripts/stubs.py"


def test_the_stub_names_what_is_public():
    imported = {a.asname for node in TREE.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assigned = {node.target.id for node in TREE.body if isinstance(node, ast.AnnAssign)}
    named = (imported - {None}) | assigned | set(DEFINITIONS)
    packages = {"compat", "distributed", "emulator", "formats", "inference", "memory", "models", "training"}
    assert named == {*gpu_ops.__all__, *packages}
    (listed,) = (node.value for node in TREE.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(listed) == gpu_ops.__all__


@pytest.mark.parametrize("op", OPS)
def test_the_stub_has_the_parameters_of_the_function(op):
    parameters = inspect.signature(getattr(gpu_ops, op)).parameters.values()
    *overloads, last = DEFINITIONS[op]
    for node in (*overloads, last):
        a = node.args
        assert [x.arg for x in a.args] == [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [x.arg for x in a.kwonlyargs] == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert defaults(last) == {p.name: p.default for p in parameters if p.default is not p.empty}


def defaults(node):
    a = node.args
    of_positional = zip(a.args[len(a.args) - len(a.defaults) :], a.defaults, strict=True)
    of_keywords = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    return {x.arg: ast.literal_eval(d) for x, d in (*of_positional, *of_keywords) if d is not None}


@pytest.mark.parametrize("op", OPS)
def test_results_are_what_the_stub_says(op):
    """Every row of ``RETURNS`` holds, by calls with float16 arrays, which other dtypes differ from."""
    like, cases = stubs.RETURNS[op]
    tried = set()
    for name in VARIANTS:
        case = call(name, np.float16)
        for options, kinds in cases.items() if case.op == op else ():
            arguments = with_options(op, {**case.arrays, **case.options}, options)
            if arguments is not None:
                tried.add(options)
                check(getattr(gpu_ops, op)(**arguments, backend="reference"), kinds, arguments[like])
    assert tried == set(cases)


def with_options(op, arguments, options):
    """Arguments of a call with the options of a row; None if it has no array for one of them, or a different one."""
    words = dict(word.partition("=")[::2] for word in options.split())
    if deciding := stubs.deciding(op):
        for name in ("lse_dtype", "dweight", "dbias"):  # options of results that the row may not have
            arguments.pop(name, None)
    if op == "rope_backward" and "dk" not in words:  # the table of calls has no such call
        del arguments["dk"]
    for name in deciding:
        default = inspect.signature(getattr(gpu_ops, op)).parameters[name].default
        if f"?{name}" in words:
            continue
        if words.get(name):
            arguments[name] = ast.literal_eval(words[name])
        elif isinstance(default, bool):
            arguments[name] = True if name in words else default
        elif isinstance(arguments.get(name), str):
            del arguments[name]
        elif (name in words) is not (arguments.get(name) is not None):
            return None
    return arguments


def check(result, kinds, like):
    kinds = kinds.split(", ")
    results = result if isinstance(result, tuple) else (result,)
    assert len(results) == len(kinds)
    for x, expected in zip(results, kinds, strict=True):
        if expected == "like":
            assert (type(x), x.dtype, x.ndim) == (type(like), like.dtype, like.ndim)
        elif expected == "extra":
            assert all(isinstance(gradient, np.ndarray) for gradient in x.values())
        elif expected[0].islower():
            assert isinstance(x, np.ndarray)
            assert expected in ("any", x.dtype.name)
        else:
            assert type(x).__name__ in (expected, f"{expected}Type")


def test_a_type_checker_knows_the_results_of_calls():
    """mypy passes on typed_calls.py. Its cache is that of ``mypy`` without arguments."""
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "tests/house/typed_calls.py"],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
