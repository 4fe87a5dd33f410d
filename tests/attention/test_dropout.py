"""Dropout of attention weights: the same weights are dropped on every backend, and results without them."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DeviceError, OptionError
from gpu_ops.reference.attention import forward as reference
from gpu_ops.reference.attention.core import dropout_mask, rounded_dropout
from gpu_ops.reference.philox import philox4x32
from tests.attention.cases import DTYPES, Expected, make, row_id
from tests.support.compare import assert_close

DEVICES = ("cpu", "emulator", "cuda")
REFERENCE = {"device": "cpu", "backend": "reference"}
SEED = 0x9E3779B97F4A7C15


def runs(case):
    """CUDA C++ kernels take no float64."""
    return case["backend"]["backend"] != "raw" or case.get("case", ("",))[0] != "float64"


def quick_on_emulator(raw):
    """Run each kernel once. Numba kernels compile for seconds, and draw for each weight."""
    return {
        "test_values_and_gradients": {"dtype": ["bfloat16"] * raw, "row": ROWS[1::2]},
        "test_the_masks_of_all_passes": {"case": [CASES[0], CASES[-1]] * raw},
        "test_a_block_drops_what_the_whole_drops": {} if raw else {"starts": [(5, 39)]},
        "test_packed_sequences": {} if raw else None,
        "test_a_seed_in_an_array": {} if raw else None,
        "test_a_given_delta_and_a_wide_lse": {} if raw else None,
        "test_a_value_that_is_dropped_may_not_hide": None,
    }


# ---- which weights -----------------------------------------------------------------------------------------


def test_philox_gives_the_published_words():
    """kat_vectors of Random123: philox4x32, 10 rounds."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32((0, 0, 0, 0), (0, 0)).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32((ones,) * 4, (ones, ones)).tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    words = philox4x32(pi, (0xA4093822, 0x299F31D0))
    assert words.tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_weights_are_dropped_independently(dropout_p):
    """The share kept is within five standard deviations, of all weights and of pairs a small distance apart."""
    kept = dropout_mask((2, 3, 96, 128), dropout_p, SEED)
    share = 1 - dropout_p
    pairs = [kept[..., :-i, :] & kept[..., i:, :] for i in (1, 8, 16, 32)]
    pairs += [kept[..., :-j] & kept[..., j:] for j in (1, 8, 16, 24, 32)]
    pairs += [kept[:, :1] & kept[:, 1:2], kept[:1] & kept[1:]]
    for sample, expected in [(kept, share), *((both, share**2) for both in pairs)]:
        assert abs(sample.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / sample.size)


def test_a_mask_is_a_part_of_a_larger_one():
    whole = dropout_mask((3, 2, 70, 90), 0.3, SEED)
    part = dropout_mask((1, 2, 30, 41), 0.3, SEED, first_sequence=2, q_start=39, k_start=47)
    np.testing.assert_array_equal(part, whole[2:, :, 39:69, 47:88])


@pytest.mark.parametrize(
    ("dropout_p", "rounded"), [(0.0, 0.0), (2e-6, 0.0), (0.1, 6554 / 65536), (0.99999999, 1 - 2.0**-15)]
)
def test_the_probability_has_16_bits(dropout_p, rounded):
    assert rounded_dropout(dropout_p) == rounded
    q, v = np.zeros((1, 1, 1, 8)), np.ones((1, 64, 1, 1))
    out = gpu_ops.attention(q, np.zeros((1, 64, 1, 8)), v, dropout_p=dropout_p, seed=1)
    kept = dropout_mask((1, 1, 1, 64), dropout_p, 1)
    assert out.item() == pytest.approx(kept.mean() / (1 - rounded))


# dtype, head_dim, options of the backward: tiles of the CUDA C++ kernels that own different parts of a draw
CASES = [
    ("float16", 8, {}),
    ("float16", 8, {"deterministic": True}),
    ("float16", 256, {}),
    ("float64", 8, {}),
    ("float32", 256, {}),
    ("float32", 8, {"deterministic": True}),
]


