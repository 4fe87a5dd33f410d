"""Checkpoints of one rank: of another model, damaged, in a folder with other files."""

from __future__ import annotations

import copy
import itertools
import json
import shutil

import numpy as np
import pytest

from gpu_ops.distributed import DataParallel, ShardedCheckpoints
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.distributed.shard_index import Slices, common, covers, runs_of
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.models import LlamaConfig

SIZES = {"vocab": 16, "hidden": 8, "ffn": 16, "nlayers": 2, "nheads": 2}


def model(fill=1.0, **changes):
    parallel = DataParallel(LlamaConfig(**SIZES | changes), SingleProcess(), stage=1)
    parallel.flat.buffers["params"].fill(fill)
    parallel.publish()
    return parallel


@pytest.fixture
def saved(tmp_path):
    checkpoints = ShardedCheckpoints(tmp_path / "saved", SingleProcess(), keep=1)
    checkpoints.save(1, model())
    return checkpoints


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nlayers": 1}, r"holds layers\.1\.\w+, which this model lacks"),
        ({"nlayers": 3}, r"layers\.2\.\w+ has shape .* lacks it"),
        ({"tied": True}, "holds lm_head, which this model lacks"),
        ({"ffn": 32}, r"layers\.0\.gate_up has shape \(64, 8\), .* has \(32, 8\)"),
    ],
)
def test_another_model_is_refused_before_anything_is_written(saved, changes, words):
    other = model(5.0, **changes)
    with pytest.raises(ShapeError, match=words):
        saved.load(other)
    assert (other.flat.buffers["params"] == 5).all()


WRONG = [
    ("files", {}),
    ("files", [5]),
    ("tensors", []),
    ("tensors", "norm", 5),
    ("tensors", "norm", {}),
    ("tensors", "norm", "shape", 8),
    ("tensors", "norm", "shape", ["a"]),
    ("tensors", "norm", "shards", 5),
    ("tensors", "norm", "shards", 0, {}),
    ("tensors", "norm", "shards", 0, "file", 1),
    ("tensors", "norm", "shards", 0, "file", "x"),
    ("tensors", "norm", "shards", 0, "file", 0.5),
    ("tensors", "norm", "shards", 0, "axis", -1),
    ("tensors", "norm", "shards", 0, "axis", 1),
    ("tensors", "norm", "shards", 0, "elements", [0, 7]),
    ("tensors", "norm", "shards", 0, "elements", [0, 9]),
    ("next_step", 0),
    ("next_step", 1 << 63),
    ("meta", 5),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_damaged_index_is_a_format_error(saved, wrong):
    path = saved.path(1) / "index.json"
    index = copy.deepcopy(json.loads(path.read_text()))
    *keys, last, value = wrong
    entry = index
    for key in keys:
        entry = entry[key]
    entry[last] = value
    path.write_text(json.dumps(index))
    parallel = model(5.0)
    with pytest.raises(FormatError):
        saved.load(parallel)
    assert (parallel.flat.buffers["params"] == 5).all()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_an_old_state_that_is_no_folder_goes(saved, tmp_path, kind):
    old = saved.path(1)
    shutil.move(old, tmp_path / "moved")
    if kind == "link":
        old.symlink_to(tmp_path / "moved")
    else:
        old.write_text("not a folder")
    for step in (2, 3):
        saved.save(step, model())
    assert [path.name for path in saved.folder.iterdir()] == [saved.path(3).name]
    assert (tmp_path / "moved" / "index.json").exists()


@pytest.mark.parametrize("meta", [[1], 5, "x", {1: 2}, {"x": object()}])
def test_meta_that_is_no_json_object_is_refused(saved, meta):
    with pytest.raises(OptionError, match="meta"):
        saved.save(2, model(), meta)
    assert saved.steps() == [1]


def test_a_step_is_an_integer(saved):
    with pytest.raises(OptionError, match="step"):
        saved.load(model(), True)


def test_parts_cover_an_array_or_do_not():
    rng = np.random.default_rng(0)
    answers = set()
    for _ in range(300):
        parts, seen = [], np.zeros((4, 3), bool)
        for _ in range(3):
            start, stop = np.sort(rng.integers(0, 4, 2)).tolist()
            size = 4 * (stop - start)
            first, last = np.sort(rng.integers(0, size + 1, 2)).tolist() if rng.random() < 0.5 else (0, size)
            parts.append(runs_of(Slices((4, 3), 1, ((start, stop),), first, last)))
            columns = seen[:, start:stop].reshape(-1)
            columns[first:last] = True
            seen[:, start:stop] = columns.reshape(4, -1)
        answers.add(bool(seen.all()))
        assert covers(12, parts) == seen.all()
    assert answers == {True, False}
    assert covers(0, [])
    assert not covers(1, [])


def test_what_parts_have_in_common():
    """Check against arrays of numbers: all pairs of random parts of arrays with one to three axes."""
    rng = np.random.default_rng(0)
    for shape, axis in (((7,), 0), ((5, 4), 0), ((5, 6), 1), ((3, 4, 5), 1), ((2, 3, 4), 2), ((4, 0), 0)):
        numbers = np.arange(np.prod(shape)).reshape(shape)
        parts = []
        for _ in range(6):
            cuts = np.sort(rng.integers(0, shape[axis] + 1, 4))
            pieces = tuple((int(a), int(b)) for a, b in cuts.reshape(2, 2)) if rng.random() < 0.8 else ()
            size = Slices(shape, axis, pieces, 0, 0).size
            first, last = np.sort(rng.integers(0, size + 1, 2)).tolist()
            chosen = (
                np.concatenate([np.arange(a, b) for a, b in pieces]) if pieces else np.arange(shape[axis])
            )
            values = np.take(numbers, chosen, axis).reshape(-1)[first:last]
            parts.append((Slices(shape, axis, pieces, first, last), values))
        for (a, of_a), (b, of_b) in itertools.product(parts, parts):
            merged = np.full(of_a.size, -1)
            for target, source, n in zip(*common(runs_of(a), runs_of(b)), strict=True):
                merged[target : target + n] = of_b[source : source + n]
            np.testing.assert_array_equal(merged, np.where(np.isin(of_a, of_b), of_a, -1))
