"""The CPU decode kernel alone: its row tiles, chunk tails, blocks, parts and address modes.

The options of attention_decode are crossed in test_decode.py; the sizes here are those at which this
kernel takes a different path.
"""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.kernels.attention.cpu.config import DECODE_ROWS, select_config
from gpu_ops.kernels.attention.cpu.decode import block_keys
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import DTYPES
from tests.attention.test_decode import check, make

CPU = {"device": "cpu", "backend": "numba"}


def plan(arrays, options):
    return gpu_ops.explain("attention_decode", *arrays, **options, **CPU)


def run_check(**settings):
    arrays, options = make(**{k: v for k, v in settings.items() if k != "num_splits"})
    assert "decode kernel" in str(plan(arrays, options))
    check(CPU, **settings)


# 1, 2, 3 .. 16 query rows per KV head: tiles of 1, 2 and 4 rows, full or not, one or several
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "seqlen_q"),
    [
        ((2, 2), 1),
        ((2, 2), 2),
        ((3, 1), 1),
        ((8, 2), 1),
        ((5, 1), 1),
        ((8, 1), 1),
        ((16, 1), 1),
        ((8, 2), 4),
        ((4, 4), 3),
    ],
    ids=str,
)
def test_rows_per_kv_head(dtype, heads, seqlen_q):
    run_check(dtype=dtype, heads=heads, seqlen_q=seqlen_q, causal=True, used=(131, 3, 0, 64))


# whole chunks, several at once, one at a time, and a remainder of 1 .. chunk - 1 elements; K and V differ
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "head_dims",
    [(1, 1), (16, 8), (40, 40), (59, 64), (64, 33), (80, 96), (128, 128), (192, 128), (256, 256), (576, 512)],
    ids=str,
)
def test_head_dims(dtype, head_dims):
    run_check(dtype=dtype, head_dims=head_dims, used=(70, 1), heads=(8, 2))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_narrow_tiles(rows, dtype):
    run_check(dtype=dtype, head_dims=(104, 200), used=(70, 1), heads=(2, 2), seqlen_q=rows)


@pytest.mark.parametrize("page_size", [None, 1, 5, 16, 64])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_and_pages(dtype, page_size, num_splits):
    run_check(
        dtype=dtype,
        page_size=page_size,
        num_splits=num_splits,
        used=(259, 0, 1, 64),
        heads=(8, 2),
        seqlen_q=2,
        causal=True,
        window_size=(100, -1),
        sinks=True,
        alibi="batch_heads",
        softcap=3.0,
    )


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_block_boundaries(offset):
    block = block_keys(128 * 4)
    run_check(head_dims=(128, 128), used=(block + offset, 2 * block + offset), heads=(4, 1))


def test_long_sums_keep_their_digits():
    """Equal weights: O is the mean of V. A sum key after key would be off by 6e-6."""
    n = 1 << 15
    v = np.random.default_rng(0).uniform(0.5, 1.5, (1, n, 1, 64)).astype(np.float32)
    q, k = np.zeros((1, 1, 4, 64), np.float32), np.ones_like(v)
    actual = gpu_ops.attention_decode(q, k, v, seqused_k=np.array([n], np.int32), num_splits=1, **CPU)
    mean = v[0, :, 0].mean(0, dtype=np.float64)
    np.testing.assert_allclose(actual[0, 0], np.broadcast_to(mean, (4, 64)), rtol=1.5e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_what_a_row_does_not_see_is_not_in_it(causal, value, num_splits):
    """Rows that see a bad key show it as the reference does; the other rows of the same tile are untouched."""
    (q, k, v), options = make(used=(90, 90), seqlen_q=4, heads=(8, 2))
    k, v = k.copy(), v.copy()
    k[0, 89, 0, 5] = value
    v[1, 88, 1, 3] = value
    options |= {"causal": causal, "window_size": (20, -1)}
    clean = make(used=(90, 90), seqlen_q=4, heads=(8, 2))[0]
    want = reference.attention_decode(q, k, v, **options, precision="float64")
    actual = gpu_ops.attention_decode(q, k, v, **options, num_splits=num_splits, **CPU)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(want))
    np.testing.assert_allclose(actual, want, rtol=1e-4, atol=1e-5)
    assert (~np.isfinite(want)).any()
    if causal:  # only the last query sees key 89, the last two see key 88
        expected = gpu_ops.attention_decode(*clean, **options, num_splits=num_splits, **CPU)
        np.testing.assert_array_equal(actual[0, :3], expected[0, :3])
        np.testing.assert_allclose(actual[1, :2], expected[1, :2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["heads first", "interleaved", "packed rows", "batch reversed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(layout, dtype):
    (q, k, v), options = make(used=(77, 50), heads=(8, 2), dtype=dtype, head_dims=(40, 40))
    expected = gpu_ops.attention_decode(q, k, v, **options, **CPU)
    if layout == "heads first":
        k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
    elif layout == "interleaved":
        both = np.stack([k, v], axis=3)
        k, v = both[:, :, :, 0], both[:, :, :, 1]
    elif layout == "packed rows":  # k, v and padding in one row: odd strides, nothing aligned
        row = np.concatenate([k, v, v[..., :1]], axis=3)
        k, v = row[..., :40], row[..., 40:80]
    else:
        k, v = (np.ascontiguousarray(x[::-1])[::-1] for x in (k, v))
    np.testing.assert_array_equal(gpu_ops.attention_decode(q, k, v, **options, **CPU), expected)


def test_when_it_serves():
    """The kernel serves few query rows with neither bias nor block mask; attention() of one query uses it too."""
    for heads, seqlen_q in ((16, 1), (4, 4), (1, 16)):
        assert select_config(1, heads, 1, seqlen_q, 100, decode=True).kernel == "decode"
        assert select_config(1, heads, 1, seqlen_q, 100).kernel == "tiled"
    assert select_config(1, DECODE_ROWS + 1, 1, 1, 100, decode=True).kernel == "tiled"
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 4, 64), dtype=np.float32) for n in (2, 300, 300))
    assert "decode kernel" in str(gpu_ops.explain("attention", q, k, v, causal=True, **CPU))
    bias = np.zeros((1, 300), np.float32)
    assert "decode kernel" not in str(gpu_ops.explain("attention", q, k, v, bias=bias, **CPU))
    with_bias = gpu_ops.attention(q, k, v, bias=bias, causal=True, **CPU)
    np.testing.assert_allclose(
        gpu_ops.attention(q, k, v, causal=True, **CPU), with_bias, rtol=1e-5, atol=1e-6
    )


def test_result_does_not_depend_on_the_batch_or_the_page_table():
    (q, k, v), options = make(used=(300, 120, 300), dtype="bfloat16", heads=(8, 2))
    whole = gpu_ops.attention_decode(q, k, v, **options, num_splits=2, **CPU)
    for b in range(3):
        single = gpu_ops.attention_decode(
            q[b : b + 1],
            k[b : b + 1],
            v[b : b + 1],
            seqused_k=options["seqused_k"][b : b + 1],
            num_splits=2,
            **CPU,
        )
        np.testing.assert_array_equal(single[0], whole[b])
