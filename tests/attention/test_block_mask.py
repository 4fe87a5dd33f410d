"""Block masks on the CPU that hide some panels of a tile and show others, in any order."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask
from tests.support.compare import random

BLOCKS = [(32, 64), (48, 40), (128, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
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
