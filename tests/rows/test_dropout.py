"""Dropout: the same elements are kept on every backend, with the right values. The laws cover it as well."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import OptionError
from gpu_ops.reference.philox import philox4x32
from gpu_ops.reference.rows import dropout as reference
from gpu_ops.reference.rows.dropout import dropout_mask
from tests.rows.cases import close, emulator_dtypes, views
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
SEED = 0x9E3779B97F4A7C15
# One element; vectors with a remainder; rows of less than a vector; a prime; several blocks of the GPU and the CPU.
SHAPES = [(1,), (37,), (5, 3), (3, 64), (1, 2053), (2, 3, 701)]
OFFSETS = [0, 3, 2**34 - 6, 2**63 - 1]  # counters of one word, of two, and that carry from one to two


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


# ---- which elements ----------------------------------------------------------------------------------------


def test_a_mask_by_hand():
    kept = dropout_mask((2, 5), 0.25, seed=SEED, offset=2**34 - 3)
    for i, bit in enumerate(kept.ravel()):
        n = 2**34 - 3 + i
        words = philox4x32((n // 4 % 2**32, n // 4 >> 32, 0, 2**32 - 1), (SEED % 2**32, SEED >> 32))
        assert bit == (words[n % 4] >= 2**30)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_are_dropped_independently(p):
    """The share kept is within five standard deviations, of all elements, of pairs, and of successive seeds."""
    kept, share = dropout_mask((1 << 17,), p, seed=SEED), 1 - p
    pairs = [kept[:-i] & kept[i:] for i in (1, 2, 3, 4, 5, 8, 64, 4096)]
    pairs += [kept & dropout_mask(kept.shape, p, seed=seed) for seed in (SEED + 1, SEED ^ 1 << 32)]
    for sample, expected in [(kept, share), *((both, share**2) for both in pairs)]:
        assert abs(sample.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / sample.size)


def test_attention_draws_other_bits():
    """Counters of attention give other words than those of dropout with the same seed."""
    ours = philox4x32((np.arange(1000), 0, 0, 2**32 - 1), (7, 0))
    theirs = philox4x32((np.arange(1000), 0, 0, 0), (7, 0))
    assert not np.isin(ours, theirs).any()


@pytest.mark.parametrize(
    ("p", "share"), [(0.0, 0), (1e-12, 0), (2.0**-32, 2.0**-32), (1 - 2.0**-40, 1 - 2.0**-32)]
)
def test_the_probability_has_32_bits(p, share, backend):
    """Words from 2**32 * share on are kept: almost none, or almost all."""
    x = np.ones(64, np.float32)
    y = gpu_ops.dropout(x, p, seed=SEED, **backend)
    assert (y == (np.float32(1 / (1 - p)) if share < 0.5 else 0)).all()


# ---- all backends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(backend, dtype, shape, rng):
    for offset in OFFSETS:
        for p in (0.4, 0.05):
            x, drawn = random(rng, shape, dtype), {"seed": SEED, "offset": offset}
            y = gpu_ops.dropout(x, p, **drawn, **backend)
            assert y.dtype == dtype
            np.testing.assert_array_equal(y != 0, dropout_mask(shape, p, **drawn) & (x != 0))
            expected, naive = (
                reference.dropout(x, p, **drawn, precision=how) for how in ("float64", "naive")
            )
            close(y, expected, naive, dtype)
            assert gpu_ops.dropout_backward(x, p, **drawn, **backend).tobytes() == y.tobytes()


def test_layouts_change_no_bit(backend, dtype, rng):
    x = random(rng, (6, 45), dtype)
    for offset in (0, 5):
        expected = gpu_ops.dropout(x, 0.3, seed=SEED, offset=offset, **backend)
        for what, view in views(x):
            actual = gpu_ops.dropout(view, 0.3, seed=SEED, offset=offset, **backend)
            assert actual.tobytes() == expected.tobytes(), what
        padded = np.zeros((6, 50), dtype)
        gpu_ops.dropout(x, 0.3, seed=SEED, offset=offset, out=padded[:, 2:47], **backend)
        np.testing.assert_array_equal(padded[:, 2:47], expected)
        assert not padded[:, :2].any()
        assert not padded[:, 47:].any()
        place = x.copy()
        assert gpu_ops.dropout(place, 0.3, seed=SEED, offset=offset, out=place, **backend) is place
        assert place.tobytes() == expected.tobytes()


def test_parts_drop_what_the_whole_drops(backend, dtype, rng):
    x = random(rng, (7, 33), dtype)
    whole = gpu_ops.dropout(x, 0.3, seed=SEED, offset=10, **backend)
    for first, last in ((0, 2), (2, 3), (3, 7)):
        part = gpu_ops.dropout(x[first:last], 0.3, seed=SEED, offset=10 + 33 * first, **backend)
        assert part.tobytes() == whole[first:last].tobytes()


def test_nan_infinity_and_overflow(backend, dtype):
    """0 * NaN and 0 * inf are NaN, and an element that is dropped does not overflow."""
    kept = dropout_mask((40,), 0.75, seed=SEED)
    largest = np.full(40, ml_dtypes.finfo(dtype).max, dtype)
    actual = gpu_ops.dropout(largest, 0.75, seed=SEED, **backend).astype(np.float64)
    np.testing.assert_array_equal(actual, np.where(kept, np.inf, 0))
    for bad in (np.nan, np.inf, -np.inf):
        actual = gpu_ops.dropout(np.full(40, bad, dtype), 0.75, seed=SEED, **backend).astype(np.float64)
        np.testing.assert_array_equal(actual, np.where(kept, bad, np.nan))


def test_without_dropout_it_is_a_copy(backend, dtype, rng):
    x = random(rng, (3, 40), dtype)
    x[0, :4] = 0.0, -0.0, np.inf, ml_dtypes.finfo(dtype).smallest_subnormal
    y = gpu_ops.dropout(x, 0, seed=SEED, **backend)
    assert y.tobytes() == x.tobytes()
    assert not np.shares_memory(x, y)


# ---- seeds and offsets -------------------------------------------------------------------------------------


def test_seeds_and_offsets_of_later_calls():
    """Every call has its own seed and offset, and is refused wherever a first call would be."""
    x = np.ones((3, 40), np.float32)
    gpu_ops.dropout(x, 0.5, seed=1, offset=1)
    known = len(gpu_ops.dropout.op.known)
    for seed in (0, 1, 2**32, 2**64 - 1, np.uint64(2**63)):
        for offset in (0, 1, 4, 2**63 - 1, np.int64(5)):
            actual = gpu_ops.dropout(x, 0.5, seed=seed, offset=offset)
            np.testing.assert_array_equal(
                actual != 0, dropout_mask(x.shape, 0.5, seed=seed, offset=int(offset))
            )
            assert (
                actual.tobytes()
                == gpu_ops.dropout(x, 0.5, seed=np.array(seed, "u8"), offset=offset).tobytes()
            )
    # integers of any type count as one kind; with a number and with an array without axes; without offset=
    kinds = 2 * 2 + 2
    gpu_ops.dropout(x, 0.5, seed=3)
    assert len(gpu_ops.dropout.op.known) <= known + kinds
    default = gpu_ops.dropout(x, 0.5, seed=4)
    np.testing.assert_array_equal(default, gpu_ops.dropout(x, 0.5, seed=4, offset=0))
    out = np.full_like(x, 7)
    for wrong in ({"seed": -1}, {"seed": 2**64}, {"offset": -1}, {"offset": 2**63}, {"offset": True}):
        with pytest.raises(OptionError, match=f"dropout: {next(iter(wrong))}"):
            gpu_ops.dropout(x, 0.5, **{"seed": 1, "offset": 1, **wrong}, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_seed_in_an_array(backend, shape):
    """The seed is read at every call; int64 counts as its 64 bits."""
    x, seed = np.ones(40, np.float32), np.zeros(shape, np.int64)
    for number in (7, -1):
        seed[...] = number
        actual = gpu_ops.dropout(x, 0.5, seed=seed, **backend)
        np.testing.assert_array_equal(actual != 0, dropout_mask((40,), 0.5, seed=number % 2**64))


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_a_captured_graph_draws_another_mask(cupy, kernels):
    x, seed, y = (
        FakeArray(np.ones(40, np.float32)),
        FakeArray(np.array(7)),
        FakeArray(np.zeros(40, np.float32)),
    )
    gpu_ops.dropout(x, 0.5, seed=seed, out=y, backend=kernels)
    with cupy.capture():
        gpu_ops.dropout(x, 0.5, seed=seed, out=y, backend=kernels)
    for number in (8, 9):
        seed.host[...] = number
        cupy.replay()
        np.testing.assert_array_equal(y.host != 0, dropout_mask((40,), 0.5, seed=number))


# ---- the CPU's blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [2048, 6163])
def test_many_rows_are_streamed(cols, rng):
    """Streamed results, at any address, have the bits of small ones."""
    x = random(rng, (1, cols), np.dtype(np.float32))
    rows = (40 << 20) // x.nbytes
    whole = np.zeros(rows * cols + 16, np.float32)
    for start in (0, 3):
        y = whole[start : start + rows * cols].reshape(rows, cols)
        gpu_ops.dropout(np.broadcast_to(x, y.shape), 0.5, seed=SEED, out=y)
        for r in (0, 1, rows // 2, rows - 1):
            assert y[r].tobytes() == gpu_ops.dropout(x[0], 0.5, seed=SEED, offset=r * cols).tobytes()
