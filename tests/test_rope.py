"""rope and rope_backward on every backend, against the reference and against complex multiplication."""

from __future__ import annotations

import math
import threading

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, random
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops import RopeScaling, rope, rope_backward
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.reference import rope as reference
from gpu_ops.reference.tolerance import GRADIENT
from gpu_ops.rope_tables import clear_rope_tables, rope_tables

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
    """One call against the reference: values, dtypes, untouched inputs; the results."""
    before = [x.copy() for x in inputs]
    got = call(*inputs, **options, **backend)
    want = ref(*inputs, **options, precision="float64")
    naive = ref(*inputs, **options, precision="naive")
    pairs = zip(got, want, naive, strict=True) if len(inputs) == 2 else [(got, want, naive)]
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
    return got


# ---- against the reference: every option, every dtype -----------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("conjugate", [False, True])
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
def test_matches_the_reference(shape, rotary_dim, interleaved, conjugate, dtype, backend, rng):
    q = random(rng, shape, dtype)
    k = random(rng, (*shape[:2], 1, shape[3]), dtype)
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "conjugate": conjugate}
    check(rope, reference.rope, [q, k], dtype, backend, **options)
    check(rope_backward, reference.rope_backward, [q, k], dtype, backend, GRADIENT, **options)
    check(rope, reference.rope, [q], dtype, backend, **options)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("seqlen", [None, 5, 6])
def test_scalings(name, seqlen, dtype, backend, rng):
    q = random(rng, (2, 6, 2, 16), dtype)
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


def test_layout_bhsd_is_a_transposed_view(dtype, backend, rng):
    q, k = random(rng, (2, 4, 9, 16), dtype), random(rng, (2, 2, 9, 16), dtype)
    options = {"positions": np.arange(18).reshape(2, 9)}
    got = check(rope, reference.rope, [q, k], dtype, backend, layout="bhsd", **options)
    want = rope(q.swapaxes(1, 2), k.swapaxes(1, 2), **options, **backend)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w.swapaxes(1, 2))
    back = rope_backward(*got, layout="bhsd", **options, **backend)
    for x, b in zip((q, k), back, strict=True):
        np.testing.assert_allclose(b.astype(float), x.astype(float), atol=0.05)


def test_many_tasks_with_ragged_ends(backend, rng):
    """More tokens than one task takes, in both orders of memory, crossing batches within a task."""
    q = random(rng, (3, 701, 4, 32), np.dtype(np.float32))
    check(rope, reference.rope, [q], q.dtype, backend)
    turned = np.ascontiguousarray(q.swapaxes(1, 2))
    check(rope, reference.rope, [turned], q.dtype, backend, layout="bhsd")


# ---- an independent oracle --------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_complex_multiplication(interleaved, backend, rng):
    q = rng.standard_normal((2, 11, 3, 12))
    positions = rng.integers(0, 5000, (2, 11))
    z = q[..., 0:8:2] + 1j * q[..., 1:8:2] if interleaved else q[..., 0:4] + 1j * q[..., 4:8]
    angle = positions[:, :, None, None] / 100.0 ** (np.arange(4) / 4)
    z = z * (np.cos(angle) + 1j * np.sin(angle))
    want = q.copy()
    first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    want[..., first], want[..., second] = z.real, z.imag
    got = rope(q, positions=positions, theta=100.0, rotary_dim=8, interleaved=interleaved, **backend)
    np.testing.assert_allclose(got, want, atol=1e-11)
    np.testing.assert_array_equal(got[..., 8:], q[..., 8:])  # the tail is copied, bit for bit


