"""out_dtype and lse_dtype: unrounded results of attention, for parts that are merged."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DTypeError, OptionError
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16
from tests.attention.cases import DTYPES, make

DEVICES = ("cpu", "emulator", "cuda")
WIDE = {"out_dtype": np.float32, "lse_dtype": np.float64}


def quick_on_emulator(raw):
    """Numba kernels compile for seconds: whole rows and parts of them, once each."""
    if raw:
        return {"test_wide_results": {"form": ["dense", "split", "varlen"]}}
    return {
        "test_wide_results": {"form": ["dense"]},
        "test_no_digit_is_lost": {"seqlen_q": [1]},
    }


def call(form, p, **options):
    """Bind arrays and options; the result is a function of further options."""
    if form == "dense":
        return lambda **more: gpu_ops.attention(*p.arrays, causal=True, return_lse=True, **options, **more)
    if form == "varlen":
        starts = np.array([0, 30, 70], np.int32)
        arrays = (x[0] for x in p.arrays)
        q, k, v = arrays
        return lambda **more: gpu_ops.attention_varlen(
            q, k, v, starts, starts, return_lse=True, **options, **more
        )
    cached = {"seqused_k": np.array([66], np.int32), "num_splits": 2 if form == "split" else 1}
    return lambda **more: gpu_ops.attention_decode(
        p.q[:, :1], p.k, p.v, **cached, return_lse=True, **options, **more
    )


@pytest.mark.parametrize("form", ["dense", "decode", "split", "varlen"])
def test_wide_results(form, backend):
    """Wide results, once rounded, equal the default results."""
    dtype = "float16" if form == "varlen" else "bfloat16"
    p = make(seqlens=(70, 70), heads=(4, 2), head_dims=(32, 64), dtype=dtype, batch=1)
    attend = call(form, p, **backend)
    out, lse = attend()
    wide_out, wide_lse = attend(**WIDE)
    assert (wide_out.dtype, wide_lse.dtype) == (np.float32, np.float64)
    if backend["backend"] == "reference":  # rounds float64: once, or twice here
        np.testing.assert_allclose(wide_out, out, rtol=2**-8, atol=1e-7)
    else:
        np.testing.assert_array_equal(wide_out.astype(DTYPES[dtype]), out)
    np.testing.assert_allclose(wide_lse, lse, rtol=3e-7, atol=3e-7)
    buffers = np.empty_like(wide_out), np.empty_like(wide_lse)
    assert attend(**WIDE, out=buffers)[0] is buffers[0]
    np.testing.assert_array_equal(buffers[0], wide_out)
    np.testing.assert_array_equal(buffers[1], wide_lse)


@pytest.mark.parametrize("size", [4000.0, -16000.0])
@pytest.mark.parametrize("seqlen_q", [1, 33])
def test_no_digit_is_lost(seqlen_q, size, backend):
    """lse of n equal keys is lse of one key plus log n, whatever the size of the scores."""
    dtype = DTYPES["bfloat16"]
    q, k = np.zeros((1, seqlen_q, 1, 32), dtype), np.zeros((1, 200, 1, 32), dtype)
    q[..., 0], k[..., 0] = 64.0, size / 64
    lse = [
        gpu_ops.attention(q, k[:, :n], k[:, :n], softmax_scale=1.0, return_lse=True, **WIDE, **backend)[1]
        for n in (1, 200)
    ]
    np.testing.assert_allclose(lse[0], size, rtol=1e-6)
    np.testing.assert_allclose(lse[1] - lse[0], np.log(200), rtol=3e-7)


def test_a_row_that_sees_nothing(backend, rng):
    q = rng.standard_normal((1, 20, 1, 32)).astype(DTYPES["float16"])
    out, lse = gpu_ops.attention(q, q, q, causal=True, k_start=13, return_lse=True, **WIDE, **backend)
    assert not out[0, :13].any()
    assert (lse[0, 0, :13] == -np.inf).all()
    assert np.isfinite(lse[0, 0, 13:]).all()


@pytest.mark.parametrize(
    ("dtype", "options", "error", "message"),
    [
        (
            "bfloat16",
            {"out_dtype": np.float16},
            DTypeError,
            "out_dtype must be bfloat16 or float32 here, got <class",
        ),
        (
            "bfloat16",
            {"out_dtype": "float"},
            DTypeError,
            "out_dtype must be bfloat16 or float32 here, got 'float'",
        ),
        ("float64", {"out_dtype": np.float32}, DTypeError, "out_dtype must be float64 here"),
        ("float32", {"out_dtype": "single precision"}, DTypeError, "out_dtype must be float32 here"),
        (
            "float32",
            {"lse_dtype": np.float16, "return_lse": True},
            DTypeError,
            "lse_dtype must be float32 or float64",
        ),
        (
            "float32",
            {"lse_dtype": np.float64},
            OptionError,
            "lse_dtype is that of lse, which only return_lse=True",
        ),
    ],
)
def test_mistakes(dtype, options, error, message):
    q = np.ones((1, 3, 1, 8), DTYPES[dtype])
    for _ in range(2):  # the second call uses the cached first one
        with pytest.raises(error, match=message):
            gpu_ops.attention(q, q, q, **options)
        gpu_ops.attention(q, q, q)


def test_a_dtype_may_be_spelled_in_any_way():
    q = np.ones((1, 3, 1, 8), DTYPES["bfloat16"])
    for _ in range(2):
        for word in (np.float32, "float32", np.dtype("f4"), "f"):
            assert gpu_ops.attention(q, q, q, out_dtype=word).dtype == np.float32
        assert gpu_ops.attention(q, q, q, out_dtype=q.dtype).dtype == q.dtype
        with pytest.raises(DTypeError, match="out is bfloat16"):
            gpu_ops.attention(q, q, q, out_dtype=np.float32, out=np.empty_like(q))


@pytest.mark.skipif(not DOT_BFLOAT16, reason="a CPU without products of bfloat16 scales q, and rounds scores")
def test_tiles_are_rescaled_as_their_weights_are_rounded():
    """300 keys of one score, then 300 of the next: lse is that of one key and log(300 + 300 / e)."""
    q, k = np.zeros((1, 40, 16, 32), DTYPES["bfloat16"]), np.zeros((1, 600, 16, 32), DTYPES["bfloat16"])
    q[..., :2], k[..., 0], k[:, 300:, :, 1] = [128.0, 1.0], 125.0, 1.0
    last = k[:, -1:]
    _, lse = gpu_ops.attention(q, k, k, softmax_scale=1.0, return_lse=True, **WIDE, device="cpu")
    _, single = gpu_ops.attention(q, last, last, softmax_scale=1.0, return_lse=True, **WIDE, device="cpu")
    np.testing.assert_allclose(lse - single, np.log(300 + 300 / np.e), rtol=3e-6)
