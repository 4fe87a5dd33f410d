"""The folder of compiled kernels: shared by processes, repaired when damaged, optional when unwritable."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite.binding import Linkage

from gpu_ops.cli import warmup
from gpu_ops.kernels.common.cpu import jit
from gpu_ops.kernels.common.cpu.codegen import numba_pipeline
from gpu_ops.kernels.common.cpu.jit import Kernel
from gpu_ops.kernels.gemm.cpu import swiglu
from tests.support.processes import PATIENCE, ROOT, ends_with_all_it_started, in_background, python

# Runs an op that compiles fast and prints where its kernel came from: "compiled" when saved, "loaded" when read.
CALL = """
import numpy as np, gpu_ops
from gpu_ops.kernels.common.cpu import jit
saved, load = [], jit.DiskCache.load_overload
def watched(self, *a):
    found = load(self, *a)
    print(self._label, "compiled" if found is None else "loaded")
    return found
jit.DiskCache.load_overload = watched
x = np.linspace(-1, 1, 96, dtype=np.float32).reshape(3, 32)
y, want = gpu_ops.swiglu(x, x), gpu_ops.swiglu(x, x, backend="reference")
assert np.abs(y - want).max() < 1e-6
"""
COMPILED, LOADED = "swiglu_forward_silu-float32 compiled", "swiglu_forward_silu-float32 loaded"


def start(cache, code=CALL, root=ROOT, **env):
    env = {**os.environ, "GPU_OPS_CACHE_DIR": str(cache), **env}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, env=env, stdout=pipe, stderr=pipe, text=True
    )


def finish(process):
    """Standard output and standard error of a process that must succeed."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out.strip(), err


def entries(cache):
    return sorted(Path(cache).rglob("*.nbc"))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Cache folder after a first call, made where the working directory has been deleted."""
    cache = tmp_path_factory.mktemp("first")
    code = "import os, tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())\n"
    assert finish(start(cache, "import gpu_ops\n" + code + CALL))[0] == COMPILED
    return cache


@pytest.fixture
def filled(first, tmp_path):
    return shutil.copytree(first, tmp_path / "cache")


def test_compiled_once_then_loaded(first):
    assert [e.name for e in entries(first)] == ["swiglu_forward_silu-float32.nbc"]
    assert finish(start(first))[0] == LOADED


def test_kernels_of_several_processes_run_in_one(tmp_path):
    """Code of the same names, made in processes with equal counters, does not replace each other."""
    code = CALL.replace("y, want =", "for a in {}: y, want =").replace("(x, x", "(x, x, activation=a")
    code = code.replace("\nassert", "; assert")
    for names in (["silu"], ["gelu"], ["silu", "gelu"], ["gelu", "silu"]):
        out, _ = finish(start(tmp_path, code.format(names)))
        where = "compiled" if len(names) == 1 else "loaded"
        assert out.splitlines() == [f"swiglu_forward_{name}-float32 {where}" for name in names]


def test_a_kernel_shows_nothing_but_its_entry(tmp_path, monkeypatch):
    """Other exported symbols could replace those of another kernel, or be replaced by them."""
    libraries = []
    kept = numba_pipeline.KernelLibrary._finalize_final_module
    monkeypatch.setattr(
        numba_pipeline.KernelLibrary,
        "_finalize_final_module",
        lambda self: libraries.append(self) or kept(self),
    )
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    kernel = Kernel(
        swiglu.FORWARD["silu"]._function, swiglu.FORWARD["silu"]._signature, ("float32",), jit.CONTRACT
    )
    jit.KERNELS.remove(kernel)
    kernel.name = "some_kernel"
    kernel["float32"]
    (library,) = libraries
    seen = [
        function.name
        for function in library._final_module.functions
        if not function.is_declaration and function.linkage not in (Linkage.internal, Linkage.private)
    ]
    assert len(seen) >= 2  # for compiled callers, and for Python
    assert all("some_kernel" in name for name in seen), seen


def test_the_emulators_ufuncs_are_loaded_by_a_process_that_compiles_nothing(tmp_path):
    code = "from gpu_ops.emulator.instructions.elements import fma; print(fma(2.0, 3.0, 0.5))"
    for _ in range(2):
        assert finish(start(tmp_path, code))[0] == "6.5"
    assert len(entries(tmp_path)) == 2  # float32 and float64


def test_two_processes_warm_one_folder_at_once(tmp_path):
    both = [start(tmp_path) for _ in range(2)]
    for process in both:
        assert finish(process)[1].count("Warning") == 0
    assert len(entries(tmp_path)) == 1
    leftovers = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".nbc"]
    assert not leftovers
    assert finish(start(tmp_path))[0] == LOADED


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_empty(path):
    path.write_bytes(b"")


def damage_other(path):
    """Pickle, the former format of entries: its checksum holds, but it must not be run."""
    payload = pickle.dumps(Runs(path.parent))
    path.write_bytes(hashlib.sha256(payload).digest() + payload)


class Runs:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / "unpickled"),)


def damage_moved(path):
    """Entry of another variant under the name of this one."""
    finish(start(path.parents[2], CALL.replace("(x, x", "(x, x, activation='gelu'")))
    path.with_name("swiglu_forward_gelu-float32.nbc").replace(path)


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_empty, damage_other, damage_moved])
def test_a_damaged_entry_is_compiled_anew_and_replaced(filled, damage):
    (entry,) = entries(filled)
    damage(entry)
    assert finish(start(filled))[0] == COMPILED
    assert finish(start(filled))[0] == LOADED
    assert not (entry.parent / "unpickled").exists()


@pytest.mark.parametrize("kind", ["below a file", "not permitted", "of all"])
def test_an_unwritable_folder_warns_once_and_computes(filled, tmp_path, kind):
    if kind == "below a file":
        (tmp_path / "file").write_text("in the way")
        cache = tmp_path / "file" / "cache"
    elif kind == "of all":
        cache = filled
        cache.chmod(0o777)
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere: run as another user")
        cache = tmp_path / "closed"
        cache.mkdir(mode=0o500)
    out, err = finish(start(cache))
    assert out == COMPILED
    assert err.count("UserWarning") == 1
    assert "GPU_OPS_CACHE_DIR" in err


READ_ONLY = """
from gpu_ops.kernels.compiler import cache
def refuse(folder):
    refuse.count = getattr(refuse, "count", 0) + 1
    raise PermissionError(13, "Permission denied", str(folder / f"tmp{refuse.count}"))
