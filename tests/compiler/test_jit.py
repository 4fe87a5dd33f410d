"""Kernels compile without a GPU, exactly as requested."""

from __future__ import annotations

import gc
import re
import threading

import pytest

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler import cubin, jit, numba_ptx, nvrtc, toolkit
from gpu_ops.presets import ARCHES
from tests.support import numba_kernels
from tests.support.compilers import (
    ARCH_LIST,
    SCALE,
    SCALE_HEADER,
    needs_numba_cuda,
    needs_nvrtc,
    needs_ptxas,
    scale,
    scale_tree,
)
from tests.support.processes import PATIENCE, python


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
@pytest.mark.parametrize("arch", [*ARCHES, "sm_90a", "sm_100a", "sm_120a"])
def test_every_architecture(tree, arch):
    compiled = jit.compile_kernel(scale(tree, kind="__half"), arch)
    assert re.search(rf"^\.target {arch}\b", compiled.ptx, re.MULTILINE)
    assert compiled.entry == "scale"
    assert compiled.entries == ["scale", "negate"]
    assert cubin.architecture(compiled.cubin) == int(arch.rstrip("a")[3:])
    assert compiled.seconds > 0


@needs_nvrtc
def test_text_compiles_where_the_working_directory_was_deleted(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert jit.compile_text('extern "C" __global__ void k() {}', "sm_80").entries == ["k"]


@needs_numba_cuda
def test_a_numba_kernel_compiles_where_the_working_directory_was_deleted(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert jit.compile_kernel(numba_kernels.scale_kernel(3.0), "sm_80").ptx


@needs_nvrtc
def test_sm_90a_keeps_its_instructions():
    """The suffix must reach the assembler: without it wgmma compiles in NVRTC and fails in ptxas."""
    source = 'extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }'
    unit = jit.compile_text(source, "sm_90a")
    if nvrtc.version() < (13, 0):  # in this ABI the flags distinguish 90a from 90
        assert int.from_bytes(unit.cubin[0x30:0x34], "little") == 0x5A0D5A
    with pytest.raises(KernelCompileError, match=r"wgmma.*sm_90a|sm_90a.*wgmma|not supported.*sm_90"):
        jit.compile_text(source, "sm_90")


@needs_nvrtc
def test_macros_specialise(tree):
    kernels = [scale(tree, kind=element, factor=f) for element in ("float", "double") for f in (2, 3)]
    assert len({jit.compile_kernel(k, "sm_80").ptx for k in kernels}) == 4
    assert kernels[0].label == "scale[ELEMENT=float,FACTOR=2]"
    assert jit.CudaKernel("scale", "scale").label == "scale"


@needs_nvrtc
def test_arithmetic_is_precise():
    """Denormals are not flushed, and division and square root are exact unless a kernel requests approximations."""
    source = """
    extern "C" __global__ void k(float* x) { x[0] = x[1] / x[2]; x[3] = sqrtf(x[4]); x[5] = x[6] + x[7]; }
    """
    ptx = jit.compile_text(source, "sm_80").ptx
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert ".ftz" not in ptx
    fast = jit.compile_text(source, "sm_80", options=("-use_fast_math",)).ptx
    assert "div.approx.ftz.f32" in fast


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCH_LIST)
def test_lines_lead_to_the_sources(tree, arch):
    """Every .loc of our code names a real file, and the line in that file is the statement it represents."""
    compiled = jit.compile_kernel(scale(tree), arch)
    kernel, header = str(tree / "scale.cu"), str(tree / "scale.cuh")
    assert compiled.sources == {kernel: SCALE, header: SCALE_HEADER}
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', compiled.ptx))
    lines = {(files[f], int(n)) for f, n in re.findall(r"\.loc\s+(\d+)\s+(\d+)", compiled.ptx) if n != "0"}
    where = {name: {line for file, line in lines if file == name} for name in (kernel, header)}
    assert 1 + SCALE.splitlines().index("    if (i < n) y[i] = scaled(x[i], FACTOR);") in where[kernel]
    assert 1 + SCALE_HEADER.splitlines().index("    return x * V(factor);") in where[header]


@needs_nvrtc
def test_text(tmp_path, monkeypatch):
    source = '#include <cuda_fp16.h>\nextern "C" __global__ void k(__half* x) {\n    x[0] = x[W];\n}\n'
    monkeypatch.chdir(tmp_path)
    unit = jit.compile_text(source, "sm_86", name="mine.cu", options=("-DW=7",))
    assert (unit.entry, unit.entries) == ("", ["k"])
    assert unit.sources == {"mine.cu": source}
    assert '"mine.cu"' in unit.ptx
    assert str(tmp_path) not in unit.ptx
    assert not list(tmp_path.rglob("*.jit"))  # the includes of a text are unknown
    assert jit.compile_text(source, "sm_86", name="mine.cu", options=("-DW=7",)) is unit
    assert jit.compile_text(source, "sm_86", name="mine.cu", options=("-DW=8",)).ptx != unit.ptx


@needs_nvrtc
def test_many_threads_compile_one_kernel_once(tree, monkeypatch):
    calls = []
    compile_cuda = nvrtc.compile_cuda
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda *a: calls.append(a) or compile_cuda(*a))
    results = []
    kernels = [scale(tree), scale(tree, "negate")]  # of one file: one compilation
    threads = [
        threading.Thread(target=lambda i=i: results.append(jit.compile_kernel(kernels[i % 2], "sm_80")))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == 8
    assert {r.entry for r in results} == {"scale", "negate"}
    assert len(calls) == 1


@needs_nvrtc
def test_many_threads_compile_different_kernels(tree):
    kernels = [scale(tree, factor=f) for f in range(8)]
    expected = [jit.compile_kernel(k, "sm_80").ptx for k in kernels]
    jit.forget()
    results = {}
    threads = [
        threading.Thread(target=lambda k=k: results.update({k: jit.compile_kernel(k, "sm_86").ptx}))
        for k in kernels
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [results[k].replace("sm_86", "sm_80") for k in kernels] == expected


@needs_nvrtc
def test_dump(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_DUMP", str(tmp_path / "dump"))
    for _ in range(2):  # the second time from the disk
        compiled = jit.compile_kernel(scale(tree), "sm_80")
        stem = "scale-ELEMENT=float-FACTOR=2.sm_80"
        dumped = {p.name: p for p in (tmp_path / "dump").iterdir()}
        assert set(dumped) == {f"{stem}.scale.cu", f"{stem}.scale.cuh", f"{stem}.ptx", f"{stem}.cubin"}
        assert dumped[f"{stem}.ptx"].read_text() == compiled.ptx
        assert dumped[f"{stem}.cubin"].read_bytes() == compiled.cubin
        assert dumped[f"{stem}.scale.cu"].read_text() == SCALE
        for path in dumped.values():
            path.unlink()
        jit.forget()


@needs_numba_cuda
@pytest.mark.parametrize("arch", ARCH_LIST)
def test_numba(arch):
    kernel = numba_kernels.scale_kernel(3.0)
    compiled = jit.compile_kernel(kernel, arch)
    assert re.search(rf"^\.target {arch}\b", compiled.ptx, re.MULTILINE)
    assert compiled.entries == [compiled.entry]
    assert "0d4008000000000000" in compiled.ptx  # 3.0, from the closure, through a device function
    assert compiled.cubin is None
    (name,) = compiled.sources
    assert name == numba_kernels.__file__
    line = 1 + compiled.sources[name].splitlines().index("            y[i] = times(x[i, 0])")
    assert re.search(rf"\.loc\s+\d+ {line} ", compiled.ptx)


@needs_numba_cuda
@needs_ptxas
def test_numba_products_are_rounded():
    """ptxas fuses a product and a sum without rounding modifiers into an fma, and the emulator does not."""
    compiled = jit.compile_kernel(numba_kernels.difference_kernel(), "sm_90")
    assert len(re.findall(r"\bmul\.rn\.f32\b", compiled.ptx)) == 2
    assert re.search(r"\bsub\.rn\.f32\b", compiled.ptx)
    assert re.search(r"\b(atom|red)\.[\w.]*add\.f32\b", compiled.ptx)
    jit.assemble(compiled, "sm_90")  # ptxas takes these forms


@needs_numba_cuda
@needs_ptxas
def test_numba_machine_code():
    compiled = jit.compile_kernel(numba_kernels.scale_kernel(3.0), "sm_90a")
    assembled = jit.assemble(compiled, "sm_90a")
    needs = cubin.resources(assembled.cubin, assembled.entry, assembled.log)
    assert 0 < needs.registers <= 32
    assert needs.spill_bytes == 0
    # Two arrays of 7 and 9 words and a scalar: the launch layout that the emulator fills in.
    assert len(cubin.parameter_sizes(assembled.cubin, assembled.entry)) == 9 + 7 + 1
    assert jit.assemble(assembled, "sm_90a") is assembled
    with pytest.raises(KernelCompileError, match="ptxas refuses the PTX for sm_80") as failure:
        toolkit.assemble("no PTX", "sm_80")
    assert "syntax error" in failure.value.log or "fatal" in failure.value.log


@needs_numba_cuda
def test_device_functions_see_the_target_in_the_compiling_thread_only(monkeypatch):
    """Another thread may launch on a real GPU meanwhile, and must not see the target."""
    from numba import cuda
    from numba.cuda import dispatcher

    def ask(seen):
        try:
            seen.append(dispatcher.get_current_device().compute_capability)
        except Exception as error:  # no driver
            seen.append(type(error).__name__)

    here, elsewhere, after = [], [], []

    def compile(*args, **kwargs):
        ask(here)
        thread = threading.Thread(target=ask, args=(elsewhere,))
        thread.start()
        thread.join(PATIENCE)
        return ".entry k()", None

    numba_ptx.numba_cuda()
    monkeypatch.setattr(cuda, "compile", compile)
    jit.compile_kernel(numba_kernels.scale_kernel(5.0), "sm_90a")
    ask(after)
    assert here == [(9, 0, "a")]
    assert elsewhere == after
    assert after != here


def test_importing_loads_no_compiler():
    code = "import gpu_ops.kernels.compiler.jit, sys; print({'numba', 'cuda.bindings', 'cupy'} & set(sys.modules))"
    assert python("-c", code).strip() == "set()"


@needs_numba_cuda
def test_a_compilation_leaves_no_target_data_as_garbage():
    """An interrupt in the finalizer of target data would be lost, as the collector may run at any time."""
    from llvmlite.binding import TargetData

    def alive():
        return sum(type(x) is TargetData for x in gc.get_objects())  # isinstance would query dead proxies

    jit.compile_kernel(numba_kernels.scale_kernel(5.0), "sm_80")
    gc.collect()
    before = alive()
    gc.disable()
    try:
        jit.compile_kernel(numba_kernels.scale_kernel(7.0), "sm_80")
        assert alive() == before
    finally:
        gc.enable()
