"""Numba CUDA kernels of attention gradients alone: tiles that fit, registers, memory accesses, sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator
from gpu_ops.core.device import compiler_missing
from gpu_ops.kernels.attention.problem import PLAIN, Features
from gpu_ops.kernels.compiler import cubin, jit, toolkit
from tests.attention.cases import DTYPES, make

if compiler_missing("numba"):
    pytest.skip(str(compiler_missing("numba")), allow_module_level=True)

from gpu_ops.kernels.attention.numba_cuda.backward import keys_kernel, queries_kernel
from gpu_ops.kernels.attention.numba_cuda.backward_bias import bias_kernel
from gpu_ops.kernels.attention.numba_cuda.backward_config import (
    NumbaBackwardProblem,
    count_parts,
    select_config,
)
from gpu_ops.kernels.attention.numba_cuda.backward_rows import rows_kernel

LIMIT = 48 * 1024  # bytes of static shared memory; Numba cannot request more
BACKEND = {"device": "emulator", "backend": "numba"}
EVERYTHING = {"softcap": True, "alibi": True, "block_mask": True}


def gradients(p, **more):
    out, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, device="cpu", backend="reference")
    return gpu_ops.attention_backward(p.dout, *p.arrays, out, lse, **p.options, **more, **BACKEND)


# ---- tiles -------------------------------------------------------------------------------------------------


def test_tiles_fit():
    dims = (1, 8, 16, 17, 32, 40, 64, 80, 96, 111, 128, 192, 256, 512, 576)
    for dtype, scores, owned, dim in itertools.product(
        DTYPES, (PLAIN, Features(softcap=True)), ("queries", "keys"), dims
    ):
        c = select_config(NumbaBackwardProblem(dtype, scores), owned, dim)
        assert c.shared_bytes <= LIMIT, c
        assert c.slab >= min(dim, 64 if dtype == "float64" else 128)
        # assumptions of the division of work among 128 threads
        assert c.block_m % 8 == 0 == c.block_n % 16
        assert c.block_n % c.chunk_v == 0
        assert c.chunk_v * c.slab <= c.staged
        lanes = 32 if c.slab % 32 == 0 else 16
        assert c.chunk_v % (128 // lanes) == 0 == c.slab % lanes
        assert c.block_m % (128 // min(c.chunk, 32)) == 0
        my_queries, my_keys = c.pairs
        assert my_queries * my_keys <= 32  # bits of the visible pairs of a block mask


def kernels(dtype):
    """Kernels by name: those with the most registers, for plain scores and with every option."""
    plain, every = (
        NumbaBackwardProblem(dtype, masked=True),
        NumbaBackwardProblem(dtype, Features(bias=dtype, **EVERYTHING), True),
    )
    for name, problem in (("plain", plain), ("every option", every)):
        yield f"dq, {name}", queries_kernel(select_config(problem, "queries", 128), dtype)
        yield f"dk and dv, {name}", keys_kernel(select_config(problem, "keys", 128), dtype)
    yield "dk and dv of small heads", keys_kernel(select_config(plain, "keys", 64), dtype)
    yield "dbias", bias_kernel(select_config(every, "both"), True, True)
    yield "rows", rows_kernel(every, True, "float32", dtype)


@pytest.mark.slow  # two minutes; scripts/inspect_kernels.py --check has the commonest kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_tiles_stay_in_registers(dtype):
    for name, kernel in kernels(dtype):
        compiled = jit.compile_kernel(kernel, "sm_80")
        image, log = toolkit.assemble(compiled.ptx, "sm_80")
        needs = cubin.resources(image, compiled.entry, log)
        assert needs.static_shared_bytes <= LIMIT, name
        assert needs.spill_bytes == needs.local_bytes == 0, name


def test_memory_accesses_are_whole():
    p = make(mask="causal", dtype="bfloat16", heads=(2, 1), head_dims=(32, 32), batch=1, seqlens=(64, 192))
    with emulator.record() as profiles:
        gradients(p)
    names = [profile.name.removeprefix("attention_backward_") for profile in profiles]
    assert names == ["rows", "queries", "keys"]
    for name, profile in zip(names, profiles, strict=True):
        assert profile.counts.replays == 0, name  # no bank conflict
        sectors = {b.name: b.sectors_per_128_bytes for b in profile.buffers}
        whole = {"rows": ["dout", "out"], "queries": ["q", "k", "v", "dout", "dq"]}
        for array in whole.get(name, ["q", "k", "v", "dout", "dk", "dv"]):
            assert sectors[array] == 4.0, (name, array)  # no needless bytes


# ---- sums in parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "units", "parts"), [(1, 5, 5), (1, 10**6, 20), (3, 10**6, 7), (20, 10**6, 1), (0, 0, 1)]
)
def test_few_blocks_divide_their_units(blocks, units, parts):
    assert count_parts(blocks, units, sms=10) == parts


def test_a_row_that_sees_one_key_has_no_gradient_of_scores():
    """dP and delta are the same products, summed in the same order."""
    p = make(mask="causal", dtype="float32", heads=(2, 1), head_dims=(16, 16), seqlens=(70, 1))
    dq, dk, _ = gradients(p)
    assert (dq == 0).all()
    assert (dk == 0).all()


def test_the_workspace_is_a_few_numbers_per_row():
    p = make(mask="causal", dtype="bfloat16", heads=(4, 2), head_dims=(64, 64), seqlens=(256, 256))
    out, lse = np.zeros_like(p.dout), np.zeros((2, 4, 256), np.float32)
    size = gpu_ops.workspace_size("attention_backward", p.dout, *p.arrays, out, lse, **p.options, **BACKEND)
    assert size == 3 * lse.nbytes
