"""Sampling: the same token on every backend, and the correct distribution. The laws cover it as well."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import OptionError
from gpu_ops.reference.philox import DROPOUT_DOMAIN, SAMPLE_DOMAIN, philox4x32
from gpu_ops.reference.sampling import sample as reference
from tests.rows.cases import close, emulator_dtypes
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
# One token; a prime; vectors with a remainder; several steps of a warp, and blocks of the CPU.
VOCABS = [1, 97, 1000, 5003]
F32 = np.float32


def quick_on_emulator(raw):
    few = {"dtype": emulator_dtypes(raw)}
    return {"test_all_options": {**few, "vocab": VOCABS[:2]}, "*": few}


def options_of_rows(rng, rows, vocab, dtype):
    """Arrays of each option; some rows omit filters, some take the largest token."""
    some = lambda share: (rng.random(rows) < share).astype(F32)  # noqa: E731
    return {
        "temperature": (rng.uniform(0.2, 2, rows) * some(0.8)).astype(F32),
        "top_k": (rng.integers(1, vocab + 2, rows) * some(0.6)).astype(np.int32),
        "top_p": np.minimum(rng.uniform(0, 1.3, rows), 1).astype(F32),
        "min_p": (rng.uniform(0, 0.3, rows) * some(0.5)).astype(F32),
        "repetition_penalty": rng.uniform(0.5, 2, rows).astype(F32),
        "frequency_penalty": rng.uniform(-1, 1, rows).astype(F32),
        "presence_penalty": rng.uniform(-1, 1, rows).astype(F32),
        "seed": rng.integers(0, 2**64, rows, np.uint64),
        "step": rng.integers(0, 2**64, rows, np.uint64),
        "counts": rng.integers(-1, 3, (rows, vocab)).astype(np.int32),
        "bias": rng.standard_normal((rows, vocab)).astype(np.float64 if dtype == np.float64 else F32),
    }


def filters(options):
    return {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "step")}


# ---- the definition ----------------------------------------------------------------------------------------


def test_counters_end_in_the_same_words_on_all_backends():
    numba_cuda = importlib.import_module("gpu_ops.kernels.common.numba_cuda.philox")
    cpu = importlib.import_module("gpu_ops.kernels.sampling.cpu.sample")
    assert (numba_cuda.DROPOUT_DOMAIN, numba_cuda.SAMPLE_DOMAIN) == (DROPOUT_DOMAIN, SAMPLE_DOMAIN)
    assert cpu.DOMAIN == SAMPLE_DOMAIN != DROPOUT_DOMAIN
    folder = Path(gpu_ops.__file__).parent / "kernels"
    source = (folder / "sampling/sample.cu").read_text(encoding="utf-8")
    assert f"kDomain = {SAMPLE_DOMAIN:#x}u;" in source
    source = (folder / "rows/dropout.cu").read_text(encoding="utf-8")
    assert f"static_cast<unsigned>(group >> 32), 0, {DROPOUT_DOMAIN:#x}u}};" in source


def oracle(z, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities in float64, computed by a sort."""
    p = np.exp((z - z.max()) / temperature)
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))[: top_k or len(z)]
    total, before, kept = p[order].sum(), 0.0, np.zeros(len(z))
    for i in order:
        if (before < top_p * total or i == order[0]) and p[i] >= min_p * p.max():
            kept[i] = p[i]
        before += p[i]
    return kept / kept.sum()


@pytest.mark.parametrize("vocab", VOCABS)
def test_what_is_kept(vocab, rng):
    for dtype in (np.float64, F32):
        for _ in range(8):
            z, options = (3 * rng.standard_normal(vocab)).astype(dtype), options_of_rows(rng, 1, vocab, dtype)
            named = {n: options[n].item() for n in ("top_k", "top_p", "min_p")}
            t = float(F32(options["temperature"].item() or 0.7))
            weights = reference.token_weights(z, t)
            kept = reference.kept_tokens(z, weights, **named)
            expected = oracle(z.astype(np.float64), t, **named)
            np.testing.assert_array_equal(kept & (weights > 0), (expected > 0) & (weights > 0))
            np.testing.assert_allclose(
                np.where(kept, weights, 0) / weights[kept].sum(dtype=float), expected, 1e-5, 1e-9
            )


