"""CUDA C++ kernels over quantized pages: tiles, every code, special numbers, bytes read."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DeviceError
from gpu_ops.kernels.attention import forward as attention
from gpu_ops.kernels.attention.config import _TILES, ForwardTile, configs
from gpu_ops.reference.attention.quantized_pages import dequantize
from tests.attention.cases import DTYPES
from tests.attention.test_quantized_pages import CODES, check, make, new_tokens

pytest.importorskip("cuda.core")

FLOATS = ("float32", "bfloat16", "float16")
RAW = {"device": "emulator", "backend": "raw"}
QUICK = ForwardTile(128, 64, 4), ForwardTile(64, 16, 4), ForwardTile(16, 32, 1, 2)
LEGAL = [
    pytest.param(t, id=f"{t.block_m}x{t.block_n}", marks=[pytest.mark.slow] * (t not in QUICK))
    for t in _TILES
    if not t.one_k  # quantized keys have one buffer anyway
]


@pytest.fixture
def only(monkeypatch):
    """Restrict calls to one tile, over whole sequences or parts of them."""

    def take(tile, num_splits=1):
        def choose(builder, space, problem, device):
            parts = replace(problem, num_splits=num_splits)
            return next(config for _, config in configs(parts, device) if config.tile == tile)

        monkeypatch.setattr(attention, "choose", choose)
        forget_calls()

    yield take
    forget_calls()


@pytest.mark.parametrize("tile", LEGAL)
def test_tiles(tile, only):
    only(tile)
    rows = tile.block_m // 2 if tile.warps_n > 1 else 40
    lengths = ((rows, 2 * tile.block_n + 5), (1, 1), (0, 3))
    check(RAW, *make("bfloat16", "int8", lengths, heads=(2, 1), head_dims=(32, 32), causal=True))


@pytest.mark.parametrize(("dtype", "head_dims"), [("float16", (40, 264)), ("float32", (24, 200))], ids=str)
def test_blocks_that_share_the_values(dtype, head_dims):
    check(RAW, *make(dtype, "uint8", ((5, 70), (1, 3)), heads=(2, 1), head_dims=head_dims, causal=True))


@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("codes", ["int8", "uint8"])
def test_parts_of_the_keys(codes, page_size, only):
    """Tiles within one page, and tiles that span several."""
    only(ForwardTile(16, 64, 1, 4), num_splits=3)
    lengths = ((1, 450), (1, 64), (1, 0))
    check(RAW, *make("float16", codes, lengths, page_size, head_dims=(128, 128)))


# ---- every code ------------------------------------------------------------------------------------------------


def every_code(codes, scale):
    """One key in one page, whose elements are all codes: (1, 1, 1, 256), and its scale."""
    pages = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256).view(CODES[codes])
    return pages, np.full((1, 1, 1), scale, np.float32)


def one_key(q, pages, scale):
    return gpu_ops.attention_decode(
        q,
        *pages,
        seqused_k=np.array([1], np.int32),
        block_table=np.zeros((1, 1), np.int32),
        k_scale=scale[0],
        v_scale=scale[1],
        softmax_scale=1.0,
        return_lse=True,
        **RAW,
    )


@pytest.mark.parametrize("codes", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_that_sees_one_key_returns_its_value(dtype, codes):
    pages, scale = every_code(codes, 0.0123)
    plain = np.zeros((1, 1, 1, 256), CODES[codes])
    out, _ = one_key(np.ones((1, 1, 1, 256), DTYPES[dtype]), (plain, pages), (scale, scale))
    expected = (dequantize(pages, np.ones((1, 1, 1))).astype(np.float32) * scale[0]).astype(DTYPES[dtype])
    lost = 2**-22 if dtype == "float32" else 0  # 3 x TF32
    np.testing.assert_allclose(out[0, 0, 0].astype(float), expected[0, 0, 0].astype(float), rtol=lost, atol=0)


@pytest.mark.parametrize("codes", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_of_every_code_are_exact(dtype, codes):
    """Query i picks element i of the only key; its lse is that score."""
    pages, scale = every_code(codes, 0.0123)
    numbers = dequantize(pages, np.ones((1, 1, 1)))[0, 0, 0]
    if codes == "uint8":  # a NaN among the keys is one for all queries
        pages[0, 0, 0, np.isnan(numbers)] = 0
        numbers = dequantize(pages, np.ones((1, 1, 1)))[0, 0, 0]
    q = np.eye(256)[None, :, None].astype(DTYPES[dtype])
    _, lse = one_key(q, (pages, np.zeros_like(pages)), (scale, scale))
    np.testing.assert_allclose(lse[0, 0], numbers * float(scale[0, 0, 0]), rtol=4e-7)


# ---- special numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_scale_that_is_nan_shows_where_it_is_seen(dtype):
    (q, k, v, cu), options = make(dtype, "int8", lengths=((3, 40), (40, 50), (1, 9)), causal=True)
    table = options["block_table"]
    options["v_scale"][table[0, 39 // 8], 39 % 8, 0] = np.nan  # the last query of the first sequence sees it
    options["k_scale"][table[1, 49 // 8], 49 % 8, 1] = np.nan
    out = gpu_ops.attention_varlen(q, k, v, cu, **options, **RAW)
    assert np.argwhere(np.isnan(out).all(axis=2)).tolist() == [[2, 0], [2, 1], [42, 2], [42, 3]]
    assert np.isnan(out).sum() == 4 * out.shape[2]


@pytest.mark.parametrize("where", ["k", "v"])
def test_a_code_that_is_nan_shows_where_it_is_seen(where):
    (q, k, v, cu), options = make("bfloat16", "uint8", lengths=((2, 40),), causal=True)
    pages = {"k": k, "v": v}[where]
    pages[options["block_table"][0, 39 // 8], 39 % 8, 0, 5] = 0xFF
    out = gpu_ops.attention_varlen(q, k, v, cu, **options, **RAW)
    columns = range(out.shape[2]) if where == "k" else [5]
    assert np.argwhere(np.isnan(out)).tolist() == [[1, head, c] for head in (0, 1) for c in columns]


def test_a_value_beyond_float16_is_infinite():
    (q, k, v, cu), options = make("float16", "int8", lengths=((2, 40),), causal=True)
    page = options["block_table"][0, 39 // 8], 39 % 8
    v[page][0] = 0
    v[page][0, 5] = 100
    options["v_scale"][page][0] = 1000
    out = gpu_ops.attention_varlen(q, k, v, cu, **options, **RAW)
    assert np.argwhere(np.isinf(out)).tolist() == [[1, 0, 5], [1, 1, 5]]
    assert not np.isnan(out).any()


# ---- what they read and take -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 64])
def test_decoding_reads_a_byte_per_element(page_size):
    """Each byte is read once, although the scales of unused rows are NaN."""
    (q, k, v, _), options = make(
        "bfloat16", "uint8", ((1, 400),), page_size, heads=(4, 2), head_dims=(64, 64)
    )
    with emulator.record() as profiles:
        gpu_ops.attention_decode(q[None], k, v, **options, num_splits=1, **RAW)
    read = {b.name: b.bytes_read for b in profiles[0].buffers}
    assert read["k_cache"] == read["v_cache"] == 400 * 2 * 64


def test_pages_that_are_not_aligned():
    (q, k, v, cu), options = make("bfloat16", "int8")
    room = np.zeros(k.size + 4, np.int8)
    odd = room[4:].reshape(k.shape) if room.ctypes.data % 8 == 0 else room[:-4].reshape(k.shape)
    with pytest.raises(
        DeviceError, match=r"raw: address and strides .* of k are not all multiples of 8 bytes"
    ):
        gpu_ops.attention_varlen(q, odd, v, cu, **options, **RAW)


@pytest.mark.parametrize("head_dim", [40, 41])
def test_new_tokens_in_pages_that_are_not_aligned(head_dim):
    """Codes are stored one by one: the bits are those of aligned pages."""
    (q, k, v, *_), options = new_tokens("bfloat16", "uint8", head_dim=head_dim)
    results = []
    for skip in (0, 1):
        pages = [
            np.zeros(5 * 4 * 2 * head_dim + skip, np.uint8)[skip:].reshape(5, 4, 2, head_dim) for _ in "kv"
        ]
        scales = {name: np.zeros((5, 4, 2), np.float32) for name in ("k_scale", "v_scale")}
        gpu_ops.rope_append_kv(q, k, v, *pages, **options | scales, **RAW)
        results.append([*pages, *scales.values()])
    for aligned, odd in zip(*results, strict=True):
        np.testing.assert_array_equal(aligned, odd)
    assert ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max == 448
    assert (results[0][1] & 0x7F).max() == 0x7E  # the largest element of a head is 448 times its scale