def check_masks(batch, n, dtype, head_dim, backend, *, starts=None, **of_backward):
    """Check where out and dv are 0, with equal weights and with unit vectors as values and as gradients."""
    nheads, starts = 2, starts or {}
    q, unit = (np.zeros((batch, n, nheads, dim), DTYPES[dtype]) for dim in (head_dim, n))
    unit[:] = np.eye(n)[None, :, None, :]
    forward_options = {"dropout_p": 0.4, "seed": SEED, **starts, **backend}
    out, lse = gpu_ops.attention(q, q, unit, return_lse=True, **forward_options)
    kept = dropout_mask((batch, nheads, n, n), 0.4, SEED, **starts)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) != 0, kept)
    np.testing.assert_allclose(lse, np.log(n), rtol=1e-6)  # dropout does not change it
    _, _, dv = gpu_ops.attention_backward(unit, q, q, unit, out, lse, **forward_options, **of_backward)
    np.testing.assert_array_equal(dv.transpose(0, 2, 3, 1) != 0, kept)
    scale = 1 / (1 - rounded_dropout(0.4)) / n
    for x in (out, dv):
        np.testing.assert_allclose(x[x != 0].astype(np.float64), scale, rtol=1e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_masks_of_all_passes(case, backend):
    dtype, head_dim, options = case
    batch, n = (2, 72) if case is CASES[0] and backend["backend"] != "numba" else (1, 40)
    check_masks(batch, n, dtype, head_dim, backend, **options)


@pytest.mark.parametrize("starts", [(16, 96), (5, 39)], ids=str)
def test_a_block_drops_what_the_whole_drops(starts, backend):
    """CUDA C++ kernels draw for whole groups of positions."""
    starts = dict(zip(("q_start", "k_start"), starts, strict=True))
    if backend["backend"] == "raw" and starts["q_start"] % 16:
        with pytest.raises(
            DeviceError, match=r"dropout from q_start=5 and k_start=39 on: .* of 16 and of 32"
        ):
            check_masks(1, 40, "float16", 8, backend, starts=starts)
        return
    check_masks(1, 40, "float16", 8, backend, starts=starts)


# ---- values ------------------------------------------------------------------------------------------------

ROWS = [
    {"seqlens": (70, 90)},
    {"seqlens": (70, 90), "mask": "causal_left", "softcap": 1.5, "heads": (2, 1), "bias": "keys"},
    {"seqlens": (40, 70), "mask": "causal", "sinks": True, "alibi": "heads", "block_mask": "shared"},
    {"seqlens": (70, 40), "mask": "causal", "softcap": 1.5, "heads": (4, 2), "sinks": True, "layout": "bhsd"},
]


def dropped(dropout_p=0.3, seed=SEED, **settings):
    problem = make(**settings)
    problem.options |= {"dropout_p": dropout_p, "seed": seed}
    exact, naive = {}, {}
    for results, precision in ((exact, "float64"), (naive, "naive")):
        options = {**problem.options, "precision": precision}
        out, lse = reference.attention(*problem.arrays, return_lse=True, **options)
        dq, dk, dv, extra = reference.attention_backward(
            problem.dout, *problem.arrays, out, lse, return_extra=True, **options
        )
        results |= {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        results |= {f"d{name}": x for name, x in extra.items()}
    return Expected(problem, exact, naive)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row, dtype, backend):
    e = dropped(
        **{"heads": (2, 1), "head_dims": (32, 40), "blocks": (16, 32), "batch": 1, **row}, dtype=dtype
    )
    p = e.problem
    out, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, **backend)
    e.check("out", out)
    e.check("lse", lse)
    *gradients, extra = gpu_ops.attention_backward(
        p.dout, *p.arrays, out, lse, **p.options, return_extra=True, **backend
    )
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        e.check(name, x)
    for name, x in extra.items():
        e.check(f"d{name}", x)


def test_a_given_delta_and_a_wide_lse(backend):
    """delta is that of the results with dropout; lse is that of the weights before dropout."""
    e = dropped(seqlens=(40, 70), heads=(2, 1), head_dims=(32, 32), batch=1, sinks=True, dtype="float32")
    p = e.problem
    delta = (p.dout * e.exact["out"]).sum(axis=-1).swapaxes(1, 2).astype(np.float32)
    poison = np.full_like(p.dout, np.nan)  # out is not read
    for lse in (e.exact["lse"], e.exact["lse"].astype(np.float32)):
        *gradients, extra = gpu_ops.attention_backward(
            p.dout, *p.arrays, poison, lse, delta=delta, **p.options, return_extra=True, **backend
        )
        for name, x in zip(("dq", "dk", "dv", "dsinks"), (*gradients, extra["sinks"]), strict=True):
            e.check(name, x)


def test_packed_sequences(backend):
    """The sequence number replaces the batch index, and positions count from the start of the sequence."""
    rng = np.random.default_rng(0)
    dtype = np.float32 if backend["backend"] == "numba" else np.float16
    lengths_q, lengths_k = (37, 0, 20), (50, 7, 33)
    cu_q, cu_k = (np.cumsum((0, *n), dtype=np.int32) for n in (lengths_q, lengths_k))
    q, k, v, dout = (rng.standard_normal((n, 2, 16)).astype(dtype) for n in (57, 90, 90, 57))
    options = {"dropout_p": 0.3, "seed": 5, "causal": True}
    out, lse = gpu_ops.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options, **backend)
    grads = gpu_ops.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **options, **backend)
    exact = reference.attention_varlen(q, k, v, cu_q, cu_k, **options, precision="float64")
    naive = reference.attention_varlen(q, k, v, cu_q, cu_k, **options, precision="naive")
    assert_close(out, exact, naive, dtype)
    inputs = (dout, q, k, v, exact, lse, cu_q, cu_k)
    exact, naive = (
        reference.attention_varlen_backward(*inputs, **options, precision=p) for p in ("float64", "naive")
    )
    for name, *values in zip(("dq", "dk", "dv"), grads, exact, naive, strict=True):
        assert_close(*values, dtype, factor=3, what=name)


