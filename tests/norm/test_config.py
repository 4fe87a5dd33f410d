"""RMSNorm and LayerNorm on GPUs: choice of kernel and threads for every card, tested without a GPU."""

from __future__ import annotations

import functools

import pytest

from gpu_ops.kernels.compiler import cubin, jit
from gpu_ops.kernels.norm.config import BackwardConfig, RowConfig, select_backward, select_forward
from gpu_ops.kernels.norm.norm import _backward, _forward, variants
from gpu_ops.presets import ARCHES, PRESETS
from tests.support.compilers import each_card, needs_nvrtc

COLS = (
    *(1, 2, 7, 8, 64, 100, 123, 128, 256, 257, 512, 1000, 1024, 2048, 4095, 4096, 5120, 8192, 8193, 12288, 16384),
    *(24576, 32768, 50000, 65535, 65536, 131072, 1 << 20),
)  # fmt: skip


PASSES = ("forward", "backward of rmsnorm", "backward of layernorm")


def choose(which, rows, cols, itemsize, card, alignment=16) -> RowConfig | BackwardConfig:
    limits = {"alignment": alignment, "sms": card.sms, "smem_per_block_optin": card.arch.smem_per_block_optin}
    if which == "forward":
        return select_forward(rows, cols, itemsize, **limits)
    return select_backward(rows, cols, itemsize, sums=1 if which == "backward of rmsnorm" else 2, **limits)


def kernels(which, config, dtype):
    """Kernels that run a choice."""
    norms = ("layernorm", "rmsnorm") if which == "forward" else (which.rpartition(" ")[2],)
    return [(_forward if which == "forward" else _backward)(norm, config, dtype) for norm in norms]


