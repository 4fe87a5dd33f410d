"""RMSNorm on GPUs: the choice of kernel and threads, for every card, with no GPU."""

from __future__ import annotations

import functools

import pytest
from compilers import needs_nvrtc

from gpu_ops.kernels import cubin, jit
from gpu_ops.kernels.rmsnorm import RowConfig, _kernel, select_config, variants
from gpu_ops.presets import ARCHES, PRESETS

CARDS = [p for p in PRESETS.values() if p.arch.compute_capability >= (8, 0)]
COLS = [1, 2, 7, 8, 64, 100, 123, 128, 256, 257, 512, 1000, 1024, 2048, 4095, 4096, 5120, 8192, 8193, 12288, 16384,
        24576, 32768, 50000, 65535, 65536, 131072, 1 << 20]  # fmt: skip


def choose(which, rows, cols, itemsize, card, alignment=16) -> RowConfig:
    optin = card.arch.smem_per_block_optin
    return select_config(
        which, rows, cols, itemsize, alignment=alignment, sms=card.sms, smem_per_block_optin=optin
    )


# What __launch_bounds__ allows in the forward, by KEEP and VECS; the backward bounds registers only.
MOST_THREADS = {("Registers", 2): 128, ("Registers", 4): 256, ("Shared", 0): 1024, ("Global", 0): 512}


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.name)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_every_choice_can_be_launched_and_covers_the_row(which, itemsize, card):
    for cols in COLS:
        for rows in (1, 3, 1000, 8192, 1 << 20, 1 << 33):
            c = choose(which, rows, cols, itemsize, card)
            assert c.threads <= (MOST_THREADS[c.keep, c.vecs] if which == "forward" else 1024), (cols, c)
            assert c.threads % 32 == 0
            assert c.rows_per_block == 1 or (c.threads_per_row <= 32 and 32 % c.threads_per_row == 0)
            assert c.shared_bytes + 256 <= card.arch.smem_per_block_optin
            assert 1 <= c.grid <= 2**31 - 1
            assert c.grid <= -(-rows // c.rows_per_block), "a block without a row"
            assert cols % c.vec == 0
            if c.keep == "Registers":
                assert c.vecs * c.vec * c.threads_per_row >= cols
            if c.keep == "Shared":
                assert c.shared_bytes >= cols * itemsize


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.name)
def test_16384_columns_are_read_once(card):
    for cols in (n for n in COLS if n <= 16384):
        for itemsize in (2, 4):
            assert choose("forward", 64, cols, itemsize, card).keep != "Global"
            if cols * itemsize % 16 == 0:
                assert choose("backward", 64, cols, itemsize, card).keep == "Registers"


def test_where_the_row_is_kept():
    h100, ada = PRESETS["H100 SXM"], PRESETS["RTX 4090"]
    plans = [(h100, 8192, "Registers"), (h100, 8200, "Shared"), (h100, 65536, "Shared"), (h100, 131072, "Global"),
             (ada, 8192, "Registers"), (ada, 32768, "Shared"), (ada, 65536, "Global")]  # fmt: skip
    for card, cols, keep in plans:
        assert choose("forward", 64, cols, 2, card).keep == keep, (card.name, cols)
    plans = [
        (h100, 32768, "Registers"),
        (h100, 32776, "Global"),
        (ada, 16384, "Registers"),
        (ada, 32768, "Global"),
    ]
    for card, cols, keep in plans:
        assert choose("backward", 64, cols, 2, card).keep == keep, (card.name, cols)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_alignment_changes_how_vectors_are_fetched_and_nothing_else(which, itemsize):
    """Else the same numbers would add up to other bits elsewhere in memory."""
    card = PRESETS["A100-40"]
    for cols in COLS:
        aligned = choose(which, 100, cols, itemsize, card)
        for alignment in (8, 4, itemsize):
            c = choose(which, 100, cols, itemsize, card, alignment)
            assert c.access in (1, c.vec)
            assert alignment % (c.access * itemsize) == 0
            assert {**vars(c), "access": 0} == {**vars(aligned), "access": 0}
    assert choose(which, 100, 4096, itemsize, card).access == 16 // itemsize


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.name)
def test_sums_of_dweight_stay_short(card):
    """A sum suffers a rounding per row of its thread and per row group of its block: at most 56, and 8 after."""
    for rows in (1, 100, 8192, 65536, 10**6, 10**7):
        for cols in (n for n in COLS if n <= 16384):
            c = choose("backward", rows, cols, 2, card)
            if c.keep == "Registers":
                tiles = -(-rows // c.rows_per_block)
                assert -(-tiles // c.grid) + c.rows_per_block <= 56


def test_many_small_rows_fill_the_card_and_keep_their_weights():
    card = PRESETS["H100 SXM"]
    c = choose("forward", 1_000_000, 128, 2, card)  # QK norm
    assert (c.threads_per_row, c.rows_per_block, c.vecs) == (8, 16, 2)
    assert c.grid == 10 * card.sms
    assert choose("forward", 20, 128, 2, card).grid == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_every_choice_is_listed(arch):
    listed = {v.kernel for v in variants(arch)}
    card = PRESETS[arch.rstrip("a")]
    for cols in COLS:
        for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
            for alignment in (16, itemsize):
                c = choose("forward", 64, cols, itemsize, card, alignment)
                assert {_kernel("forward", c, dtype, residual) for residual in (False, True)} <= listed
                assert (
                    _kernel("backward", choose("backward", 64, cols, itemsize, card, alignment), dtype)
                    in listed
                )


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_more_than_half_of_the_warps(dtype, itemsize, arch):
    """Rows of whole vectors, up to 16384 elements, have no spills and more than half of an SM's warps at work.

    But for one case: of x and dy in registers, 32 per thread, two blocks would fill the 65536 of an SM. So a float32
    row of more than 4 * 576 vectors gets one block of 1024 threads, half of the 2048 that some SMs have.
    """
    limits = ARCHES[arch]

    @functools.cache
    def resources(kernel):
        compiled = jit.assemble(jit.compile_kernel(kernel, arch), arch)
        return cubin.resources(compiled.cubin, kernel.entry, compiled.log)

    for which in ("forward", "backward"):
        for cols in range(16 // itemsize, 16385, 16 // itemsize):
            c = choose(which, 1 << 20, cols, itemsize, PRESETS[arch])
            needs = resources(_kernel(which, c, dtype, which == "forward"))
            assert needs.spill_bytes == 0
            share = cubin.occupancy(needs, c.threads, c.shared_bytes, limits).share
            if which == "backward" and cols > 4 * 4 * 576 and itemsize == 4 and arch == "sm_80":
                assert (share, c.threads) == (0.5, 1024)
            else:
                assert share > 0.5, (which, cols, c)
