"""Data parallelism and ZeRO against one rank that adds up the same gradients in the same order."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from gpu_ops import models, training
from gpu_ops.distributed import DataParallel, Mesh, TensorParallel
from gpu_ops.errors import OptionError, ShapeError, StateError
from gpu_ops.models import Layer, LlamaConfig, llama
from tests.models.test_block import made, tokens

CONFIG = LlamaConfig(vocab=29, hidden=20, ffn=24, nlayers=3, nheads=2, head_dim=8, biases=("qkv",))
TIED = dataclasses.replace(CONFIG, tied=True, nlayers=2, layers=(Layer(None, None, 3), Layer(500.0)))
STAGES = (0, 1, 2, 3)
# microbatches, options of a step, maximum norm; in the last case Adam does not hide a wrong scale
STEPS = (
    (1, {"lr": 3e-2, "weight_decay": 0.1}, 0.05),
    (2, {"lr": 3e-2, "weight_decay": 0.1}, 0.05),
    (2, {"lr": 3.0, "eps": 1.0}, None),
)


def share(step, rank, microbatch):
    """ids and targets of a microbatch of one rank, the same whichever rank computes them."""
    seed = 100 * step + 10 * microbatch + rank
    ids, targets = tokens((2, 6), seed), tokens((2, 6), seed + 1000)
    targets[0, rank] = -100
    return ids, targets


def grads_of(arrays, config, batches, **options):
    """Gradients by name, summed over batches one after the other."""
    dtype = arrays["embed"].dtype
    grad_dtype = np.float64 if dtype == np.float64 else np.float32
    grads = {name: np.zeros(x.shape, grad_dtype) for name, x in arrays.items()}
    weights, grads_model = models.Llama.of(arrays, config), models.Llama.of(grads, config)
    for ids, targets in batches:
        models.loss_and_grads(ids, targets, weights, config, grads=grads_model, **options)
    return grads


def in_order(gradients):
    total = gradients[0]
    for more in gradients[1:]:
        total = {name: x + more[name] for name, x in total.items()}
    return total


def summed(arrays, config, size, stage, microbatches, step):
    """Gradients of the microbatches of all ranks, added as the stage adds them."""
    each = [[share(step, r, j) for r in range(size)] for j in range(microbatches)]
    options = {"dloss": 1 / microbatches}
    if stage < 2:
        return in_order([grads_of(arrays, config, batches, **options) for batches in zip(*each, strict=True)])
    sums = [in_order([grads_of(arrays, config, [batch], **options) for batch in row]) for row in each]
    return in_order(sums)


def one_rank(config, dtype, size, stage, case, steps=2):
    """Parameters and norms after each step."""
    microbatches, options, max_norm = case
    flat = training.FlatParams.from_shapes(config.shapes(), dtype=dtype)
    flat.assign(made(config, np.float32)[0])
    for step in range(steps):
        for name, x in summed(flat.params, config, size, stage, microbatches, step).items():
            flat.grads[name][...] = x
        norm = math.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in flat.grads.values())) / size
        scale = training.clip_coefficient(norm, max_norm) if max_norm else 1.0
        flat.step(grad_scale=scale / size if size > 1 else scale, **options)
        yield flat.params, norm


def many(parallel, case, start=None, steps=2):
    """Parameters and norms after each step, trained on all ranks."""
    microbatches, options, max_norm = case
    parallel.assign(made(parallel.config, np.float32)[0] if start is None else start)
    for step in range(steps):
        for j in range(microbatches):
            ids, targets = share(step, parallel.comm.rank, j)
            last = j == microbatches - 1
            parallel.loss_and_grads(ids, targets, last=last, dloss=1 / microbatches)
        norm = parallel.grad_norm()
        scale = training.clip_coefficient(norm, max_norm) if max_norm else 1.0
        parallel.step(grad_scale=scale, **options)
        yield parallel.gather_weights(), norm


def check_the_bits_of_one_rank(comm):
    """Parameters and norms of every stage have the bits of one rank, with buckets of one part, several and all."""
    dtypes = ("float32", "bfloat16", "float64")
    for stage, (dtype, case, bucket_mb, config) in itertools.product(
        STAGES, zip(dtypes, STEPS, (0, 0.01, 25), (CONFIG, TIED, CONFIG), strict=True)
    ):
        parallel = DataParallel(config, comm, stage=stage, bucket_mb=bucket_mb, dtype=dtype)
        pairs = zip(many(parallel, case), one_rank(config, dtype, comm.size, stage, case), strict=True)
        for (weights, norm), (expected, expected_norm) in pairs:
            assert weights.keys() == expected.keys()
            for name, x in expected.items():
                np.testing.assert_array_equal(weights[name].view(np.uint8), x.view(np.uint8))
            assert abs(norm - expected_norm) <= 1e-14 * expected_norm


def check_the_loss_falls_as_in_float64(comm):
    """Gradients match those of the whole batch to 1e-12, with tokens divided unequally among ranks."""
    batches = [share(0, r, 0) for r in range(comm.size)]
    for rank, (_, targets) in enumerate(batches):
        targets[1, : rank % 4] = -100
    ids, targets = (np.concatenate(x) for x in zip(*batches, strict=True))
    count = int((targets >= 0).sum())
    expected = grads_of(made(CONFIG)[0], CONFIG, [(ids, targets)])
    for stage in STAGES:
        parallel = DataParallel(CONFIG, comm, stage=stage, dtype="float64", mean=False)
        parallel.assign(made(CONFIG)[0])
        loss = parallel.loss_and_grads(*batches[comm.rank], denominator=count, policy="layer")
        grads = {}
        for bucket in parallel._buckets:
            shares = (bucket.joined(parallel.flat.grads)[None], 0)
            whole = shares[0][0] if stage == 0 else comm.all_gather(*shares).reshape(-1)
            grads |= bucket.views_of(whole)
        for name, x in expected.items():
            assert np.abs(grads[name] - x).max() <= 1e-12 * max(1.0, np.abs(x).max()), name
        expected_loss = models.loss(ids, targets, models.Llama.of(made(CONFIG)[0], CONFIG), CONFIG)
        assert abs(comm.all_reduce(np.array([loss]))[0] - expected_loss) <= 1e-12
        assert abs(models.loss(ids, targets, parallel.model(), CONFIG) - expected_loss) <= 1e-12


def check_bytes(comm):
    """Check bytes of memory and messages by the formulas; stages 0 and 1 send nothing before the last microbatch."""
    p, dtype = comm.size, "bfloat16"
    for config, stage, microbatches in itertools.product((CONFIG, TIED), STAGES, (1, 2)):
        parallel = DataParallel(config, comm, stage=stage, dtype=dtype, bucket_mb=0)
        shards = p if stage else 1
        sizes = {}  # of a part, whose arrays and total are padded
        for part in llama.parts_of(config):
            names = llama.names_of(config, part)
            n = sum(-(-math.prod(config.shapes()[name]) // 256) * 256 for name in names)
            sizes[part] = -(-n // (256 * p)) * 256 * p
        n = sum(sizes.values())
        assert parallel.flat.nbytes == {
            name: size * n // shards for name, size in {"params": 2, "grads": 4, "m": 4, "v": 4, "master": 4}.items()
        }  # fmt: skip
        before = dict(comm.bytes_sent)
        for j in range(microbatches):
            last = j == microbatches - 1
            parallel.loss_and_grads(*share(0, comm.rank, j), last=last)
            if stage < 2 and not last:
                assert dict(comm.bytes_sent) == before
        parallel.step(lr=1e-3)
        sent = {op: comm.bytes_sent[op] - before.get(op, 0) for op in ("reduce_scatter", "all_gather")}
        part = {op: x * p // max(p - 1, 1) for op, x in sent.items()}
        if p == 1:
            assert sent == {"reduce_scatter": 0, "all_gather": 0}
            continue
        assert part["reduce_scatter"] == 4 * n * (microbatches if stage >= 2 else 1)
        layers = sum(size for x, size in sizes.items() if isinstance(x, int))
        tied = sizes["embed"] if config.tied else 0
        gathered = (n, n, n, microbatches * (n + layers + tied))[stage]
        assert part["all_gather"] == (4 if stage == 0 else 2) * gathered


def check_sums_begin_behind_the_backward_pass(comm):
    """Sums start behind the backward pass, and stage 3 holds at most two layers at a time."""
    block_backward, seen = llama.block_backward, []

    def backward(*arguments, **options):
        begun = len(parallel._grads._sent), len(parallel._weights._gathers)
        seen.append((*begun, len(parallel._started)))
        return block_backward(*arguments, **options)

    for stage in STAGES:
        parallel = DataParallel(CONFIG, comm, stage=stage, bucket_mb=0)
        seen.clear()
        llama.block_backward = backward
        try:
            parallel.loss_and_grads(*share(0, comm.rank, 0))
        finally:
            llama.block_backward = block_backward
        sent, gathered, started = zip(*seen, strict=True)
        assert started == (1, 2, 3)
        assert max(sent) == 2
        assert max(gathered) == (2 if stage == 3 else 0)
        assert not parallel._weights._gathers
        assert len(parallel._grads._whole) == (len(parallel._buckets) if stage == 1 else 0)


def check_with_tensor_parallelism(comm):
    """Weights and norms match one rank to 1e-12, also where KV heads are on several ranks."""
    tp = 2 if comm.size % 2 == 0 else 1
    mesh = Mesh(comm, tp=tp, dp=comm.size // tp)
    config = dataclasses.replace(CONFIG, nheads_kv=1, qk_norm=True)
    case = STEPS[1]
    for stage, divided in itertools.product(STAGES, (False, True)):
        parts = TensorParallel(config, mesh.tp, sequence_parallel=divided)
        parallel = DataParallel(parts, mesh.dp, stage=stage, dtype="float64")
        of_one = one_rank(config, "float64", mesh.dp.size, stage, case)
        start = parts.shard_weights(made(config, np.float32)[0])
        for (weights, norm), (expected, expected_norm) in zip(
            many(parallel, case, start), of_one, strict=True
        ):
            whole = parts.gather_weights(weights)
            for name, x in expected.items():
                assert np.abs(whole[name] - x).max() <= 1e-12 * max(1.0, np.abs(x).max()), name
            assert abs(norm - expected_norm) <= 1e-12 * expected_norm


def check_a_step_that_one_rank_skips(comm):
    for stage in STAGES:
        parallel = DataParallel(CONFIG, comm, stage=stage)
        parallel.assign(made(CONFIG, np.float32)[0])
        for skips in (True, False):
            parallel.loss_and_grads(*share(0, comm.rank, 0))
            parallel.step(lr=1e-2, skip=np.array(skips and comm.rank == comm.size - 1, np.float32))
            assert parallel.flat.steps == (not skips)
            same = [(x == made(CONFIG, np.float32)[0][n]).all() for n, x in parallel.gather_weights().items()]
            assert all(same) if skips else not any(same)


def check_other_options(comm):
    """bfloat16 without masters, 8-bit moments, a choice of decayed weights: the bits of one rank on all ranks."""
    for stage in STAGES:
        for options in ({"dtype": "bfloat16", "master": False}, {"moment_bits": 8}, {"decay": ("norm",)}):
            parallel = DataParallel(CONFIG, comm, stage=stage, **options)
            *_, (weights, _) = many(parallel, STEPS[0])
            for x in weights.values():
                each = comm.all_gather(x[None].view(np.uint8))
                assert (each == each[0]).all()
            if "master" in options:
                continue
            flat = training.FlatParams.from_shapes(CONFIG.shapes(), **{"dtype": "float32"} | options)
            flat.assign(made(CONFIG, np.float32)[0])
            for step in range(2):
                total = summed(flat.params, CONFIG, comm.size, stage, 1, step)
                for name, x in total.items():
                    flat.grads[name][...] = x
                norm = (
                    math.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in total.values())) / comm.size
                )
                scale = training.clip_coefficient(norm, STEPS[0][2])
                flat.step(grad_scale=scale / comm.size if comm.size > 1 else scale, **STEPS[0][1])
            for name, x in flat.params.items():
                np.testing.assert_array_equal(weights[name], x)


def check_gradients_that_are_forgotten(comm):
    """zero_grad drops gradients of microbatches, also while their sums are in progress."""
    for stage in STAGES:
        parallel = DataParallel(CONFIG, comm, stage=stage, bucket_mb=0)
        parallel.assign(made(CONFIG, np.float32)[0])
        parallel.loss_and_grads(*share(5, comm.rank, 0), last=False)
        parallel.zero_grad()
        parallel.loss_and_grads(*share(0, comm.rank, 0))
        norm = parallel.grad_norm()
        parallel.zero_grad()
        assert parallel.grad_norm() == 0
        parallel.zero_grad()
        parallel.loss_and_grads(*share(0, comm.rank, 0))
        assert parallel.grad_norm() == norm


def check_a_pass_that_failed(comm):
    """A pass fails on all ranks (a target beyond the vocabulary); the next one has correct weights and gradients."""
    for stage in STAGES:
        parallel = DataParallel(CONFIG, comm, stage=stage, bucket_mb=0)
        parallel.assign(made(CONFIG, np.float32, 1)[0])
        ids, targets = share(0, comm.rank, 0)
        with pytest.raises(OptionError, match="99"):
            parallel.loss_and_grads(ids, np.full_like(targets, 99))
        parallel.zero_grad()
        parallel.assign(made(CONFIG, np.float32)[0])
        for name, x in parallel.gather_weights().items():
            np.testing.assert_array_equal(x, made(CONFIG, np.float32)[0][name])
        fresh = DataParallel(CONFIG, comm, stage=stage, bucket_mb=0)
        fresh.assign(made(CONFIG, np.float32)[0])
        for each in (parallel, fresh):
            each.loss_and_grads(ids, targets)
        np.testing.assert_array_equal(parallel.flat.buffers["grads"], fresh.flat.buffers["grads"])


def check_data_mistakes(comm):
    arrays = made(CONFIG, np.float32)[0]
    parallel = DataParallel(CONFIG, comm, stage=2)
    parallel.assign(arrays)
    ids, targets = share(0, comm.rank, 0)
    parallel.loss_and_grads(ids, targets)
    before = dict(comm.bytes_sent)
    mistakes = (
        (OptionError, "stage", lambda: DataParallel(CONFIG, comm, stage=4)),
        (OptionError, "bucket_mb", lambda: DataParallel(CONFIG, comm, bucket_mb=-1)),
        (OptionError, "did you mean 'dtype'", lambda: DataParallel(CONFIG, comm, dtypes="float32")),
        (OptionError, "decay", lambda: DataParallel(CONFIG, comm, decay=("layers.9.o",))),
        (OptionError, "parts=", lambda: DataParallel(CONFIG, comm, parts=(0, 7))),
        (OptionError, "mean", lambda: DataParallel(CONFIG, comm, mean=2)),
        (ShapeError, "norm is missing", lambda: parallel.assign({k: x for k, x in arrays.items() if k != "norm"})),
        (ShapeError, "norm has shape", lambda: parallel.assign(arrays | {"norm": arrays["embed"]})),
        (OptionError, "z_loss", lambda: parallel.loss_and_grads(ids, targets, zloss=1.0)),
        (StateError, "call step", lambda: parallel.loss_and_grads(ids, targets)),
    )  # fmt: skip
    for error, message, call in mistakes:
        for _ in range(2):
            with pytest.raises(error, match=message):
                call()
    assert dict(comm.bytes_sent) == before
