"""Packing and unpacking of CUDA arrays, on the fake CuPy."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import ternary_pack, ternary_unpack
from gpu_ops.errors import FormatError
from gpu_ops.reference.weights import ternary as reference
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray


def message(call):
    with pytest.raises(FormatError) as caught:
        call()
    return str(caught.value)


@needs_nvrtc
def test_arrays_on_a_gpu(cupy, rng):
    t = rng.integers(-1, 2, (4, 256)).astype(np.int8)
    for name in ("w2", "q2_0"):
        packed = ternary_pack(FakeArray(t, 1), name)
        assert isinstance(packed, FakeArray)
        assert packed.device.id == 1
        assert packed.host.tobytes() == reference.ternary_pack(t, name).tobytes()
        back = ternary_unpack(packed, t.shape, name)
        assert isinstance(back, FakeArray)
        np.testing.assert_array_equal(back.host, t)
    names = ("[FORMAT=kW2]", "_blocks[FORMAT=kQ2]")
    launched = [(f"ternary_{way}{kernel}", 1) for kernel in names for way in ("pack", "unpack")]
    assert [launch[:2] for launch in cupy.launched] == launched
    np.testing.assert_array_equal(ternary_pack(t, "w2", device="cuda"), reference.ternary_pack(t, "w2"))
    expected = reference.ternary_pack(t, "tq2_0", scale=(scale := np.array([0.5, 1, 2, 4], np.float32)))
    np.testing.assert_array_equal(ternary_pack(FakeArray(t), "tq2_0", scale=FakeArray(scale)).host, expected)
    np.testing.assert_array_equal(ternary_pack(t, "tq2_0", scale=scale, device="cuda"), expected)
    t[3, 200] = 5
    for name in ("w2", "q2_0"):
        assert "trits[3, 200] is 5" in message(lambda name=name: ternary_pack(FakeArray(t), name))
        assert "trits[3, 200] is 5" in message(lambda name=name: ternary_pack(t, name, device="cuda"))
