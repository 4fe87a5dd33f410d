"""attention_merge on every backend, and attention over blocks of keys that are merged."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.attention import forward as reference
from gpu_ops.reference.attention.merge import attention_merge as definition
from tests.attention.cases import DTYPES, mixed
from tests.rows.cases import emulator_dtypes
from tests.support.compare import assert_close

DEVICES = ("cpu", "emulator", "cuda")
INF = np.inf
# shape of out1, shape of lse1, layout: rows of part of a warp and longer, with and without vectors
SHAPES = [
    ((2, 7, 3, 40), (2, 3, 7), "bshd"),
    ((2, 3, 9, 64), (2, 3, 9), "bhsd"),
    ((11, 3, 17), (3, 11), "bshd"),
    ((1, 3, 2, 600), (1, 2, 3), "bshd"),
]
# lse1 and lse2 of rows: no key seen by both or one, infinite, NaN, far apart, large
SPECIAL = [(-INF, -INF), (-INF, 2), (1, -INF), (INF, 1), (INF, INF), (np.nan, 0), (-INF, np.nan), (300, -300)]
SPECIAL += [(16000, 16001.5), (-16000, -16000)]


def quick_on_emulator(raw):
    dtypes = {"dtype": emulator_dtypes(raw)}
    return {
        "test_the_rule": {"shape": SHAPES[:3] if raw else SHAPES[:1], **dtypes},
        "test_what_saw_nothing_does_not_count": dtypes,
        "test_blocks_err_no_more_than_textbook_code": {"blocks": [4] * raw, "size": [0.0, 16000.0]},
    }


def parts(rng, shape, lse_shape, dtype, lse_dtypes):
    """Two parts; the first rows are special."""
    out1, out2 = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    logs = [3 * rng.standard_normal(lse_shape) for _ in range(2)]
    for i, lse in enumerate(logs):
        lse.reshape(-1)[: len(SPECIAL)] = [pair[i] for pair in SPECIAL][: lse.size]
    lse1, lse2 = (lse.astype(dtype) for lse, dtype in zip(logs, lse_dtypes, strict=True))
    return out1, lse1, out2, lse2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule(shape, dtype, backend, rng):
    shape, lse_shape, layout = shape
    for lse_dtypes in ("ff", "dd", "fd") if len(shape) == 3 else ("ff",):
        arrays = parts(rng, shape, lse_shape, dtype, lse_dtypes)
        out, lse = gpu_ops.attention_merge(*arrays, layout=layout, **backend)
        (expected, expected_lse), (naive, _) = (
            definition(*arrays, layout=layout, precision=p) for p in ("float64", "naive")
        )
        if dtype == np.float64:
            np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
        else:
            assert_close(out, expected, naive, dtype)
        assert lse.dtype == np.result_type(*lse_dtypes, np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_allclose(
            lse, expected_lse, rtol=3e-7 if lse.dtype == np.float32 else 1e-11, atol=3e-7
        )


def test_what_saw_nothing_does_not_count(dtype, backend, rng):
    out1, lse1, out2, lse2 = parts(rng, (1, 6, 1, 24), (1, 1, 6), dtype, "ff")
    lse1[..., :3], lse2[..., 2:] = -INF, -INF
    lse2[..., :2] = lse1[..., 3:] = 1.5
    out1[:, :3], out2[:, 2:] = np.nan, INF  # these elements are not results
    out, lse = gpu_ops.attention_merge(out1, lse1, out2, lse2, **backend)
    np.testing.assert_array_equal(out[:, :2], out2[:, :2])
    np.testing.assert_array_equal(out[:, 3:], out1[:, 3:])
    assert not out[:, 2].any()
    np.testing.assert_array_equal(lse[0, 0], [1.5, 1.5, -INF, 1.5, 1.5, 1.5])


@functools.cache
def keys_of_size(size, dtype, seqlen=96):
    """Queries, keys and values with scores about ``size``."""
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 1, seqlen, 2, 32))
    if size:
        q[..., 0] = 2.0 ** round(np.log2(size) / 2)
        k[..., 0] = size / q[..., 0] * 32**0.5
    return tuple(x.astype(dtype) for x in (q, k, v))


def merged(q, k, v, blocks, backend, **options):
    """Attention over blocks of the keys, one after the other, summed in the arrays of the first block."""
    out = lse = None
    dtypes = {"out_dtype": np.float64 if q.dtype == np.float64 else np.float32, "lse_dtype": np.float64}
    for keys in np.array_split(np.arange(k.shape[1]), blocks):
        place = {"q_start": 0, "k_start": int(keys[0])}
        part = gpu_ops.attention(
            q, k[:, keys], v[:, keys], **options, **place, **dtypes, return_lse=True, **backend
        )
        if out is None:
            out, lse = part
        else:
            gpu_ops.attention_merge(out, lse, *part, out=(out, lse), **backend)
    return out, lse


@pytest.mark.parametrize("blocks", [2, 7, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (20, 3)},
        {"causal": True, "alibi_slopes": np.array([0.3, 0.01], np.float32)},
    ],
    ids=str,
)
def test_blocks_are_the_whole(options, blocks):
    for size in (0.0, 4000.0, 16000.0):
        arrays = keys_of_size(size, np.float64)
        out, lse = merged(*arrays, blocks, {"device": "cpu"}, **options)
        # A unit of lse is a relative error of all weights of its block, a unit of a score is one of its weight: the
        # reference rounds large scores differently.
        whole = functools.partial(gpu_ops.attention, device="cpu") if size else reference.attention
        expected, expected_lse = whole(*arrays, **options, return_lse=True)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12 + 2 * np.spacing(size))
        np.testing.assert_allclose(lse, expected_lse, rtol=3e-16, atol=1e-12)


@pytest.mark.parametrize("blocks", [2, 4, 16])
@pytest.mark.parametrize("size", [0.0, 4000.0, 16000.0])
def test_blocks_err_no_more_than_textbook_code(size, blocks, backend):
    """Parts in float32 of bfloat16 inputs; the last block is seen by few rows, some by none."""
    arrays = keys_of_size(size, DTYPES["bfloat16"], 64 if backend["device"] == "emulator" else 96)
    expected = reference.attention(*arrays, causal=True, precision="float64")
    textbook, *_ = mixed((*arrays, np.zeros_like(arrays[0])), {"causal": True})
    out, _ = merged(*arrays, blocks, backend, causal=True)
    off, allowed = (np.abs(x - expected) for x in (out, textbook))
    assert np.mean(off**2) <= np.mean(allowed**2)
    if (
        size < 16000
    ):  # where one float32 rounding of a score is 1e-3, and the order of its sum decides the worst one
        assert off.max() <= allowed.max()


def test_a_part_may_be_merged_in_place(rng):
    out1, lse1, out2, lse2 = parts(rng, (1, 300, 4, 128), (1, 4, 300), np.float32, "ff")
    expected = gpu_ops.attention_merge(out1, lse1, out2, lse2)
    buffers = out1.copy(), lse1.copy()
    actual = gpu_ops.attention_merge(*buffers, out2, lse2, out=buffers)
    for x, y, z in zip(actual, buffers, expected, strict=True):
        assert x is y
        np.testing.assert_array_equal(y, z)
