"""rope and rope_backward on every backend, against the reference and against complex multiplication."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import RopeScaling, rope, rope_backward
from gpu_ops.reference.rope import rope as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.row_cases import emulator_dtypes
from tests.support.compare import assert_close, random

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


# ---- against the reference: every option, every dtype -----------------------------------------------------


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
    options = {"positions": np.arange(18).reshape(2, 9)}
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


# ---- scalings through rope --------------------------------------------------------------------------------


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
