"""Kernel labels for people: short, and as informative as the macros."""

from __future__ import annotations

import pytest

from gpu_ops.kernels.compiler import jit
from gpu_ops.kernels.compiler.kernel import CudaKernel, short_label
from tests.support.compilers import needs_numba_cuda


@pytest.mark.parametrize(
    ("label", "short"),
    [
        (
            "attention_forward[DTYPE=bf16,HEAD_DIM=128,HEAD_DIM_V=128,VALUE_PARTS=1,BLOCK_M=64,BLOCK_N=32,WARPS_M=4,"
            "WARPS_N=1,MASK=kCausal,BIAS=kNone,SOFTCAP=0,ALIBI=1]",
            "attention_forward bfloat16 D128 causal alibi 64x32 warps4x1",
        ),
        ("x[HEAD_DIM=64,HEAD_DIM_V=32]", "x D64 Dv32"),
        ("gemv[DTYPE=bf16,OUT=f32,VEC=8]", "gemv bfloat16 to float32 vec8"),
        ("softmax_forward[DTYPE=bf16,MASK=f32]", "softmax_forward bfloat16 mask float32"),
        (
            "rope_append_kv[DTYPE=f16,PAGE_DTYPE=s8,VEC=8,ACCESS=8,INTERLEAVED=0,UNITS=1]",
            "rope_append_kv float16 pages of int8 vec8 access8",
        ),
        ("attention_forward[bfloat16,64x64,slab 128]", "attention_forward bfloat16 64x64 slab 128"),
        ("attention_decode-float16-2", "attention_decode float16 2"),
        ("cached_lengths-None", "cached_lengths"),
        ("norm_dweight", "norm_dweight"),
    ],
)
def test_short_labels(label, short):
    assert short_label(label) == short


@needs_numba_cuda
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_kernels_of_the_ops_have_short_labels_of_their_own(arch):
    labels = {v.kernel.label for v in jit.all_variants(arch) if isinstance(v.kernel, CudaKernel)}
    short = {short_label(label) for label in labels}
    assert len(short) == len(labels) > 300
    assert not any("=" in text for text in short)
    assert max(map(len, short)) < 110