def test_against_torch(backend, rng):
    """The formula that Hugging Face models run, in torch float32: cat(-x2, x1) * sin + x * cos."""
    torch = pytest.importorskip("torch", reason="pip install torch (CPU) to compare with it")
    q = rng.standard_normal((2, 33, 4, 64)).astype(np.float32)
    x = torch.from_numpy(q)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = torch.arange(33, dtype=torch.float64)[:, None] * inv_freq
    angles = torch.cat([angles, angles], -1)[:, None]
    want = x * angles.cos().float() + torch.cat([-x[..., 32:], x[..., :32]], -1) * angles.sin().float()
    np.testing.assert_allclose(rope(q, **backend), want.numpy(), atol=2e-6)


@pytest.mark.parametrize("position", [10**6, 10**9])
def test_large_positions_lose_nothing_in_float32(position, backend):
    q = np.ones((1, 1, 1, 128), np.float32)
    got = rope(q, positions=np.array([position]), **backend)[0, 0, 0]
    angle = [math.fmod(position * 10000.0 ** (-i / 64), 2 * math.pi) for i in range(64)]
    want = [math.cos(a) - math.sin(a) for a in angle] + [math.cos(a) + math.sin(a) for a in angle]
    np.testing.assert_allclose(got, want, atol=5e-7)


# ---- properties -------------------------------------------------------------------------------------------

cases = st.fixed_dictionaries(
    {
        "half": st.integers(1, 9),
        "tail": st.integers(0, 3),
        "interleaved": st.booleans(),
        "theta": st.floats(2.0, 1e6),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def make(case, shape):
    rng = np.random.default_rng(case["seed"])
    options = {k: case[k] for k in ("theta", "interleaved")}
    head_dim = 2 * case["half"] + case["tail"]
    return rng.standard_normal((*shape, head_dim)), {**options, "rotary_dim": 2 * case["half"]}, rng


@pytest.mark.parametrize("name", ["numba", "reference"])
@given(case=cases, shift=st.integers(-1000, 1000))
@settings(max_examples=30, deadline=None)
def test_scores_depend_on_differences_of_positions_only(name, case, shift):
    x, options, rng = make(case, (2, 5, 2))
    positions = rng.integers(0, 1000, (5,))
    q, k = x[:1], x[1:]
    a = rope(q, k, positions=positions, **options, backend=name)
    b = rope(q, k, positions=positions + shift, **options, backend=name)
    scores = [np.einsum("bihd,bjhd->hij", *pair) for pair in (a, b)]
    np.testing.assert_allclose(*scores, atol=1e-10)


@pytest.mark.parametrize("name", ["numba", "reference"])
@given(case=cases)
@settings(max_examples=30, deadline=None)
def test_conjugate_is_the_inverse_and_norms_stay(name, case):
    x, options, rng = make(case, (2, 5, 2))
    options["positions"] = rng.integers(-1000, 1000, (2, 5))
    y = rope(x, **options, backend=name)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), atol=1e-12)
    np.testing.assert_allclose(rope(y, conjugate=True, **options, backend=name), x, atol=1e-12)
    np.testing.assert_allclose(
        rope(rope(x, conjugate=True, **options, backend=name), **options), x, atol=1e-12
    )


@pytest.mark.parametrize("name", ["numba", "reference"])
@pytest.mark.parametrize("scaling", [None, RopeScaling.yarn(8.0, 64)], ids=["none", "yarn"])
@given(case=cases, conjugate=st.booleans())
@settings(max_examples=20, deadline=None)
def test_backward_is_the_transpose(name, scaling, case, conjugate):
    """<rope(x), dy> = <x, rope_backward(dy)>, with yarn's attention factor too."""
    x, options, rng = make(case, (2, 5, 2))
    dy = rng.standard_normal(x.shape)
    options |= {"scaling": scaling, "conjugate": conjugate, "backend": name}
    left = np.sum(rope(x, **options) * dy)
    right = np.sum(x * rope_backward(dy, **options))
    assert left == pytest.approx(right, rel=1e-11, abs=1e-11)


