"""Later calls of a kind look at values again: lengths, offsets, pages, positions, and the caches they write to."""

import numpy as np
import pytest

import gpu_ops
from gpu_ops import errors
from tests.test_repeated_calls import CALLS, append, append_slots, f, paged, varlen, varlen_backward


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_lengths_are_checked_every_time(rng):
    (q, k, v), _ = CALLS["attention_decode"](rng)
    used = np.array([3, 40], np.int32)
    gpu_ops.attention_decode(q, k, v, seqused_k=used)
    short = gpu_ops.attention_decode(q, k, v, seqused_k=used - 2)
    np.testing.assert_allclose(
        short, gpu_ops.attention_decode(q, k, v, seqused_k=used - 2, backend="reference"), atol=1e-5
    )
    for wrong in (used + 1, used - 4):
        with pytest.raises(errors.OptionError, match="seqused_k"):
            gpu_ops.attention_decode(q, k, v, seqused_k=wrong)


def test_masks_are_read_every_time(rng):
    (q, k, v), _ = CALLS["attention"](rng)
    visible = np.ones((3, 3), np.bool_)
    mask = gpu_ops.BlockMask(visible, block_q=4, block_k=4)
    for hidden in ((0, 2), (2, 0), (1, 1)):
        visible[hidden] = False  # in place: the mask is the same object
        found = gpu_ops.attention(q, k, v, block_mask=mask)
        want = gpu_ops.attention(q, k, v, block_mask=mask, backend="reference")
        np.testing.assert_allclose(found, want, atol=1e-5)
    wider = gpu_ops.BlockMask(visible, block_q=5, block_k=4)  # 2 blocks of queries
    with pytest.raises(errors.ShapeError, match="block_mask"):
        gpu_ops.attention(q, k, v, block_mask=wider)
    with pytest.raises(errors.ShapeError, match="block_mask"):
        gpu_ops.attention(q, k, v, block_mask=gpu_ops.BlockMask(visible[:2], block_q=4, block_k=4))
    turned = gpu_ops.BlockMask(visible.T, block_q=4, block_k=4)
    want = gpu_ops.attention(q, k, v, block_mask=turned, backend="reference")
    np.testing.assert_allclose(gpu_ops.attention(q, k, v, block_mask=turned), want, atol=1e-5)


def test_offsets_are_checked_every_time(rng):
    args, kwargs = varlen(rng)
    gpu_ops.attention_varlen(*args, **kwargs)
    for other in (np.array([0, 9, 9, 9], np.int32), np.array([0, 0, 4, 9], np.int32)):
        found = gpu_ops.attention_varlen(*args[:3], other, args[4], **kwargs)
        want = gpu_ops.attention_varlen(*args[:3], other, args[4], **kwargs, backend="reference")
        np.testing.assert_allclose(found[0], want[0], atol=1e-5)
        np.testing.assert_allclose(found[1], want[1], atol=1e-5)
    for wrong in ([0, 3, 2, 9], [1, 2, 2, 9], [0, 2, 2, 8]):
        with pytest.raises(errors.OptionError, match="cu_seqlens_q must start at 0"):
            gpu_ops.attention_varlen(*args[:3], np.array(wrong, np.int32), args[4], **kwargs)
    args, kwargs = varlen_backward(rng)
    gpu_ops.attention_varlen_backward(*args, **kwargs | {"max_seqlen_k": 6})
    long = np.array([0, 1, 2, 11], np.int32)
    with pytest.raises(errors.OptionError, match="longest sequence has 9"):
        gpu_ops.attention_varlen_backward(*args[:-1], long, **kwargs | {"max_seqlen_k": 6})


def test_pages_are_checked_every_time(rng):
    args, kwargs = paged(rng)
    kwargs["seqused_k"] = np.array([7, 12], np.int32)
    gpu_ops.attention_decode(*args, **kwargs)
    table = kwargs["block_table"]
    for at, page in (((0, 1), -1), ((1, 2), 5)):
        wrong = table.copy()
        wrong[at] = page
        with pytest.raises(errors.OptionError, match="block_table"):
            gpu_ops.attention_decode(*args, **kwargs | {"block_table": wrong})
    moved = kwargs | {"block_table": table[:, ::-1].copy(), "seqused_k": np.array([0, 12], np.int32)}
    want = gpu_ops.attention_decode(*args, **moved, backend="reference")
    np.testing.assert_allclose(gpu_ops.attention_decode(*args, **moved), want, atol=1e-5)


def test_caches_are_written_and_checked_every_time(rng):
    for made in (append, append_slots, CALLS["rope_append_kv paged"]):
        for _ in range(3):
            args, kwargs = made(rng)
            want = [x.copy() for x in args[3:]]
            wanted = gpu_ops.rope_append_kv(*args[:3], *want, **kwargs, backend="reference")
            np.testing.assert_allclose(gpu_ops.rope_append_kv(*args, **kwargs), wanted, atol=1e-5)
            for x, y in zip(args[3:], want, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5)
    for name, wrong in (
        ("seqused_k", np.array([1, 14], np.int32)),
        ("block_table", np.array([[0], [2]], np.int32)),
    ):
        with pytest.raises(errors.OptionError, match=name):
            gpu_ops.rope_append_kv(*args, **{**kwargs, name: wrong})
    closed = args[4].copy()
    closed.flags.writeable = False
    for v_cache, problem in (
        (closed, "read-only"),
        (args[3], "shares memory"),
        (args[3][::-1], "shares memory"),
    ):
        with pytest.raises(errors.ShapeError, match=problem):
            gpu_ops.rope_append_kv(*args[:4], v_cache, **kwargs)


