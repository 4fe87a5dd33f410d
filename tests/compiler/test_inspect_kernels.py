"""scripts/inspect_kernels.py finds the faults of a kernel, and the kernels of the ops have none."""

from __future__ import annotations

import json
import re

import pytest

from gpu_ops.kernels.compiler import jit
from gpu_ops.kernels.compiler.kernel import short_label
from scripts import inspect_kernels, inspect_loops
from tests.support import numba_kernels
from tests.support.compilers import (
    ARCH_LIST,
    needs_numba_cuda,
    needs_nvrtc,
    needs_ptxas,
    scale,
    scale_tree,
    slow,
    write,
)

pytestmark = [needs_nvrtc, needs_numba_cuda, needs_ptxas]

FAULTY = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
    float held[96];
    #pragma unroll
    for (int i = 0; i < 96; i++) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; i++) x[(95 - i) * 1024 + threadIdx.x] = held[i] * held[(i * 7) % 96];
}
extern "C" __global__ void __launch_bounds__(128) shared(float4* x) {
    extern __shared__ float4 row[];
    row[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = row[threadIdx.x ^ 1];
}
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Registry of good kernels; tests add to it."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "cache"))
    tree = scale_tree(tmp_path / "cuda")
    write(tree, "faulty.cu", FAULTY)
    variants = [
        jit.Variant(scale(tree), 256),
        jit.Variant(jit.CudaKernel("faulty", "shared", (), tree), 128, 96 * 1024),
        jit.Variant(numba_kernels.scale_kernel(2.0), 128),
    ]
    monkeypatch.setattr(jit, "all_variants", lambda arch: iter(variants))
    jit.forget()
    yield variants
    jit.forget()


def check(capsys, *options):
    status = inspect_kernels.main(["--check", *options])
    return status, capsys.readouterr().out


def test_good_kernels_pass(kernels, capsys):
    status, out = check(capsys)
    assert status == 0, out
    assert "21 kernels compiled on sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100, sm_120; 0 with problems" in out


@pytest.mark.parametrize(
    ("entry", "threads", "dynamic", "arch", "message"),
    [
        ("spilling", 1024, 0, "sm_80", r"spilling on sm_80: spills \d+ bytes per thread"),
        ("shared", 128, 100 * 1024, "sm_86", "102400 bytes of shared memory per block, 101376 are allowed"),
        ("shared", 160, 0, "sm_80", "launched with 160 threads, __launch_bounds__ says 128"),
        ("missing", 32, 0, "sm_80", "has no extern .* 'missing'; it has: spilling, shared"),
    ],
)
def test_faults_are_found(kernels, capsys, entry, threads, dynamic, arch, message):
    good = kernels[1].kernel
    kernels.append(jit.Variant(jit.CudaKernel(good.stem, entry, (), good.folder), threads, dynamic))
    status, out = check(capsys, "--arch", arch)
    assert status == 1
    assert "1 with problems" in out

    assert re.search(message, out)
    assert check(capsys, "--arch", arch, "--kernel", "scale")[0] == 0  # the filter leaves it out


def test_json_and_table(kernels, capsys):
    assert inspect_kernels.main(["--json", "--arch", "sm_80", "sm_90a"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kernel"], row["arch"]) for row in rows] == [
        (v.kernel.label, arch) for arch in ("sm_80", "sm_90a") for v in kernels
    ]
    shared = rows[1]
    assert shared["dynamic_shared"] == 96 * 1024
    assert (shared["blocks_per_sm"], shared["limiter"]) == (1, "shared memory")
    assert shared["occupancy"] == 4 / 64
    assert inspect_kernels.main(["--arch", "sm_80"]) == 0
    table = capsys.readouterr().out
    assert all(short_label(v.kernel.label) in table for v in kernels)
    assert "shared memory" in table


def test_wide_accesses_are_counted(kernels):
    if inspect_kernels.toolkit.tool("nvdisasm") is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    for arch in ARCH_LIST:
        row = inspect_kernels.inspect(kernels[1], arch, with_sass=True)
        counts = dict(item.split(":") for item in row.sass.split())
        assert counts == {"LDG.128": "1", "STG.128": "1", "LDS.128": "1", "STS.128": "1"}, arch


def test_nothing_to_look_at_is_an_error(kernels, capsys):
    status, out = check(capsys, "--kernel", "no such kernel")
    assert status == 1
    assert "no op lists a kernel whose name contains 'no such kernel'" in out
    with pytest.raises(SystemExit):
        inspect_kernels.main(["--arch", "sm_35"])


@pytest.mark.parametrize("arch", ["sm_120", *slow("sm_80", "sm_90a")])
def test_kernels_of_the_ops(arch):
    """A sample of kernels on each kind of architecture; ``.ci/run`` checks every kernel on every architecture."""
    variants = list(jit.all_variants(arch))
    if not variants:
        pytest.skip("no op lists GPU kernels")
    sample = variants[:: -(-len(variants) // 8)]
    rows = [inspect_kernels.inspect(variant, arch, with_sass=False) for variant in sample]
    assert not [row for row in rows if row.problems]


def test_a_share_of_the_architectures(kernels):
    """Each kernel is on two architectures, always the same ones, and all architectures take turns."""

    def choice(kernel: str, each_on: int = 2) -> list[tuple[str, str]]:
        tasks = inspect_kernels.chosen(inspect_kernels.PRESET_ARCHES, kernel, each_on)
        return [(variant.kernel.label, arch) for variant, arch in tasks]

    every = choice("")
    labels = [variant.kernel.label for variant in kernels]
    assert len(set(every)) == len(every)
    assert sorted(label for label, _ in every) == sorted(2 * labels)
    assert len(choice("", each_on=9)) == 21
    kernels.reverse()
    kernels += [jit.Variant(jit.CudaKernel("copy", f"kernel {i}", ()), 32) for i in range(40)]
    assert set(every) <= set(choice(""))  # new kernels change the choice of no other
    assert {arch for _, arch in choice("")} == set(inspect_kernels.PRESET_ARCHES)


def test_loops_without_a_disassembler_say_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(inspect_loops.toolkit, "tool", lambda name: None)
    assert inspect_loops.main(["--arch", "sm_80"]) == 1
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().err


def test_no_loop_at_all_is_an_error(kernels, monkeypatch, capsys):
    monkeypatch.setattr(inspect_loops.toolkit, "tool", lambda name: name)
    assert inspect_loops.main(["--arch", "sm_80"]) == 1
    assert "no loop found in an attention kernel" in capsys.readouterr().err
