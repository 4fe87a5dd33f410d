"""Checkpoints of several ranks: saved from one division of a model, loaded into others, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpu_ops import training
from gpu_ops.distributed import (
    DataParallel,
    Mesh,
    Pipeline,
    ShardedCheckpoints,
    TensorParallel,
    sharded_checkpoints,
)
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.errors import CommError, DTypeError, FormatError, MissingFileError, OptionError, ShapeError
from gpu_ops.training import Batches
from tests.distributed.ranks.tensor import ALL_BIASES, UNEVEN, config_for
from tests.models.test_block import made

KINDS = ("params", "master", "m", "v")


@contextmanager
def folder_of_all(comm):
    """New folder that all ranks see."""
    name = np.zeros(200, np.uint8)
    if comm.rank == 0:
        text = tempfile.mkdtemp().encode()
        name[: len(text)] = np.frombuffer(text, np.uint8)
    path = Path(bytes(comm.broadcast(name)).rstrip(b"\0").decode())
    try:
        yield path
        comm.barrier()
    finally:
        if comm.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def config_of(comm):
    """Config with KV heads that several ranks hold."""
    nheads, nheads_kv = UNEVEN[comm.size]
    return config_for(comm, nheads=nheads, nheads_kv=nheads_kv, qk_norm=True, biases=ALL_BIASES, nlayers=1)


def layouts(comm):
    """Layouts: number of ranks for tensor parallelism, and stage."""
    p = comm.size
    pairs = [(1, 1), (p, 0), (1, 3), (1, 0), (p, 2), *([(2, 1), (2, 2), (2, 3)] if p == 4 else [])]
    return list(dict.fromkeys(pairs))


class Run:
    """Model in training, divided in one way."""

    def __init__(self, comm, config, tp, stage, **options):
        self.mesh = Mesh(comm, tp=tp, dp=comm.size // tp)
        self.parts = TensorParallel(config, self.mesh.tp, sequence_parallel=stage == 2)
        options = {"dtype": "bfloat16", "bucket_mb": 0.001 * stage} | options
        self.parallel = DataParallel(self.parts, self.mesh.dp, stage=stage, **options)

    def start(self, seed=0):
        self.parallel.assign(self.parts.shard_weights(made(self.parts.whole, np.float32, seed)[0]))

    def train(self, first, last):
        """Run steps; each batch has the same 12 rows whatever the division."""
        dp = self.mesh.dp
        rows = 12 // dp.size
        batches = Batches(np.arange(400) % 29, rows, 12, seed=5, rank=dp.rank, world=dp.size, start=first)
        assert batches.step == first
        for _ in range(first, last):
            ids, targets = next(batches)
            self.parallel.loss_and_grads(ids, targets)
            norm = self.parallel.grad_norm()
            self.parallel.step(lr=1e-2, weight_decay=0.1, grad_scale=training.clip_coefficient(norm, 0.1))


def assembled(folder, config):
    """Whole arrays ("m/norm" etc.) from the files of a checkpoint; check that every element is in some file."""
    index = json.loads((folder / "index.json").read_text())
    files = [training.load_state(folder / name)[0] for name in index["files"]]
    assert index["tensors"].keys() == config.shapes().keys()
    arrays = {}
    for name, entry in index["tensors"].items():
        for state in index["dtypes"]:
            whole, seen = None, np.zeros(entry["shape"], bool)
            for shard in entry["shards"]:
                part = files[shard["file"]][f"{state}/{name}"]
                whole = np.zeros(entry["shape"], part.dtype) if whole is None else whole
                axis = shard["axis"]
                bounds = shard["pieces"] or [[0, whole.shape[0]]]
                rows = np.concatenate([np.arange(a, b) for a, b in bounds])
                local, known = np.take(whole, rows, axis), np.take(seen, rows, axis)
                at = slice(*shard["elements"])
                fresh = ~known.reshape(-1)[at]
                old = local.reshape(-1)[at]
                assert (old[~fresh] == part[~fresh]).all()  # on several ranks: the same
                local.reshape(-1)[at], known.reshape(-1)[at] = part, True
                place = (slice(None),) * axis + (rows,)
                whole[place], seen[place] = local, known
            assert seen.all(), name
            arrays[f"{state}/{name}"] = whole
    return arrays, index


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name].view(np.uint8), x.view(np.uint8), err_msg=name)


def check_any_layout_loads_any_other(comm):
    config = config_of(comm)
    with folder_of_all(comm) as folder:
        for number, (tp, stage) in enumerate(layouts(comm)[: 6 if comm.size == 4 else 3]):
            run = Run(comm, config, tp, stage)
            run.start()
            run.train(0, 2)
            first = ShardedCheckpoints(folder / f"from{number}", comm)
            first.save(2, run.parallel, {"loss": 0.5, "who": [tp, stage]})
            expected, index = assembled(first.path(2), config)
            assert (index["next_step"], index["dtypes"].keys()) == (3, set(KINDS))
            weights = run.parts.gather_weights(run.parallel.gather_weights())
            same(
                {f"params/{name}": x for name, x in weights.items()},
                {k: x for k, x in expected.items() if k[0] == "p"},
            )
            for other in layouts(comm):
                if (tp, stage) != (1, 1) and other not in ((1, 3), (comm.size, 0), (tp, stage)):
                    continue
                target = Run(comm, config, *other)
                target.start(seed=1)
                assert first.load(target.parallel) == (2, {"loss": 0.5, "who": [tp, stage]})
                second = ShardedCheckpoints(folder / f"{number}-{other[0]}-{other[1]}", comm)
                second.save(2, target.parallel)
                actual, again = assembled(second.path(2), config)
                assert again["next_step"] == 3
                same(actual, expected)
                same(target.parts.gather_weights(target.parallel.gather_weights()), weights)
            alone = DataParallel(config, SingleProcess(), dtype="bfloat16")
            ShardedCheckpoints(folder / f"from{number}", SingleProcess()).load(alone)
            same(alone.gather_weights(), weights)


def check_a_run_goes_on(comm):
    """A resumed run has the bits of an uninterrupted one; with another division it matches to 1e-12 in float64."""
    config = config_of(comm)
    for (tp, stage), dtype in zip(layouts(comm)[:3], ("bfloat16", "float32", "float64"), strict=True):
        with folder_of_all(comm) as folder:
            run, checkpoints = Run(comm, config, tp, stage, dtype=dtype), ShardedCheckpoints(folder, comm)
            run.start()
            run.train(0, 2)
            checkpoints.save(2, run.parallel)
            run.train(2, 4)
            expected = run.parts.gather_weights(run.parallel.gather_weights())
            for other in ((tp, stage), (1, 2), (comm.size, 1)):
                again = Run(comm, config, *other, dtype=dtype)
                step, _ = checkpoints.load(again.parallel)
                again.train(step, 4)
                weights = again.parts.gather_weights(again.parallel.gather_weights())
                if other == (tp, stage):
                    same(weights, expected)
                elif dtype == "float64":
                    for name, x in expected.items():
                        assert np.abs(weights[name] - x).max() <= 1e-12 * max(1.0, np.abs(x).max()), name


def check_pipelines(comm):
    """Each rank saves its layers; ranks that have parts of all layers load them, and vice versa."""
    config = dataclasses.replace(config_of(comm), nlayers=comm.size)
    whole = made(config, np.float32)[0]
    line = Pipeline(config, comm)
    with folder_of_all(comm) as folder:
        for backwards in (False, True):
            layers = DataParallel(config, SingleProcess(), parts=line.parts)
            shares = DataParallel(config, comm, stage=3)
            source, target = (shares, layers) if backwards else (layers, shares)
            source.assign(whole)
            checkpoints = ShardedCheckpoints(folder / str(backwards), comm)
            checkpoints.save(1, source)
            checkpoints.load(target)
            same(layers.gather_weights(), {n: x for n, x in whole.items() if n in layers.gather_weights()})
            same(shares.gather_weights(), whole)


def check_how_many_stay(comm):
    config = config_of(comm)
    run = Run(comm, config, 1, 1)
    with folder_of_all(comm) as folder:
        checkpoints = ShardedCheckpoints(folder / "new", comm, keep=2)
        assert checkpoints.steps() == []
        with pytest.raises(MissingFileError, match="none"):
            checkpoints.load(run.parallel)
        for step in (1, 5, 7):
            assert checkpoints.save(step, run.parallel, {"step": step}) == checkpoints.path(step)
        assert checkpoints.steps() == [5, 7]
        assert checkpoints.load(run.parallel, 5) == (5, {"step": 5})
        assert sorted(x.name for x in (folder / "new").iterdir()) == [
            checkpoints.path(x).name for x in (5, 7)
        ]
        with pytest.raises(OptionError, match="holds step 7, and this is step 7"):
            checkpoints.save(7, run.parallel)
        with pytest.raises(MissingFileError, match="not step 1, but"):
            checkpoints.load(run.parallel, 1)


def check_what_does_not_fit(comm):
    config = config_of(comm)
    run = Run(comm, config, 1, 1)
    with folder_of_all(comm) as folder:
        checkpoints = ShardedCheckpoints(folder, comm)
        checkpoints.save(1, run.parallel)
        wider = DataParallel(dataclasses.replace(config, ffn=12 * comm.size), comm, dtype="bfloat16")
        deeper = DataParallel(dataclasses.replace(config, nlayers=2), comm, dtype="bfloat16")
        mistakes = (
            (OptionError, "moment_bits=8", lambda: checkpoints.save(2, DataParallel(config, comm, moment_bits=8))),
            (OptionError, "step", lambda: checkpoints.save(-1, run.parallel)),
            (OptionError, "keep", lambda: ShardedCheckpoints(folder, comm, keep=0)),
            (DTypeError, "params float32", lambda: checkpoints.load(DataParallel(config, comm))),
            (ShapeError, "gate_up", lambda: checkpoints.load(wider)),
            (ShapeError, r"layers\.1\.\w+ has shape .* lacks it", lambda: checkpoints.load(deeper)),
        )  # fmt: skip
        for error, message, call in mistakes:
            with pytest.raises(error, match=message):
                call()
            comm.barrier()


def check_an_error_on_one_rank(comm):
    """An error on one rank is raised on all ranks, and none waits; the previous state stays."""
    config, last = config_of(comm), comm.size - 1
    run = Run(comm, config, 1, 1)
    run.start()
    expected = run.parallel.gather_weights()
    with folder_of_all(comm) as folder:
        checkpoints = ShardedCheckpoints(folder, comm)
        path = checkpoints.save(1, run.parallel)
        error = OptionError if comm.rank == last else CommError
        with pytest.raises(error, match="meta cannot be written"):
            checkpoints.save(2, run.parallel, {"x": object()} if comm.rank == last else {})
        assert checkpoints.steps() == [1]
        comm.barrier()
        if comm.rank == last:
            file = next(path.glob(f"rank-{last:05d}*"))
            file.write_bytes(file.read_bytes()[:-1])
        comm.barrier()
        run.start(seed=1)
        with pytest.raises(FormatError if comm.rank == last else CommError, match=r"FormatError|safetensors"):
            checkpoints.load(run.parallel)
        run.start()
        same(run.parallel.gather_weights(), expected)


def check_ranks_without_which_the_model_is_not_whole(comm):
    config = config_of(comm)
    with folder_of_all(comm) as folder:
        for parallel in (
            DataParallel(config, comm, stage=1),
            DataParallel(config, SingleProcess(), parts=("embed",)),
        ):
            with pytest.raises(OptionError, match=r"do not have all of .* such as mesh\.comm"):
                ShardedCheckpoints(folder / str(comm.rank), SingleProcess()).save(1, parallel)


def check_interrupted_saves(comm):
    """Wherever a save is interrupted, the previous state is the last one; the next save is complete."""
    config, alone = config_of(comm), SingleProcess()
    parallel = DataParallel(config, alone)
    parallel.assign(made(config, np.float32)[0])

    def fails(*arguments, **options):
        raise KeyboardInterrupt

    with folder_of_all(comm) as folder:
        checkpoints = ShardedCheckpoints(folder / str(comm.rank), alone, keep=1)
        checkpoints.save(1, parallel, {"step": 1})
        names = ("save_state", "write_file", "sync_folder")
        for step, name in enumerate(names, 2):
            parallel.flat.params["0.decays"][...] = step
            real = getattr(sharded_checkpoints, name)
            setattr(sharded_checkpoints, name, fails)
            try:
                with pytest.raises(KeyboardInterrupt):
                    checkpoints.save(step, parallel, {"step": step})
            finally:
                setattr(sharded_checkpoints, name, real)
            last = step if name == "sync_folder" else 1
            assert checkpoints.steps()[-1] == last
            other = DataParallel(config, alone)
            assert checkpoints.load(other) == (last, {"step": last})
        checkpoints.save(9, parallel)
        assert checkpoints.steps() == [9]


def check_damaged_files(comm):
    config, alone = config_of(comm), SingleProcess()
    parallel = DataParallel(config, alone)
    with folder_of_all(comm) as folder:
        checkpoints = ShardedCheckpoints(folder / str(comm.rank), alone)
        where = checkpoints.save(1, parallel)
        index = json.loads((where / "index.json").read_text())
        entry = index["tensors"]["norm"]
        far = [{**entry["shards"][0], "elements": [0, 10**9]}]
        without, beyond = (
            index | {"tensors": index["tensors"] | {"norm": entry | {"shards": x}}} for x in ([], far)
        )
        damaged = (
            ("kind", index | {"kind": "another"}),
            ("no index", [1]),
            ("no file of the folder", index | {"files": ["../x"]}),
            ("no file with 20 elements of norm", without),
            ("no part of an array", beyond),
        )
        for words, wrong in damaged:
            (where / "index.json").write_text(json.dumps(wrong))
            with pytest.raises(FormatError, match=words):
                checkpoints.load(parallel)
        (where / "index.json").write_text(json.dumps(index))
        checkpoints.load(parallel)
        path = where / index["files"][0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(FormatError, match="checksum"):
            checkpoints.load(parallel)