@each_card
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("which", PASSES)
def test_every_choice_can_be_launched_and_covers_the_problem(which, itemsize, card):
    for cols in COLS:
        for rows in (1, 3, 1000, 8192, 1 << 20, 1 << 33):
            c = choose(which, rows, cols, itemsize, card)
            assert cols % c.vec == 0
            assert c.threads <= 1024
            assert c.threads % 32 == 0
            assert c.rows_per_block == 1 or (c.threads_per_row <= 32 and 32 % c.threads_per_row == 0)
            assert c.shared_bytes + 512 <= card.arch.smem_per_block_optin
            assert 1 <= c.grid <= 2**31 - 1
            if isinstance(c, BackwardConfig):
                assert c.parts <= -(-rows // c.rows_per_block), "a part without a row"
                assert c.vecs == 0 or c.vecs * c.threads_per_row * c.vec >= c.block_cols
                assert c.team or c.grid == c.parts
            else:
                assert c.team or (c.on_chip(cols) == cols and c.grid <= -(-rows // c.rows_per_block))
                assert c.vecs or c.shared_bytes >= c.on_chip(c.block_cols) * itemsize
            if c.team:
                check_team(c, rows, cols, card)
            else:
                assert c.block_cols == cols


def check_team(c, rows, cols, card):
    """Check that every column has a block, and every block of a team has an SM."""
    assert c.block_cols % (32 * c.vec) == 0
    assert (c.team - 1) * c.block_cols < cols <= c.team * c.block_cols, "a block without a column"
    assert c.grid % c.team == 0
    teams = c.grid // c.team
    assert teams <= (c.parts if isinstance(c, BackwardConfig) else rows), "a team without a row"
    assert c.grid <= 3 * card.sms
    assert 3 * (c.shared_bytes + 512 + 1024) <= card.arch.smem_per_sm


@each_card
def test_the_forward_reads_rows_once_that_all_sms_can_hold(card):
    """A block of a team holds at least 7680 columns: 5 vectors of 4 for each of 384 threads."""
    for itemsize in (2, 4):
        for cols in COLS:
            if cols <= 7680 * 3 * card.sms:
                assert choose("forward", 64, cols, itemsize, card).on_chip(cols) == cols
        longest = choose("forward", 64, 1 << 25, itemsize, card)
        assert longest.on_chip(1 << 25) < 1 << 25
        assert 0.99 * 3 * card.sms <= longest.team <= 3 * card.sms


@each_card
@pytest.mark.parametrize("which", PASSES[1:])
def test_the_backward_reads_rows_once_that_all_sms_can_hold(which, card):
    """An SM holds at least 9216 columns: 8 single elements for each of 1152 threads."""
    for itemsize in (2, 4):
        for cols in COLS:
            if cols <= 9216 * card.sms:
                assert choose(which, 64, cols, itemsize, card).vecs > 0
        longest = choose(which, 64, 1 << 24, itemsize, card)
        assert longest.vecs == 0
        assert 0.99 * 3 * card.sms <= longest.team <= 3 * card.sms


@each_card
@pytest.mark.parametrize("which", PASSES)
def test_teams_have_work_for_the_whole_card(which, card):
    for cols in (16384, 32768, 65536, 131072):
        for itemsize in (2, 4):
            c = choose(which, 8192, cols, itemsize, card)
            if c.team:
                assert c.grid >= 0.9 * 3 * card.sms, c


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_alignment_changes_how_vectors_are_fetched_and_nothing_else(which, itemsize):
    """Otherwise sums of the same numbers would have other bits at other addresses."""
    card = PRESETS["A100-40"]
    for cols in COLS:
        aligned = choose(which, 100, cols, itemsize, card)
        for alignment in (8, 4, itemsize):
            c = choose(which, 100, cols, itemsize, card, alignment)
            assert c.access in (1, c.vec)
            assert alignment % (c.access * itemsize) == 0
            assert {**vars(c), "access": 0} == {**vars(aligned), "access": 0}
    assert choose(which, 100, 4096, itemsize, card).access == 16 // itemsize


@each_card
def test_sums_of_dweight_stay_short(card):
    """A sum is rounded once per row of its thread and per row group of its block: at most 56 times, and 8 after."""
    for rows in (1, 100, 8192, 65536, 10**6, 10**7):
        for cols in COLS:
            c = choose("backward of rmsnorm", rows, cols, 2, card)
            tiles = -(-rows // c.rows_per_block)
            assert -(-tiles // c.parts) + c.rows_per_block <= 56


@each_card
@pytest.mark.parametrize("which", PASSES)
def test_more_than_half_of_the_warps_on_every_card(which, card):
    """Occupancy with the registers that __maxnreg__ allows; the test with a compiler checks the actual number."""
    for itemsize in (2, 4):
        for cols in (*range(1, 16385, 61), *range(8, 16385, 64), *COLS):
            for alignment in (16, itemsize):
                c = choose(which, 8192, cols, itemsize, card, alignment)
                many = c.vecs in ((0, 2) if which == "forward" else (3, 4)) or c.team
                registers = 56 if many else 48
                needs = cubin.Resources(registers, 0, 0, 512, 1, None)
                occupancy = cubin.occupancy(needs, c.threads, c.shared_bytes, card.arch)
                assert occupancy.share > 0.5, c
                assert not c.team or c.grid <= occupancy.blocks * card.sms


def test_many_small_rows_fill_the_card_and_keep_their_weights():
    card = PRESETS["H100 SXM"]
    c = choose("forward", 1_000_000, 128, 2, card)  # QK norm
    assert (c.threads_per_row, c.rows_per_block, c.vecs) == (8, 16, 2)
    assert c.grid == 9 * card.sms
    assert choose("forward", 20, 128, 2, card).grid == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_every_choice_is_listed(arch):
    listed = {v.kernel for v in variants(arch)}
    card = PRESETS[arch.rstrip("a")]
    for cols in COLS:
        for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
            for alignment in (16, itemsize):
                for which in PASSES:
                    c = choose(which, 64, cols, itemsize, card, alignment)
                    assert set(kernels(which, c, dtype)) <= listed


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "itemsize", "arch"),
    [
        ("bfloat16", 2, "sm_80"),
        ("float32", 4, "sm_120"),
        pytest.param("bfloat16", 2, "sm_120", marks=pytest.mark.slow),
        pytest.param("float32", 4, "sm_80", marks=pytest.mark.slow),
    ],
)
def test_more_than_half_of_the_warps(dtype, itemsize, arch):
    """Kernels have no spills, and fill more than half of the warps of an SM."""
    limits = ARCHES[arch]

    @functools.cache
    def resources(kernel):
        compiled = jit.assemble(jit.compile_kernel(kernel, arch), arch)
        return cubin.resources(compiled.cubin, kernel.entry, compiled.log)

    vec = 16 // itemsize
    for which in PASSES:
        for cols in (*range(vec, 16385, vec), 20000, 32768, 50000, 65536, 100_000, 131072):
            c = choose(which, 1 << 20, cols, itemsize, PRESETS[arch])
            for kernel in kernels(which, c, dtype):
                needs = resources(kernel)
                assert needs.spill_bytes == 0
                occupancy = cubin.occupancy(needs, c.threads, c.shared_bytes, limits)
                assert occupancy.share > 0.5, (which, cols, c)
                assert not kernel.cooperative or c.grid <= occupancy.blocks * PRESETS[arch].sms
