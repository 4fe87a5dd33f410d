"""Complete flash-attention kernel on tensor cores, written like production kernels."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import emulator
from gpu_ops.errors import GpuOpsError
from tests.support.cards import slow
from tests.support.compare import random

SOURCE = (Path(__file__).with_name("flash.cu")).read_text(encoding="utf-8")
BF16 = ml_dtypes.bfloat16

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")


def attention(q, k, v, out, source=SOURCE, arch="sm_80"):
    """Run the kernel for ``out = softmax(q k^T / 8) v``, 128 threads per 64 rows of q."""
    scale = np.float32(np.log2(np.e) / 8)
    emulator.launch(source, "flash", len(q) // 64, 128, (q, k, v, out, len(k), scale), arch=arch)


def exact(q, k, v):
    scores = q.astype(np.float64) @ k.astype(np.float64).T / 8
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p @ v.astype(np.float64) / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", *slow("sm_86", "sm_90", "sm_120")])
def test_it_is_attention(rng, arch):
    q, k, v = (random(rng, (n, 64), BF16) for n in (512, 192, 192))
    out = np.empty_like(q)
    attention(q, k, v, emulator.Buffer(out, "out", written=False), arch=arch)
    # P and the result are rounded to bfloat16: two half units of 2^-8, for values below 4.
    np.testing.assert_allclose(out.astype(np.float64), exact(q, k, v), atol=2 * 2**-9 * 4, rtol=0)


# Lines that are easy to forget.
FAULTS = {
    "the barrier before tiles are overwritten": (
        "        __syncthreads();  // everybody is done with the last tiles\n",
        "shared-memory race",
    ),
    "the wait for the tiles": (
        '        copy_tile(s.v, v + start * D);\n        asm volatile("cp.async.wait_group 0;");\n',
        "asynchronous copy not waited for",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_line_is_missing(rng, what):
    line, message = FAULTS[what]
    assert SOURCE.count(line) == 1
    kept = line.splitlines(keepends=True)[0] if "wait" in what else ""
    q, k, v = (random(rng, (128, 64), BF16) for _ in range(3))
    with pytest.raises(GpuOpsError, match=message):
        attention(q, k, v, np.zeros_like(q), SOURCE.replace(line, kept))
