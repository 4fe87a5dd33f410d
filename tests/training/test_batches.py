"""Batches: the order is a function of seed and step, and every window occurs once per epoch."""

from __future__ import annotations

import hashlib
import os
import threading
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import DTypeError, OptionError, OutOfMemoryError, ShapeError
from gpu_ops.training import Batches, TokenFile, write_tokens
from gpu_ops.training.batches import permuted
from tests.support.processes import exit_code, python


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**96 - 1))
def test_a_permutation_has_every_number_once(n, seed, epoch):
    assert np.array_equal(np.sort(permuted(np.arange(n), n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [2**31 - 1, 2**32, 2**40 + 7, 2**62])
def test_permutations_of_any_length_take_no_memory(n, rng):
    index = np.unique(rng.integers(0, n, 1000))
    permutation = permuted(index, n, 1, 2)
    assert len(np.unique(permutation)) == len(index)
    assert permutation.min() >= 0
    assert permutation.max() < n
    assert abs(permutation.mean() / n - 0.5) < 0.05  # five standard deviations


@pytest.mark.parametrize("n", [13, 100])
def test_permutations_are_fair(n):
    """Each number is equally often at each position (chi squared), and neighbours are separated."""
    seeds = 1000
    seen = np.zeros((n, n))
    for seed in range(seeds):
        seen[np.arange(n), permuted(np.arange(n), n, seed, 0)] += 1
    expected, freedom = seeds / n, (n - 1) ** 2
    chi = ((seen - expected) ** 2 / expected).sum()
    assert abs(chi - freedom) < 6 * np.sqrt(2 * freedom)
    large = permuted(np.arange(10**5), 10**5, 0, 0)
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.02


def windows_of(batches, steps):
    """First token of each window, in order; tokens count up, so that it identifies the window."""
    ids = [batches.at(step)[0] for step in range(steps)]
    return np.concatenate([x[:, 0] for x in ids])


@pytest.mark.parametrize(
    ("batch", "seqlen", "n"), [(3, 4, 101), (1, 1, 2), (7, 5, 26), (4, 8, 4000), (2, 3, 14)]
)
def test_every_window_is_seen_once_per_epoch(batch, seqlen, n):
    batches = Batches(np.arange(n), batch, seqlen, seed=5)
    assert batches.windows == (n - 1) // seqlen
    steps = -(-3 * batches.windows // batch)
    seen = windows_of(batches, steps)
    orders = set()
    for epoch in range(3):
        part = seen[epoch * batches.windows : (epoch + 1) * batches.windows]
        np.testing.assert_array_equal(np.sort(part), np.arange(batches.windows) * seqlen)
        orders.add(part.tobytes())
    assert len(orders) == 3 or batches.windows < 6


def test_targets_are_the_ids_one_later():
    ids, targets = Batches(np.arange(1000) * 3, 8, 10).at(3)
    assert ids.dtype == targets.dtype == np.int32
    assert ids.shape == targets.shape == (8, 10)
    assert ids.flags.c_contiguous
    assert targets.flags.c_contiguous
    np.testing.assert_array_equal(targets, ids + 3)
    assert not (ids[:, 0] % 30).any()


def test_a_run_resumes_at_any_step():
    tokens = np.arange(5000)
    whole = [x for x in islice(Batches(tokens, 4, 16, seed=7), 200)]
    for start in (0, 1, 77, 78, 79, 199):  # an epoch ends within step 78
        resumed = Batches(tokens, 4, 16, seed=7, start=start)
        assert resumed.step == start
        for step, batch in zip(range(start, 200), resumed, strict=False):
            np.testing.assert_array_equal(batch, whole[step])
        np.testing.assert_array_equal(resumed.at(3), whole[3])  # at() does not advance
        assert resumed.step == 200


def test_the_order_depends_on_the_seed():
    tokens = np.arange(5000)
    orders = {
        windows_of(Batches(tokens, 4, 16, seed=seed), 70).tobytes() for seed in (0, 1, 2, 2**32, 2**64 - 1)
    }
    assert len(orders) == 5
    assert windows_of(Batches(tokens, 4, 16, seed=1), 70).tobytes() in orders


def test_the_order_is_the_same_in_every_version():
    """A run that is resumed after an update continues with the same batches."""
    seen = windows_of(Batches(np.arange(100_000), 16, 32, seed=1234, start=0), 400)
    assert hashlib.sha256(seen.astype("<i4").tobytes()).hexdigest()[:16] == "88e32557a92d77ac"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_share_a_batch(world):
    tokens = np.arange(3001)
    together = Batches(tokens, 12, 10, seed=3)
    ranks = [Batches(tokens, 12 // world, 10, seed=3, rank=rank, world=world) for rank in range(world)]
    for step in (0, 1, 24, 25, 10**9):
        joined = [np.concatenate(parts) for parts in zip(*(rank.at(step) for rank in ranks), strict=True)]
        np.testing.assert_array_equal(joined, together.at(step))


def test_several_sources(tmp_path):
    """Windows do not cross sources; a source that is too short is skipped."""
    lengths, parts, start = (40, 3, 1, 0, 25, 90), [], 0
    for i, n in enumerate(lengths):
        part = start + np.arange(n)
        start += 1000
        if i % 2:
            write_tokens(tmp_path / f"{i}", part, vocab=10_000)
        parts.append(TokenFile(tmp_path / f"{i}") if i % 2 else part)
    batches = Batches(parts, 3, 6)
    assert batches.windows == 6 + 0 + 0 + 0 + 4 + 14
    rows = np.concatenate([np.hstack(batches.at(step)) for step in range(8)])
    expected = {1000 * i + 6 * w for i, n in enumerate(lengths) for w in range(max(n - 1, 0) // 6)}
    assert {int(row[0]) for row in rows} == expected
    for row in rows:
        np.testing.assert_array_equal(row[:6], row[0] + np.arange(6))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            (np.arange(4), 1, 4),
            {},
            ShapeError,
            "seqlen \\+ 1 = 5 tokens, and the longest of 1 sources has 4",
        ),
        (([], 1, 4), {}, ShapeError, "of 0 sources has 0"),
        ((np.arange(0), 1, 1), {}, ShapeError, "has 0"),
        ((np.ones(9), 1, 4), {}, DTypeError, "expected integers"),
        ((np.ones((9, 1), int), 1, 4), {}, ShapeError, "expected one axis"),
        ((np.arange(9) - 1, 1, 4), {}, OptionError, "token 0 is -1"),
        ((np.arange(9) + 2**31, 1, 4), {}, OptionError, "token 0 is 2147483648"),
        (("tokens.bin", 1, 4), {}, DTypeError, "is str, not an array"),
        ((np.arange(9), 0, 4), {}, OptionError, "batch must"),
        ((np.arange(9), 1, 0), {}, OptionError, "seqlen must"),
        ((np.arange(9), 1.0, 4), {}, OptionError, "batch must"),
        ((np.arange(9), 1, 4), {"seed": -1}, OptionError, "seed must"),
        ((np.arange(9), 1, 4), {"seed": 2**64}, OptionError, "seed must"),
        ((np.arange(9), 1, 4), {"start": -1}, OptionError, "start must"),
        ((np.arange(9), 1, 4), {"rank": 2, "world": 2}, OptionError, r"rank must lie in \[0, 1\]"),
        ((np.arange(9), 1, 4), {"world": 0}, OptionError, "world must"),
    ],
)
def test_bad_options_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Batches(*arguments, **options)
    with pytest.raises(OptionError, match="step must"):
        Batches(np.arange(9), 1, 4).at(-1)


def test_the_last_step_there_is():
    batches = Batches(np.arange(9), 2**10, 1, seed=2**64 - 1, rank=2**24 - 1, world=2**24)
    ids, _ = batches.at(2**48 - 1)
    assert sorted(set(ids.ravel().tolist())) == list(range(8))


def test_a_batch_that_does_not_fit_in_memory():
    with pytest.raises(OutOfMemoryError, match=r"Batches\.at: no memory") as caught:
        Batches(np.zeros(2**24 + 1, np.int8), 2**24, 2**24).at(0)
    assert caught.value.required == 2**50


def test_threads_and_forks_share_a_file(tmp_path):
    write_tokens(tmp_path / "t", np.arange(60_000), vocab=60_000)
    batches = Batches(TokenFile(tmp_path / "t"), 16, 50, seed=1)
    want = [batches.at(step) for step in range(40)]
    wrong = []

    def compare():
        wrong.extend(step for step in range(40) if not np.array_equal(batches.at(step), want[step]))

    threads = [threading.Thread(target=compare) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if not child:
        compare()
        os._exit(len(wrong))
    for thread in threads:
        thread.join()
    assert exit_code(child) == 0
    assert not wrong


def test_the_order_is_the_same_in_another_process(tmp_path):
    write_tokens(tmp_path / "t", np.arange(60_000), vocab=60_000)
    code = (
        "import sys, hashlib; from gpu_ops.training import *; "
        "b = Batches(TokenFile(sys.argv[1]), 4, 50, seed=9, start=290); "
        "print(hashlib.sha256(b''.join(x.tobytes() for _ in range(20) for x in next(b))).hexdigest())"
    )
    batches = Batches(TokenFile(tmp_path / "t"), 4, 50, seed=9, start=290)
    here = hashlib.sha256(b"".join(x.tobytes() for _ in range(20) for x in next(batches))).hexdigest()
    assert python("-c", code, tmp_path / "t").strip() == here
