"""Attention needs memory for its inputs and outputs, never for a seqlen x seqlen array."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import python

LIMIT = 64 << 20

# Runs in a separate process, so that nothing else changes the peak. Kernels load before the measurement.
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import gpu_ops

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024

def call(seqlen):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, seqlen, 1, 64), dtype=np.float32)
    options = dict(causal=sys.argv[2] == "causal", device="cpu", backend="numba")
    if sys.argv[1] == "backward":
        out, lse = gpu_ops.attention(q, k, v, return_lse=True, **options)
        run = lambda: gpu_ops.attention_backward(dout, q, k, v, out, lse, **options)
    else:
        run = lambda: gpu_ops.attention(q, k, v, return_lse=True, **options)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    except OSError:
        pass
    before = max(status("VmRSS"), status("VmHWM"))
    results = run()
    return status("VmHWM") - before - sum(x.nbytes for x in results)

call(256)
print(call(16384))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc (Linux)")
@pytest.mark.parametrize("mask", [pytest.param("full", marks=pytest.mark.slow), "causal"])
@pytest.mark.parametrize(("direction", "threads"), [("forward", None), ("backward", None), ("backward", 32)])
def test_seqlen_16384_fits_in_64_megabytes(direction, threads, mask):
    variables = {} if threads is None else {"NUMBA_NUM_THREADS": str(threads)}
    grown = int(python("-c", SCRIPT, direction, mask, **variables))
    assert grown < LIMIT, f"{direction} grew by {grown / 2**20:.1f} MiB beyond its inputs and results"
