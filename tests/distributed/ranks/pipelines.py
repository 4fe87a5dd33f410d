"""Pipelines against one rank that runs one microbatch after the other."""

from __future__ import annotations

import dataclasses
import itertools
import weakref

import numpy as np
import pytest

from gpu_ops import models, training
from gpu_ops.distributed import DataParallel, Mesh, Pipeline, TensorParallel, pipeline
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.errors import CommError, OptionError, ShapeError, StateError
from gpu_ops.models import LlamaConfig
from tests.distributed.ranks.tensor import ALL_BIASES, same_on_all
from tests.models.test_block import made, tokens

CONFIG = LlamaConfig(vocab=29, hidden=16, ffn=24, nlayers=9, nheads=2, biases=ALL_BIASES, qk_norm=True)
GEMMA = dataclasses.replace(
    CONFIG, nlayers=8, post_norms=True, sub_norms=True, softcap=5.0, residual_scale=0.5
)


def batch(rows):
    ids, targets = tokens((rows, 5)), tokens((rows, 5), 2)
    targets[0, 3] = -100
    return ids, targets


def one_rank(config, dtype, microbatches, mean=True, ids_and_targets=None, **options):
    """Loss, and gradients by name."""
    arrays, grads = made(config, np.float32)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    grads = {name: x.astype(np.float64 if dtype == np.float64 else np.float32) for name, x in grads.items()}
    weights, into = models.Llama.of(arrays, config), models.Llama.of(grads, config)
    factor, total = 1 / microbatches if mean else 1.0, 0
    each = (np.split(x, microbatches) for x in ids_and_targets or batch(2 * microbatches))
    for ids, targets in zip(*each, strict=True):
        loss = models.loss_and_grads(ids, targets, weights, config, grads=into, dloss=factor, **options)
        total = total + loss * loss.dtype.type(factor)
    return total, grads


def schedules(comm):
    """Names, chunks, and numbers of microbatches: fewer than ranks, as many, more."""
    p = comm.size
    plain = [(name, 1, m) for name in ("gpipe", "1f1b", "zb-h1") for m in sorted({1, 2, p, 2 * p + 1})]
    return [*plain, ("interleaved", 2, p), ("interleaved", 2, 2 * p), ("interleaved", 1, p)]


def held_by(comm, line, config=CONFIG, **options):
    """Parts of the model held by this rank."""
    parallel = DataParallel(config, SingleProcess(), parts=line.parts, **options)
    parallel.assign(made(config, np.float32)[0])
    return parallel


def same_grads(parallel, want):
    grads = parallel._grads.arrays
    assert grads
    for name, x in grads.items():
        assert x.dtype == want[name].dtype
        np.testing.assert_array_equal(x, want[name], err_msg=name)
    return set(grads)


def check_the_bits_of_one_rank_by_one(comm):
    """Loss and all gradients have the bits of one rank, for every schedule."""
    dtypes = itertools.cycle(("float32", "bfloat16", "float64"))
    for (name, chunks, m), dtype in zip(schedules(comm), dtypes, strict=False):
        config = GEMMA if m == comm.size else CONFIG
        line = Pipeline(config, comm, schedule=name, chunks=chunks)
        parallel = held_by(comm, line, config, dtype=dtype)
        param_dtype = parallel.flat.buffers["params"].dtype
        ids, targets = batch(2 * m)
        policy = ("none", "layer")[m % 2]
        loss = line.loss_and_grads(ids, targets, parallel, microbatches=m, policy=policy)
        expected_loss, expected = one_rank(config, param_dtype, m)
        assert loss.dtype == expected_loss.dtype
        assert loss == expected_loss
        same_grads(parallel, expected)
        owners = np.array([[n in parallel._grads.arrays for n in config.shapes()]])
        assert (comm.all_gather(owners.astype(int)).sum(axis=0) == 1).all()


