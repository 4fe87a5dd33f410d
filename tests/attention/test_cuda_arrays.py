"""attention of CUDA arrays: device memory is not read on the host, out is filled in place.

CuPy is a fake that refuses conversion to NumPy, and the kernels run on the emulator; see fake_cupy.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask
from tests.attention import test_decode as decode
from tests.attention import test_paged as paged
from tests.attention import test_varlen as varlen
from tests.attention.cases import make
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

pytestmark = needs_nvrtc


def on_device(x):
    if isinstance(x, BlockMask):
        return BlockMask(FakeArray(x.visible), x.block_q, x.block_k)
    return FakeArray(x.copy()) if isinstance(x, np.ndarray) else x


def check(op, arrays, options, bounds=None):
    """Check results against NumPy arrays on the emulator, which take the same path."""
    expected, expected_lse = op(*arrays, **options, return_lse=True, device="emulator", backend="raw")
    device_arrays, device_options = (
        [on_device(x) for x in arrays],
        {n: on_device(x) for n, x in options.items()},
    )
    actual, lse = op(*device_arrays, **device_options, **(bounds or {}), return_lse=True, backend="raw")
    np.testing.assert_allclose(actual.host.astype(np.float32), expected.astype(np.float32), rtol=0, atol=2e-3)
    np.testing.assert_allclose(lse.host, expected_lse, rtol=0, atol=1e-5)
    out = FakeArray(np.full_like(expected, np.nan))
    assert op(*device_arrays, **device_options, **(bounds or {}), out=out, backend="raw") is out
    assert out.host.tobytes() == actual.host.tobytes()


def test_dense(cupy):
    p = make(
        seqlens=(37, 70),
        head_dims=(40, 24),
        heads=(4, 2),
        dtype="bfloat16",
        mask="causal",
        layout="bhsd",
        sinks=True,
        alibi="batch_heads",
        bias="keys",
        block_mask="each",
        blocks=(16, 32),
    )
    check(gpu_ops.attention, p.arrays, p.options)
    assert len(cupy.launched) == 2


@pytest.mark.parametrize("bounded", [True, False])
def test_sequences_whose_lengths_lie_on_the_device(cupy, bounded):
    (_, *arrays), offsets, options, longest = varlen.make(dtype="float16", causal=True, alibi="heads")
    check(gpu_ops.attention_varlen, (*arrays, *offsets), options, longest if bounded else {})


@pytest.mark.parametrize("bounded", [True, False])
def test_pages_of_sequences_whose_lengths_lie_on_the_device(cupy, bounded):
    arrays, options = paged.make(dtype="float16", causal=True)
    bounds = {"max_seqlen_q": 70, "max_seqlen_k": 200} if bounded else {}
    check(gpu_ops.attention_varlen, arrays, options, bounds)


@pytest.mark.parametrize("page_size", [None, 16])
def test_caches_whose_lengths_lie_on_the_device(cupy, page_size):
    arrays, options = decode.make(used=(300, 0, 65), page_size=page_size, dtype="float16", sinks=True)
    check(gpu_ops.attention_decode, arrays, options)


def test_numpy_arrays_and_their_block_mask_are_copied_there_and_back(cupy):
    p = make(seqlens=(37, 70), head_dims=(32, 32), dtype="float16", block_mask="shared", blocks=(16, 32))
    actual = gpu_ops.attention(*p.arrays, **p.options, device="cuda", backend="raw")
    expected = gpu_ops.attention(*p.arrays, **p.options, device="emulator", backend="raw")
    assert actual.tobytes() == expected.tobytes()
