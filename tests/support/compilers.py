"""Helpers of tests that compile GPU kernels: the compilers of this machine, a folder of kernels, and the cards."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler import jit, nvrtc, toolkit
from gpu_ops.presets import PRESETS

ARCH_LIST = ("sm_80", "sm_90a", "sm_120")  # one architecture of each PTX dialect and cubin format


def _has_nvrtc():
    try:
        return nvrtc.version() >= (12, 0)
    except KernelCompileError:
        return False


def _ptxas_reads_the_compilers_ptx():
    try:
        toolkit.assemble(jit.compile_text('extern "C" __global__ void k() {}', "sm_80").ptx, "sm_80")
    except KernelCompileError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="no NVRTC: pip install '.[emulator]'")
needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="no numba-cuda: pip install '.[emulator]'"
)
needs_ptxas = pytest.mark.skipif(
    not _ptxas_reads_the_compilers_ptx(),
    reason="no ptxas for this NVRTC's PTX: pip install '.[emulator]' (CUDA 13: nvidia-cuda-nvcc)",
)

SCALE = """
#include "scale.cuh"
extern "C" __global__ void scale(ELEMENT* y, const ELEMENT* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = scaled(x[i], FACTOR);
}
extern "C" __global__ void negate(ELEMENT* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = -y[threadIdx.x];
}
"""
SCALE_HEADER = """
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <typename V> __device__ V scaled(V x, int factor) {
    return x * V(factor);
}
"""


def scale_tree(folder):
    """Folder of kernels: scale.cu and the header it includes."""
    write(folder, "scale.cu", SCALE)
    write(folder, "scale.cuh", SCALE_HEADER)
    return folder


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def scale(folder, entry="scale", kind="float", factor=2):
    return jit.CudaKernel("scale", entry, (("ELEMENT", kind), ("FACTOR", factor)), folder)


CARDS = [p for p in PRESETS.values() if p.arch.compute_capability >= (8, 0)]
# by shared memory: fewest and most SMs
EXTREMES = (
    "sm_89",
    "RTX 5090",
    "sm_87",
    "A100-40",
    "H100 PCIe",
    "B200",
)


def slow(*levels: Any) -> list[Any]:
    """Slow values of a parameter."""
    return [pytest.param(level, marks=pytest.mark.slow) for level in levels]


each_card = pytest.mark.parametrize(
    "card", [p if p.name in EXTREMES else slow(p)[0] for p in CARDS], ids=lambda p: p.name
)
