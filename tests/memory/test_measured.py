"""Estimates against real runs: within 2 % by tracemalloc, to the byte by a limit; and an arena against both."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import inference, memory, models
from gpu_ops.errors import OutOfMemoryError
from gpu_ops.memory.arena import place
from tests.memory.measured import ALL_STEPS, CHOSEN, CONFIG, MAKERS
from tests.support.processes import python


def measured(names, threads):
    """Estimated and measured bytes by name."""
    lines = python("-m", "tests.memory.measured", *names, NUMBA_NUM_THREADS=str(threads)).splitlines()
    entries = map(json.loads, lines)
    return {entry["name"]: (entry["estimated"], entry["measured"]) for entry in entries}


@pytest.fixture(scope="module")
def by_one_thread():
    return measured(CHOSEN, 1)


@pytest.mark.parametrize("name", CHOSEN)
def test_an_estimate_is_what_a_run_takes(name, by_one_thread):
    estimated, took = by_one_thread[name]
    assert abs(took - estimated) <= 0.02 * took


def test_more_threads_take_no_more_than_is_estimated():
    """Runs may take less: a thread that wakes up late allocates nothing."""
    for name, (estimated, took) in measured(CHOSEN[::4], 3).items():
        assert took <= 1.02 * estimated, name


@pytest.mark.slow
def test_every_step_takes_what_is_estimated():
    names = [name for name in MAKERS if name.startswith("step ")]
    assert len(names) == len(ALL_STEPS)
    for name, (estimated, took) in measured(names, 1).items():
        assert abs(took - estimated) <= 0.02 * took, name


# ---- what fits, by running it ------------------------------------------------------------------------------

SIZES = {"batch": 3, "seqlen": 64}


def state_of(pool, config, dtype, names):
    """Arrays of the pool for weights, gradients and optimizer states."""
    groups = []
    for name in names:
        arrays = {n: pool.empty(shape, dtype, name) for n, shape in config.shapes().items()}
        for x in arrays.values():
            x.fill(0)
        groups.append(arrays)
    return groups


def infer(pool, batch, seqlen, dtype):
    """Run the prompt through the model, with a cache allocated."""
    (weights,) = state_of(pool, CONFIG, dtype, ["weights"])
    shape = (batch, seqlen, CONFIG.nheads_kv, CONFIG.head_dim)
    cache = [pool.empty(shape, dtype, "KV cache") for _ in range(2 * CONFIG.nlayers)]
    model = models.Llama.of(weights, CONFIG)
    states = models.hidden_states(np.zeros((batch, seqlen), np.int32), model, CONFIG)
    gpu_ops.linear(pool.empty((batch, CONFIG.hidden), dtype, "last states"), model.lm_head)
    del states, cache


def train(pool, batch, seqlen, dtype):
    """Run a step, with the states of AdamW allocated; float32 has no masters."""
    weights, grads, *states = state_of(pool, CONFIG, dtype, ["weights", "gradients", "m", "v"])
    ids, (of, into) = (
        np.zeros((batch, seqlen), np.int32),
        (models.Llama.of(x, CONFIG) for x in (weights, grads)),
    )
    models.loss_and_grads(ids, ids, of, CONFIG, grads=into)
    gpu_ops.global_norm(list(grads.values()))
    del states


@pytest.mark.parametrize("sought", SIZES)
@pytest.mark.parametrize(("run", "dtype"), [(infer, "float32"), (infer, "bfloat16"), (train, "float32")])
def test_what_fits_runs_under_the_limit_and_one_more_does_not(run, dtype, sought):
    sizes = {name: n for name, n in SIZES.items() if name != sought}
    estimate = memory.estimate if run is train else memory.estimate_inference
    expected = estimate(CONFIG, **{sought: 7}, **sizes, dtype=dtype).peak
    for budget in (expected, expected + 1000):
        limit = memory.fit(CONFIG, budget, **sizes, train=run is train, dtype=dtype)
        assert limit >= 7
        with memory.limit(budget) as pool:
            run(pool, **{sought: limit}, **sizes, dtype=dtype)
            assert pool.peak == estimate(CONFIG, **{sought: limit}, **sizes, dtype=dtype).peak
            with pytest.raises(OutOfMemoryError):
                run(pool, **{sought: limit + 1}, **sizes, dtype=dtype)


# ---- an arena ----------------------------------------------------------------------------------------------


def largest_live_set(buffers):
    """Maximum number of bytes alive at a time. A buffer lives from ``came`` to before ``went``."""
    events = [(b.allocated_at, b.nbytes) for b in buffers] + [
        (b.freed_at, -b.nbytes) for b in buffers if b.freed_at is not None
    ]
    live = peak = 0
    for _, nbytes in sorted(events):
        live += nbytes
        peak = max(peak, live)
    return peak


def traced_step(config, batch, seqlen, policy, dtype=np.float32):
    """Buffers of a step over arrays without memory."""
    ids = np.zeros((batch, seqlen), np.int32)
    with memory.Trace() as trace:
        weights, grads = (
            {n: trace.empty(shape, dtype_) for n, shape in config.shapes().items()}
            for dtype_ in (dtype, np.float32)
        )
        of, into = models.Llama.of(weights, config), models.Llama.of(grads, config)
        models.loss_and_grads(ids, ids, of, config, grads=into, policy=policy)
    return [b for b in trace.buffers if not b.given]


@pytest.mark.parametrize("policy", models.POLICIES)
@pytest.mark.parametrize("size", ["small", "large"])
def test_an_arena_is_little_more_than_the_largest_live_set(policy, size):
    """Offsets are fixed once, for a step of a small model and of Llama-3.2-1B."""
    if size == "small":
        buffers = traced_step(replace(CONFIG, nlayers=8), 2, 128, policy)
    else:
        buffers = traced_step(models.PRESETS["llama-3.2-1b"], 2, 1024, policy, ml_dtypes.bfloat16)
    offsets, nbytes = place(buffers, 64)
    assert len(offsets) == len(buffers) > 100
    least = largest_live_set(buffers)
    assert least <= nbytes <= 1.05 * least


def test_an_arena_holds_a_pass_of_inference():
    config = replace(CONFIG, nlayers=6)
    weights = models.Llama.of(models.initial_weights(config), config)
    ids = np.random.default_rng(0).integers(0, config.vocab, (2, 96)).astype(np.int32)
    with memory.Trace() as trace:
        models.logits(ids, weights, config)
    arena = memory.Arena(trace)
    assert arena.nbytes <= 1.05 * largest_live_set(trace.buffers)
    expected = models.logits(ids, weights, config)
    for _ in range(2):
        with arena:
            logits = models.logits(ids, weights, config)
            assert np.array_equal(logits, expected)
            del logits
    assert inference.generate(weights, config, [[1]], max_new_tokens=1)
