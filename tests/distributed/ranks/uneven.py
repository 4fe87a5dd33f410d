"""Data parallelism of ranks with unequal shares, and of ranks that differ where they must not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gpu_ops.distributed import DataParallel, Mesh, TensorParallel
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.errors import CommError
from tests.distributed.ranks.data import CONFIG, STAGES, STEPS, many, share
from tests.models.test_block import made


def check_tables_that_ranks_do_not_divide(comm):
    """Ranks have the same buckets, and round shared weights alike."""
    if comm.size % 2:
        return
    mesh = Mesh(comm, tp=2, dp=comm.size // 2)
    limit = (15 * 20 + 10) * 4 / (1 << 20)  # between the sizes of the two ranks' output layers
    for stage, bucket_mb in itertools.product(STAGES, (0, limit)):
        parts = TensorParallel(CONFIG, mesh.tp, sequence_parallel=True)
        options = {"dtype": "bfloat16", "master": False, "bucket_mb": bucket_mb}
        parallel = DataParallel(parts, mesh.dp, stage=stage, **options)
        *_, (weights, _) = many(parallel, STEPS[0], parts.shard_weights(made(CONFIG, np.float32)[0]))
        for name in (name for name in weights if name.endswith("norm")):
            each = comm.all_gather(weights[name][None].view(np.uint8))
            assert (each == each[0]).all(), (stage, name)


def check_ranks_that_differ(comm):
    """Ranks that differ get an error when they make a model, not a hang or weights of other layers."""
    for of_rank in (
        {"stage": comm.rank % 2},
        {"stage": 1, "parts": ("embed", 0) if comm.rank else (1, 2, "head")},
        {"dtype": "bfloat16" if comm.rank else "float32"},
    ):
        with pytest.raises(CommError, match=r"rank 0 DataParallel\(stage=.*rank 1 DataParallel"):
            DataParallel(CONFIG, comm, **of_rank)


def check_a_rank_without_rows(comm):
    """A rank without rows adds nothing to the gradients of the others."""
    ids, targets = share(0, 0, 0)
    rows = len(ids) if comm.rank == 0 else 0
    for stage in STAGES:
        alone, parallel = (DataParallel(CONFIG, c, stage=stage, mean=False) for c in (SingleProcess(), comm))
        for each, n in ((alone, len(ids)), (parallel, rows)):
            each.assign(made(CONFIG, np.float32)[0])
            loss = each.loss_and_grads(ids[:n], targets[:n], denominator=float(ids.size))
            assert (loss > 0) == (n > 0)
        assert abs(alone.grad_norm() / parallel.grad_norm() - 1) < 1e-12
        for each in (alone, parallel):
            each.step(lr=1e-2)
        for name, x in alone.gather_weights().items():
            np.testing.assert_array_equal(parallel.gather_weights()[name], x)
