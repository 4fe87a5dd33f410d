"""Resources in a cubin against the output of ptxas, and occupancy against figures calculated by hand."""

from __future__ import annotations

import random
import re
import shutil
import subprocess

import pytest

from gpu_ops.kernels.compiler import cubin, jit, nvrtc, toolkit
from gpu_ops.presets import ARCHES
from tests.support.compilers import ARCH_LIST, needs_nvrtc
from tests.support.processes import PATIENCE

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(96) plain(float* x, char flag, double scale, short n) {
    x[threadIdx.x] = flag ? x[n] * scale : 0;
}
extern "C" __global__ void two_barriers(float* x) {
    __shared__ float row[640];
    row[threadIdx.x] = x[threadIdx.x];
    asm volatile("bar.sync 0;");
    asm volatile("bar.sync 2, 64;");
    x[threadIdx.x] = row[threadIdx.x ^ 1];
}
extern "C" __global__ void dynamic_only(float* x) {
    extern __shared__ float row[];
    row[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = row[threadIdx.x ^ 1];
}
// More values than 32 registers hold, all alive across a barrier.
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
    float held[96];
    #pragma unroll
    for (int i = 0; i < 96; i++) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; i++) x[(95 - i) * 1024 + threadIdx.x] = held[i] * held[(i * 7) % 96];
}
extern "C" __global__ void local_array(float* x, int n) {
    float held[50];
    for (int i = 0; i < 50; i++) held[i] = x[i * n];
    for (int i = 0; i < n; i++) x[i] = held[(i * n) % 50];
}
"""


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCH_LIST)
def test_resources_are_what_ptxas_says(arch):
    unit = jit.compile_text(SOURCE, arch)
    assert unit.cubin is not None
    assert cubin.architecture(unit.cubin) == int(arch.rstrip("a")[3:])
    assert sorted(cubin.kernel_names(unit.cubin)) == sorted(unit.entries)
    resources = {name: cubin.resources(unit.cubin, name, unit.log) for name in unit.entries}
    for name, needs in resources.items():
        properties, used = re.findall(
            rf"Function properties for {name}\n.*?(\d+ bytes stack.*)\n.*?(Used.*)", unit.log
        )[0]
        stack, stores, loads = map(int, re.findall(r"(\d+) bytes", properties))
        smem = re.search(r"(\d+) bytes smem", used)
        assert needs.local_bytes == stack
        assert needs.spill_bytes == stores + loads
        assert needs.static_shared_bytes == (int(smem.group(1)) if smem else 0)
        assert f"Used {needs.registers} registers" in used
        assert f"used {needs.barriers} barriers" in used
    assert resources["plain"].max_threads == 96
    assert resources["two_barriers"].max_threads is None
    assert resources["two_barriers"].barriers == 3  # the highest id in use, plus one
    assert resources["two_barriers"].static_shared_bytes == 2560
    assert resources["dynamic_only"].static_shared_bytes == 0
    assert resources["spilling"].spill_bytes > 0
    assert resources["local_array"].local_bytes >= 200
    assert resources["local_array"].spill_bytes == 0


@needs_nvrtc
def test_parameter_sizes_in_order():
    unit = jit.compile_text(SOURCE, "sm_90")
    assert cubin.parameter_sizes(unit.cubin, "plain") == [8, 1, 8, 2]
    with pytest.raises(ValueError, match="no kernel 'missing'"):
        cubin.parameter_sizes(unit.cubin, "missing")


def test_other_files_are_refused():
    with pytest.raises(ValueError, match="not a cubin"):
        cubin.kernel_names(b"// PTX, or anything else")


def needs(registers, shared=0, barriers=0):
    return cubin.Resources(registers, 0, 0, shared, barriers, None)


@pytest.mark.parametrize(
    ("arch", "what", "threads", "dynamic", "blocks", "limiter"),
    [
        # 2048 threads, 64 K registers: 32 each fill it; 33 are allocated as 40.
        ("sm_80", needs(32), 256, 0, 8, "warps"),
        ("sm_80", needs(33), 256, 0, 6, "registers"),
        ("sm_80", needs(255), 256, 0, 1, "registers"),
        ("sm_80", needs(128), 1024, 0, 0, "registers"),
        # Small blocks: their number is the limit, 32 or 24 or 16.
        ("sm_90", needs(16), 32, 0, 32, "blocks"),
        ("sm_89", needs(16), 32, 0, 24, "blocks"),
        ("sm_86", needs(16), 32, 0, 16, "blocks"),
        # 1536 threads: one block of 1024.
        ("sm_86", needs(32), 1024, 0, 1, "warps"),
        # 100 KiB per SM, one of them reserved per block: 49 twice, 50 once, 99 once, more never.
        ("sm_86", needs(16), 128, 49 * 1024, 2, "shared memory"),
        ("sm_86", needs(16, 1024), 128, 49 * 1024, 1, "shared memory"),
        ("sm_86", needs(16), 128, 99 * 1024, 1, "shared memory"),
        ("sm_86", needs(16), 128, 99 * 1024 + 1, 0, "shared memory"),
        ("sm_90", needs(16), 128, 227 * 1024, 1, "shared memory"),
        # sm_75 reserves nothing.
        ("sm_75", needs(16), 128, 32 * 1024, 2, "shared memory"),
        # Named barriers are a pool from 9.0 on: 64 per SM of 2048 threads.
        ("sm_90", needs(16, barriers=16), 128, 0, 4, "barriers"),
        ("sm_80", needs(16, barriers=16), 128, 0, 16, "warps"),
        # An odd warp out leaves its quarter of the registers unused: 3 warps of 168 registers.
        ("sm_80", needs(168), 96, 0, 4, "registers"),
    ],
)
def test_occupancy(arch, what, threads, dynamic, blocks, limiter):
    limits = ARCHES[arch]
    fit = cubin.occupancy(what, threads, dynamic, limits)
    assert (fit.blocks, fit.limiter) == (blocks, limiter)
    assert fit.warps == blocks * -(-threads // 32)
    assert fit.share == fit.warps * 32 / limits.max_threads_per_sm


CALCULATOR = """
#include <cstddef>
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
    int major, minor, sm_threads, threads, registers, barriers;
    size_t sm_shared, optin, fixed, dynamic;
    while (scanf("%d %d %d %zu %zu %d %d %zu %zu %d", &major, &minor, &sm_threads, &sm_shared, &optin, &threads,
                 &registers, &fixed, &dynamic, &barriers) == 10) {
        cudaOccDeviceProp device;
        device.computeMajor = major, device.computeMinor = minor, device.warpSize = 32, device.numSms = 1;
        device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = sm_threads;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = sm_shared;
        device.sharedMemPerBlockOptin = optin, device.reservedSharedMemPerBlock = sm_shared - optin;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = fixed;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = optin - fixed;
        kernel.partitionedGCConfig = PARTITIONED_GC_OFF, kernel.numBlockBarriers = barriers;
        cudaOccDeviceState state;
        state.cacheConfig = CACHE_PREFER_SHARED, state.carveoutConfig = 100;
        cudaOccResult result;
        int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, dynamic);
        printf("%d\\n", error ? 0 : result.activeBlocksPerMultiprocessor);
    }
}
"""


@needs_nvrtc
def test_occupancy_is_the_toolkits(tmp_path):
    """Occupancy equals that of ``cuda_occupancy.h``, the toolkit's calculator, on random configurations."""
    compiler = shutil.which("g++")
    headers = toolkit.headers(nvrtc.version()[0])
    if compiler is None or headers is None or not (headers / "cuda_occupancy.h").is_file():
        pytest.skip("no g++, or no toolkit headers")
    source, program = tmp_path / "occupancy.cpp", tmp_path / "occupancy"
    source.write_text(CALCULATOR)
    subprocess.run([compiler, f"-I{headers}", source, "-o", program], check=True, timeout=PATIENCE)
    rng = random.Random(0)
    lines, ours = [], []
    for _ in range(5000):
        arch = rng.choice(list(ARCHES.values()))
        threads, registers, barriers = rng.randint(1, 1024), rng.randint(1, 255), rng.randint(0, 16)
        static = rng.choice([0, rng.randint(0, 48 * 1024)])
        dynamic = rng.choice([0, rng.randint(0, 20_000), rng.randint(0, 240_000)])
        limits = (arch.max_threads_per_sm, arch.smem_per_sm, arch.smem_per_block_optin)
        words = (*arch.compute_capability, *limits, threads, registers, static, dynamic, barriers)
        lines.append(" ".join(map(str, words)))
        ours.append(cubin.occupancy(needs(registers, static, barriers), threads, dynamic, arch).blocks)
    run = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    theirs = list(map(int, run.stdout.split()))
    assert len(theirs) == len(lines)
    wrong = [(line, a, b) for line, a, b in zip(lines, ours, theirs, strict=True) if a != b]
    assert not wrong, f"{len(wrong)} differ, such as {wrong[0]}"


def test_shared_memory_of_a_block_is_the_presets():
    assert {name: cubin.smem_per_block_optin(name) for name in ARCHES} == {
        name: arch.smem_per_block_optin for name, arch in ARCHES.items()
    }
    assert cubin.smem_per_block_optin("sm_90a") == cubin.smem_per_block_optin("sm_90")