def test_backward_by_finite_differences(backend, rng):
    x, dy, direction = (rng.standard_normal((1, 4, 2, 12)) for _ in range(3))
    options = {"rotary_dim": 8, "scaling": RopeScaling.yarn(4.0, 64), "positions": np.array([9, 2, 5, 70])}

    def loss(step):
        return np.sum(rope(x + step * direction, **options, **backend) * dy)

    slope = (loss(1e-4) - loss(-1e-4)) / 2e-4
    gradient = rope_backward(dy, **options, **backend)
    assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-9)


def test_with_yarn_the_backward_is_not_the_inverse(backend, rng):
    x = rng.standard_normal((1, 4, 2, 8))
    scaling = RopeScaling.yarn(8.0, 64)
    a = scaling.attention_factor_at(4)
    assert a > 1.1
    back = rope_backward(rope(x, scaling=scaling, **backend), scaling=scaling, **backend)
    np.testing.assert_allclose(back, a * a * x, rtol=1e-12)


# ---- scalings through rope --------------------------------------------------------------------------------


def test_dynamic_goes_by_the_largest_position_or_by_seqlen(backend, rng):
    q = rng.standard_normal((1, 4, 1, 8))
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
    q = rng.standard_normal((1, 4, 1, 8))
    scaling = RopeScaling.from_hf({"rope_theta": 500.0, "partial_rotary_factor": 0.5})
    np.testing.assert_array_equal(
        rope(q, scaling=scaling, **backend), rope(q, theta=500.0, rotary_dim=4, **backend)
    )
    np.testing.assert_array_equal(
        rope(q, scaling=scaling, theta=100.0, rotary_dim=8, **backend), rope(q, theta=100.0, **backend)
    )


# ---- memory: strides, in place, empty ---------------------------------------------------------------------


def test_strided_inputs(dtype, backend, rng):
    """q and k as slices of one fused projection, a reversed axis, and a last axis with gaps."""
    qkv = random(rng, (2, 6, 4 + 2 + 2, 16), dtype)
    q, k = qkv[:, :, :4], qkv[:, :, 4:6]
    check(rope, reference.rope, [q, k], dtype, backend)
    check(rope, reference.rope, [q[:, ::-1], k[:, ::-1]], dtype, backend)
    check(rope, reference.rope, [q[..., ::2]], dtype, backend, interleaved=True)
    check(rope, reference.rope, [np.broadcast_to(q[:1], q.shape)], dtype, backend)
    check(rope, reference.rope, [np.asfortranarray(q)], dtype, backend)


def test_in_place_changes_nothing_else(dtype, backend, rng):
    for interleaved in (False, True):
        qkv = random(rng, (2, 6, 4 + 2 + 2, 18), dtype)
        options = {"interleaved": interleaved, "rotary_dim": 12, **backend}
        want = qkv.copy()
        want[:, :, :4], want[:, :, 4:6] = rope(qkv[:, :, :4], qkv[:, :, 4:6], **options)
        q, k = qkv[:, :, :4], qkv[:, :, 4:6]
        result = rope(q, k, out=(q, k), **options)
        assert result[0] is q
        assert result[1] is k
        np.testing.assert_array_equal(qkv, want)


def test_in_place_one_array_and_bhsd(dtype, backend, rng):
    x = random(rng, (2, 3, 9, 16), dtype)
    want = rope(x, layout="bhsd", **backend)
    assert rope(x, layout="bhsd", out=x, **backend) is x
    np.testing.assert_array_equal(x, want)


def test_out_may_be_strided_on_leading_axes(dtype, backend, rng):
    q, k = random(rng, (2, 6, 4, 16), dtype), random(rng, (2, 6, 2, 16), dtype)
    room = np.zeros((2, 6, 6, 20), dtype)
    out = [room[:, :, :4, 2:18], room[:, :, 4:, 2:18]]
    got = rope(q, k, out=out, **backend)
    for g, o, w in zip(got, out, rope(q, k, **backend), strict=True):
        assert g is o
        np.testing.assert_array_equal(g, w)
    assert not room[..., :2].any()
    assert not room[..., 18:].any()


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8), (0, 2, 8)])
def test_empty(shape, dtype, backend):
    x = np.zeros(shape, dtype)
    for result in (rope(x, **backend), rope_backward(x, scaling=RopeScaling.dynamic(2.0, 8), **backend)):
        assert result.shape == shape
        assert result.dtype == dtype
    pair = rope(x, np.zeros((*shape[:-2], 1, 8), dtype), **backend)
    assert pair[1].shape == (*shape[:-2], 1, 8)