def test_weights_are_exponentials(rng):
    for dtype, error in ((F32, 3e-6), (np.float64, 1e-14)):
        for vocab in (10, 1 << 17, (1 << 31) - 1):
            bits = reference.weight_bits(vocab)
            assert vocab << bits < 2**63 <= vocab << bits + 2
        z = np.sort(rng.uniform(-40, 0, 5000).astype(dtype))
        weights, bits = reference.token_weights(z, 0.5), reference.weight_bits(len(z))
        exact = np.exp((z.astype(np.float64) - z[-1]) / 0.5) * 2.0**bits
        assert weights[-1] == 2**bits
        np.testing.assert_allclose(weights.astype(np.float64), exact, rtol=error, atol=1)
        assert (np.diff(weights.astype(np.int64)) >= -1).all()


def test_a_token_by_hand():
    """Random bits use the counter (step, row, a constant), which dropout of the same seed does not use."""
    words = philox4x32((3, 1, 0, 2**32 - 2), (7, 1))
    number = (int(words[1]) << 32 | int(words[0])) / 2**64
    z = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    expected = int(np.searchsorted(np.cumsum([0.1, 0.2, 0.3, 0.4]), number))
    assert reference.sample(z, seed=2**32 + 7, step=2**32 + 3) == expected
    assert not np.isin(
        words, philox4x32((np.arange(1000), 0, 0, 2**32 - 1), (7, 1))
    ).any()  # those of dropout


def chi_square(tokens, p):
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any()
    kept = p > 0
    return np.sum((counts[kept] - len(tokens) * p[kept]) ** 2 / (len(tokens) * p[kept])), kept.sum() - 1


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.2},
    ],
    ids=str,
)
def test_the_distribution(named, rng):
    """Successive seeds, successive steps, and the rows of one seed are within five deviations of chi-square."""
    z, draws = rng.standard_normal(20), np.arange(20000)
    p = oracle(z, **named)
    logits = np.broadcast_to(z, (len(draws), 20))
    for counters in (
        {"seed": draws},
        {"seed": np.full_like(draws, 9), "step": draws},
        {"seed": 9, "step": 4},
    ):
        statistic, freedom = chi_square(gpu_ops.sample(logits, **counters, **named, device="cpu"), p)
        assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


# ---- all backends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABS)
def test_all_options(backend, dtype, vocab, rng):
    for rows in ((5,), (2, 2)):
        logits = (3 * rng.standard_normal((*rows, vocab))).astype(dtype)
        options = options_of_rows(rng, math.prod(rows), vocab, dtype)
        options = {n: x.reshape(*rows, *x.shape[1:]) for n, x in options.items()}
        for more in (options, filters(options)):
            expected, exact = reference.sample(logits, **more, return_logprob=True, precision="float64")
            naive = reference.sample(logits, **more, return_logprob=True, precision="naive")[1]
            tokens, logprob = gpu_ops.sample(logits, **more, return_logprob=True, **backend)
            assert tokens.dtype == np.int32
            np.testing.assert_array_equal(tokens, expected)
            close(logprob, exact, naive, np.float64 if dtype == np.float64 else F32)
            np.testing.assert_array_equal(gpu_ops.sample(logits, **more, **backend), expected)


def test_a_request_does_not_see_its_batch(backend, dtype, rng):
    """A row alone, rows in another order, and numbers in place of arrays give the same tokens."""
    logits, options = rng.standard_normal((6, 50)).astype(dtype), options_of_rows(rng, 6, 50, dtype)
    tokens = gpu_ops.sample(logits, **options, **backend)
    order = rng.permutation(6)
    shuffled = gpu_ops.sample(logits[order], **{n: x[order] for n, x in options.items()}, **backend)
    np.testing.assert_array_equal(shuffled, tokens[order])
    for r in range(6):
        alone = {n: x[r] if n in ("counts", "bias") else x[r].item() for n, x in options.items()}
        assert gpu_ops.sample(logits[r], **alone, **backend) == tokens[r]


