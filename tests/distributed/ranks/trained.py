"""Llama trained on all ranks against one rank: loss and gradient norm of every step, in float64."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

from gpu_ops import RopeScaling, models, training
from gpu_ops.distributed import Comm, ContextParallel, DataParallel, Mesh, TensorParallel
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.models import Layer, LlamaConfig

CONFIG = LlamaConfig(vocab=32, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)
MIXED = dataclasses.replace(
    CONFIG,
    layers=(
        Layer(window=5),
        Layer(500.0, RopeScaling.dynamic(4.0, 8)),
    ),  # the length of whole sequences counts
    **{"qk_norm": True, "tied": True, "softcap": 3.0, "biases": ("qkv",)},
)
BATCH, SEQLEN, STEPS = 6, 24, 50  # which 2, 3 and 4 ranks divide


def batch(step):
    """ids and targets: each row counts from a random start by a random stride."""
    rng = np.random.default_rng(step)
    starts, strides = rng.integers(0, CONFIG.vocab, (BATCH, 1)), rng.integers(1, 4, (BATCH, 1))
    run = (starts + strides * np.arange(SEQLEN + 1)) % CONFIG.vocab
    return run[:, :-1].astype(np.int32), run[:, 1:].astype(np.int32)


def start(config):
    return models.initial_weights(config, seed=1, std=0.1)


def options(step):
    """Options of a step: lr with warm-up, and weight decay."""
    return {"lr": 2e-2 * min(1.0, (step + 1) / 5), "weight_decay": 0.1}


def scale(norm):
    return training.clip_coefficient(norm, 0.5)


@functools.cache
def of_one_rank(comm, config, steps):
    """Losses and norms, computed by rank 0 alone."""
    history = alone(config, steps) if comm.rank == 0 else np.empty((steps, 2))
    return comm.broadcast(history)


def alone(config, steps):
    flat = training.FlatParams.from_shapes(config.shapes(), dtype="float64")
    flat.assign(start(config))
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)
    history = []
    for step in range(steps):
        loss = models.loss_and_grads(*batch(step), weights, config, grads=grads)
        norm = math.sqrt(sum(np.sum(np.square(x)) for x in flat.grads.values()))
        flat.step(grad_scale=scale(norm), **options(step))
        history.append((float(loss), norm))
        flat.zero_grad()
    return np.array(history)


def of_ranks(parallel, part, steps, **more):
    """Losses and norms on all ranks. ``part``: part of this rank of an array (batch, seqlen)."""
    history = []
    for step in range(steps):
        ids, targets = map(part, batch(step))
        loss = parallel.loss_and_grads(ids, targets, **more)
        norm = parallel.grad_norm()
        parallel.step(grad_scale=scale(norm), **options(step))
        history.append((parallel.comm.all_reduce(np.array([loss]))[0] / parallel.comm.size, norm))
    return np.array(history)


def pair(comm):
    """Number of ranks in a group: 2 where the size is even, else 1."""
    return 2 if comm.size % 2 == 0 else 1


def equal(actual, expected):
    worst = np.abs(actual - expected).max(axis=0)
    assert (worst <= 1e-9).all(), f"loss and norm differ by up to {worst}"


def rows_of(comm: Comm):
    each = BATCH // comm.size
    return lambda x: x[comm.rank * each : (comm.rank + 1) * each]


def check_heads_and_batch(comm):
    """Two ranks share each layer, and pairs share the batch."""
    mesh = Mesh(comm, tp=pair(comm), dp=comm.size // pair(comm))
    expected = of_one_rank(comm, CONFIG, STEPS)
    assert expected[-1, 0] < 0.5 * expected[0, 0]
    parts = TensorParallel(CONFIG, mesh.tp, sequence_parallel=True)
    parallel = DataParallel(parts, mesh.dp, stage=1, dtype="float64")
    parallel.assign(parts.shard_weights(start(CONFIG)))
    equal(of_ranks(parallel, rows_of(mesh.dp), STEPS), expected)


def check_sequence(comm):
    """All ranks share every sequence."""
    mesh = Mesh(comm, cp=comm.size)
    context = ContextParallel(mesh.cp, SEQLEN)
    parallel = DataParallel(CONFIG, mesh.cp, stage=2, dtype="float64")
    parallel.assign(start(CONFIG))
    equal(of_ranks(parallel, context.part, STEPS, sequences=context), of_one_rank(comm, CONFIG, STEPS))


def check_sequence_with_all_else(comm):
    """Pairs share the sequences of their part of the batch, or the heads; every layout, recomputed attention."""
    steps = 5
    expected = of_one_rank(comm, MIXED, steps)
    for layout, stage, policy in (("zigzag", 3, "layer"), ("contiguous", 0, "attention")):
        mesh = Mesh(comm, cp=comm.size // pair(comm), dp=pair(comm))
        context, rows = ContextParallel(mesh.cp, SEQLEN, layout=layout), rows_of(mesh.dp)
        parallel = DataParallel(MIXED, mesh.group("dp", "cp"), stage=stage, dtype="float64")
        parallel.assign(start(MIXED))
        more = {"sequences": context, "policy": policy}
        equal(of_ranks(parallel, lambda x, f=context.part, g=rows: f(g(x)), steps, **more), expected)
    mesh = Mesh(comm, cp=comm.size // pair(comm), tp=pair(comm))
    context, parts = ContextParallel(mesh.cp, SEQLEN, layout="striped"), TensorParallel(CONFIG, mesh.tp)
    parallel = DataParallel(parts, mesh.cp, dtype="float64")
    parallel.assign(parts.shard_weights(start(CONFIG)))
    equal(
        of_ranks(parallel, context.part, steps, sequences=context), of_one_rank(comm, CONFIG, STEPS)[:steps]
    )


def check_mistakes_with_sequences(comm):
    before = dict(comm.bytes_sent)
    context = ContextParallel(comm, SEQLEN)
    mistakes = (
        (ShapeError, "chunks", lambda: ContextParallel(comm, 2 * comm.size + 1)),
        (OptionError, "layout", lambda: ContextParallel(comm, SEQLEN, layout="zig")),
        (ShapeError, "ContextParallel.part", lambda: context.part(np.zeros((2, SEQLEN // 2)))),
        (ShapeError, "ContextParallel.part", lambda: context.part(np.zeros(SEQLEN))),
    )
    for error, message, call in mistakes:
        with pytest.raises(error, match=message):
            call()
    assert dict(comm.bytes_sent) == before
