"""RoPE of arrays on a device: synchronisation, copies and widening. CuPy is a fake; see fake_cupy.py."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import RopeScaling, rope
from gpu_ops.errors import DeviceError, OptionError
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

RAW = {"device": "emulator", "backend": "raw"}


@pytest.fixture
def problem(rng):
    q, k = random(rng, (2, 7, 4, 32), np.float16), random(rng, (2, 7, 1, 32), np.float16)
    return q, k, rng.integers(0, 5000, (2, 7))


@needs_nvrtc
@pytest.mark.parametrize("dtype", [np.int32, np.int64, None], ids=["int32", "int64", "none"])
def test_positions_on_the_device_are_not_waited_for(cupy, problem, dtype, monkeypatch):
    q, k, positions = problem
    waited, asarray = [], cupy.asarray
    monkeypatch.setattr(cupy, "asarray", lambda x, blocking: waited.append(blocking) or asarray(x, blocking))
    positions = None if dtype is None else positions.astype(dtype)
    expected = rope(q, k, positions=positions, **RAW)
    device_positions = None if dtype is None else FakeArray(positions)
    out = FakeArray(np.empty_like(q)), FakeArray(np.empty_like(k))
    for _ in range(3):
        actual = rope(FakeArray(q), FakeArray(k), positions=device_positions, backend="raw", out=out)
        for g, o, w in zip(actual, out, expected, strict=True):
            assert g is o
            np.testing.assert_array_equal(g.host, w)
    assert len(cupy.launched) == 3
    assert waited == [True], "the frequencies are copied once"
    assert ("copy to the host", 0) not in cupy.waits


@needs_nvrtc
def test_positions_of_other_integers_are_widened_on_the_device(cupy, problem):
    q, k, positions = problem
    for dtype in (np.uint8, np.int16):
        device_positions = FakeArray(positions.astype(dtype))
        expected = rope(q, k, positions=positions.astype(dtype), **RAW)
        for _ in range(2):
            actual = rope(FakeArray(q), FakeArray(k), positions=device_positions, backend="raw")
            for g, w in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(g.host, w)


@needs_nvrtc
def test_a_number_on_the_device_is_read_and_checked_every_time(cupy, problem):
    q, k, _ = problem
    for scaling in (None, RopeScaling.dynamic(2.0, 64)):
        for first in (3, 0, np.int32(90), 100):
            expected = rope(q, k, positions=first, scaling=scaling, seqlen=int(first) + 7, **RAW)
            actual = rope(FakeArray(q), FakeArray(k), positions=first, scaling=scaling, backend="raw")
            for g, w in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(g.host, w)
        with pytest.raises(OptionError, match=r"2\*\*53"):
            rope(FakeArray(q), FakeArray(k), positions=2**60, scaling=scaling, backend="raw")


@needs_nvrtc
def test_scalings_that_go_by_the_length(cupy, problem):
    q, k, positions = problem
    dynamic = RopeScaling.dynamic(2.0, 64)
    expected = rope(q, k, positions=positions, scaling=dynamic, seqlen=5000, **RAW)
    device_arrays, device_positions = (FakeArray(q), FakeArray(k)), FakeArray(positions)
    actual = rope(*device_arrays, positions=device_positions, scaling=dynamic, seqlen=5000)
    np.testing.assert_array_equal(actual[0].host, expected[0])
    assert ("copy to the host", 0) not in cupy.waits
    reached = rope(*device_arrays, positions=device_positions, scaling=dynamic)  # their largest decides
    assert ("copy to the host", 0) in cupy.waits
    with cupy.capture(), pytest.raises(DeviceError, match=r"largest position.*pass seqlen="):
        rope(*device_arrays, positions=device_positions, scaling=dynamic, out=device_arrays)
    np.testing.assert_array_equal(reached[0].host, rope(q, k, positions=positions, scaling=dynamic, **RAW)[0])
    np.testing.assert_array_equal(  # needs no copy to the host where positions count up
        rope(*device_arrays, positions=100, scaling=dynamic)[1].host,
        rope(q, k, positions=100, scaling=dynamic, **RAW)[1],
    )


@needs_nvrtc
@pytest.mark.parametrize("in_place", [False, True])
def test_numpy_arrays_are_copied_there_and_back(cupy, problem, in_place):
    q, k, positions = problem
    expected = rope(q, k, positions=positions, **RAW)
    out = (q, k) if in_place else (np.empty_like(q), np.empty_like(k))
    actual = rope(q, k, positions=positions, device="cuda", backend="raw", out=out)
    for g, o, w in zip(actual, out, expected, strict=True):
        assert g is o
        np.testing.assert_array_equal(o, w)


@needs_nvrtc
def test_results_of_host_arrays_lie_in_memory_as_the_inputs(cupy, rng):
    """Results of host arrays computed on the GPU are copied back with the memory layout of the inputs."""
    q = rng.standard_normal((2, 9, 4, 16)).astype(np.float32)
    turned = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    on_cpu = rope(turned)
    on_gpu = rope(turned, device="cuda")
    assert on_gpu.strides == on_cpu.strides == turned.strides
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=0, atol=1e-6)