def check_a_denominator_of_the_whole_batch(comm):
    ids, targets = batch(6)
    targets[3:, 1:] = -100
    options = {"denominator": int((targets >= 0).sum()), "z_loss": 1e-3}
    line = Pipeline(CONFIG, comm, schedule="zb-h1")
    parallel = held_by(comm, line, dtype="float64")
    loss = line.loss_and_grads(ids, targets, parallel, microbatches=3, mean=False, **options)
    expected_loss, expected = one_rank(
        CONFIG, np.float64, 3, mean=False, ids_and_targets=(ids, targets), **options
    )
    assert loss == expected_loss
    same_grads(parallel, expected)
    whole, exact = one_rank(CONFIG, np.float64, 1, mean=False, ids_and_targets=(ids, targets), **options)
    assert abs(loss - whole) <= 1e-12
    for name, x in parallel._grads.arrays.items():
        assert np.abs(x - exact[name]).max() <= 1e-12 * max(1.0, np.abs(exact[name]).max()), name


def check_how_many_passes_are_held(comm):
    """The number of passes held obeys the bounds of the schedule table."""
    p, r, m = comm.size, comm.rank, 3 * comm.size
    bounds = {
        "gpipe": m,
        "1f1b": min(p - r, m),
        "zb-h1": min(p, m),
        "interleaved": 2 * (p - r) - 1 + p,
    }
    alive, real = weakref.WeakSet(), pipeline.Pass
    most = [0]

    class Counted(real):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            alive.add(self)
            most[0] = max(most[0], len(alive))

    pipeline.Pass = Counted
    try:
        for name, bound in bounds.items():
            line = Pipeline(CONFIG, comm, schedule=name, chunks=2 if name == "interleaved" else 1)
            parallel = held_by(comm, line)
            most[0] = 0
            line.loss_and_grads(*batch(m), parallel, microbatches=m)
            assert not alive
            # in stages without a table to add to, zb-h1 holds no pass for W
            assert most[0] == bound if name != "zb-h1" or r == 0 else most[0] <= bound, name
    finally:
        pipeline.Pass = real


def check_pipeline_bytes(comm):
    """Each microbatch sends N between two stages and N back; the loss is sent once."""
    p, m = comm.size, 2 * comm.size
    for name, chunks, dtype in (
        ("1f1b", 1, "bfloat16"),
        ("interleaved", 2, "float32"),
        ("zb-h1", 1, "float64"),
    ):
        line = Pipeline(CONFIG, comm, schedule=name, chunks=chunks)
        parallel = held_by(comm, line, dtype=dtype)
        before = dict(comm.bytes_sent)
        line.loss_and_grads(*batch(2 * m), parallel, microbatches=m)
        item = parallel.flat.buffers["params"].dtype.itemsize
        n = 2 * 5 * CONFIG.hidden * item
        last = comm.rank == p - 1
        onward, back = chunks - last, chunks - (comm.rank == 0)
        loss = (p - 1) * (8 if dtype == "float64" else 4) * last
        sent = {op: count - before.get(op, 0) for op, count in comm.bytes_sent.items()}
        assert {op: count for op, count in sent.items() if count} == (
            {"send": (onward + back) * m * n, **({"broadcast": loss} if loss else {})} if p > 1 else {}
        )


