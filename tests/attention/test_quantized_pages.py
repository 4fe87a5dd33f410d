"""Pages of int8 and e4m3 on every backend: rope_append_kv writes and attention reads, against the reference."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import emulator
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DeviceError, DTypeError, OptionError, ShapeError
from gpu_ops.kernels.attention import forward as attention
from gpu_ops.kernels.attention.config import _TILES, ForwardTile, configs
from gpu_ops.reference.attention import forward as reference
from gpu_ops.reference.attention.quantized_pages import dequantize, quantize
from gpu_ops.reference.rope.rope_append_kv import rope_append_kv
from tests.attention.cases import DTYPES, assert_lse
from tests.attention.test_paged import make as make_paged
from tests.support.compare import assert_close

DEVICES = ("cpu", "emulator", "cuda")
CODES = {"int8": np.int8, "uint8": np.uint8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
# Rows of scale 1: numbers half-way between codes, of even and of odd lower neighbours, normal and subnormal.
E4M3_TIES = (448, 17, 19, -17, -19, 1.0625, 1.1875, *(n / 1024 for n in (1, 3, 5, 13, 15, -3, -5)))
TIES = {
    "int8": (127, 0.5, 1.5, 2.5, 126.5, -0.5, -1.5, -2.5),
    "uint8": E4M3_TIES,
    "float8_e4m3fn": E4M3_TIES,
}
MIXED = ((5, 90), (0, 7), (40, 60), (1, 1), (1, 130), (9, 0))


def quick_on_emulator(raw):
    """Numba compiles a kernel for most tests, seconds each; the CUDA C++ kernels take one second."""
    if raw:
        return {"test_attention": {"codes": ["int8", "uint8"], "lengths": [MIXED, ((3, 77), (3, 3))]}}
    return {
        "test_new_tokens": {"dtype": ["bfloat16"], "codes": ["uint8"], "norm": [True]},
        "test_attention": {"dtype": ["bfloat16"], "codes": ["int8"], "lengths": [MIXED]},
        "*": None,
    }


def new_tokens(dtype, codes, norm=True, head_dim=40):
    """Arguments of rope_append_kv for 7 tokens in pages of 4; one token is padding."""
    rng = np.random.default_rng(0)
    native = DTYPES[dtype]
    q = rng.standard_normal((7, 4, head_dim)).astype(native)
    k, v = rng.standard_normal((2, 7, 2, head_dim)).astype(native)
    v[0, 0], v[1, 1, 3], v[2, 0, 1] = 0, np.nan, -np.inf
    v[3] = (v[3] * 1e-3).astype(native)
    v[4, 0] = np.resize(TIES[codes], head_dim)
    pages, scales = np.zeros((2, 5, 4, 2, head_dim), CODES[codes]), np.full((2, 5, 4, 2), 7, np.float32)
    slots = rng.permutation(20)[:7]
    slots[-1] = -1
    options = {"slot_mapping": slots, "positions": rng.integers(0, 500, 7), "rotary_dim": 24}
    options |= {"k_scale": scales[0], "v_scale": scales[1]}
    if norm:
        options |= {name: rng.standard_normal(head_dim).astype(native) for name in ("q_weight", "k_weight")}
    return (q, k, v, *pages), options


# ---- the scheme --------------------------------------------------------------------------------------------


@given(st.sampled_from(["int8", "uint8"]), st.integers(0, 2**32 - 1), st.floats(-30, 30))
@settings(max_examples=60)
def test_error_of_an_element(codes, seed, exponent):
    rng = np.random.default_rng(seed)
    x = np.exp(rng.normal(exponent, 3, (5, 33))) * rng.choice([-1, 0, 1], (5, 33))
    x = x.astype(np.float32)
    quantized, scale = quantize(x, CODES[codes])
    error, scale = np.abs(dequantize(quantized, scale) - x), scale[:, None].astype(np.float64)
    bound = scale / 2 if codes == "int8" else np.maximum(np.abs(x) / 16, scale / 1024)
    assert (error <= bound * (1 + 1e-5)).all()  # x / scale is rounded to float32 first


def test_rows_without_a_scale():
    tiny = np.float32(1e-37)
    x = np.array([[0, 0], [-0.0, 0], [tiny, 0], [np.nan, 1], [1, np.inf]], np.float32)
    for codes in ("int8", "uint8"):
        quantized, scale = quantize(x, CODES[codes])
        np.testing.assert_array_equal(scale, [0, 0, 0, np.nan, np.nan])
        assert not quantized.any()


def test_numbers_of_e4m3_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(dequantize(codes[:, None], np.ones(256, np.float32))[:, 0], expected)


# ---- writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_new_tokens(dtype, codes, norm, backend):
    (q, k, v, *pages), options = new_tokens(dtype, codes, norm)
    written = [*pages, options["k_scale"], options["v_scale"]]
    before = [x.copy() for x in written]
    want_q, *expected = rope_append_kv(q, k, v, *pages, **options)
    got_q = gpu_ops.rope_append_kv(q, k, v, *pages, **options, **backend)
    kept = options["slot_mapping"][:-1]
    for x, then in zip(written, before, strict=True):
        untouched = np.ones(20, bool)
        untouched[kept] = False
        rows = (x.reshape(20, -1), then.reshape(20, -1))
        np.testing.assert_array_equal(*[row[untouched].view(np.uint8) for row in rows])
    np.testing.assert_allclose(
        got_q.astype(float), want_q.astype(float), atol=0.04 if dtype == "bfloat16" else 4e-3
    )
    np.testing.assert_array_equal(pages[1].view(np.uint8), expected[1].view(np.uint8))
    np.testing.assert_array_equal(options["v_scale"], expected[3])
    np.testing.assert_allclose(options["k_scale"], expected[2], rtol=2e-6)
    exact = rope_append_kv(q, k, v, *np.zeros((2, 5, 4, 2, 40)), precision="float64", **no_scales(options))[1]
    place = np.divmod(kept, 4)
    scale = options["k_scale"][place][..., None]
    error = np.abs(dequantize(pages[0], options["k_scale"])[place] - exact[place])
    bound = scale / 2 if codes == "int8" else np.maximum(np.abs(exact[place]) / 16, scale / 1024)
    assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize("codes", ["int8", "uint8"])
def test_ties_go_to_the_even_code(codes):
    (q, k, v, *pages), options = new_tokens("float32", codes, norm=False)
    gpu_ops.rope_append_kv(q, k, v, *pages, **options, device="cpu", backend="numba")
    row = (*np.divmod(options["slot_mapping"][4], 4), 0)
    x = np.resize(TIES[codes], 40)
    assert options["v_scale"][row] == 1
    even = np.rint(x) if codes == "int8" else x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert (pages[1][row].view(np.uint8)[np.abs(x) < 100] % 2 == 0).all()
    np.testing.assert_array_equal(dequantize(pages[1][row], np.float32(1)), even)


def no_scales(options):
    return {name: x for name, x in options.items() if name not in ("k_scale", "v_scale")}


# ---- reading -----------------------------------------------------------------------------------------------


def make(dtype, codes, lengths=MIXED, page_size=8, **settings):
    """Arguments of attention_varlen; scales of unused rows are NaN."""
    (q, k, v, cu), options = make_paged(lengths=lengths, page_size=page_size, dtype=dtype, **settings)
    (k, options["k_scale"]), (v, options["v_scale"]) = (quantize(x, CODES[codes]) for x in (k, v))
    return (q, k, v, cu), options


def check(backend, arrays, options):
    q, k, v, cu = arrays
    exact, naive = (
        reference.attention_varlen(*arrays, **options, return_lse=True, precision=precision)
        for precision in ("float64", "naive")
    )
    out, lse = gpu_ops.attention_varlen(*arrays, **options, return_lse=True, **backend)
    assert out.dtype == q.dtype
    assert_close(out, exact[0], naive[0], q.dtype)
    assert_lse(lse, exact[1], q.dtype, options.get("softcap"))
    queries = np.diff(cu)
    if len(set(queries.tolist())) == 1:
        batch = q.reshape(len(queries), queries[0], *q.shape[1:])
        out = gpu_ops.attention_decode(batch, k, v, **options, **backend)
        assert_close(out.reshape(exact[0].shape), exact[0], naive[0], q.dtype)


def test_the_reference_is_attention_over_the_numbers():
    (q, k, v, cu), options = make("float32", "uint8", causal=True)
    actual = reference.attention_varlen(q, k, v, cu, **options, precision="float64")
    numbers = [dequantize(x, scale) for x, scale in ((k, options["k_scale"]), (v, options["v_scale"]))]
    expected = reference.attention_varlen(q, *numbers, cu, **no_scales(options), precision="float64")
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("lengths", [MIXED, ((1, 300), (1, 17), (1, 0)), ((3, 77), (3, 3))], ids=str)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention(dtype, codes, lengths, backend):
    check(backend, *make(dtype, codes, lengths, causal=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"heads": (4, 1), "head_dims": (128, 128), "lengths": ((1, 700), (1, 64))},
        {"heads": (3, 3), "head_dims": (24, 8), "window_size": (20, 0), "page_size": 7},
        {"softcap": 2.0, "sinks": True, "alibi": "batch_heads", "page_size": 1},
        {"lengths": ()},
        {"lengths": ((4, 0), (0, 0))},
    ],
    ids=str,
)
def test_options(settings, backend):
    check(backend, *make("float32", "uint8", **settings))


def test_a_head_that_is_nan_shows_where_it_is_seen(backend):
    (q, k, v, cu), options = make("float32", "int8", lengths=((3, 40), (40, 50), (1, 9)), causal=True)
    table = options["block_table"]
    options["v_scale"][table[0, 39 // 8], 39 % 8, 0] = np.nan  # the last query of the first sequence sees it
    options["k_scale"][table[1, 49 // 8], 49 % 8, 1] = np.nan
    options["v_scale"][table[2, 0], 3, 0] = np.nan
    out = gpu_ops.attention_varlen(q, k, v, cu, **options, **backend)
    assert np.argwhere(np.isnan(out).all(axis=2)).tolist() == [
        [2, 0],
        [2, 1],
        [42, 2],
        [42, 3],
        [43, 0],
        [43, 1],
    ]
    assert np.isnan(out).sum() == 6 * out.shape[2]


def test_a_code_of_e4m3_that_is_nan(backend):
    (q, k, v, cu), options = make("float32", "uint8", lengths=((2, 40),), causal=True)
    v[options["block_table"][0, 39 // 8], 39 % 8, 0, 5] = 0xFF
    out = gpu_ops.attention_varlen(q, k, v, cu, **options, **backend)
    assert np.argwhere(np.isnan(out)).tolist() == [[1, 0, 5], [1, 1, 5]]


# ---- refusals ----------------------------------------------------------------------------------------------


def decode(**changes):
    (q, k, v, _), options = make("float32", "int8", lengths=((1, 9), (1, 3)))
    arrays = {"q": q[:, None], "k_cache": k, "v_cache": v, **options, **changes}
    return gpu_ops.attention_decode(**{name: x for name, x in arrays.items() if x is not None})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_scale": None}, OptionError, "k_cache is int8 and k_scale is missing"),
        ({"k_scale": None, "v_scale": None}, OptionError, "pass k_scale= and v_scale="),
        (
            {"block_table": None}
            | {name: np.zeros((2, 16, 2, 32), np.int8) for name in ("k_cache", "v_cache")},
            OptionError,
            "a quantized cache lies in pages: pass block_table=",
        ),
        ({"v_cache": np.zeros((6, 8, 2, 32), np.uint8)}, DTypeError, "v_cache is uint8 but k_cache is int8"),
        (
            {"v_cache": np.zeros((6, 8, 2, 32), np.float32)},
            DTypeError,
            "v_cache is float32 but k_cache is int8",
        ),
        ({"k_scale": np.ones((6, 8, 2))}, DTypeError, "k_scale is float64, expected float32"),
        ({"v_scale": np.ones((6, 8, 3), np.float32)}, ShapeError, "nheads_kv is 3 here but 2"),
        ({"q": np.zeros((2, 1, 4, 32))}, DTypeError, "q is float64, and quantized pages take"),
        ({"q": np.zeros((2, 1, 4, 32), np.int8)}, DTypeError, "q is int8; allowed"),
    ],
)
def test_mistakes(changes, error, message):
    for _ in range(2):
        with pytest.raises(error, match=message.replace("(", r"\(")):
            decode(**changes)


def test_scales_of_pages_that_are_not_quantized():
    (q, k, v, cu), options = make_paged(lengths=((1, 9),))
    scale = np.ones(k.shape[:3], np.float32)
    with pytest.raises(
        OptionError, match="k_scale is for pages of int8, float8_e4m3fn, uint8, and k is float32"
    ):
        gpu_ops.attention_varlen(q, k, v, cu, **options, k_scale=scale, v_scale=scale)


def test_mistakes_of_new_tokens():
    (*arrays,), options = new_tokens("float32", "int8")
    scale = options["k_scale"]
    frozen = scale.copy()
    frozen.flags.writeable = False
    for _ in range(2):
        with pytest.raises(OptionError, match="v_scale is missing"):
            gpu_ops.rope_append_kv(*arrays, **{**options, "v_scale": None})
        with pytest.raises(ShapeError, match="v_scale shares memory with k_scale"):
            gpu_ops.rope_append_kv(*arrays, **{**options, "v_scale": scale})
        with pytest.raises(ShapeError, match="k_scale is read-only"):
            gpu_ops.rope_append_kv(*arrays, **{**options, "k_scale": frozen})
    rows = {"seqused_k": np.zeros(1, np.int32), **{name: options[name] for name in ("k_scale", "v_scale")}}
    with pytest.raises(OptionError, match="lies in pages"):
        gpu_ops.rope_append_kv(*[x[None, :4] for x in arrays[:3]], *[x[:1] for x in arrays[3:]], **rows)
    assert not arrays[3].any()
    assert (scale == 7).all()


# CUDA C++ kernels over quantized pages: tiles, every code, special numbers, bytes read.

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


# ---- every code --------------------------------------------------------------------------------------------


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


# ---- special numbers ---------------------------------------------------------------------------------------


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


# ---- what they read and take -------------------------------------------------------------------------------


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
