"""Arrays that attention accepts: strided, read-only, into ``out``, from several threads."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DeviceError
from tests.attention.cases import make

DEVICES = ("cpu", "emulator", "cuda")


# The host part, which the Numba twins share with the CUDA C++ kernels.
SHARED = (
    "test_calls_from_many_threads",
    "test_the_same_call_gives_the_same_bits",
)


def quick_on_emulator(raw):
    """Run each behaviour once; test_attention_pairwise crosses the options."""
    return {
        "test_misaligned_arrays": {"which": ["k", "out"] * raw},
        **({} if raw else dict.fromkeys(SHARED, None)),
    }


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_misaligned_arrays(which, backend):
    """CUDA C++ kernels copy 16 bytes at a time; the others take any address."""
    p = make(mask="causal", seqlens=(33, 65), head_dims=(16, 16), dtype="float16")
    arrays = dict(zip(("q", "k", "v"), p.arrays, strict=True))
    expected_out = gpu_ops.attention(**arrays, **p.options, backend="numba")
    arrays["out"] = np.full_like(expected_out, np.nan)
    padded = np.zeros((*arrays[which].shape[:3], 20), np.float16)
    padded[..., 3:19] = arrays[which]
    arrays[which] = padded
    if backend["device"] == "cuda":  # where a copy of a host array is aligned
        cupy = pytest.importorskip("cupy")
        arrays = {name: cupy.asarray(x) for name, x in arrays.items()}
    arrays[which] = arrays[which][..., 3:19]
    if backend["backend"] == "raw":
        message = f"raw: address and strides .* of {which} are not all multiples of 16 bytes"
        with pytest.raises(DeviceError, match=message):
            gpu_ops.attention(**arrays, **p.options, **backend)
        plan = str(gpu_ops.explain("attention", **arrays, **p.options, device=backend["device"]))
        assert re.search(f"backend numba \\(next choice\\).*not +{message}", plan, re.DOTALL)
        return
    out = gpu_ops.attention(**arrays, **p.options, **backend)
    np.testing.assert_allclose(out.astype(np.float32), expected_out.astype(np.float32), rtol=0, atol=2e-3)


def test_the_same_call_gives_the_same_bits(backend):
    p = make(mask="causal", seqlens=(200, 300), head_dims=(32, 32), dtype="bfloat16")
    first = gpu_ops.attention(*p.arrays, **p.options, **backend)
    for _ in range(3):
        np.testing.assert_array_equal(gpu_ops.attention(*p.arrays, **p.options, **backend), first)


def test_calls_from_many_threads(backend):
    small = {"seqlens": (33, 40), "batch": 1} if backend["device"] == "emulator" else {"seqlens": (90, 150)}
    settings = {"mask": "causal", "head_dims": (32, 32), "dtype": "float32", **small}
    problems = [make(**settings, seed=i) for i in range(2 if "batch" in small else 8)]
    alone = [gpu_ops.attention(*p.arrays, **p.options, **backend) for p in problems]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda p: gpu_ops.attention(*p.arrays, **p.options, **backend), problems * 4)
        )
    for out, expected_out in zip(together, alone * 4, strict=True):
        np.testing.assert_array_equal(out, expected_out)
