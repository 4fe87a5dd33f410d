"""Numba CUDA attention kernels alone: tiles that fit, registers, memory accesses, division of keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import gpu_ops
from gpu_ops import emulator
from gpu_ops.core.device import compiler_missing
from gpu_ops.kernels.compiler import cubin, jit, toolkit
from tests.attention.cases import DTYPES, make

if compiler_missing("numba"):
    pytest.skip(str(compiler_missing("numba")), allow_module_level=True)

from gpu_ops.kernels.attention.numba_cuda.config import NumbaForwardConfig, count_splits, select_config
from gpu_ops.kernels.attention.numba_cuda.forward import forward_kernel
from gpu_ops.kernels.attention.problem import Features

PLAIN = {"mask": "causal", "dtype": "float32", "heads": (2, 1), "head_dims": (32, 32), "batch": 1}


# ---- tiles -------------------------------------------------------------------------------------------------

LIMIT = 48 * 1024  # bytes of static shared memory; Numba cannot request more


def configs():
    sizes = (1, 8, 16, 17, 32, 40, 64, 80, 96, 111, 128, 192, 256, 512, 576)
    for dtype, rows in itertools.product(DTYPES, (1, 8, 9, 16, 17, 32, 33, 10**6)):
        for head_dim, head_dim_v in itertools.product(sizes, sizes):
            yield rows, head_dim_v, select_config(dtype, head_dim, head_dim_v, rows)


def test_tiles_fit():
    for rows, head_dim_v, c in configs():
        assert c.shared_bytes <= LIMIT, c
        assert c.block_m >= min(rows, 32)
        assert c.slab >= min(head_dim_v, 128)
        # assumptions of the division of work among 128 threads
        assert c.block_m % 8 == 0 == c.block_n % 16
        assert c.block_n % c.chunk_v == 0
        assert c.chunk_v * c.slab <= c.staged
        lanes = 32 if c.slab % 32 == 0 else 16
        assert c.chunk_v % (128 // lanes) == 0 == c.block_m % (128 // min(c.chunk, 32))
        assert c.slab % lanes == 0


EVERY = Features(softcap=True, sinks=True, alibi=True, block_mask=True)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        # the longest loops: if they are not unrolled, their arrays are in memory
        ("bfloat16", 1024),
        *(
            pytest.param(dtype, rows, marks=pytest.mark.slow)
            for dtype in DTYPES
            for rows in (8, 16, 32, 1024)
        ),
    ],
)
def test_tiles_stay_in_registers(dtype, rows):
    c = select_config(dtype, 128, 128, rows, replace(EVERY, bias=dtype), masked=True)
    compiled = jit.compile_kernel(forward_kernel(c), "sm_80")
    image, log = toolkit.assemble(compiled.ptx, "sm_80")
    needs = cubin.resources(image, compiled.entry, log)
    assert needs.static_shared_bytes == c.shared_bytes
    assert needs.spill_bytes == needs.local_bytes == 0


def test_memory_accesses_are_whole():
    p = make(**PLAIN, seqlens=(64, 320))
    with emulator.record() as profiles:
        gpu_ops.attention(*p.arrays, **p.options, return_lse=True, device="emulator", backend="numba")
    (profile,) = profiles
    assert profile.counts.replays == 0  # no bank conflict
    sectors = {b.name: b.sectors_per_128_bytes for b in profile.buffers}
    assert [sectors[name] for name in ("q", "k", "v", "out")] == [4.0] * 4  # no needless bytes
    # Share of all instructions with head_dim 32, where the softmax has the largest share.
    assert profile.by(lambda i: i.form)["fma.rn.f32"].warps > 0.45 * profile.counts.warps


@pytest.mark.parametrize(
    ("blocks", "seqlen_k", "parts"), [(1, 100, 1), (1, 512, 2), (1, 10**6, 20), (19, 10**6, 2)]
)
def test_few_blocks_split_their_keys(blocks, seqlen_k, parts):
    config = NumbaForwardConfig("float32", 8, 64, 32, 64, 16)
    assert count_splits(config, blocks, seqlen_k, sms=10) == parts