def test_nan_and_inf_stay_in_their_pair(dtype, backend):
    q = np.ones((1, 3, 1, 8), dtype)
    q[0, 1, 0, 2] = np.nan
    q[0, 2, 0, 1] = np.inf
    got = rope(q, **backend)[0, :, 0]
    bad = np.zeros((3, 8), bool)
    bad[1, [2, 6]] = bad[2, [1, 5]] = True
    np.testing.assert_array_equal(~np.isfinite(got.astype(np.float32)), bad)


# ---- the tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computed", [np.float32, np.float64])
def test_tables_are_the_rounded_cosines_of_the_positions(computed):
    clear_rope_tables()
    inv_freq = 10000.0 ** (-np.arange(32) / 32)
    # growing, shrinking, gathered, far apart, negative: kept tables and direct ones must agree
    for positions in ([range(10)], [range(3000)], [[2999, 5, 5]], [[10**7, 3]], [[-4, 4]], [range(2000)]):
        p = np.array(positions, np.int64)
        cos, sin, rows = rope_tables(p, int(p.min()), int(p.max()), inv_freq, 1.25, computed)
        assert rows.shape == p.shape
        assert cos.dtype == sin.dtype == computed
        angles = p[..., None] * inv_freq
        tolerance = 0.5000001 * np.finfo(computed).eps * 1.25 + 1e-15
        np.testing.assert_allclose(cos[rows], 1.25 * np.cos(angles), rtol=0, atol=tolerance)
        np.testing.assert_allclose(sin[rows], 1.25 * np.sin(angles), rtol=0, atol=tolerance)


def test_tables_are_kept_shared_and_bounded():
    clear_rope_tables()
    inv_freq = 10000.0 ** (-np.arange(64) / 64)
    first = rope_tables(np.arange(100)[None], 0, 99, inv_freq, 1.0, np.float32)
    again = rope_tables(np.array([[77]]), 77, 77, inv_freq, 1.0, np.float32)
    assert again[0] is first[0]  # a decode step finds the prefill's table
    assert rope_tables(np.arange(100)[None], 0, 99, inv_freq, 2.0, np.float32)[0] is not first[0]
    for theta in range(2, 40):  # far more than the budget
        rope_tables(np.arange(20000)[None], 0, 19999, float(theta) ** (-np.arange(64) / 64), 1.0, np.float32)
    from gpu_ops import rope_tables as module

    assert sum(c.nbytes + s.nbytes for c, s in module._kept.values()) <= module._BUDGET
    clear_rope_tables()


def test_threads_share_the_tables(rng):
    clear_rope_tables()
    q = rng.standard_normal((1, 500, 2, 16)).astype(np.float32)
    want = rope(q, backend="reference")
    results: list = [None] * 8

    def work(i):
        n = 500 - 30 * i  # every thread needs another length of the same table
        results[i] = rope(q[:, :n])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, want[:, : 500 - 30 * i], atol=1e-6)


# ---- mistakes: typed, helpful, and nothing written --------------------------------------------------------