def test_one_seed_for_all_rows(backend):
    """Rows draw by their row number; row 0 draws as a single request."""
    logits = np.zeros((64, 1000), F32)
    tokens = gpu_ops.sample(logits, seed=5, step=2, **backend)
    np.testing.assert_array_equal(tokens, reference.sample(logits, seed=5, step=2))
    assert len(set(tokens.tolist())) > 50
    assert gpu_ops.sample(logits[:1], seed=np.array([5]), step=np.array([2]), **backend) == tokens[0]
    for other in ({"seed": 6, "step": 2}, {"seed": 5, "step": 3}, {"seed": 5 + 2**32, "step": 2}):
        assert (gpu_ops.sample(logits, **other, **backend) != tokens).sum() > 50


@pytest.mark.parametrize("top_k", [1, 50, 1024, 1025])
def test_top_k_of_a_long_row(top_k, rng):
    """Tokens of the whole row, many of them tied, that are copied (up to 1024) or cut by passes over it."""
    logits = (np.round(rng.standard_normal((3, 12_000)) * 40) / 8).astype(F32)
    logits[1] = np.sort(logits[1])  # each block has larger ones
    logits[2, 100:] = -np.inf
    for top_p in (1.0, 0.7):
        named = {"top_k": top_k, "top_p": top_p, "seed": np.arange(3), "step": 5}
        expected = reference.sample(logits, **named)
        np.testing.assert_array_equal(gpu_ops.sample(logits, **named, device="cpu"), expected)


def test_ties_go_to_the_first(backend, dtype):
    """Ties at the edge of top_k and of top_p go to the first token, over several blocks; -0 ties with 0."""
    vocab = 4500
    logits = np.full((1, vocab), -30, dtype)
    tied = np.array([3, 700, 701, 2500, 4400])
    logits[0, tied] = [0.0, -0.0, 0.0, -0.0, 0.0]
    draws = np.arange(40)
    repeated = np.broadcast_to(logits, (40, vocab))
    for named, kept in [
        ({"top_k": 2}, 2),
        ({"top_k": 4}, 4),
        ({"top_p": 0.59}, 3),
        ({"top_p": 0.19}, 1),
        ({"top_k": 4, "top_p": 0.6}, 3),
        ({"min_p": 1.0}, 5),
    ]:
        tokens = gpu_ops.sample(repeated, seed=draws, **named, **backend)
        assert set(tokens.tolist()) == set(tied[:kept].tolist()), named
    assert gpu_ops.sample(logits, temperature=0.0, seed=0, **backend) == 3


def test_one_token_is_left(backend, dtype, rng):
    logits = rng.standard_normal((4, 300)).astype(dtype)
    logits[1] = logits[1, 0]
    expected = logits.argmax(axis=1)
    for named in (
        {"temperature": 0},
        {"temperature": 1e-45},
        {"temperature": 1e-8},
        {"top_k": 1},
        {"top_p": 0},
    ):
        if named.get("temperature"):
            expected[1] = reference.sample(logits, seed=3, **named)[1]  # any of equal ones
        np.testing.assert_array_equal(gpu_ops.sample(logits, seed=3, **named, **backend), expected)
        expected[1] = 0


def test_extreme_temperatures(backend, dtype, rng):
    logits = rng.standard_normal((6, 40)).astype(dtype)
    logits[2:4, ::2] = -np.inf
    for t in (1e-40, 1e30, 3e38):
        tokens = gpu_ops.sample(logits, temperature=t, seed=1, **backend)
        np.testing.assert_array_equal(tokens, reference.sample(logits, temperature=t, seed=1))
        assert (tokens[2:4] % 2 == 1).all()


