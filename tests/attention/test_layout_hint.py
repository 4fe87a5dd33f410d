"""A swapped layout of attention: ``explain`` and the error of head counts name the other one."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import ShapeError

HINTS = {
    "bshd": "for arrays (batch, heads, seqlen, head_dim) pass layout='bhsd'",
    "bhsd": "for arrays (batch, seqlen, heads, head_dim) pass layout='bshd'",
}


def arrays(seqlen_q, nheads, seqlen_k, nheads_kv, layout):
    """q, k and v of a layout."""
    q, k = np.ones((1, seqlen_q, nheads, 64), np.float32), np.ones((1, seqlen_k, nheads_kv, 64), np.float32)
    return [x if layout == "bshd" else x.swapaxes(1, 2) for x in (q, k, k)]


@pytest.mark.parametrize("layout", HINTS)
def test_explain_names_the_layout_of_more_heads_than_keys(layout):
    q, k, v = arrays(8, 1024, 2, 1024, layout)  # 8 heads of 1024 queries, and 2 of keys, in the other layout
    plan = str(gpu_ops.explain("attention", q, k, v, layout=layout))
    line = f"  layout    {layout}: 1024 heads of 8 queries, 1024 heads of 2 keys; {HINTS[layout]}"
    assert plan.splitlines()[1] == line
    lse = np.ones((1, 1024, 8), np.float32)
    assert line in str(gpu_ops.explain("attention_backward", q, q, k, v, q, lse, layout=layout))


@pytest.mark.parametrize(
    "sizes", [(1024, 8, 1024, 8), (1, 32, 4096, 8), (1, 8, 4, 8), (8, 8, 8, 8), (4, 8, 0, 8)]
)
@pytest.mark.parametrize("layout", HINTS)
def test_explain_has_no_hint_for_other_shapes(layout, sizes):
    assert "  layout  " not in str(gpu_ops.explain("attention", *arrays(*sizes, layout), layout=layout))


@pytest.mark.parametrize("layout", HINTS)
def test_the_error_of_head_counts_names_the_other_layout(layout):
    with pytest.raises(ShapeError) as caught:  # one query over a cache, in the other layout
        gpu_ops.attention(*arrays(32, 1, 32, 4096, layout), layout=layout)
    assert (
        f"nheads=1 of q must be a positive multiple of nheads_kv=4096 of k and v (layout {layout}: "
        in str(caught.value)
    )
    assert HINTS[layout] in str(caught.value)
    with pytest.raises(ShapeError) as caught:  # wrong in either layout
        gpu_ops.attention(*arrays(4, 6, 3, 4, layout), layout=layout)
    assert "layout" not in str(caught.value)
