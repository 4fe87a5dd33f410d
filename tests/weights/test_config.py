"""Choices of ternary_config.py: they fit and are listed, models fill the card, sums are divided."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gpu_ops import TernaryMatrix, emulator, ternary_matmul
from gpu_ops.kernels.weights import ternary as kernels
from gpu_ops.kernels.weights import ternary_backward
from gpu_ops.kernels.weights.ternary_config import (
    backward_config,
    backward_tiles,
    gemm_config,
    gemm_configs,
    gemv_config,
    gemv_configs,
)
from gpu_ops.presets import ARCHES, PRESETS
from tests.support.compilers import CARDS, each_card

H200 = PRESETS["H200"]


def limits(card):
    return {"sms": card.sms, "smem_per_block_optin": card.arch.smem_per_block_optin}


@each_card
def test_every_choice_fits_and_is_listed(card):
    arch = card.arch.name
    listed = {v.kernel: v for v in kernels.variants(arch)}
    for m, n, k in itertools.product(
        (1, 2, 3, 4, 5, 16, 17, 32, 33, 512, 8192), (1, 7, 300, 4096, 28672), (64, 4096, 65536)
    ):
        for groups, dtype, act in itertools.product(
            (1, k // 64), ("bfloat16", "float32"), ("int8", "native")
        ):
            grouped = groups > 1
            gemv = gemv_config(m, n, k, groups, sms=card.sms) if act == "int8" else None
            if gemv is not None:
                divided = gemv.shares > 1
                how = gemv.tokens, gemv.rows, divided, grouped
                variant = listed[kernels._gemv_kernel(dtype, dtype, *how)]
                assert kernels._gemv_kernel("int8", dtype, *how) in listed
                assert m <= gemv.tokens
                assert n >= gemv.rows, "the kernel takes the last rows as a whole"
                assert gemv.shared_bytes <= variant.dynamic_shared_bytes < ARCHES[arch].smem_per_block_optin
                if divided:
                    assert 8 % gemv.shares == 0
                    assert gemv.shares <= -(-k // 2048), "every warp has a step"
                    assert gemv.grid == -(-n * gemv.shares // 8) <= card.sms
                else:
                    assert 1 <= gemv.grid <= -(-n // gemv.rows)
                continue
            name = "int8" if act == "int8" else dtype
            itemsize = 1 if act == "int8" else 2 if dtype == "bfloat16" else 4
            gemm, splits = gemm_config(m, n, k, itemsize, grouped=grouped, **limits(card))
            variant = listed[kernels._gemm_kernel(name, dtype, grouped, splits > 1, gemm)]
            assert variant.threads_per_block == gemm.threads
            assert variant.dynamic_shared_bytes == gemm.shared_bytes(itemsize)
            assert gemm.shared_bytes(itemsize) <= ARCHES[arch].smem_per_block_optin
            if splits > 1:
                assert splits <= 16
                assert splits * gemm.blocks(m, n) <= card.sms
                assert -(-k // 64) >= splits * gemm.units * gemm.stages, "every part fills the pipeline"


@each_card
def test_every_choice_of_the_gradient_fits_and_is_listed(card):
    listed = {v.kernel: v for v in ternary_backward.variants(card.arch.name)}
    for m, n, k in itertools.product((1, 31, 33, 64, 65, 512, 8192), (1, 300, 4096, 28672), (1, 64, 4096)):
        for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
            tile, splits = backward_config(m, n, k, itemsize, sms=card.sms)
            assert tile in backward_tiles(itemsize)
            out = dtype if splits == 1 else "float32"
            variant = listed[ternary_backward._kernel(dtype, out, True, True, tile)]
            assert variant.threads_per_block == tile.threads
            assert variant.dynamic_shared_bytes == tile.shared_bytes(itemsize)
            assert tile.shared_bytes(itemsize) <= ARCHES[card.arch.name].smem_per_block_optin
            if splits > 1:
                assert splits * tile.blocks(m, k) <= card.sms
                assert n > (splits - 1) * tile.block_n(itemsize) * tile.stages


def test_models_fill_the_card():
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (2560, 2560), (6912, 2560)):
        config = gemv_config(1, n, k, 1, sms=H200.sms)
        assert config is not None
        assert config.grid >= H200.sms
        assert config.shares == 1
        gemm, splits = gemm_config(16, n, k, 1, grouped=False, **limits(H200))
        assert gemm.blocks(16, n) * splits >= H200.sms // 2
        tile, splits = backward_config(4096, n, k, 2, sms=H200.sms)
        assert tile.blocks(4096, k) >= 2 * H200.sms
        assert splits == 1
    assert gemv_config(1, 4096, 4096, 1, sms=H200.sms).rows == 2
    assert gemv_config(5, 4096, 4096, 1, sms=H200.sms) is None
    assert {rows for tokens, rows, _ in gemv_configs() if tokens == 1} == {1, 2, 4}


def test_small_results_have_their_sums_divided():
    assert gemv_config(1, 256, 8192, 1, sms=H200.sms).shares == 4  # a step of 2048 each
    assert gemv_config(1, 256, 28672, 1, sms=H200.sms).shares == 4  # 128 blocks; 8 would be two waves
    assert gemv_config(1, 64, 28672, 1, sms=H200.sms).shares == 8
    assert gemv_config(1, 1024, 4096, 1, sms=H200.sms).shares == 1  # already 128 blocks
    for m, n, k, divided in ((16, 1024, 28672, True), (64, 1024, 8192, True), (16, 1024, 4096, False)):
        gemm, splits = gemm_config(m, n, k, 1, grouped=False, **limits(H200))
        assert (splits > 1) is divided, "a second launch must pay"
        assert splits * gemm.blocks(m, n) <= H200.sms


def test_an_sm_of_any_card_has_two_blocks_of_few_tokens():
    """Two blocks hide the latency of each other; cards of 100 KB per SM get fewer stages."""
    for card, itemsize in itertools.product(CARDS, (1, 2)):
        for tile in gemm_configs(
            itemsize, grouped=False, smem_per_block_optin=card.arch.smem_per_block_optin
        ):
            if tile.block_m <= 64:
                blocks = (card.arch.smem_per_block_optin + 1024) // (tile.shared_bytes(itemsize) + 1024)
                assert blocks >= 2, (card.name, tile)
                assert tile.stages >= 2


@pytest.mark.parametrize(
    ("m", "n", "k", "activations", "group", "launches"),
    [
        (1, 5, 8191, "int8", None, {"ternary_gemv": (3, 1, 1)}),
        (3, 9, 4096, "int8", 64, {"ternary_gemv": (3, 1, 1)}),
        (40, 33, 8191, "int8", None, {"ternary_gemm": (1, 16, 1), "ternary_gemm_sum": (2, 1, 1)}),
        (20, 40, 8192, "int8", 64, {"ternary_gemm": (2, 8, 1), "ternary_gemm_sum": (1, 1, 1)}),
        (20, 32, 4096, "native", None, {"ternary_gemm": (1, 8, 1), "ternary_gemm_sum": (1, 1, 1)}),
    ],
    ids=str,
)
def test_divided_sums(m, n, k, activations, group, launches, rng):
    """Divided sums are exact at the largest magnitudes and at random ones; a weight is read once."""
    seen = {}
    for fill in (-1, 1, None):
        t = rng.integers(-1, 2, (n, k)).astype(np.int8) if fill is None else np.full((n, k), fill, np.int8)
        x = rng.integers(-127, 128, (m, k)) if fill is None else np.full((m, k), 127)
        x[:, 0] = 127
        scale = np.float32(0.5) if group is None else np.full((n, k // group), 0.5, np.float32)
        w = TernaryMatrix.from_trits(t, scale)
        with emulator.record() as profiles:
            y = ternary_matmul(
                x.astype(np.float32), w, activations=activations, device="emulator", backend="raw"
            )
        np.testing.assert_array_equal(y, x @ t.T.astype(int) / 2)
        seen |= {p.name: p for p in profiles}
    for name, grid in launches.items():
        assert seen[name].grid == grid
    profile = seen[next(iter(launches))]
    (codes,) = (b for b in profile.buffers if b.name == "w.codes")
    assert codes.bytes_read == n * -(-k // 64) * 16
    assert not [i.ptx for i in profile.instructions if i.waves > i.phases]
