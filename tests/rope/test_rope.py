"""rope and rope_backward on every backend, against the reference and against complex multiplication."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, rope, rope_backward
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.ops.rope.tables import RopeTables, clear_rope_tables
from gpu_ops.reference.rope import rope as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import emulator_dtypes
from tests.support.compare import assert_close, random
from tests.support.processes import PATIENCE

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


LONG = tuple(1.0 + 0.25 * i for i in range(8))
SCALINGS = {
    "none": None,
    "linear": RopeScaling.linear(4.0),
    "ntk": RopeScaling.ntk(2.0),
    "dynamic": RopeScaling.dynamic(2.0, 5),
    "yarn": RopeScaling.yarn(4.0, 64),
    "longrope": RopeScaling.longrope((1.0,) * 8, LONG, 5, factor=4.0),
    "llama3": RopeScaling.llama3(8.0, 64),
}


def check(call, ref, inputs, dtype, backend, factor=2.0, **options):
    """Check one call against the reference: values, dtypes, unchanged inputs; return the results."""
    before = [x.copy() for x in inputs]
    actual = call(*inputs, **options, **backend)
    expected = ref(*inputs, **options, precision="float64")
    naive = ref(*inputs, **options, precision="naive")
    pairs = zip(actual, expected, naive, strict=True) if len(inputs) == 2 else [(actual, expected, naive)]
    for x, g, w, n in zip(inputs, *zip(*pairs, strict=True), strict=True):
        assert g.dtype == dtype
        if dtype == np.float64:
            # the reference is float64 too, so textbook code has no error to compare with: allow each side
            # its three roundings of |x1 cos| + |x2 sin| <= 2 max|x| (attention factors here are below 1.5)
            bound = 2 * 3 * 2.0**-53 * 2 * 1.5 * np.abs(x).max(initial=0.0)
            np.testing.assert_allclose(g, w, rtol=0, atol=bound)
        else:
            assert_close(g, w, n, dtype, factor)
    for x, b in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, b)
    return actual


# ---- against the reference: every option, every dtype ------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        ((2, 7, 3, 16), None),
        ((1, 5, 2, 24), 6),
        ((3, 1, 1, 2), None),
        ((1, 300, 2, 80), 64),
        ((2, 3, 5, 7), 4),
    ],
)
def test_matches_the_reference(shape, rotary_dim, interleaved, dtype, backend, rng):
    q = random(rng, shape, dtype)
    k = random(rng, (*shape[:2], 1, shape[3]), dtype)
    for conjugate in (False, True):
        options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "conjugate": conjugate}
        check(rope, reference.rope, [q, k], dtype, backend, **options)
        check(rope_backward, reference.rope_backward, [q, k], dtype, backend, GRADIENT, **options)
        check(rope, reference.rope, [q], dtype, backend, **options)


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings(name, dtype, backend, rng):
    q = random(rng, (2, 6, 2, 16), dtype)
    for seqlen in (None, 5, 6):
        options = {"scaling": SCALINGS[name], "seqlen": seqlen, "theta": 500.0}
        check(rope, reference.rope, [q], dtype, backend, **options)
        check(rope_backward, reference.rope_backward, [q], dtype, backend, GRADIENT, **options)


@pytest.mark.parametrize(
    "positions",
    [
        np.array([3, 1, 4, 1, 5, 9], np.int32),
        np.array([[0, 1, 2, 0, 1, 2], [100000, 100001, 100002, 7, 8, 9]]),
        np.array([[5, 6, 7, 8, 9, 10]], np.uint8),
        np.array([-3, -2, -1, 0, 1, 2]),
        np.arange(12)[::2],
    ],
    ids=["seqlen", "batch_seqlen", "1_seqlen", "negative", "strided"],
)
def test_positions(positions, dtype, backend, rng):
    q, k = random(rng, (2, 6, 3, 8), dtype), random(rng, (2, 6, 1, 8), dtype)
    check(rope, reference.rope, [q, k], dtype, backend, positions=positions)


@pytest.mark.parametrize("first", [0, 70, -5, np.int32(1000)])
def test_one_position_is_the_first(first, dtype, backend, rng):
    q, packed = random(rng, (2, 6, 3, 8), dtype), random(rng, (6, 3, 8), dtype)
    for x in (q, packed):
        actual = rope(x, positions=first, **backend)
        np.testing.assert_array_equal(actual, rope(x, positions=int(first) + np.arange(6), **backend))


def test_packed_sequences_equal_the_same_sequences_in_a_batch(dtype, backend, rng):
    lengths = [3, 5]
    q = random(rng, (8, 2, 16), dtype)
    positions = np.concatenate([np.arange(n) for n in lengths])
    packed = check(rope, reference.rope, [q], dtype, backend, positions=positions)
    start = 0
    for n in lengths:
        alone = rope(q[None, start : start + n], **backend)
        np.testing.assert_array_equal(packed[start : start + n], alone[0])
        start += n
    np.testing.assert_array_equal(rope(q, **backend), rope(q[None], **backend)[0])


def test_results_lie_in_memory_as_the_inputs(backend, rng):
    q = random(rng, (2, 9, 4, 16), np.float32)
    turned = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    for x in (q, turned, turned[0], q[:, :1], np.broadcast_to(q[:, :1], q.shape)):
        y = rope(x, **backend)
        if x is turned or x.ndim == 3:
            y = y.swapaxes(-3, -2)
        assert y.flags.c_contiguous


def test_layout_bhsd_is_a_transposed_view(dtype, backend, rng):
    q, k = random(rng, (2, 4, 9, 16), dtype), random(rng, (2, 2, 9, 16), dtype)
    positions = np.arange(18).reshape(2, 9)
    positions[0, 2], positions[1, 5:] = 30, positions[1, :4]  # they are not consecutive
    options = {"positions": positions}
    actual = check(rope, reference.rope, [q, k], dtype, backend, layout="bhsd", **options)
    expected = rope(q.swapaxes(1, 2), k.swapaxes(1, 2), **options, **backend)
    for g, w in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(g, w.swapaxes(1, 2))
    back = rope_backward(*actual, layout="bhsd", **options, **backend)
    for x, b in zip((q, k), back, strict=True):
        np.testing.assert_allclose(b.astype(float), x.astype(float), atol=0.05)


def test_many_tasks_with_ragged_ends(backend, rng):
    """Test more tokens than one task takes, in both memory orders, with tasks that span batches."""
    q = random(rng, (3, 701, 4, 32), np.dtype(np.float32))
    check(rope, reference.rope, [q], q.dtype, backend)
    turned = np.ascontiguousarray(q.swapaxes(1, 2))
    check(rope, reference.rope, [turned], q.dtype, backend, layout="bhsd")


@pytest.mark.parametrize("axis", [1, 2], ids=["tokens", "heads"])
def test_what_is_not_rotated_is_copied_into_reversed_results(axis, backend, rng):
    """Copies go to results with negative strides."""
    x = random(rng, (1, 5, 3, 16), np.float32)
    out = np.full_like(x, np.nan)
    view = np.flip(out, axis)
    assert rope(x, rotary_dim=6, out=view, **backend) is view
    np.testing.assert_array_equal(view[..., 6:], x[..., 6:])
    np.testing.assert_allclose(view, reference.rope(x, rotary_dim=6), rtol=0, atol=1e-5)


def test_nan_and_inf_stay_in_their_pair(dtype, backend):
    q = np.ones((1, 3, 1, 8), dtype)
    q[0, 1, 0, 2] = np.nan
    q[0, 2, 0, 1] = np.inf
    actual = rope(q, **backend)[0, :, 0]
    bad = np.zeros((3, 8), bool)
    bad[1, [2, 6]] = bad[2, [1, 5]] = True
    np.testing.assert_array_equal(~np.isfinite(actual.astype(np.float32)), bad)


# ---- scalings through rope ---------------------------------------------------------------------------------


def test_dynamic_goes_by_the_largest_position_or_by_seqlen(backend, rng):
    q = random(rng, (1, 4, 1, 8), np.float32)
    dynamic = RopeScaling.dynamic(2.0, 64)
    positions = np.array([0, 1, 2, 199])
    by_positions = rope(q, positions=positions, scaling=dynamic, **backend)
    np.testing.assert_array_equal(
        by_positions, rope(q, positions=positions, scaling=dynamic, seqlen=200, **backend)
    )
    assert not np.array_equal(
        by_positions, rope(q, positions=positions, scaling=dynamic, seqlen=300, **backend)
    )
    short = rope(q, positions=positions, scaling=dynamic, seqlen=64, **backend)
    np.testing.assert_array_equal(short, rope(q, positions=positions, **backend))


def test_theta_and_rotary_dim_come_from_the_config_unless_given(backend, rng):
    q = random(rng, (1, 4, 1, 8), np.float32)
    scaling = RopeScaling.from_hf({"rope_theta": 500.0, "partial_rotary_factor": 0.5})
    np.testing.assert_array_equal(
        rope(q, scaling=scaling, **backend), rope(q, theta=500.0, rotary_dim=4, **backend)
    )
    np.testing.assert_array_equal(
        rope(q, scaling=scaling, theta=100.0, rotary_dim=8, **backend), rope(q, theta=100.0, **backend)
    )


def test_explain_says_what_would_run():
    q, k = np.ones((2, 5, 4, 8), np.float32), np.ones((2, 5, 2, 8), np.float32)
    plan = gpu_ops.explain("rope", q, k, interleaved=True, scaling=RopeScaling.linear(2.0))
    text = str(plan)
    assert "rope: q (2, 5, 4, 8) and k (2, 5, 2, 8) float32, rotary_dim 8 interleaved, scaling linear" in text
    assert "tokens per task" in text


def test_bfloat16_rounds_once(backend, rng):
    """The result is the rounded float32 result, without intermediate roundings."""
    q = random(rng, (1, 64, 2, 32), ml_dtypes.bfloat16)
    float32_result = rope(q.astype(np.float32), **backend)
    np.testing.assert_array_equal(rope(q, **backend), float32_result.astype(ml_dtypes.bfloat16))


# Tables of cos and sin for rope: values, sharing, and bounds.


@pytest.mark.parametrize("computed", [np.float32, np.float64])
def test_tables_are_the_rounded_cosines_of_the_positions(computed):
    clear_rope_tables()
    inv_freq = 10000.0 ** (-np.arange(32) / 32)
    # growing, shrinking, gathered, far apart, negative: kept tables and direct ones must agree
    for positions in (
        [range(10)],
        [[16]],
        [range(3000)],
        [[4096, 5, 5]],
        [[10**7, 3]],
        [[-4, 4]],
        [range(9)],
    ):
        p = np.array(positions, np.int64)
        cos, sin, rows = RopeTables(inv_freq, 1.25, computed)(p, int(p.min()), int(p.max()))
        assert rows.shape == p.shape
        assert cos.dtype == sin.dtype == computed
        angles = p[..., None] * inv_freq
        tolerance = 0.5000001 * np.finfo(computed).eps * 1.25 + 1e-15
        np.testing.assert_allclose(cos[rows], 1.25 * np.cos(angles), rtol=0, atol=tolerance)
        np.testing.assert_allclose(sin[rows], 1.25 * np.sin(angles), rtol=0, atol=tolerance)


def test_tables_are_kept_shared_and_bounded():
    clear_rope_tables()
    inv_freq = 10000.0 ** (-np.arange(64) / 64)
    first = RopeTables(inv_freq, 1.0, np.float32)(np.arange(100)[None], 0, 99)
    again = RopeTables(inv_freq, 1.0, np.float32)(np.array([[77]]), 77, 77)
    assert again[0] is first[0]  # a decode step finds the prefill's table
    assert RopeTables(inv_freq, 2.0, np.float32)(np.arange(100)[None], 0, 99)[0] is not first[0]
    for theta in range(2, 40):  # far more than the budget
        tables = RopeTables(float(theta) ** (-np.arange(64) / 64), 1.0, np.float32)
        tables(np.arange(20000)[None], 0, 19999)
    from gpu_ops.ops.rope import tables as module

    assert sum(c.nbytes + s.nbytes for c, s in module._kept.values()) <= module._BUDGET
    clear_rope_tables()


def test_threads_share_the_tables(rng):
    clear_rope_tables()
    q = rng.standard_normal((1, 500, 2, 16)).astype(np.float32)
    expected = rope(q, backend="reference")
    results: list = [None] * 8

    def work(i):
        n = 500 - 30 * i  # every thread needs another length of the same table
        results[i] = rope(q[:, :n])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, expected[:, : 500 - 30 * i], atol=1e-6)


# Wrong calls of rope and rope_backward: a typed, helpful error, and nothing written.

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
        ({"layout": "sbhd"}, OptionError, r"layout='sbhd' is unknown; did you mean 'bshd'\? allowed: 'bshd', 'bhsd'"),
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