def check_training_on_a_mesh(comm):
    """Check pipelines of ranks that also divide the batch or the weights against one rank."""
    p = comm.size
    pp = 2 if p % 2 == 0 else p
    for axis, stage in (("dp", 0), ("dp", 1), ("tp", 1)):
        mesh = Mesh(comm, pp=pp, **{axis: p // pp})
        config = dataclasses.replace(CONFIG, nlayers=2 * pp)
        parts = TensorParallel(config, mesh.tp) if axis == "tp" else config
        whole = made(config, np.float32)[0]
        start = parts.shard_weights(whole) if axis == "tp" else whole
        for name in ("1f1b", "zb-h1"):
            line = Pipeline(config, mesh.pp, schedule=name)
            parallel = DataParallel(parts, mesh.dp, stage=stage, parts=line.parts, dtype="float64")
            parallel.assign(start)
            flat = training.FlatParams.from_shapes(config.shapes(), dtype="float64")
            flat.assign(whole)
            weights, grads = (models.Llama.of(x, config) for x in (flat.params, flat.grads))
            for step in range(2):
                ids, targets = tokens((4 * mesh.dp.size, 6), step), tokens((4 * mesh.dp.size, 6), step + 9)
                share = slice(4 * mesh.dp.rank, 4 * mesh.dp.rank + 4)
                loss = line.loss_and_grads(ids[share], targets[share], parallel, microbatches=2)
                norm = parallel.grad_norm(also=mesh.pp)
                parallel.step(lr=1e-2, grad_scale=training.clip_coefficient(norm, 0.1))
                flat.zero_grad()
                expected = models.loss_and_grads(ids, targets, weights, config, grads=grads)
                expected_norm = np.sqrt(sum(np.vdot(x, x) for x in flat.grads.values()))
                flat.step(lr=1e-2, grad_scale=training.clip_coefficient(expected_norm, 0.1))
                assert abs(norm - expected_norm) <= 1e-12 * expected_norm
                mean = mesh.dp.all_reduce(np.array([loss])) / mesh.dp.size
                assert abs(mean[0] - expected) <= 1e-12
                same_on_all(mesh.pp, np.asarray(loss))
                same_on_all(mesh.tp, np.asarray(loss))
            gathered = parallel.gather_weights()
            exact = parts.shard_weights(flat.params) if axis == "tp" else flat.params
            for array, x in gathered.items():
                assert np.abs(x - exact[array]).max() <= 1e-12 * max(1.0, np.abs(x).max()), array


def check_pipeline_mistakes(comm):
    p = comm.size
    line = Pipeline(CONFIG, comm)
    parallel = held_by(comm, line)
    ids, targets = batch(6)
    run, options = line.loss_and_grads, {"microbatches": 3}
    three = DataParallel(CONFIG, SingleProcess(), stage=2, parts=line.parts)
    before = dict(comm.bytes_sent)
    mistakes = [
        (OptionError, "did you mean '1f1b'", lambda: Pipeline(CONFIG, comm, schedule="1f1")),
        (OptionError, "use interleaved", lambda: Pipeline(CONFIG, comm, chunks=2)),
        (OptionError, "fewer than", lambda: Pipeline(CONFIG, comm, schedule="interleaved", chunks=10)),
        (OptionError, "microbatches", lambda: run(ids, targets, parallel, microbatches=0)),
        (OptionError, "z_loss", lambda: run(ids, targets, parallel, zloss=0.1, **options)),
        (OptionError, "mean", lambda: run(ids, targets, parallel, mean=2, **options)),
        (OptionError, "expected stage 0 or 1", lambda: run(ids, targets, three, **options)),
        (ShapeError, "divide evenly", lambda: run(ids[:5], targets[:5], parallel, **options)),
        (ShapeError, "divide evenly", lambda: run(ids[0], targets[0], parallel, **options)),
        (ShapeError, "targets", lambda: run(ids, targets[:5], parallel, **options)),
    ]
    if p > 1:
        tied, whole = dataclasses.replace(CONFIG, tied=True), DataParallel(CONFIG, SingleProcess())
        uneven = Pipeline(CONFIG, comm, schedule="interleaved", chunks=2).loss_and_grads
        mistakes += [
            (OptionError, "tied=False", lambda: Pipeline(tied, comm)),
            (OptionError, "expected stage 0 or 1, and parts=", lambda: run(ids, targets, whole, **options)),
            (OptionError, "multiple of", lambda: uneven(ids, targets, parallel, microbatches=p + 1)),
        ]
    for error, message, call in mistakes:
        for _ in range(2):
            with pytest.raises(error, match=message):
                call()
    assert dict(comm.bytes_sent) == before
    run(ids, targets, parallel, **options)
    parallel.finish()
    with pytest.raises(StateError, match="call step"):
        run(ids, targets, parallel, **options)
    comm.barrier()


def check_different_options(comm):
    """Every rank gets the error before it sends anything else."""
    last = comm.rank == comm.size - 1
    line = Pipeline(CONFIG, comm, schedule="gpipe" if last else "1f1b")
    with pytest.raises(CommError, match=r"schedule='1f1b'.*schedule='gpipe'"):
        line.loss_and_grads(*batch(2), held_by(comm, line), microbatches=2)
