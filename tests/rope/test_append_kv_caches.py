"""The caches of rope_append_kv share memory with no other array, in a first call and in a later one."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import rope_append_kv
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import ShapeError


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("place", ["rows", "pages", "slots"])
def test_a_cache_is_no_other_array_in_any_call(place, cache):
    """Every array has the shape of a valid call, so that a later call differs only in addresses."""
    shape = (2, 4, 2, 8)
    arrays = {name: np.ones(shape, np.float32) for name in ("q", "k", "v", "k_cache", "v_cache", "out")}
    arrays |= {name: np.ones(8, np.float32) for name in ("q_weight", "k_weight")}
    arrays["positions"] = np.zeros(shape[:2], np.int32)
    if place == "slots":
        tokens = ("q", "k", "v", "out")
        arrays |= {name: arrays[name].reshape(8, 2, 8) for name in tokens}
        arrays |= {"slot_mapping": np.arange(8), "positions": np.zeros(8, np.int32)}
    else:
        arrays["seqused_k"] = np.zeros(2, np.int32)
    if place == "pages":
        arrays["block_table"] = np.array([[0], [1]], np.int32)
    whole = np.ones(shape, np.float32)
    for name, x in arrays.items():
        if name == cache:
            continue
        inside = whole.reshape(-1)[: x.nbytes // 4].view(x.dtype).reshape(x.shape)
        inside[...] = x
        inputs = arrays | {cache: whole, name: inside}
        for later in (False, True):
            forget_calls()
            if later:
                rope_append_kv(**{n: a.copy() for n, a in inputs.items()})
            before = {n: a.copy() for n, a in inputs.items()}
            with pytest.raises(ShapeError, match="shares memory with"):
                rope_append_kv(**inputs)
            assert all(a.tobytes() == before[n].tobytes() for n, a in inputs.items()), (name, later)
            if x.shape == shape and x.dtype == whole.dtype:
                with pytest.raises(ShapeError, match="shares memory with"):  # the very same array
                    rope_append_kv(**{**inputs, name: whole})
