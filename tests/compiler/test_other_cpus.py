"""The vector code of other CPUs, compiled for them and run here: AVX2, SSE, and LLVM's generic vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import python

FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""

_AVX2 = "+avx,+avx2,+fma,+f16c"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"
# NUMBA_CPU_NAME, NUMBA_CPU_FEATURES, OPENBLAS_CORETYPE, bytes of a vector, what this CPU must have to run it
CPUS = {
    "AVX-512 with bfloat16, no tiles": (
        "cooperlake",
        f"{_AVX512},+avx512vnni,+avx512bf16",
        "Cooperlake",
        64,
        "avx512_bf16",
    ),
    "AVX-512 alone": ("skylake-avx512", _AVX512, "SkylakeX", 64, "avx512bw"),
    "AVX2": ("haswell", _AVX2, "Haswell", 32, "avx2"),
    "SSE": ("nehalem", "+sse4.2", "Nehalem", 16, "sse4_2"),
    "generic": ("generic", "", "Prescott", 16, "sse2"),
}

SMALL_CALLS = """
import sys
import numpy as np
from gpu_ops.kernels.common.cpu.codegen.target import VECTOR_BYTES
from tests.support.calls import OPS, call, results
assert VECTOR_BYTES == int(sys.argv[1]), VECTOR_BYTES
for op in OPS:
    for found, want in zip(results(call(op)()), results(call(op)(backend="reference")), strict=True):
        if hasattr(found, "shape"):
            found, want = (np.asarray(x, np.float64) for x in (found, want))
            assert np.abs(found - want).max(initial=0) <= 1e-5 * max(1, np.abs(want).max(initial=0)), op
print(len(OPS))
"""


def environment(cpu, cache):
    name, features, blas, vector, needs = CPUS[cpu]
    if needs not in FLAGS:
        pytest.skip(f"needs an x86 CPU with {needs}")
    env = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "OPENBLAS_CORETYPE": blas}
    return env | {"GPU_OPS_CACHE_DIR": str(cache)}, vector


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_every_op(cpu, tmp_path):
    env, vector = environment(cpu, tmp_path)
    assert int(python("-c", SMALL_CALLS, vector, **env)) > 12


ON_THE_CPU = ("-k", "not emulator and not cuda and not cpu-reference")
BODIES = (
    *(
        "attention/test_attention",
        "attention/test_backward",
        "attention/test_decode",
        "attention/test_varlen",
    ),
    *("rope/test_rope", "rope/test_append_kv"),
    *("norm/test_rmsnorm", "norm/test_layernorm", "norm/test_rmsnorm_quant"),
    *("rows/test_dropout", "gemm/test_swiglu", "gemm/test_swiglu_mlp"),
    *("weights/test_matmul", "weights/test_linear", "weights/test_quantize", "weights/test_packed"),
)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("cpu", CPUS)
def test_the_same_bodies_pass(cpu, body, tmp_path_factory):
    env, _ = environment(cpu, tmp_path_factory.getbasetemp() / cpu.replace(" ", "-").replace(",", ""))
    python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *ON_THE_CPU, f"tests/{body}.py", **env)


# Default tests whose bounds the rounding of a CPU affects, with few kernels to compile: P, which GPUs and some CPUs
# round to bfloat16 and others do not; a model's gradients, losses and products; quantized caches; merged parts.
PART = (
    "tests/distributed/test_nccl.py::test_ranks_with_gpus",
    "tests/distributed/test_distributed.py::test_one_rank[tensor]",
    "tests/distributed/test_distributed.py::test_one_rank[vocabulary]",
    "tests/attention/test_merge.py::test_blocks_err_no_more_than_textbook_code",
    "tests/inference/test_inference.py::test_logits_are_close_to_those_of_the_unquantized_cache",
    "tests/gemm/test_linear.py::test_forward",
    "tests/loss/test_linear_cross_entropy.py::test_chunks_cost_no_accuracy",
)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["AVX-512 alone", "AVX2", "generic"])
def test_a_part_of_the_default_tests(cpu, tmp_path):
    """A part that takes minutes, for CI."""
    env, _ = environment(cpu, tmp_path)
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *ON_THE_CPU, *PART, **env)