cache._writable = refuse
"""


def test_a_folder_that_others_filled_is_read(filled):
    """A container warmed as root and run as a user gives no warning if nothing is missing, else a single one."""
    out, err = finish(start(filled, READ_ONLY + CALL))
    assert out == LOADED
    assert "UserWarning" not in err
    more = "gpu_ops.rmsnorm(x, x[0]), gpu_ops.layernorm(x, x[0])\n"
    out, err = finish(start(filled, READ_ONLY + CALL + more))
    assert len(out.splitlines()) == 3
    assert err.count("UserWarning") == 1
    assert "GPU_OPS_CACHE_DIR" in err


def test_changed_source_is_compiled_anew(tmp_path):
    """Any module of the kernels' package counts: a helper's edit must not serve the old machine code."""
    cache, tree, edited = tmp_path / "cache", tmp_path / "tree", tmp_path / "edited"
    for name in ("gpu_ops", "kernels", "reference"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tree, edited, symlinks=True)
    helper = edited / "kernels" / "common" / "cpu" / "dtype.py"
    helper.write_text(helper.read_text() + "\n# changed\n")
    assert finish(start(cache, root=tree))[0] == COMPILED
    assert finish(start(cache, root=edited))[0] == COMPILED
    assert len(entries(cache)) == 2
    assert finish(start(cache, root=tree))[0] == LOADED
    assert finish(start(cache, root=edited))[0] == LOADED


PRODUCT = """
import numpy as np
from gpu_ops.kernels.gemm.cpu.gemm import matmul
out = np.empty((1, 1), np.float32)
matmul(np.full((1, 1), 3, np.float32), np.full((1, 1), 5, np.float32), out)
print(out.item())
"""


def test_an_edited_generator_of_vector_code_makes_new_code(tmp_path):
    """The emitted code is in no source line of the kernel, so Numba's cache would serve the old result."""
    tree = tmp_path / "tree"
    for name in ("gpu_ops", "kernels", "reference"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert finish(start(tmp_path / "cache", PRODUCT, tree))[0] == "15.0"
    generator = tree / "kernels" / "common" / "cpu" / "codegen" / "build.py"
    text = generator.read_text()
    assert text.count("x.type, x, y, total)") == 1
    generator.write_text(text.replace("x.type, x, y, total)", "x.type, x, x, total)"))
    assert finish(start(tmp_path / "cache", PRODUCT, tree))[0] == "9.0"


def test_every_variant_has_a_file_of_its_own():
    labels = [kernel.label(variant) for kernel, variant in warmup._all_variants()]
    assert len(labels) > 50
    assert len(labels) == len(set(labels))


STUBBED_CALLS = """
import numpy as np
from gpu_ops.cli import warmup
from gpu_ops.kernels.common.cpu.jit import FLOATS, Kernel
from tests.support.calls import OPS, call

listed, requested = set(warmup.variants()), set()

def request(kernel, variant):
    parts = variant if isinstance(variant, tuple) else (variant,)
    requested.add(kernel.label(tuple(part.name if isinstance(part, np.dtype) else part for part in parts)))
    return lambda *arguments: None

calls = [call(op, dtype) for dtype in FLOATS for op in OPS]
Kernel.__getitem__ = request
np.empty = np.ones  # in place of the kernels' results; 1 is valid
with np.errstate(all="ignore"):
    for case in calls:
        case()
assert len(requested) > 60, requested
print(*sorted(requested - listed))
"""


def test_warmup_knows_every_variant_that_runs():
    """Every op, called with kernels that do nothing, requests only kernels that a warm-up would compile.

    In a separate process: ops keep the kernels of a call for the next one.
    """
    assert python("-c", STUBBED_CALLS).split() == []


def test_default_folder_follows_xdg(tmp_path):
    code = "from gpu_ops.kernels.common.cpu.jit import cache_dir; print(cache_dir())"
    out, _ = finish(start("", code, XDG_CACHE_HOME=str(tmp_path)))
    assert Path(out).is_relative_to(tmp_path / "gpu_ops" / "numba_cpu")


def test_warmup_fills_the_folder(tmp_path):
    """``python -m gpu_ops warmup`` compiles in two processes; a call then compiles nothing."""
    arguments = ("warmup", "--jobs", 2, "--kernel", "swiglu_forward_", "--dtype", "float32")
    printed = python("-m", "gpu_ops", *arguments, GPU_OPS_CACHE_DIR=str(tmp_path))
    lines = printed.splitlines()
    assert re.match(r"\d of \d kernels ready in", lines[-1])
    assert re.match(r"1 of \d  swiglu_forward_\w+ float32: \d+\.\d s", lines[2])
    assert len(lines) == 3 + int(lines[-1][0]), printed  # one per kernel, when it is compiled
    assert {e.stem for e in entries(tmp_path)} >= {
        "swiglu_forward_silu-float32",
        "swiglu_forward_gelu-float32",
    }
    assert finish(start(tmp_path))[0] == LOADED


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals (Linux, macOS)")
def test_warmup_ends_with_its_workers_when_it_is_killed(tmp_path):
    """They end also if a shell started it in the background; kernels compiled by then are kept."""
    arguments = ("warmup", "--jobs", 2, "--kernel", "swiglu_forward_", "--dtype", "float32")
    warmup = in_background("-m", "gpu_ops", *arguments, GPU_OPS_CACHE_DIR=str(tmp_path))
    while " of " not in warmup.stdout.readline():
        assert warmup.poll() is None
    assert ends_with_all_it_started(warmup)
    assert warmup.returncode == -signal.SIGTERM
    assert entries(tmp_path)


def test_warmup_names_what_it_does_not_know(tmp_path):
    printed = python("-m", "gpu_ops", "warmup", "--kernel", "no_such_kernel", status=1)
    assert "no kernel matches" in printed