def test_rows_without_a_distribution(backend, dtype, rng):
    logits = rng.standard_normal((7, 2100)).astype(dtype)
    logits[0, 5], logits[1, 2099], logits[2] = np.nan, np.inf, -np.inf
    logits[3, :-1], logits[4, 7], logits[5, 2] = -np.inf, -np.inf, np.array(-np.nan, dtype)
    bias = np.zeros(2100, np.float64 if dtype == np.float64 else F32)
    for named in ({}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.5}, {"bias": bias}):
        tokens, logprob = gpu_ops.sample(logits, seed=1, **named, return_logprob=True, **backend)
        np.testing.assert_array_equal(tokens, reference.sample(logits, seed=1, **named))
        assert tokens[[0, 1, 2, 3, 5]].tolist() == [-1, -1, -1, 2099, -1]
        assert np.isnan(logprob[[0, 1, 2, 5]]).all()
        assert logprob[3] == 0
    bias[:], bias[[4, 9]] = -np.inf, 0
    tokens = gpu_ops.sample(logits[4:5].repeat(9, 0), seed=1, bias=bias, **backend)
    assert set(tokens.tolist()) <= {4, 9}


@pytest.mark.parametrize("by", ["numba", "reference"])
def test_a_negative_top_k_in_an_array_is_refused(by):
    """The first call and a replayed one check the values; 0 keeps all."""
    logits = np.zeros((3, 7), F32)
    for top_k in ([-1, 2, 2], [0, 1, -1]):
        array = np.zeros(3, np.int32)
        gpu_ops.sample(logits, seed=1, top_k=array, device="cpu", backend=by)
        array[:] = top_k
        with pytest.raises(OptionError, match=r"top_k\[\d\] is -1; expected at least 0"):
            gpu_ops.sample(logits, seed=1, top_k=array, device="cpu", backend=by)


def test_no_tokens_and_no_rows(backend, dtype):
    tokens, logprob = gpu_ops.sample(np.zeros((3, 0), dtype), seed=1, return_logprob=True, **backend)
    assert tokens.tolist() == [-1] * 3
    assert np.isnan(logprob).all()
    assert gpu_ops.sample(np.zeros((0, 4), dtype), seed=1, **backend).shape == (0,)


# ---- on a GPU ----------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_an_option_on_a_gpu_out_of_range(cupy, kernels, rng):
    """The row gets no token: the host does not wait for options."""
    logits, counts = (
        FakeArray(rng.standard_normal((4, 30)).astype(F32)),
        FakeArray(np.ones((4, 30), np.int32)),
    )
    wrong = {
        "temperature": (-1, np.nan, np.inf),
        "top_k": (-1, -5, -(2**31)),
        "top_p": (-0.1, 1.1, np.nan),
        "min_p": (-0.1, 1.1, np.nan),
        "repetition_penalty": (0, -1, np.nan),
        "frequency_penalty": (np.inf, -np.inf, np.nan),
        "presence_penalty": (np.inf, -np.inf, np.nan),
    }
    for name, values in wrong.items():
        options = {name: FakeArray(np.array([*values, 1], np.int32 if name == "top_k" else F32))}
        tokens = gpu_ops.sample(logits, seed=1, counts=counts, **options, backend=kernels).host
        assert (tokens[:3] == -1).all(), name
        assert tokens[3] >= 0, name


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_a_captured_step_reads_its_arrays_anew(cupy, kernels, rng):
    logits, counters = (
        rng.standard_normal((3, 70)).astype(F32),
        {"seed": np.arange(3), "step": np.zeros(3, np.int64)},
    )
    options = {"temperature": np.ones(3, F32), "top_k": np.full(3, 5, np.int32), **counters}
    held = {name: FakeArray(x.copy()) for name, x in options.items()}
    out, source = FakeArray(np.zeros(3, np.int32)), FakeArray(logits)
    gpu_ops.sample(source, **held, backend=kernels)
    with cupy.capture():
        gpu_ops.sample(source, **held, out=out, backend=kernels)
    for step in range(4):
        for name, x in {"step": step, "temperature": 1 + step, "top_k": 5 * step}.items():
            held[name].host[:] = options[name][:] = x
        cupy.replay()
        np.testing.assert_array_equal(out.host, reference.sample(logits, **options))


def test_16_bit_logits_are_those_of_float32(rng):
    logits = rng.standard_normal((9, 400)).astype(ml_dtypes.bfloat16)
    expected = gpu_ops.sample(logits.astype(F32), seed=4, top_p=0.7)
    np.testing.assert_array_equal(gpu_ops.sample(logits, seed=4, top_p=0.7), expected)