def test_two_tokens_of_one_slot_are_found_every_time(rng):
    args, kwargs = append_slots(rng)
    gpu_ops.rope_append_kv(*args, **kwargs)
    padding = np.array([-1, -7, -1, 4, 20, -1])  # may share what is nowhere
    gpu_ops.rope_append_kv(*args, **kwargs | {"slot_mapping": padding})
    for slots in ([3, 3, 0, 1, 2, 4], [31, -1, 5, -1, 4, 31], [16, 0, 1, 17, 18, 0]):
        twice = next(s for s in slots if s >= 0 and slots.count(s) == 2)
        i, j = (n for n, s in enumerate(slots) if s == twice)
        before = [x.copy() for x in args]
        with pytest.raises(errors.OptionError, match=rf"\[{i}\] and slot_mapping\[{j}\] are both {twice};"):
            gpu_ops.rope_append_kv(*args, **kwargs | {"slot_mapping": np.array(slots)})
        assert [x.tobytes() for x in args] == [x.tobytes() for x in before]
    args, kwargs = append(rng, block_table=np.array([[0, -1], [1, -1]], np.int32))
    args = (*args[:3], *(x.reshape(8, 4, 2, 8) for x in args[3:]))
    for table, used, sequences in (
        ([[0, 5], [1, 5]], (2, 2), (0, 1)),  # rows 2, 3 of their own, then row 0 of page 5
        ([[2, 2], [1, 1]], (3, 5), None),  # one page twice, and other rows of it
        ([[3, 0], [1, 3]], (1, 4), (0, 1)),
        ([[0, 3], [3, 4]], (5, 0), (0, 1)),
        ([[6, 5], [5, 7]], (4, 3), None),
    ):
        given = {"block_table": np.array(table, np.int32), "seqused_k": np.array(used, np.int32)}
        if sequences is None:
            gpu_ops.rope_append_kv(*args, **kwargs | given)
        else:
            with pytest.raises(
                errors.OptionError, match=r"of sequence 0 and token \d of sequence 1 both go to row"
            ):
                gpu_ops.rope_append_kv(*args, **kwargs | given)


def test_positions_are_read_every_time(rng):
    q = f(rng, 1, 5, 2, 8)
    for scaling in (None, gpu_ops.RopeScaling.dynamic(2.0, 4)):
        for positions in (np.arange(5), np.array([3, 99, -2, 0, 7])):
            found = gpu_ops.rope(q, positions=positions, scaling=scaling)
            want = gpu_ops.rope(q, positions=positions, scaling=scaling, backend="reference")
            np.testing.assert_allclose(found, want, atol=1e-5)
    with pytest.raises(errors.OptionError, match=r"2\*\*53"):
        gpu_ops.rope(q, positions=np.array([0, 0, 0, 0, 2**60]))


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope"])
def test_a_number_of_the_first_position_is_read_every_time(rng, kind, monkeypatch):
    """And a step of a decoding is no other kind of call."""
    scaling = {
        "default": None,
        "dynamic": gpu_ops.RopeScaling.dynamic(2.0, 4),
        "longrope": gpu_ops.RopeScaling.longrope([1.0] * 4, [2.0] * 4, original_max_position=6),
    }[kind]
    q = f(rng, 2, 3, 2, 8)
    values = (-3, 0, 2, np.int32(5), np.uint8(7), 99)
    want = [gpu_ops.rope.plan(q, positions=at, scaling=scaling).run() for at in values]
    gpu_ops.rope(q, positions=1, scaling=scaling)
    with monkeypatch.context() as patch:
        patch.setattr("gpu_ops.core.dispatch._setting", lambda *_: pytest.fail("planned again"))
        for at, y in zip(values, want, strict=True):
            np.testing.assert_array_equal(gpu_ops.rope(q, positions=at, scaling=scaling), y)
    for wrong, error in (
        (2**60, errors.OptionError),
        (2**80, errors.OptionError),
        (True, errors.OptionError),
        (np.timedelta64(1), errors.OptionError),
        (int, errors.DTypeError),
    ):
        with pytest.raises(error, match="positions"):
            gpu_ops.rope(q, positions=wrong, scaling=scaling)


@pytest.mark.parametrize(
    "scaling",
    [
        gpu_ops.RopeScaling.dynamic(2.0, 4),
        gpu_ops.RopeScaling.longrope([1.0] * 4, [2.0] * 4, original_max_position=6),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_the_length_of_a_decoding_is_looked_at_every_time(rng, scaling, monkeypatch):
    """The frequencies of these scalings go by it, and a step is no other kind of call."""
    (q, k, v, *caches), _ = append(rng)
    lengths = [np.array(used, np.int32) for used in ([0, 0], [3, 1], [2, 9], [0, 2])]
    want = []
    for used in lengths:
        filled = [cache.copy() for cache in caches]
        rotated = gpu_ops.rope_append_kv.plan(q, k, v, *filled, seqused_k=used, scaling=scaling).run()
        want.append([rotated, *filled])
    gpu_ops.rope_append_kv(q, k, v, *(c.copy() for c in caches), seqused_k=lengths[1], scaling=scaling)
    with monkeypatch.context() as patch:
        patch.setattr("gpu_ops.core.dispatch._setting", lambda *_: pytest.fail("planned again"))
        for used, expected in zip(lengths, want, strict=True):
            filled = [cache.copy() for cache in caches]
            rotated = gpu_ops.rope_append_kv(q, k, v, *filled, seqused_k=used, scaling=scaling)
            for found, exact in zip((rotated, *filled), expected, strict=True):
                np.testing.assert_array_equal(found, exact)
    assert not np.array_equal(want[1][0], want[2][0])
