"""Attention on GPUs: tile, packing and splits for every card, and autotune's candidates; tested without a GPU."""

from __future__ import annotations

import itertools

import pytest

from gpu_ops.kernels.attention import config as attention_config
from gpu_ops.kernels.attention.config import (
    MAX_HEAD_DIM,
    DeviceLimits,
    ForwardConfig,
    ForwardProblem,
    ForwardTile,
    select_config,
)
from gpu_ops.kernels.attention.forward import variants
from gpu_ops.kernels.attention.problem import shared_bytes
from gpu_ops.kernels.compiler import cubin
from gpu_ops.kernels.compiler.jit import assemble, compile_kernel
from gpu_ops.presets import PRESETS
from tests.support.compilers import each_card

HEAD_DIMS = (
    *[(d, d) for d in (8, 32, 64, 72, 80, 96, 128, 160, 192, 224, 256, 264, 512)],
    *[(40, 24), (192, 128), (64, 256), (256, 64), (64, 512), (512, 8)],
)
LENGTHS = [(1, 1), (1, 65536), (4, 300), (17, 64), (128, 128), (1023, 1024), (8192, 8192), (100_000, 100_000)]
HEADS = [(1, 1, 1), (3, 6, 6), (2, 32, 8), (64, 71, 1)]


def limits(card):
    return DeviceLimits(card.sms, card.arch.smem_per_block_optin)


