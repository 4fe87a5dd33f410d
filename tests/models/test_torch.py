"""Llama trained against the same model in torch: losses and gradients, in float64, float32 and bfloat16."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import gpu_ops
from gpu_ops import models, training
from perf.torch_llama import torch_loss

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")

CONFIG = models.LlamaConfig(vocab=64, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
BATCH, SEQLEN, LR, BETAS, DECAY = 8, 32, 3e-3, (0.9, 0.95), 0.1


@functools.cache
def data(seed):
    """Text that can be learned: most tokens are determined by the previous one."""
    rng = np.random.default_rng(seed)
    follows = rng.permutation(CONFIG.vocab)
    tokens = np.zeros(20_000, np.int64)
    for i in range(1, len(tokens)):
        tokens[i] = follows[tokens[i - 1]] if rng.random() < 0.8 else rng.integers(CONFIG.vocab)
    return training.Batches(tokens, BATCH, SEQLEN, seed=seed)


def ours(dtype, seed, steps):
    """Losses, and gradients of the first step."""
    flat = training.FlatParams.from_shapes(CONFIG.shapes(), dtype=dtype)
    flat.assign(models.initial_weights(CONFIG, seed=seed))
    weights, grads = models.Llama.of(flat.params, CONFIG), models.Llama.of(flat.grads, CONFIG)
    losses, first = [], {}
    for step in range(steps):
        flat.zero_grad()
        losses.append(float(models.loss_and_grads(*data(seed).at(step), weights, CONFIG, grads=grads)))
        first = first or {name: g.astype(np.float64) for name, g in flat.grads.items()}
        norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
        scale = training.clip_coefficient(norm, 1.0)
        flat.step(lr=LR, betas=BETAS, weight_decay=DECAY, grad_scale=scale, skip=found_inf)
    return np.array(losses), first


def torchs(dtype, seed, steps):
    start = models.initial_weights(CONFIG, seed=seed)
    p = {n: torch.tensor(x, dtype=dtype, requires_grad=True) for n, x in start.items()}
    groups = [
        {"params": [x for x in p.values() if x.ndim > 1], "weight_decay": DECAY},
        {"params": [x for x in p.values() if x.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    losses, first = [], {}
    for step in range(steps):
        ids, targets = (torch.tensor(x, dtype=torch.long) for x in data(seed).at(step))
        optimizer.zero_grad()
        loss = torch_loss(p, CONFIG, ids, targets)
        loss.backward()
        losses.append(loss.item())
        first = first or {name: x.grad.double().numpy().copy() for name, x in p.items()}
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
    return np.array(losses), first


def worst(actual, expected):
    return max(float(np.abs(actual[n] - g).max() / np.abs(g).max()) for n, g in expected.items())


def test_float64_is_torchs():
    losses, grads = ours("float64", 0, 40)
    theirs, right = torchs(torch.float64, 0, 40)
    assert np.abs(losses - theirs).max() < 1e-10
    assert worst(grads, right) < 1e-12
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_float32_is_as_near_to_float64_as_torch(seed):
    exact, right = torchs(torch.float64, seed, 40)
    losses, grads = ours("float32", seed, 40)
    theirs, others = torchs(torch.float32, seed, 40)
    assert np.abs(losses - exact).max() <= 2 * np.abs(theirs - exact).max()
    for name in right:
        off, allowed = (np.sqrt(np.mean((g[name] - right[name]) ** 2)) for g in (grads, others))
        assert off <= 2 * allowed, name


def test_bfloat16_stays_near_float32():
    losses, grads = ours("bfloat16", 0, 14)
    exact, right = ours("float32", 0, 14)
    assert abs(losses[-1] - exact[-1]) < 0.01
    assert np.abs(grads["embed"] - right["embed"]).max() <= 0.01 * np.abs(right["embed"]).max()
