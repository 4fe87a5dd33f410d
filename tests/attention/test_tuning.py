"""Candidates that autotune() tries for attention, and which problems share its results."""

from __future__ import annotations

import pytest

from gpu_ops.kernels.attention import config as attention_tuning
from gpu_ops.kernels.attention.config import DeviceLimits, ForwardConfig, ForwardProblem, select_config

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
    assert attention_tuning.bucket(problem) == words


@pytest.mark.parametrize("card", [A30, DeviceLimits(132, 227 * 1024), DeviceLimits(128, 99 * 1024)])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("lengths", [(1, 100), (1, 40_000), (9, 3000), (4096, 4096)])
def test_candidates(card, num_splits, lengths):
    for itemsize, head_dim, heads in ((2, 64, (8, 2)), (2, 256, (4, 4)), (4, 128, (16, 1))):
        p = ForwardProblem(itemsize, 1, *heads, *lengths, head_dim, head_dim, num_splits=num_splits)
        choices = attention_tuning.candidates(p, card)
        assert 1 <= len(choices) == len(set(choices.values())) <= 24
        assert next(iter(choices.values())) == select_config(p, card)
        for label, config in choices.items():
            assert isinstance(config, ForwardConfig)
            assert label.startswith(attention_tuning.label(config))
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
    assert (words in attention_tuning.candidates(problem, device)) == offered
    assert attention_tuning.label(select_config(problem, device)) != words
