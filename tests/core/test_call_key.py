"""Memory ranges of arrays in call keys: from the first byte to the last, for any strides."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.core.call_key import extent

X = np.zeros((4, 6, 8), np.float32)
VIEWS = {
    "whole": X,
    "slice": X[1:3, 2:, 3:7],
    "steps": X[::2, ::3, ::2],
    "reversed": X[::-1, :, ::-1],
    "reversed steps": X[3:0:-2, 1:, 6::-3],
    "transposed": X.T,
    "broadcast": np.broadcast_to(X[:, :1], X.shape),
    "0-d": X[1, 2, 3, ...],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_extent_is_from_the_first_byte_to_the_last(view):
    assert extent(view) == np.lib.array_utils.byte_bounds(view)


def test_an_empty_array_has_no_bytes():
    start, end = extent(X[1:1])
    assert start == end
