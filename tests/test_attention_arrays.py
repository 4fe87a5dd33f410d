"""attention takes arrays as they come: strided, read-only, into ``out``, from several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpu_ops
from tests.attention_cases import DTYPES, expected, make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_views(dtype, backend):
    e = expected(mask="causal", seqlens=(60, 90), head_dims=(32, 32), heads=(4, 2), dtype=dtype)
    p = e.problem

    def strided(x):  # every second entry of a wider array on all axes
        wide = np.full([2 * n for n in x.shape], np.nan, x.dtype)
        wide[::2, ::2, ::2, ::2] = x
        return wide[::2, ::2, ::2, ::2]

    def packed(x):  # one slice of an array that holds q, k and v side by side
        wide = np.full((*x.shape[:2], 3, *x.shape[2:]), np.nan, x.dtype)
        wide[:, :, 1] = x
        return wide[:, :, 1]

    def backwards(x):
        return np.ascontiguousarray(x[:, ::-1])[:, ::-1]

    for view in (strided, packed, backwards):
        e.check("out", gpu_ops.attention(*(view(x) for x in p.arrays), **p.options, **backend))


def test_strided_options(backend):
    settings = {
        "seqlens": (60, 90),
        "sinks": True,
        "alibi": "batch_heads",
        "bias": "full",
        "dtype": "float32",
    }
    e = expected(**settings, head_dims=(16, 16))
    options = dict(e.problem.options)
    for name in ("sinks", "alibi_slopes", "bias"):
        options[name] = np.repeat(options[name], 2, axis=-1)[..., ::2]
    e.check("out", gpu_ops.attention(*e.problem.arrays, **options, **backend))


def test_inputs_are_left_alone_and_may_be_read_only(backend):
    p = make(mask="causal", seqlens=(33, 65), sinks=True, bias="full", alibi="heads", dtype="float32")
    options = [x for x in p.options.values() if isinstance(x, np.ndarray)]
    before = [x.copy() for x in (*p.arrays, *options)]
    for x in (*p.arrays, *options):
        x.flags.writeable = False
    gpu_ops.attention(*p.arrays, **p.options, **backend)
    for x, y in zip((*p.arrays, *options), before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out(dtype, layout, backend):
    p = make(mask="causal", seqlens=(33, 65), head_dims=(16, 8), dtype=dtype, layout=layout)
    fresh = gpu_ops.attention(*p.arrays, **p.options, **backend)
    wide = np.full((*p.dout.shape[:3], 20), 7, p.q.dtype)
    for given in (np.full_like(p.dout, np.nan), wide[..., 5:13]):
        assert gpu_ops.attention(*p.arrays, **p.options, out=given, **backend) is given
        np.testing.assert_array_equal(given, fresh)
    assert (wide[..., :5] == 7).all()
    assert (wide[..., 13:] == 7).all()


def test_the_same_call_gives_the_same_bits(backend):
    p = make(mask="causal", seqlens=(200, 300), head_dims=(32, 32), dtype="bfloat16")
    first = gpu_ops.attention(*p.arrays, **p.options, **backend)
    for _ in range(3):
        np.testing.assert_array_equal(gpu_ops.attention(*p.arrays, **p.options, **backend), first)


def test_calls_from_many_threads(backend):
    problems = [make(mask="causal", seqlens=(90 + i, 150), head_dims=(32, 32), seed=i) for i in range(8)]
    alone = [gpu_ops.attention(*p.arrays, **p.options, **backend) for p in problems]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda p: gpu_ops.attention(*p.arrays, **p.options, **backend), problems * 4)
        )
    for out, expected_out in zip(together, alone * 4, strict=True):
        np.testing.assert_array_equal(out, expected_out)