Q = np.ones((2, 5, 4, 8), np.float32)
K = np.ones((2, 5, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": Q[0, 0]},
            ShapeError,
            r"q has 2 axes, shape \(4, 8\); expected \(batch, seqlen, nheads, head_dim\)",
        ),
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
        (
            {"scaling": {"rope_type": "yarn"}},
            OptionError,
            r"must be a RopeScaling, got dict; use RopeScaling\.from_hf",
        ),
        ({"scaling": 4.0}, OptionError, r"got float; use for example RopeScaling\.linear"),
        ({"scaling": RopeScaling.longrope([1.0], [1.0], 8)}, OptionError, r"rotary_dim=8 needs 4"),
        ({"seqlen": -1}, OptionError, r"seqlen must lie in \[0, inf\]"),
        ({"positions": 7}, ShapeError, r"pass 7 \+ np\.arange\(5\)"),
        (
            {"positions": np.arange(4)},
            ShapeError,
            r"shape \(4,\); expected .* \(5,\) or \(2, 5\) or \(1, 5\)",
        ),
        ({"positions": np.zeros((5, 2), int)}, ShapeError, r"positions has shape \(5, 2\)"),
        ({"positions": np.arange(5.0)}, DTypeError, r"positions is float64; allowed: integers"),
        ({"positions": np.ones(5, bool)}, DTypeError, r"positions is bool"),
        ({"positions": [0, 1, 2, 3, 4]}, DTypeError, r"numpy\.asarray\(positions\)"),
        ({"positions": np.full(5, 2**60)}, OptionError, r"positions reach beyond 2\*\*53"),
        ({"device": "tpu"}, OptionError, r"device='tpu' is unknown"),
    ],
)
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


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda q, k: q.copy(), OptionError, r"out must be a pair of arrays, for q and k; got ndarray"),
        (lambda q, k: (q.copy(),), OptionError, r"got tuple of 1"),
        (lambda q, k: (q.copy(), None), OptionError, r"must be a pair of arrays"),
        (
            lambda q, k: (k, q),
            ShapeError,
            r"out\[0\] has shape \(2, 5, 2, 8\), expected exactly \(2, 5, 4, 8\)",
        ),
        (
            lambda q, k: (q.astype(np.float64), k.copy()),
            DTypeError,
            r"out\[0\] is float64, expected exactly float32",
        ),
        (lambda q, k: (q, q[:, :, :2]), ShapeError, r"out\[1\] shares memory with q"),
        (lambda q, k: (q[:, ::-1], k), ShapeError, r"out\[0\] shares memory with q"),
        (lambda q, k: (q.copy(), k[:, ::-1]), ShapeError, r"out\[1\] shares memory with k"),
    ],
)
def test_mistakes_in_out(out, error, message):
    q, k = Q.copy(), K.copy()
    with pytest.raises(error, match=message):
        rope(q, k, out=out(q, k))
    np.testing.assert_array_equal(q, Q)
    np.testing.assert_array_equal(k, K)


def test_the_two_outs_may_not_overlap():
    room = np.zeros((2, 5, 6, 8), np.float32)
    with pytest.raises(ShapeError, match=r"out\[1\] shares memory with out\[0\]"):
        rope(Q, K, out=(room[:, :, :4], room[:, :, 3:5]))
    assert not room.any()


def test_shifted_overlap_is_refused():
    room = np.ones((1, 9, 1, 8), np.float32)
    with pytest.raises(ShapeError, match="shares memory with q"):
        rope(room[:, :8], out=room[:, 1:])
    assert (room == 1).all()


def test_explain_says_what_would_run():
    plan = gpu_ops.explain("rope", Q, K, interleaved=True, scaling=RopeScaling.linear(2.0))
    text = str(plan)
    assert "rope: q (2, 5, 4, 8) and k (2, 5, 2, 8) float32, rotary_dim 8 interleaved, scaling linear" in text
    assert "tokens per task" in text


def test_bfloat16_rounds_once():
    """The result is the float32 result rounded: nothing is rounded on the way."""
    q = np.random.default_rng(1).standard_normal((1, 64, 2, 32)).astype(ml_dtypes.bfloat16)
    wide = rope(q.astype(np.float32))
    np.testing.assert_array_equal(rope(q), wide.astype(ml_dtypes.bfloat16))
