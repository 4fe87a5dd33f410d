"""Errors of a kernel that does not compile give the reason, and the package to install."""

from __future__ import annotations

import pytest

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler import jit, toolkit
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
from tests.support.processes import ROOT, python


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "cache"))
    jit.forget()
    yield
    jit.forget()


@pytest.fixture
def tree(tmp_path):
    return scale_tree(tmp_path / "cuda")


@needs_nvrtc
def test_log_of_a_failure(tree):
    write(tree, "scale.cu", SCALE.replace("scaled(x[i]", "scaled(z[i]"))
    with pytest.raises(
        KernelCompileError, match=r'scale\.cu\(5\): error: identifier "z" is undefined'
    ) as failure:
        jit.compile_kernel(scale(tree), "sm_80")
    assert '"z" is undefined' in failure.value.log
    write(tree, "scale.cu", SCALE)  # a failure is not kept
    assert jit.compile_kernel(scale(tree), "sm_80").entry == "scale"


@needs_nvrtc
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"scale.cu": SCALE.replace('"scale.cuh"', '"other.cuh"')},
            r"scale\.cu:2: 'other.cuh' is no header of",
        ),
        ({"scale.cu": SCALE + '#include "../stray.cuh"', "stray.cuh": ""}, "'../stray.cuh' is no header of"),
        (
            {"scale.cuh": '#include "b.cuh"\n', "b.cuh": '#include "scale.cuh"\n'},
            "includes itself",
        ),
        ({"scale.cuh": SCALE_HEADER + "#include <no_such.h>"}, 'cannot open source file "no_such.h"'),
        ({"scale.cu": SCALE.replace('extern "C"', "")}, "has no extern .* 'scale'; it has: _Z5scale"),
        ({"scale.cu": '#include "scale.cuh"\n'}, "has no extern .* 'scale'; it has: none"),
    ],
    ids=[
        "unknown header",
        "stray header",
        "cyclic header",
        "missing header",
        "mangled",
        "empty",
    ],
)
def test_broken_trees(tree, files, message):
    for name, text in files.items():
        write(tree, name, text)
    with pytest.raises(KernelCompileError, match=message):
        jit.compile_kernel(scale(tree), "sm_80")


@needs_nvrtc
def test_too_much_static_shared_memory_is_the_assemblers_error(tree):
    big = SCALE.replace(
        "int i =",
        "__shared__ ELEMENT big[13000]; big[threadIdx.x] = n; __syncthreads(); n += big[n]; int i =",
    )
    write(tree, "scale.cu", big)
    with pytest.raises(KernelCompileError, match="uses too much shared data"):
        jit.compile_kernel(scale(tree), "sm_80")


def test_missing_file_and_wrong_architecture(tmp_path):
    with pytest.raises(KernelCompileError, match=r"cannot read the kernel source .*nothing\.cu"):
        jit.compile_kernel(jit.CudaKernel("nothing", "k", (), tmp_path), "sm_80")
    for arch in ("compute_80", "80", "sm_90b"):
        with pytest.raises(KernelCompileError, match="want a real one, such as sm_80"):
            jit.compile_text("", arch)


@needs_nvrtc
def test_unknown_architecture(tree):
    with pytest.raises(KernelCompileError, match="sm_99") as failure:
        jit.compile_kernel(scale(tree), "sm_99")
    assert "gpu-architecture" in failure.value.log


@needs_numba_cuda
def test_numba_type_error_is_ours():
    kernel = jit.NumbaKernel(
        numba_kernels.scale_kernel(3.0).function, "void(float32, float32[:], int64)", "wrong"
    )
    with pytest.raises(KernelCompileError, match=r"(?s)cannot compile wrong for sm_80.*getitem"):
        jit.compile_kernel(kernel, "sm_80")


@pytest.mark.parametrize("missing", ["cuda", "numba_cuda", "libnvrtc"])
def test_missing_compilers_name_the_extra(missing, tmp_path):
    """The error names the extra, in a separate process where the package cannot be found."""
    pytest.importorskip("numba_cuda", reason="pip install '.[emulator]'")
    code = f"""
import sys, importlib.util
from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler import jit
missing = {missing!r}
if missing == "libnvrtc":
    from cuda.bindings import nvrtc
    def gone():
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file")
    nvrtc.nvrtcVersion = gone
elif missing == "cuda":
    sys.modules["cuda.bindings"] = None
else:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == missing else find(name, *a)
try:
    if missing == "numba_cuda":
        jit.compile_kernel(jit.NumbaKernel(lambda x: None, "void(int64)", "k"), "sm_80")
    else:
        jit.compile_text("", "sm_80")
except KernelCompileError as error:
    print(error)
"""
    assert 'pip install ".[emulator]"' in python("-c", code)


def test_outside_of_a_checkout_the_extra_of_the_installed_package_is_named(tmp_path, monkeypatch):
    """The index does not have gpu-ops, so no text of the checkout names an extra of it there."""
    monkeypatch.setattr(toolkit, "_CHECKOUT", tmp_path)
    assert toolkit.install_command("mpi") == 'pip install "gpu_ops[mpi]"'
    for path in ("README.md", "CONTRIBUTING.md", "gpu_ops", "kernels", "perf", "scripts"):
        files = (ROOT / path).rglob("*.*") if (ROOT / path).is_dir() else [ROOT / path]
        for file in files:
            if file.suffix in (".py", ".md", ".sh"):
                assert "gpu-ops[" not in file.read_text(encoding="utf-8"), file


@needs_nvrtc
def test_missing_headers_name_the_extra(tree, monkeypatch):
    monkeypatch.setattr(toolkit, "headers", lambda major: None)
    with pytest.raises(KernelCompileError, match=r"(?s)cuda_fp16.h.*no CUDA \d+ headers.*\.\[emulator\]"):
        jit.compile_kernel(scale(tree), "sm_80")
