"""Formats of tensors in the mixes of GGUF files: llama.cpp's rules, as tables of layers."""

from __future__ import annotations

import pytest

from gpu_ops.formats.gguf_mix import MIXES, ModelSizes, tensor_format

SIZES_32 = ModelSizes(nlayers=32, nheads=32, nheads_kv=8, tied=False)
SIZES_80 = ModelSizes(nlayers=80, nheads=64, nheads_kv=8, tied=False)
MORE_32 = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
MORE_80 = {*range(10), *range(12, 70, 3), *range(70, 80)}
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k_s": 14, "q4_k_m": 15,
              "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "bf16": 32, "tq1_0": 36, "tq2_0": 37}  # fmt: skip


def layers(mix, module, format, sizes, shape=(1024, 4096)):
    """Layers whose module has this format."""
    names = (f"blk.{i}.{module}.weight" for i in range(sizes.nlayers))
    return {i for i, name in enumerate(names) if tensor_format(MIXES[mix], name, shape, sizes) == format}


def test_file_types():
    assert {name: mix.file_type for name, mix in MIXES.items()} == FILE_TYPES


@pytest.mark.parametrize(("sizes", "more"), [(SIZES_32, MORE_32), (SIZES_80, MORE_80)], ids=["32", "80"])
@pytest.mark.parametrize("module", ["attn_v", "ffn_down"])
def test_layers_with_more_bits(sizes, more, module):
    everywhere = set(range(sizes.nlayers))
    assert len(MORE_32) == 16
    assert layers("q4_k_m", module, "q6_k", sizes) == layers("q5_k_m", module, "q6_k", sizes) == more
    assert layers("q5_k_m", module, "q5_k", sizes) == everywhere - more
    small = "q5_k" if module == "attn_v" and sizes.nlayers == 80 else "q4_k"  # a 70B model's values
    assert layers("q4_k_m", module, small, sizes) == everywhere - more
    first = set(range(4 if module == "attn_v" else sizes.nlayers // 8))
    assert layers("q4_k_s", module, "q5_k", sizes) == (everywhere if small == "q5_k" else first)
    assert layers("q5_k_s", module, "q5_k", sizes) == everywhere
    assert layers("iq4_nl", module, "q5_k", sizes) == (everywhere if module == "attn_v" else first)


@pytest.mark.parametrize(
    ("mix", "name", "cols", "tied", "expected"),
    [
        ("q4_k_m", "blk.5.attn_q.weight", 4096, False, "q4_k"),
        ("q4_k_m", "blk.0.attn_output.weight", 4096, False, "q4_k"),
        ("q4_k_m", "blk.0.attn_norm.weight", 0, False, "float32"),
        ("q4_k_m", "blk.0.attn_v.bias", 0, False, "float32"),
        ("q4_k_m", "token_embd.weight", 4096, False, "q4_k"),
        ("q4_k_m", "token_embd.weight", 4096, True, "q6_k"),
        ("q4_k_m", "output.weight", 4096, False, "q6_k"),
        ("q4_0", "output.weight", 4096, False, "q6_k"),
        ("q8_0", "output.weight", 4096, False, "q8_0"),
        ("tq1_0", "blk.0.attn_v.weight", 4096, False, "tq1_0"),
        ("tq2_0", "blk.31.ffn_down.weight", 4096, False, "tq2_0"),
        ("tq2_0", "token_embd.weight", 4096, False, "q4_k"),
        ("tq2_0", "token_embd.weight", 4096, True, "q6_k"),
        ("tq1_0", "output.weight", 4096, False, "q6_k"),
        # columns that blocks of 256 do not divide
        ("q4_k_m", "blk.5.attn_q.weight", 576, False, "q5_0"),
        ("q5_k_m", "blk.5.attn_q.weight", 576, False, "q5_1"),
        ("q6_k", "blk.5.attn_q.weight", 576, False, "q8_0"),
        ("q4_k_m", "blk.0.ffn_down.weight", 576, False, "q8_0"),
        ("q4_k_s", "blk.0.ffn_down.weight", 576, False, "q5_1"),
        ("q4_k_m", "output.weight", 576, False, "q8_0"),
        ("q4_0", "output.weight", 576, False, "q8_0"),
        ("q4_0", "blk.5.attn_q.weight", 576, False, "q4_0"),
        ("tq1_0", "blk.5.attn_q.weight", 576, False, "q4_0"),
        ("tq2_0", "token_embd.weight", 576, False, "q5_0"),
        ("tq2_0", "output.weight", 576, False, "q8_0"),
        # and columns that those of 32 do not
        ("q4_k_m", "blk.5.attn_q.weight", 48, False, "float16"),
        ("q8_0", "output.weight", 48, False, "float16"),
        ("tq1_0", "blk.5.attn_q.weight", 48, False, "float16"),
        ("bf16", "output.weight", 48, False, "bfloat16"),
        ("f32", "blk.5.attn_q.weight", 4096, False, "float32"),
    ],
)
def test_formats(mix, name, cols, tied, expected):
    sizes = ModelSizes(nlayers=32, nheads=32, nheads_kv=8, tied=tied)
    assert tensor_format(MIXES[mix], name, (512, cols) if cols else (512,), sizes) == expected


def test_iq4_nl_keeps_values_that_few_heads_share():
    sizes = ModelSizes(nlayers=32, nheads=24, nheads_kv=8, tied=False)
    assert layers("iq4_nl", "attn_v", "iq4_nl", sizes) == set(range(32))
