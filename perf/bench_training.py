"""A training step of a small Llama, against torch: loss, gradients, clipping and AdamW.

``python perf/bench_training.py --device cpu --dtype float32 --seqlen 2048`` (seqlen: tokens of a step)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
import os
from typing import Any
from unittest import mock

import numpy as np

import gpu_ops
from gpu_ops import models, training
from gpu_ops.reference.precision import Precision
from perf.build import torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions, device_of

CONFIG = models.LlamaConfig(vocab=256, hidden=256, ffn=688, nlayers=4, nheads=4, nheads_kv=2)
SMALL = models.LlamaConfig(vocab=40, hidden=32, ffn=48, nlayers=2, nheads=2, nheads_kv=1)
LENGTH = 256
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def cases(config: RunOptions) -> list[Case]:
    policies = ("none",) if config.quick else ("none", "mlp", "layer")
    return [
        step(tokens, dtype, policy)
        for dtype in config.dtypes or ("float32", "bfloat16")
        for tokens in config.seqlens or (2048,)
        for policy in policies
    ]


def step(tokens: int, dtype: str, policy: str) -> Case:
    c, length = CONFIG, min(tokens, LENGTH)
    batch = max(tokens // length, 1)
    matrices = sum(n * k for n, k in (s for s in c.shapes().values() if len(s) == 2)) - c.vocab * c.hidden
    pairs = length * (length + 1) / 2 * batch
    flops = 6.0 * matrices * batch * length + 3.5 * 4 * pairs * c.nheads * c.head_dim * c.nlayers
    return Case(
        op="training",
        name=f"step, {policy}",
        shape=f"{c.parameters / 1e6:.1f}M parameters, {batch} x {length} tokens",
        dtype=dtype,
        flops=flops,
        bytes=28.0 * c.parameters,
        make=lambda rng: data(rng, c, batch, length, dtype),
        make_small=lambda rng: data(rng, SMALL, 2, 9, dtype),
        ours=functools.partial(ours, policy=policy),
        reference=gradients,
        torch=torch_step,
        backward=True,
    )


def data(rng: np.random.Generator, config: models.LlamaConfig, batch: int, length: int, dtype: str) -> Inputs:
    ids = rng.integers(0, config.vocab, (batch, length)).astype(np.int32)
    weights = models.initial_weights(config, seed=int(rng.integers(1 << 30)), std=0.05)
    weights = {name: x.astype(DTYPES[dtype]) for name, x in weights.items()}
    return {"ids": ids, "targets": np.roll(ids, -1, 1), "weights": weights}


def config_of(x: Inputs) -> models.LlamaConfig:
    return SMALL if x["weights"]["embed"].shape[0] == SMALL.vocab else CONFIG


def ours(x: Inputs, policy: str = "none", **how: Any) -> Call:
    """Step with its gradients; the gradients of the first call are checked."""
    config = config_of(x)
    dtype = x["weights"]["embed"].dtype.name
    flat = training.FlatParams.from_shapes(config.shapes(), dtype=dtype, device=device_of(x))
    flat.assign(x["weights"])
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)

    def run() -> tuple[Any, ...]:
        flat.zero_grad()
        models.loss_and_grads(x["ids"], x["targets"], weights, config, grads=grads, policy=policy)
        norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
        flat.step(grad_scale=training.clip_coefficient(norm, 1.0), skip=found_inf, **OPTIONS)
        return tuple(flat.grads.values())

    return run


def gradients(x: Inputs, precision: Precision) -> tuple[Any, ...]:
    """Gradients by the references of the ops, one after the other."""
    config = config_of(x)
    dtype = np.float64 if precision == "float64" else x["weights"]["embed"].dtype
    arrays = {name: w.astype(dtype) for name, w in x["weights"].items()}
    grads = {
        n: np.zeros(w.shape, np.float64 if dtype == np.float64 else np.float32) for n, w in arrays.items()
    }
    with mock.patch.dict(os.environ, GPU_OPS_DEVICE="cpu", GPU_OPS_BACKEND="reference"):
        weights, into = models.Llama.of(arrays, config), models.Llama.of(grads, config)
        models.loss_and_grads(x["ids"], x["targets"], weights, config, grads=into)
    return tuple(grads.values())


def torch_step(x: Inputs) -> Call:
    import torch

    from perf.torch_llama import torch_loss

    config, where = config_of(x), device_of(x)
    dtype = getattr(torch, x["weights"]["embed"].dtype.name)
    start = {name: torch.tensor(w.astype(np.float32)) for name, w in x["weights"].items()}
    p = {name: w.to(where, dtype).requires_grad_() for name, w in start.items()}
    groups = [
        {"params": [w for w in p.values() if w.ndim == n], "weight_decay": decay}
        for n, decay in ((2, OPTIONS["weight_decay"]), (1, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIONS["lr"], betas=OPTIONS["betas"], fused=True)
    ids, targets = (torch_view(x[name]).long() for name in ("ids", "targets"))

    def run() -> None:
        optimizer.zero_grad()
        torch_loss(p, config, ids, targets).backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()

    return run


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("training")