@pytest.mark.parametrize(("itemsize", "mask"), [(2, "kNone"), (2, "kCausal"), (2, "kLocal"), (4, "kCausal")])
@each_card
def test_every_choice_can_be_launched_and_covers_the_problem(card, itemsize, mask):
    device = limits(card)
    for head_dim, (seqlen_q, seqlen_k), (batch, nheads, nheads_kv) in itertools.product(
        HEAD_DIMS, LENGTHS, HEADS
    ):
        if max(head_dim) > MAX_HEAD_DIM[itemsize]:
            continue
        for block_mask, varlen, num_splits in ((False, False, 0), (True, False, 3), (False, True, 0)):
            p = ForwardProblem(
                itemsize,
                batch,
                nheads,
                nheads_kv,
                seqlen_q,
                seqlen_k,
                *head_dim,
                mask=mask,
                window=100,
                block_mask=block_mask,
                varlen=varlen,
                num_splits=num_splits,
            )
            c = select_config(p, device)
            t = c.tile
            assert 64 <= c.threads <= card.arch.max_threads_per_block
            assert c.threads % 64 == 0, "whole rows of chunks are copied"
            assert t.warp_rows in (16, 32)
            assert t.block_n % (16 * t.warps_n) == 0
            assert c.head_dim % 32 == c.head_dim_v % 32 == 0
            assert head_dim[0] <= c.head_dim < head_dim[0] + 32
            assert c.head_dim_v * c.value_parts >= head_dim[1] > c.head_dim_v * (c.value_parts - 1)
            sizes = (itemsize, t.block_m, t.block_n, t.warps_m, t.warps_n, c.head_dim, c.head_dim_v)
            assert c.shared_bytes == shared_bytes(*sizes, one_k=t.one_k, split=c.num_splits > 1)
            assert c.shared_bytes <= card.arch.smem_per_block_optin
            rows = seqlen_q * (p.group if c.pack_gqa else 1)
            heads = (nheads_kv if c.pack_gqa else nheads) * c.value_parts
            assert c.grid == (-(-rows // t.block_m) * c.num_splits, heads, batch)
            assert not (c.pack_gqa and block_mask)
            assert 1 <= c.num_splits <= 128
            if num_splits and t.block_n * num_splits <= seqlen_k:
                assert c.num_splits == num_splits


PREFILL = {"batch": 4, "nheads": 16, "nheads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096}


@pytest.mark.parametrize(
    ("card", "itemsize", "head_dim", "tile"),
    [
        ("A100-40", 2, 64, ForwardTile(128, 64, 4)),
        ("A100-40", 2, 128, ForwardTile(128, 64, 4)),
        ("A100-40", 2, 256, ForwardTile(128, 64, 8)),
        ("H100 SXM", 2, 128, ForwardTile(128, 64, 4)),
        ("RTX 4090", 2, 64, ForwardTile(128, 64, 4)),
        ("RTX 4090", 2, 128, ForwardTile(64, 64, 4)),
        ("RTX 4090", 2, 256, ForwardTile(64, 64, 4, one_k=True)),
        ("RTX 4090", 4, 256, ForwardTile(32, 16, 2)),
    ],
)
def test_the_tiles_of_long_sequences(card, itemsize, head_dim, tile):
    for mask in ("kNone", "kCausal"):
        p = ForwardProblem(itemsize, **PREFILL, head_dim=head_dim, head_dim_v=head_dim, mask=mask)
        c = select_config(p, limits(PRESETS[card]))
        assert (c.tile, c.num_splits, c.pack_gqa) == (tile, 1, False)


@each_card
def test_decoding_reads_keys_once_and_fills_the_card_in_one_wave(card):
    device = limits(card)
    for batch, seqlen_k in ((1, 4096), (1, 131072), (4, 32768), (64, 4096), (512, 512)):
        c = select_config(ForwardProblem(2, batch, 32, 8, 1, seqlen_k, 128, 128), device)
        assert c.pack_gqa
        assert c.tile.block_m == 16
        blocks = c.grid[0] * c.grid[1] * c.grid[2]
        resident = (device.smem_per_block_optin + 1024) // (c.shared_bytes + 1024)
        assert c.num_splits == 1 or blocks <= device.sms * resident
        assert seqlen_k // c.num_splits >= 256
        if batch * 8 >= 2 * device.sms * resident:
            assert c.num_splits == 1
        elif seqlen_k >= 32768:
            assert blocks > 0.7 * device.sms


def test_heads_are_packed_where_that_pads_less():
    device = limits(PRESETS["A100-40"])

    def packed(seqlen_q, **more):
        return select_config(ForwardProblem(2, 1, 32, 8, seqlen_q, 4096, 128, 128, **more), device).pack_gqa

    assert packed(1)
    assert packed(5)
    assert not packed(1, block_mask=True)


@pytest.mark.parametrize("seqlen_k", [1, 256, 4096])
@each_card
def test_a_group_that_fits_one_tile_is_packed(card, seqlen_k):
    """A block takes as long for four rows as for one; packed rows read the keys once."""
    for heads, itemsize, seqlen_q in itertools.product([(8, 2), (32, 8), (16, 1)], (2, 4), (1, 4)):
        if seqlen_q * heads[0] // heads[1] <= 16:
            p = ForwardProblem(itemsize, 1, *heads, seqlen_q, seqlen_k, 64, 64)
            assert select_config(p, limits(card)).pack_gqa, p


@pytest.mark.parametrize("varlen", [False, True])
def test_one_query_over_many_keys_takes_the_whole_card(varlen):
    config = select_config(
        ForwardProblem(2, 1, 32, 8, 1, 32768, 128, 128, varlen=varlen), DeviceLimits(108, 163 * 1024)
    )
    assert config.grid[0] * config.grid[1] >= 108


@pytest.mark.slow  # scripts/inspect_kernels.py --check finds spills too; this test finds arrays outside registers
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_no_variant_spills(arch):
    for variant in variants(arch):
        compiled = assemble(compile_kernel(variant.kernel, arch), arch)
        assert cubin.resources(compiled.cubin, compiled.entry).local_bytes == 0, variant.kernel.label


# Candidates that autotune() tries for attention, and which problems share its results.

A30 = DeviceLimits(56, 163 * 1024)
PROBLEM = ForwardProblem(2, 1, 8, 8, 256, 256, 64, 64)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (PROBLEM, "2 bytes, head_dim 64/64, group 1, kNone, batch * nheads_kv <= 8, seqlen <= 256 x 256"),
        (
            ForwardProblem(4, 3, 32, 8, 1, 5000, 72, 40, mask="kLocal", window=100, varlen=True),
            "4 bytes, head_dim 96/64, group 4, kLocal, batch * nheads_kv <= 32, seqlen <= 1 x 8192, window <= 128, "
            "varlen",
        ),
        (
            ForwardProblem(2, 1, 1, 1, 257, 0, 512, 512, block_mask=True, num_splits=3),
            "2 bytes, head_dim 512/512, group 1, kNone, batch * nheads_kv <= 1, seqlen <= 512 x 1, block mask, "
            "num_splits 3",
        ),
    ],
)
def test_problems_that_share_a_choice(problem, words):
    assert attention_config.bucket(problem) == words


@pytest.mark.parametrize("card", [A30, DeviceLimits(132, 227 * 1024), DeviceLimits(128, 99 * 1024)])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("lengths", [(1, 100), (1, 40_000), (9, 3000), (4096, 4096)])
def test_candidates(card, num_splits, lengths):
    for itemsize, head_dim, heads in ((2, 64, (8, 2)), (2, 256, (4, 4)), (4, 128, (16, 1))):
        p = ForwardProblem(itemsize, 1, *heads, *lengths, head_dim, head_dim, num_splits=num_splits)
        choices = attention_config.candidates(p, card)
        assert 1 <= len(choices) == len(set(choices.values())) <= 24
        assert next(iter(choices.values())) == select_config(p, card)
        for label, config in choices.items():
            assert isinstance(config, ForwardConfig)
            assert label.startswith(attention_config.label(config))
            assert config.shared_bytes <= card.smem_per_block_optin
            assert config.num_splits == 1 or num_splits != 1


@pytest.mark.parametrize(
    ("smem", "head_dim", "more", "words", "offered"),
    [
        (163, 64, {}, "128 x 128 on 4 x 1 warps", True),
        (227, 64, {"mask": "kCausal", "varlen": True}, "128 x 128 on 4 x 1 warps", True),
        (163, 64, {"varlen": True, "paged": True}, "128 x 128 on 4 x 1 warps", False),
        (163, 64, {"lean": False}, "128 x 128 on 4 x 1 warps", False),
        (99, 64, {}, "128 x 128 on 4 x 1 warps", False),
        (99, 128, {}, "128 x 32 on 4 x 1 warps, one K", True),
        (227, 128, {}, "128 x 32 on 4 x 1 warps, one K", False),
        (227, 256, {}, "64 x 64 on 4 x 1 warps, one K", True),
        (163, 256, {}, "64 x 64 on 4 x 1 warps, one K", False),
    ],
)
def test_tiles_that_only_a_measurement_tells(smem, head_dim, more, words, offered):
    """128 x 128 leaves no free register; a single K buffer waits longer, but lets a second block run."""
    problem = ForwardProblem(2, 4, 16, 16, 4096, 4096, head_dim, head_dim, **more)
    device = DeviceLimits(100, smem * 1024)
    assert (words in attention_config.candidates(problem, device)) == offered
    assert attention_config.label(select_config(problem, device)) != words
