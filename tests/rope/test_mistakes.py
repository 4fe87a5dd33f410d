"""Wrong calls of rope and rope_backward: a typed, helpful error, and nothing written."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, rope, rope_backward
from gpu_ops.errors import DTypeError, OptionError, ShapeError

Q = np.ones((2, 5, 4, 8), np.float32)
K = np.ones((2, 5, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": Q[0, 0]}, ShapeError, r"q has 2 axes, shape \(4, 8\); expected \(batch, seqlen, nheads, head_dim\)"),
        ({"q": Q.astype(np.int32)}, DTypeError, r"q is int32; allowed: float16, bfloat16"),
        ({"q": Q.tolist()}, DTypeError, r"q is list, not an array"),
        ({"k": K[:, :4]}, ShapeError, r"k has shape .* seqlen is 4 here but 5 in q"),
        ({"k": K[..., :6]}, ShapeError, r"head_dim is 6 here but 8 in q"),
        ({"k": K[0]}, ShapeError, r"k has 3 axes"),
        ({"k": K.astype(np.float64)}, DTypeError, r"k is float64 but q is float32"),
        ({"layout": "sbhd"}, OptionError, r"layout='sbhd' is unknown; allowed: 'bshd', 'bhsd'"),
        ({"q": Q[0], "k": None, "layout": "bhsd"}, OptionError, r"layout='bhsd' is for 4 axes"),
        ({"rotary_dim": 3}, OptionError, r"rotary_dim is 3; components rotate in pairs: .* head_dim=8"),
        ({"rotary_dim": 10}, OptionError, r"rotary_dim is 10; .* from 2 to head_dim=8"),
        ({"rotary_dim": 0}, OptionError, r"rotary_dim is 0"),
        ({"rotary_dim": 4.0}, OptionError, r"rotary_dim must be an integer, got float"),
        ({"q": Q[..., :7], "k": None}, OptionError, r"head_dim is 7; .* pass rotary_dim="),
        ({"theta": 0.0}, OptionError, r"theta must be finite and > 0"),
        ({"theta": "1e4"}, OptionError, r"theta must be a number"),
        ({"interleaved": 1}, OptionError, r"interleaved must be True or False"),
        ({"conjugate": "yes"}, OptionError, r"conjugate must be True or False"),
        ({"scaling": {"rope_type": "yarn"}}, OptionError,
         r"must be a RopeScaling, got dict; use RopeScaling\.from_hf"),
        ({"scaling": 4.0}, OptionError, r"got float; use for example RopeScaling\.linear"),
        ({"scaling": RopeScaling.longrope([1.0], [1.0], 8)}, OptionError, r"rotary_dim=8 needs 4"),
        ({"seqlen": -1}, OptionError, r"seqlen must lie in \[0, inf\]"),
        ({"positions": 7.0}, DTypeError, r"positions is the number 7.0; pass an integer, "),
        ({"positions": True}, OptionError, r"positions must be an integer, got bool"),
        ({"positions": -(2**53) - 1}, OptionError, r"positions reach beyond 2\*\*53"),
        ({"positions": np.arange(4)}, ShapeError, r"shape \(4,\); expected .* \(5,\) or \(2, 5\) or \(1, 5\)"),
        ({"positions": np.zeros((5, 2), int)}, ShapeError, r"positions has shape \(5, 2\)"),
        ({"positions": np.arange(5.0)}, DTypeError, r"positions is float64; allowed: integers"),
        ({"positions": np.ones(5, bool)}, DTypeError, r"positions is bool"),
        ({"positions": [0, 1, 2, 3, 4]}, DTypeError, r"numpy\.asarray\(positions\)"),
        ({"positions": np.full(5, 2**60)}, OptionError, r"positions reach beyond 2\*\*53"),
        ({"device": "tpu"}, OptionError, r"device='tpu' is unknown"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [rope, rope_backward], ids=["rope", "rope_backward"])
def test_mistakes(function, change, error, message):
    change = dict(change)
    q, k = change.pop("q", Q), change.pop("k", K)
    out = [np.full_like(np.asarray(x, np.float32), 7) for x in (q, k) if x is not None]
    first, second = ("q", "k") if function is rope else ("dq", "dk")
    message = (
        message.replace("q is", f"{first} is").replace("q has", f"{first} has").replace("in q", f"in {first}")
    )
    message = message.replace("k has", f"{second} has").replace("k is", f"{second} is")
    with pytest.raises(error, match=message) as raised:
        function(q, k, out=out if len(out) == 2 else out[0], **change)
    assert str(raised.value).startswith((function.__name__ + ":", "RopeScaling."))
    assert all((o == 7).all() for o in out)


def test_a_base_whose_frequencies_overflow():
    with pytest.raises(OptionError, match=r"rope: theta=.*e-32. makes frequencies infinite"):
        rope(np.ones((1, 2, 1, 128), np.float32), theta=1e-320)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_attention_factor_that_the_tables_cannot_hold(dtype):
    x, scaling = np.ones((1, 2, 1, 8), dtype), gpu_ops.RopeScaling.yarn(4.0, 16, attention_factor=1e39)
    if dtype == "float64":
        assert np.isfinite(rope(x, scaling=scaling)).all()
        return
    with pytest.raises(OptionError, match=r"rope: attention_factor must be at most 1e\+38"):
        rope(x, scaling=scaling)


def test_no_cache_receives_such_frequencies():
    x, cache = np.ones((1, 2, 1, 128), np.float32), np.zeros((2, 1, 16, 1, 128), np.float32)
    with pytest.raises(OptionError, match=r"rope_append_kv: theta=.*e-32. makes frequencies infinite"):
        gpu_ops.rope_append_kv(x, x, x, *cache, seqused_k=np.array([5], np.int32), theta=1e-320)
    assert not cache.any()