def test_packed_sequences_drop_what_a_batch_drops():
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 33, 2, 8))
    starts = np.arange(4, dtype=np.int32) * 33
    for backend in (REFERENCE, {"device": "cpu"}):
        options = {"dropout_p": 0.5, "seed": SEED, **backend}
        packed = gpu_ops.attention_varlen(
            *(x.reshape(99, 2, 8) for x in (q, k, v)), starts, starts, **options
        )
        np.testing.assert_allclose(packed.reshape(q.shape), gpu_ops.attention(q, k, v, **options), atol=1e-13)


def test_the_reference_equals_finite_differences():
    p = make(mask="causal", seqlens=(9, 12), heads=(2, 1), head_dims=(4, 3), softcap=1.5, sinks=True)
    options = {**p.options, "dropout_p": 0.4, "seed": SEED, "precision": "float64"}
    out, lse = reference.attention(*p.arrays, return_lse=True, **options)
    grads = reference.attention_backward(p.dout, *p.arrays, out, lse, **options)
    rng, h = np.random.default_rng(1), 1e-6
    for i, gradient in enumerate(grads):
        step = rng.standard_normal(p.arrays[i].shape)
        moved = [
            reference.attention(
                *(x + sign * h * step if j == i else x for j, x in enumerate(p.arrays)), **options
            )
            for sign in (1, -1)
        ]
        slope = (p.dout * (moved[0] - moved[1])).sum() / (2 * h)
        assert slope == pytest.approx((gradient * step).sum(), rel=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_dropped_may_not_hide(bad, backend):
    """0 * NaN is NaN, whether a weight is 0 by dropout or not; values that a mask hides still do not show."""
    dtype = np.float32 if backend["backend"] == "numba" else np.float16
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 40, 1, 16)).astype(dtype)
    v[0, 20, 0, 3] = bad
    out = gpu_ops.attention(q, k, v, causal=True, dropout_p=0.5, seed=3, **backend)
    assert np.isfinite(out[0, :20]).all()
    assert np.isfinite(np.delete(out, 3, axis=-1)).all()
    assert not np.isfinite(out[0, 20:, 0, 3]).any()


# ---- seeds -------------------------------------------------------------------------------------------------


def test_seeds():
    """Every call has its own seed, and is refused wherever a first call would be."""
    q = np.random.default_rng(0).standard_normal((1, 40, 1, 8)).astype(np.float32)
    call = gpu_ops.attention

    def draw(seed):
        return call(q, q, q, dropout_p=0.5, seed=seed)

    known = len(call.op.known)
    seeds = (0, 1, 2**32, 2**63, 2**64 - 1)
    first = [draw(seed) for seed in seeds]
    assert len(call.op.known) == known + 1
    for seed, expected in zip(seeds, first, strict=True):
        np.testing.assert_array_equal(draw(seed), expected)
        np.testing.assert_array_equal(draw(np.uint64(seed)), expected)
        np.testing.assert_array_equal(draw(np.array(seed, np.uint64)), expected)
    assert len({x.tobytes() for x in first}) == len(seeds)
    for bad in (-1, 2**64, True, 1.0, None):
        with pytest.raises(OptionError, match=r"attention: .*seed"):
            draw(bad)


def test_a_seed_in_an_array(backend):
    """The seed is read at every call, so that each replay drops other weights; int64 counts as its 64 bits."""
    dtype = np.float32 if backend["backend"] == "numba" else np.float16
    q, dout = np.random.default_rng(0).standard_normal((2, 1, 40, 1, 16)).astype(dtype)
    seed = np.array([7], np.int64)
    for number in (7, -1):
        seed[0] = number
        results = []
        for value in (seed, number % 2**64):
            options = {"dropout_p": 0.5, "seed": value, **backend}
            out, lse = gpu_ops.attention(q, q, q, return_lse=True, **options)
            grads = gpu_ops.attention_backward(dout, q, q, q, out, lse, **options, deterministic=True)
            results.append((out, *grads))
        for x, y in zip(*results, strict=True):
            np.testing.assert_array_equal(x, y)


def test_without_dropout_a_seed_decides_nothing():
    q = np.random.default_rng(0).standard_normal((1, 9, 1, 8)).astype(np.float32)
    expected = gpu_ops.attention(q, q, q)
    for seed in (3, np.array(3)):
        np.testing.assert_array_equal(gpu_ops.attention(q, q, q, seed=seed), expected)
    assert "dropout 0.25" in str(gpu_ops.explain("attention", q, q, q, dropout_p=0.25, seed=3))
