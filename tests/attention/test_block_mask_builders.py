"""BlockMask builders against dense masks: all visible pairs are kept, no block needlessly; panels on the CPU."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from tests.support.compare import random

LENGTHS = [(64, 64), (37, 53), (53, 37), (130, 127), (1, 90), (90, 1), (1, 1), (0, 5), (5, 0), (0, 0)]
BLOCKS = [(16, 16), (16, 24), (7, 5), (1, 1), (200, 8), (8, 200), (500, 500)]
sizes = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)


def grid(seqlen_q, seqlen_k):
    """Positions of queries among the keys, as a column, and positions of keys."""
    return np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q), np.arange(seqlen_k)


def window(seqlen_q, seqlen_k, left, right):
    position, key = grid(seqlen_q, seqlen_k)
    return (key >= position - (left if left >= 0 else 10**6)) & (
        key <= position + (right if right >= 0 else 10**6)
    )


def check(mask, dense, blocks, *, lead=()):
    """Check that the cover is complete and tight: a block is kept exactly where one of its pairs is visible."""
    seqlen_q, seqlen_k = dense.shape[-2:]
    assert (mask.block_q, mask.block_k) == blocks
    assert mask.visible.shape == (*lead, *mask.num_blocks(seqlen_q, seqlen_k))
    assert mask.visible.dtype == np.bool_
    assert mask.expand(seqlen_q, seqlen_k)[dense].all(), "a visible pair is hidden"
    short = [(0, -seqlen % block) for seqlen, block in zip((seqlen_q, seqlen_k), blocks, strict=True)]
    whole = np.pad(dense, [(0, 0)] * len(lead) + short)
    rows, columns = (n // block for n, block in zip(whole.shape[-2:], blocks, strict=True))
    tight = whole.reshape(*lead, rows, blocks[0], columns, blocks[1]).any(axis=(-3, -1))
    np.testing.assert_array_equal(mask.visible, tight)


@sizes
def test_causal(seqlen_q, seqlen_k):
    for blocks in BLOCKS:
        mask = BlockMask.causal(seqlen_q, seqlen_k, block_q=blocks[0], block_k=blocks[1])
        check(mask, window(seqlen_q, seqlen_k, -1, 0), blocks)


@sizes
def test_sliding_window(seqlen_q, seqlen_k):
    for blocks in BLOCKS:
        for sides in ((0, 0), (10, 0), (0, 9), (17, 30), (-1, 3), (3, -1), (-1, -1), (1000, 0)):
            mask = BlockMask.sliding_window(seqlen_q, seqlen_k, sides, block_q=blocks[0], block_k=blocks[1])
            check(mask, window(seqlen_q, seqlen_k, *sides), blocks)


@sizes
def test_prefix_lm(seqlen_q, seqlen_k):
    for blocks in BLOCKS:
        causal, key = window(seqlen_q, seqlen_k, -1, 0), np.arange(seqlen_k)
        lengths = sorted({0, seqlen_k // 3, seqlen_k})
        options = {"block_q": blocks[0], "block_k": blocks[1]}
        for prefix in lengths:
            mask = BlockMask.prefix_lm(seqlen_q, seqlen_k, prefix, **options)
            check(mask, causal | (key < prefix), blocks)
        each = BlockMask.prefix_lm(seqlen_q, seqlen_k, np.array(lengths, np.uint8), **options)
        dense = causal | (key < np.array(lengths)[:, None, None, None])
        check(each, dense, blocks, lead=(len(lengths), 1))


def document_ids(pattern, rng, shape):
    if pattern == "packed":  # documents one after another
        return np.sort(rng.integers(0, 6, shape), axis=-1)
    if pattern == "scattered":
        return rng.integers(-3, 3, shape)
    return rng.choice(np.array([7, 2**40, -(2**50)]), shape)


@sizes
@pytest.mark.parametrize("kind", ["packed", "scattered", "large"])
@pytest.mark.parametrize("causal", [False, True])
def test_document(seqlen_q, seqlen_k, kind, causal):
    for blocks in BLOCKS:
        rng = np.random.default_rng(seqlen_q + seqlen_k)
        options = {"causal": causal, "block_q": blocks[0], "block_k": blocks[1]}
        past = window(seqlen_q, seqlen_k, -1, 0 if causal else -1)
        q, k = (document_ids(kind, rng, (3, n)) for n in (seqlen_q, seqlen_k))
        check(BlockMask.document(q[0], k[0], **options), (q[0][:, None] == k[0]) & past, blocks)
        dense = (q[:, None, :, None] == k[:, None, None, :]) & past
        check(BlockMask.document(q, k, **options), dense, blocks, lead=(3, 1))
        dense = (q[:, None, :, None] == k[0]) & past
        check(BlockMask.document(q, k[0], **options), dense, blocks, lead=(3, 1))


def test_document_of_its_own_ids():
    ids = np.repeat([4, 1, 9], [30, 50, 21])
    mask = BlockMask.document(ids, causal=True, block_q=16, block_k=8)
    check(mask, (ids[:, None] == ids) & window(101, 101, -1, 0), (16, 8))
    assert BlockMask.document(np.zeros((0, 5), int)).visible.shape == (0, 1, 1, 1)


@sizes
def test_strided(seqlen_q, seqlen_k):
    for blocks in BLOCKS:
        position, key = grid(seqlen_q, seqlen_k)
        distance = position // blocks[1] - key // blocks[1]
        options = {"block_q": blocks[0], "block_k": blocks[1]}
        for stride, local in ((1, None), (3, None), (3, 1), (4, 0), (100, 2)):
            near = stride if local is None else local
            dense = (np.abs(distance) < near) | (distance % stride == 0)
            check(BlockMask.strided(seqlen_q, seqlen_k, stride, local=local, **options), dense, blocks)


def test_strided_blocks_are_exact_where_they_promise_it():
    position, key = grid(256, 256)
    distance = position // 32 - key // 32
    dense = (np.abs(distance) < 2) | (distance % 3 == 0)
    mask = BlockMask.strided(256, 256, 3, local=2, block_q=32, block_k=32)
    np.testing.assert_array_equal(mask.expand(256, 256), dense)


def test_documents_of_whole_blocks_are_exact():
    ids = np.repeat([0, 1, 0], [32, 64, 16])
    mask = BlockMask.document(ids, block_q=16, block_k=32)
    np.testing.assert_array_equal(mask.expand(112, 112), ids[:, None] == ids)


def test_and_or():
    a = BlockMask.causal(100, 90, block_q=8, block_k=16)
    b = BlockMask.prefix_lm(100, 90, [3, 40], block_q=8, block_k=16)
    for combined, visible in ((a & b, a.visible & b.visible), (a | b, a.visible | b.visible)):
        assert combined.visible.shape == (2, 1, 13, 6)
        np.testing.assert_array_equal(combined.visible, visible)
        assert (combined.block_q, combined.block_k) == (8, 16)
    union = BlockMask.sliding_window(100, 90, (9, -1), block_q=8, block_k=16) | a
    assert union.visible.all()


def test_masks_that_do_not_combine():
    a = BlockMask.causal(64, 64, block_q=8, block_k=16)
    for other in (BlockMask.causal(64, 64), BlockMask.causal(64, 64, block_q=8)):
        with pytest.raises(OptionError, match="do not combine"):
            a & other
    with pytest.raises(ShapeError, match="must be equal or 1"):
        a | BlockMask.causal(64, 96, block_q=8, block_k=16)
    with pytest.raises(TypeError, match="unsupported operand"):
        a & a.visible.tolist()


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: BlockMask.causal(-1, 4), OptionError, "BlockMask.causal: seqlen_q must lie in"),
        (lambda: BlockMask.causal(4, 4.0), OptionError, "seqlen_k must be an integer"),
        (lambda: BlockMask.causal(4, 4, block_q=0), OptionError, "block_q must be at least 1"),
        (lambda: BlockMask.causal(4, 4, block_k="8"), DTypeError, "block_k must be an int"),
        (lambda: BlockMask.sliding_window(4, 4, 3), OptionError, r"must be \(left, right\)"),
        (lambda: BlockMask.sliding_window(4, 4, (-2, 0)), OptionError, r"window_size\[0\] must be -1, for"),
        (lambda: BlockMask.prefix_lm(4, 4, 5), OptionError, r"\[0, seqlen_k=4\]"),
        (lambda: BlockMask.prefix_lm(4, 4, [1, -1]), OptionError, "prefix_len must lie in"),
        (lambda: BlockMask.prefix_lm(4, 4, 1.5), DTypeError, "prefix_len must be of integers"),
        (lambda: BlockMask.prefix_lm(4, 4, [[1]]), ShapeError, "an int or"),
        (lambda: BlockMask.document([0.5, 1.0]), DTypeError, "document_ids_q must be of integers"),
        (lambda: BlockMask.document(3), ShapeError, r"document_ids_q has shape \(\)"),
        (lambda: BlockMask.document([1], [[[1]]]), ShapeError, "document_ids_k has shape"),
        (lambda: BlockMask.document([[1], [2]], [[1]]), ShapeError, "batch must be the same"),
        (lambda: BlockMask.document([1], causal=1), OptionError, "causal must be True or False"),
        (lambda: BlockMask.document([1], block_q=0), OptionError, "block_q must be at least 1"),
        (lambda: BlockMask.strided(4, 4, 0), OptionError, "stride must lie in"),
        (lambda: BlockMask.strided(4, 4, 2, local=-1), OptionError, "local must lie in"),
    ],
)
def test_mistakes(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(700, 700), (77, 600), (600, 77), (3, 600)])
def test_attention_is_the_same_bit_for_bit(seqlen_q, seqlen_k):
    """The mask omits exactly the pairs that attention's causal and window options hide.

    Key tiles of the CPU kernel end where a block ends, which decides the order of its sums. A mask of the same blocks
    that hides nothing has the same order, and so does no mask at all where a block is a whole tile.
    """
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, seqlen_q, 4, 32), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, seqlen_k, 2, 32), dtype=np.float32)
    how = {"causal": True, "device": "cpu", "backend": "numba", "return_lse": True}

    def same(mask_a, mask_b, window_size=(-1, -1)):
        results = (
            gpu_ops.attention(q, k, v, **how, window_size=window_size, block_mask=mask)
            for mask in (mask_a, mask_b)
        )
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)

    for block_q, block_k in ((64, 64), (16, 24), (1000, 8)):
        mask = BlockMask.causal(seqlen_q, seqlen_k, block_q=block_q, block_k=block_k)
        everything = BlockMask(np.ones_like(mask.visible), block_q, block_k)
        same(mask, everything)
        mask = BlockMask.sliding_window(seqlen_q, seqlen_k, (40, 0), block_q=block_q, block_k=block_k)
        same(mask, everything, (40, -1))
    if seqlen_q > 3:  # few queries take a separate kernel, which has no block mask
        same(BlockMask.causal(seqlen_q, seqlen_k, block_q=64, block_k=256), None)


def test_attention_by_documents_is_attention_of_each():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 96, 2, 16), dtype=np.float32)
    ids = np.repeat([[0, 1, 2], [1, 0, 2]], [32, 48, 16], axis=1)
    mask = BlockMask.document(ids, block_q=16, block_k=16)
    actual = gpu_ops.attention(q, k, v, block_mask=mask, device="cpu")
    for start, stop in ((0, 32), (32, 80), (80, 96)):
        part = slice(start, stop)
        expected = gpu_ops.attention(q[:, part], k[:, part], v[:, part], device="cpu")
        np.testing.assert_allclose(actual[:, part], expected, rtol=0, atol=1e-6)


def test_long_sequences_need_memory_for_their_blocks_alone():
    """A mask of query-key pairs would take a gigabyte and seconds; blocks are 256 KiB."""
    n = 32768
    ids = np.repeat(np.arange(8), n // 8)
    for build in (
        lambda: BlockMask.causal(n, n),
        lambda: BlockMask.sliding_window(n, n, (4096, 0)),
        lambda: BlockMask.strided(n, n, 8),
        lambda: BlockMask.document(ids, causal=True),
    ):
        tracemalloc.start()
        assert build().visible.shape == (512, 512)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 25


@pytest.mark.parametrize("far", [2**63 - 1, 2**70])
def test_no_side_and_no_stride_is_too_large(far):
    blocks = {"block_q": 4, "block_k": 4}
    for near, limited in (((far, 2), (-1, 2)), ((2, far), (2, -1))):
        mask = BlockMask.sliding_window(10, 20, near, **blocks)
        np.testing.assert_array_equal(
            mask.visible, BlockMask.sliding_window(10, 20, limited, **blocks).visible
        )
    assert BlockMask.strided(10, 20, far, **blocks).visible.all()
    np.testing.assert_array_equal(
        BlockMask.strided(10, 20, far, local=1, **blocks).visible,
        BlockMask.strided(10, 20, 1000, local=1, **blocks).visible,
    )


@pytest.mark.parametrize("too_long", [2**48 + 1, 2**63 - 1, 2**70])
def test_sizes_that_64_bits_would_not_hold(too_long):
    with pytest.raises(OptionError, match=r"BlockMask\.block_q must be at least 1 and at most"):
        BlockMask(np.ones((1, 1), np.bool_), too_long, 1)
    with pytest.raises(OptionError, match="seqlen_k must lie in"):
        BlockMask.causal(10, too_long)


# Block masks on the CPU that hide some panels of a tile and show others, in any order.

BLOCK_SIZES = [(32, 64), (48, 40), (128, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize(("seqlen_q", "heads"), [(600, (2, 2)), (5, (8, 2))], ids=str)
def test_random_blocks(seqlen_q, heads, blocks, causal, dtype, rng):
    """One block in three is visible. With 5 queries, the heads of a group are neighbours in a tile."""
    seqlen_k, nheads = 700, heads[0]
    shape = (1, nheads, -(-seqlen_q // blocks[0]), -(-seqlen_k // blocks[1]))
    visible = rng.random(shape) < 1 / 3
    visible[0, 0, 0] = False
    options = {"block_mask": BlockMask(visible, *blocks), "causal": causal}
    arrays = [
        random(rng, (1, n, h, 64), dtype) for n, h in ((seqlen_q, heads[0]), *[(seqlen_k, heads[1])] * 2)
    ]
    dout = random(rng, arrays[0].shape, dtype)
    out, lse = gpu_ops.attention(*arrays, **options, return_lse=True)
    gradients = gpu_ops.attention_backward(dout, *arrays, out, lse, **options)
    exact_inputs, exact_dout = [a.astype(np.float64) for a in arrays], dout.astype(np.float64)
    want, expected_lse = gpu_ops.attention(*exact_inputs, **options, return_lse=True, backend="reference")
    exact = gpu_ops.attention_backward(
        exact_dout, *exact_inputs, want, expected_lse, **options, backend="reference"
    )
    digits = {"float64": 1e-12, "float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}[dtype.name]
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(expected_lse))
    for actual, expected in zip((out, *gradients), (want, *exact), strict=True):
        np.testing.assert_allclose(
            actual.astype(np.float64), expected, rtol=0, atol=digits * np.abs(expected).max()
        )
