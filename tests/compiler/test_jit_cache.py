"""Folder of compiled GPU kernels: causes of new entries, treatment of bad ones, and interrupts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from gpu_ops.kernels.compiler import cache, jit, numba_ptx, nvrtc
from tests.support import numba_kernels
from tests.support.compilers import (
    SCALE,
    SCALE_HEADER,
    needs_numba_cuda,
    needs_nvrtc,
    scale,
    scale_tree,
    write,
)
from tests.support.processes import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Cache of this test."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture
def tree(tmp_path):
    return scale_tree(tmp_path / "cuda")


@pytest.fixture
def compiled(monkeypatch):
    """Compile a kernel as a new process would; True if it was compiled, False if it came from the disk."""
    calls = []
    for module, name in ((nvrtc, "compile_cuda"), (jit, "compile_numba")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=original: calls.append(a) or f(*a))

    def compile(kernel, arch="sm_80"):
        before = len(calls)
        jit.forget()
        jit.compile_kernel(kernel, arch)
        return len(calls) > before

    yield compile
    jit.forget()


@needs_nvrtc
def test_compiled_once_then_loaded(folder, tree, compiled):
    assert compiled(scale(tree))
    fresh = jit.compile_kernel(scale(tree), "sm_80")
    assert not compiled(scale(tree))
    assert jit.compile_kernel(scale(tree), "sm_80") == fresh
    assert not compiled(scale(tree, "negate"))  # of the same file with the same macros
    (entry,) = folder.iterdir()
    assert entry.name.startswith("scale-ELEMENT=float-FACTOR=2.sm_80.")


@needs_nvrtc
def test_what_makes_a_new_entry(folder, tree, compiled, monkeypatch):
    assert compiled(scale(tree))
    assert compiled(scale(tree), "sm_86")
    assert compiled(scale(tree, factor=3))
    for name, text in (
        ("scale.cu", SCALE + "// edited"),
        ("scale.cuh", SCALE_HEADER.replace("x * V", "V(1) + x * V")),
        ("unused.cuh", "#pragma once"),  # a macro might include it
    ):
        write(tree, name, text)
        assert compiled(scale(tree)), name
        assert not compiled(scale(tree)), name
    assert "add" in jit.compile_kernel(scale(tree), "sm_80").ptx  # and the edited header is in it
    (tree / ".scale.cuh.swp").write_bytes(b"\xff\0 of an editor")
    assert not compiled(scale(tree))
    write(tree, "scale.cuh", SCALE_HEADER)
    write(tree, "scale.cu", SCALE)
    (tree / "unused.cuh").unlink()
    assert not compiled(scale(tree))  # back to the first
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fmad=false"))
    assert compiled(scale(tree))
    major, _ = nvrtc.version()
    monkeypatch.setattr(nvrtc, "version", lambda: (major, 999))
    assert compiled(scale(tree))


@needs_nvrtc
def test_two_checkouts_do_not_share_file_names(folder, tree, tmp_path, compiled):
    """The line table holds paths: a report must not lead to another checkout."""
    assert compiled(scale(tree))
    other = scale_tree(tmp_path / "other")
    assert compiled(scale(other))
    assert set(jit.compile_kernel(scale(other), "sm_80").sources) == {
        str(other / "scale.cu"),
        str(other / "scale.cuh"),
    }


@needs_numba_cuda
def test_numba_entries(folder, compiled, monkeypatch, tmp_path):
    assert compiled(numba_kernels.scale_kernel(2.0))
    assert not compiled(numba_kernels.scale_kernel(2.0))  # another function object, the same kernel
    assert compiled(numba_kernels.scale_kernel(3.0))
    kernel = numba_kernels.scale_kernel(2.0)
    assert compiled(jit.NumbaKernel(kernel.function, kernel.signature.replace("int64", "int32"), kernel.name))
    monkeypatch.setattr(numba_kernels, "OFFSET", 0.25)
    assert compiled(numba_kernels.scale_kernel(2.0))
    write(tmp_path, "numba_cuda/helper.py", "# an edited helper")
    monkeypatch.setattr(numba_ptx, "NUMBA_FOLDER", tmp_path / "numba_cuda")
    assert compiled(numba_kernels.scale_kernel(2.0))


@needs_numba_cuda
def test_numba_key_is_the_same_in_every_process(folder):
    code = """
