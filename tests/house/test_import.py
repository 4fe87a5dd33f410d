"""``import gpu_ops`` is fast, loads no compiler, and its names are right in any order of imports."""

from __future__ import annotations

import json

import pytest

import gpu_ops
from tests.support.calls import OPS
from tests.support.processes import ROOT, python

PACKAGES = ("compat", "distributed", "emulator", "formats", "inference", "memory", "models", "training")
HEAVY = {"numba", "llvmlite", "cupy", "cuda", "rich", "torch", "jax", "pynvml", "scipy", "multiprocessing"}


def test_import_loads_few_modules_and_nothing_heavy():
    """An import loads 25 small modules in addition to NumPy's and ours: its cost is the modules it executes."""
    code = (
        "import sys, json, numpy; before = set(sys.modules); import gpu_ops; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(python("-c", code))
    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    ours = [name for name in loaded if name.partition(".")[0] == "gpu_ops"]
    assert len(loaded) - len(ours) <= 40, sorted(set(loaded) - set(ours))
    # kernels are imported by the calls that need them
    assert not [name for name in ours if name.startswith(("gpu_ops.kernels.numba", "gpu_ops.emulator"))]


def test_looking_around_loads_nothing_heavy():
    code = (  # what the interpreter itself loads (.pth files of numba-cuda) is not ours
        "import sys; before = set(sys.modules); import gpu_ops; dir(gpu_ops); gpu_ops.__all__; "
        "gpu_ops.errors.ShapeError; print(*set(sys.modules) - before)"
    )
    assert not HEAVY & {name.partition(".")[0] for name in python("-c", code).split()}


def test_training_loads_nothing_heavy():
    code = "import sys; before = set(sys.modules); import gpu_ops.training; print(*set(sys.modules) - before)"
    assert not (HEAVY | {"tokenizers"}) & {name.partition(".")[0] for name in python("-c", code).split()}


MODULES = sorted(
    (path.parent.name, path.stem) for path in (ROOT / "gpu_ops" / "ops").glob("*/*.py") if path.stem in OPS
)


@pytest.mark.parametrize(
    "how", ["import gpu_ops.ops.{0}.{1}", "from gpu_ops.ops.{0}.{1} import *", "from gpu_ops import {1}"]
)
def test_a_function_is_never_shadowed_by_its_module(how):
    """``import gpu_ops.rope`` would bind a module to ``gpu_ops.rope``, which the package prevents."""
    lines = [
        f"{how.format(room, op)}\nimport gpu_ops\nassert callable(gpu_ops.{op}), {op!r}"
        for room, op in MODULES
    ]
    python("-c", "\n".join(lines))


def test_every_public_name_resolves_and_is_listed():
    for name in gpu_ops.__all__:
        assert getattr(gpu_ops, name) is getattr(gpu_ops, name)
        assert name in dir(gpu_ops)
    assert gpu_ops.__all__ == sorted(gpu_ops.__all__)


def test_looking_around_shows_what_is_public():
    assert dir(gpu_ops) == sorted([*gpu_ops.__all__, *PACKAGES])
    for package in PACKAGES:
        assert set(dir(getattr(gpu_ops, package))) >= set(getattr(getattr(gpu_ops, package), "__all__", ()))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_loads_when_it_is_first_named(package):
    code = (
        f"import sys, gpu_ops; assert {package!r} in dir(gpu_ops); before = 'gpu_ops.{package}' in sys.modules; "
        f"print(gpu_ops.{package}.__name__, before, {package!r} in gpu_ops.__all__)"
    )
    assert python("-c", code).split() == [f"gpu_ops.{package}", str(package == "formats"), "False"]


def test_star_import_gives_exactly_the_public_names():
    code = (
        "import json; before = set(dir()); from gpu_ops import *; print(json.dumps([*(set(dir()) - before)]))"
    )
    assert set(json.loads(python("-c", code))) - {"before"} == set(gpu_ops.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'atention'; did you mean 'attention'"):
        _ = gpu_ops.atention
    with pytest.raises(AttributeError, match="no attribute 'trainning'; did you mean 'training'"):
        _ = gpu_ops.trainning
    with pytest.raises(AttributeError, match="no attribute 'LLamaConfig'; did you mean 'LlamaConfig'"):
        _ = gpu_ops.models.LLamaConfig
    assert not hasattr(gpu_ops, "flash_attention")
