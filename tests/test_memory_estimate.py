"""memory.estimate says what a training step takes, and choose_policies keeps to a budget."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import memory, models
from gpu_ops.errors import OptionError, OutOfMemoryError

CONFIG = models.LlamaConfig(vocab=512, hidden=128, ffn=344, nlayers=8, nheads=4, nheads_kv=2)
# So large that the private memory of threads, up to 0.3 MiB each, does not count.
MEASURED = models.LlamaConfig(vocab=512, hidden=256, ffn=688, nlayers=8, nheads=4, nheads_kv=2)
FAMILIES = {
    "llama": MEASURED,
    # the MLP so large that the peak is there, and not where threads of attention_backward have 4 MiB each
    "biases and qk_norm": replace(MEASURED, ffn=1024, biases=("qkv", "o", "gate_up", "down"), qk_norm=True),
}
SHAPES = {"short": (8, 256), "long": (3, 1024)}
CASES = [
    pytest.param(
        family,
        shape,
        dtype,
        policy,
        marks=() if shape == "short" and policy in ("none", "layer") else pytest.mark.slow,
    )
    for family in FAMILIES
    for shape in SHAPES
    for dtype in (np.float32, ml_dtypes.bfloat16)
    for policy in models.POLICIES
]


def step(batch, seqlen, dtype, policy, config=CONFIG):
    """A training step, and a function that runs it."""
    arrays = {n: x.astype(dtype) for n, x in models.initial_weights(config).items()}
    grads = {n: np.zeros(x.shape, np.float32) for n, x in arrays.items()}
    weights, into = models.Llama.of(arrays, config), models.Llama.of(grads, config)
    ids = np.random.default_rng(0).integers(0, config.vocab, (batch, seqlen)).astype(np.int32)

    def run():
        loss = models.loss_and_grads(ids, ids, weights, config, grads=into, policy=policy)
        gpu_ops.global_norm(list(grads.values()))
        return float(loss)

    return run


@pytest.mark.parametrize(("family", "shape", "dtype", "policy"), CASES)
def test_an_estimate_is_what_a_step_takes(family, shape, dtype, policy, monkeypatch):
    config = FAMILIES[family]
    monkeypatch.setattr(
        gpu_ops.memory_pool.POOL, "limit", 0
    )  # so that NumPy allocates, which tracemalloc sees
    batch, seqlen = SHAPES[shape]
    run = step(batch, seqlen, dtype, policy, config)
    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = memory.estimate(config, batch=batch, seqlen=seqlen, dtype=dtype, policy=policy)
    assert abs(peak - found.parts["activations"]) <= 0.02 * peak
    assert found.peak == found.state + found.parts["activations"]
    assert found.parts["weights"] == config.parameters * np.dtype(dtype).itemsize


def test_policies_save_what_they_should():
    took = {
        policy: memory.estimate(CONFIG, batch=8, seqlen=128, policy=policy).parts["activations"]
        for policy in models.POLICIES
    }
    assert list(took.values()) == sorted(took.values(), reverse=True)
    assert took["layer"] <= 0.45 * took["none"]


def test_an_arena_holds_a_training_step():
    run = step(2, 64, np.float32, "mlp")
    with memory.Trace() as trace:
        run()
    arena = memory.Arena(trace)
    assert arena.nbytes <= 1.05 * trace.peak_bytes
    losses = []
    for _ in range(2):
        with arena:
            losses.append(run())
    assert losses == [run()] * 2


def test_a_large_model_is_planned_in_a_moment():
    """Llama-3-8B on a card that is not there: bytes by shapes; activations: the kept inputs and a block at work."""
    config = models.LlamaConfig(128256, 4096, 14336, 32, 32, 8, theta=500000.0)
    found = memory.estimate(config, batch=1, seqlen=8192, dtype="float16", policy="layer", device="H100 SXM")
    assert found.parts["weights"] == 2 * config.parameters
    assert found.parts["optimizer"] == 12 * config.parameters  # a master and two moments
    inputs = 32 * 8192 * 4096 * 2
    assert inputs < found.parts["activations"] < 4 * inputs
    assert "MiB" in str(found)


def test_a_budget_is_kept():
    sizes = {"batch": 4, "seqlen": 128}
    most = memory.estimate(CONFIG, **sizes).peak
    least = memory.estimate(CONFIG, **sizes, policy="layer").peak
    assert memory.choose_policies(CONFIG, **sizes, budget=most) == ["none"] * 8
    assert memory.choose_policies(CONFIG, **sizes, budget=least) != ["none"] * 8
    for share in (0.0, 0.2, 0.5, 0.9):
        budget = int(least + share * (most - least))
        chosen = memory.choose_policies(CONFIG, **sizes, budget=budget)
        assert memory.estimate(CONFIG, **sizes, policy=chosen).peak <= budget
    with pytest.raises(OutOfMemoryError) as refused:
        memory.choose_policies(CONFIG, **sizes, budget=least // 2)
    assert (refused.value.required, refused.value.available) == (least, least // 2)


@pytest.mark.parametrize(
    "change",
    [{"batch": 0}, {"optimizer": "sgd"}, {"policy": "some"}, {"device": "RTX 1"}, {"policy": ["none"]}],
)
def test_mistakes_are_typed(change):
    with pytest.raises(OptionError):
        memory.estimate(CONFIG, **({"batch": 1, "seqlen": 8} | change))