from tests.support import numba_kernels
from gpu_ops.kernels.compiler.numba_ptx import numba_key
kernel = numba_kernels.scale_kernel(2.0)
print(numba_key(kernel.function, kernel.signature))
"""
    keys = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        keys.add(run.stdout)
    assert len(keys) == 1


def test_numba_key_refuses_what_has_no_lasting_text():
    """An address in a key would create a new entry in every process or, worse, match another kernel's entry."""
    thing = object()

    def kernel(x):
        x[0] = thing

    with pytest.raises(jit.KernelCompileError, match="which no key of the cache can stand for"):
        numba_ptx.numba_key(kernel, "void(float32[:])")


def no_kernel(data):
    """Complete entry of this key that holds no kernel."""
    start, length = 52, int.from_bytes(data[48:52], "little")
    key = json.loads(data[start : start + length])["key"]
    return cache._pack(cache.Entry({}, {"ptx": b"no zlib"}), key)


DAMAGE = {
    "cut": lambda data: data[:-100],
    "one bit": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "empty": lambda data: b"",
    "of another format": lambda data: hashlib.sha256(b"old").digest() + b"old",
    "no kernel": no_kernel,
}


@needs_nvrtc
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_compiled_anew_and_replaced(folder, tree, compiled, damage):
    compiled(scale(tree))
    (entry,) = folder.iterdir()
    whole = jit.compile_kernel(scale(tree), "sm_80")
    entry.write_bytes(damage(entry.read_bytes()))
    with pytest.warns(UserWarning, match=r"ignoring the cached kernel scale-.*\.sm_80"):
        assert compiled(scale(tree))
    assert jit.compile_kernel(scale(tree), "sm_80").ptx == whole.ptx
    assert not compiled(scale(tree))


@needs_nvrtc
def test_an_unwritable_folder_warns_once(tmp_path, tree, compiled, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert compiled(scale(tree))
        assert compiled(scale(tree, factor=3))
    assert len(caught) == 1
    assert "Set GPU_OPS_CACHE_DIR to a writable folder" in str(caught[0].message)
    (tmp_path / "file").unlink()  # out of the way again
    assert compiled(scale(tree))
    assert not compiled(scale(tree))


@needs_nvrtc
def test_a_full_disk_costs_the_entry_only(folder, tree, compiled, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.warns(UserWarning, match="not cached: .*No space left"):
            assert compiled(scale(tree))
    assert list(folder.iterdir()) == []
    assert compiled(scale(tree))


@needs_nvrtc
@pytest.mark.parametrize("when", ["compiling", "writing"])
def test_an_interrupt_leaves_nothing_behind(folder, tree, compiled, monkeypatch, when):
    def interrupt(*args):
        raise KeyboardInterrupt

    jit.forget()
    with monkeypatch.context() as patch:
        patch.setattr(*((nvrtc, "compile_cuda") if when == "compiling" else (Path, "replace")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            jit.compile_kernel(scale(tree), "sm_80")
    assert list(folder.iterdir()) == []
    assert compiled(scale(tree))  # the lock is free
    assert len(list(folder.iterdir())) == 1


@needs_nvrtc
def test_processes_race(folder, tree):
    code = f"""
from pathlib import Path
from tests.support.compilers import scale
from gpu_ops.kernels.compiler import jit
for factor in range(3):
    for arch in ("sm_80", "sm_90a"):
        print(jit.compile_kernel(scale(Path({str(tree)!r}), factor=factor), arch).ptx)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    results = [process.communicate(timeout=PATIENCE) for process in running]
    assert [process.returncode for process in running] == [0] * 4, results
    assert len({out for out, _ in results}) == 1
    assert len(list(folder.iterdir())) == 6
    assert all(entry.suffix == ".jit" for entry in folder.iterdir())
