"""Checkpoints of several ranks: a file for each, and an index. Any division of the same model loads them.

A checkpoint is a folder, which gets its name once it is whole::

    step-000000000010/
        index.json                       the shape of each array, and which elements each file has of it
        rank-00001-of-00004.safetensors  "m/layers.0.qkv", ...: those elements, of save_state
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.data_parallel import DataParallel
from gpu_ops.distributed.runs import Slices, common, runs_of
from gpu_ops.errors import DTypeError, FormatError, MissingFileError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, sync_folder, system_errors, write_file
from gpu_ops.formats.safetensors import NUMPY_DTYPES, SafetensorsFile
from gpu_ops.training.state import load_state, read_meta, save_state

__all__ = ["ShardedCheckpoints"]

Array = npt.NDArray[Any]

_OP = "ShardedCheckpoints"
_KIND = "gpu_ops sharded state 1"
_FOLDER = re.compile(r"step-([0-9]{12})")
_UNFINISHED = ".gpu_ops-unfinished"
_MOST_STEP = 10**12 - 1


class ShardedCheckpoints:
    """The last states of a run of several ranks, in a folder that all of them see.

    Parameters
    ----------
    folder : path
        Made by the first save. One run at a time saves to it.
    comm : Comm
        All ranks of the run, such as ``mesh.comm``: they make the same calls.
    keep : int
        How many states stay. A save takes room for one more.

    Notes
    -----
    A state is the parameters, their masters, the moments and the number of the next step, to the bit. What is saved
    by ranks that divide the model in one way (data and tensor parallelism, ZeRO stage, pipeline) is loaded by ranks
    that divide it in another; each rank reads its own elements. The order of the data is
    :class:`gpu_ops.training.Batches`': a function of seed and step, so that a run goes on from ``start=step``.

    Examples
    --------
    >>> import tempfile
    >>> from gpu_ops import distributed, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> comm = distributed.world()
    >>> parallel = distributed.DataParallel(config, comm, stage=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = distributed.ShardedCheckpoints(folder, comm)
    ...     _ = checkpoints.save(10, parallel, {"seed": 3})
    ...     other = distributed.DataParallel(config, comm, stage=3)
    ...     checkpoints.load(other)
    (10, {'seed': 3})
    """

    def __init__(self, folder: Any, comm: Comm, *, keep: int = 2) -> None:
        self.folder, self.comm = path_of(_OP, folder), comm
        self.keep = checks.integer(_OP, "keep", keep, low=1)

    def save(self, step: int, parallel: DataParallel, meta: Mapping[str, Any] | None = None) -> Path:
        """Write the state of all ranks to a folder of this step, whole or not at all; then the oldest go.

        ``meta``: what JSON can hold. That of rank 0 is saved.

        Raises
        ------
        OptionError
            There is a state of this step or a later one; moments in 8 bits.
        """
        op, rank = f"{_OP}.save", self.comm.rank
        step = checks.integer(op, "step", step, low=0, high=_MOST_STEP)
        if "m_scale" in parallel.flat.buffers:
            raise OptionError(f"{op}: moments of moment_bits=8 are not saved in shards; use moment_bits=32")
        before = self._agreed(self.steps())
        if before and step <= before[-1]:
            raise OptionError(
                f"{op}: {self.folder} holds step {before[-1]}, and this is step {step}; remove the later states, or "
                "choose another folder"
            )
        temporary, target = self.folder / _UNFINISHED, self.path(step)
        if rank == 0:
            with system_errors(op, self.folder):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        self.comm.barrier()
        arrays, described = _shards(parallel)
        name = f"rank-{rank:05d}-of-{self.comm.size:05d}.safetensors"
        save_state(temporary / name, arrays, {"shards": described, "meta": dict(meta or {})})
        self.comm.barrier()
        if rank == 0:
            self._write_index(op, temporary, parallel)
            with system_errors(op, target):
                temporary.rename(target)
                sync_folder(self.folder)
                for old in before[: max(len(before) + 1 - self.keep, 0)]:
                    self.path(old).rename(temporary)  # its name goes first: a kill leaves no half of it
                    shutil.rmtree(temporary)
        self.comm.barrier()
        return target

    def load(self, parallel: DataParallel, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Read the state of a step, by default the last one, into ``parallel``; the step and ``meta``.

        Raises
        ------
        MissingFileError
            There is none.
        ShapeError, DTypeError
            It is of another model, or of other dtypes.
        FormatError
            It is damaged.
        """
        op = f"{_OP}.load"
        steps = self._agreed(self.steps())
        if not steps or (step is not None and step not in steps):
            wanted = "none" if step is None else f"not step {step}, but {steps}"
            raise MissingFileError(errno.ENOENT, f"{op}: the folder holds {wanted}", str(self.folder))
        step = steps[-1] if step is None else step
        where = self.path(step)
        index = _read_index(op, where)
        for name in index["files"][self.comm.rank :: self.comm.size]:
            load_state(where / name)  # verifies its checksum
        with contextlib.ExitStack() as stack:
            reader = _Reader(op, where, index, stack)
            kinds = _kinds(parallel)
            if kinds != {kind: NUMPY_DTYPES.get(dtype) for kind, dtype in index["dtypes"].items()}:
                given = ", ".join(f"{kind} {dtype}" for kind, dtype in kinds.items())
                raise DTypeError(f"{op}: {where} holds {index['dtypes']}, and this model {given}")
            for name, part, places in _own(parallel):
                for kind in kinds:
                    views = parallel.flat.views(kind)
                    reader.read(kind, name, part, views[places[0]][places[1]])
        parallel.flat.state()["next_step"].fill(index["next_step"])
        parallel.zero_grad()
        parallel.publish()
        return step, index["meta"]

    def steps(self) -> list[int]:
        """The steps saved, in order."""
        with system_errors(_OP, self.folder):
            names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        return sorted(int(match[1]) for name in names if (match := _FOLDER.fullmatch(name)))

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.folder / f"step-{step:012d}"

    def _agreed(self, steps: list[int]) -> list[int]:
        """What rank 0 found: another rank may look when a folder has just come or gone."""
        count = int(self.comm.broadcast(np.array(len(steps)))[()])
        found = np.array(steps if self.comm.rank == 0 else [0] * count, np.int64)
        return [int(x) for x in self.comm.broadcast(found)]

    def _write_index(self, op: str, folder: Path, parallel: DataParallel) -> None:
        shapes = parallel.division.whole.shapes()
        tensors: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        files = sorted(path.name for path in folder.glob("rank-*.safetensors"))
        if len(files) != self.comm.size:
            raise FormatError(
                f"{op}: {self.comm.size} ranks wrote {len(files)} files to {folder}: do all see it?"
            )
        for number, name in enumerate(files):
            saved = read_meta(folder / name)
            meta = meta or saved["meta"]  # of rank 0
            for tensor, part in saved["shards"].items():
                entry = tensors.setdefault(tensor, {"shape": list(shapes[tensor]), "shards": []})
                entry["shards"].append({"file": number, **part})
        stored = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
        index = {
            "kind": _KIND,
            "next_step": int(parallel.flat.state()["next_step"]),
            "meta": meta,
            "dtypes": {kind: stored[dtype] for kind, dtype in _kinds(parallel).items()},
            "files": files,
            "tensors": tensors,
        }
        write_file(op, folder / "index.json", [json.dumps(index).encode()])


class _Reader:
    """The files of a checkpoint."""

    def __init__(self, op: str, where: Path, index: dict[str, Any], stack: contextlib.ExitStack) -> None:
        self._op, self._where, self._index, self._stack = op, where, index, stack
        self._files: dict[int, SafetensorsFile] = {}

    def read(self, kind: str, name: str, part: Slices, target: Array) -> None:
        """The elements of an array that ``part`` describes, from all shards that have some of them."""
        entry = self._index["tensors"].get(name)
        if entry is None or tuple(entry["shape"]) != part.shape:
            found = "lacks it" if entry is None else f"has {tuple(entry['shape'])}"
            raise ShapeError(f"{self._op}: {name} has shape {part.shape}, and {self._where} {found}")
        wanted, missing = runs_of(part), np.ones(target.size, np.bool_)
        for shard in entry["shards"]:
            try:
                saved = Slices.from_json(entry["shape"], shard)
                overlap = common(wanted, runs_of(saved))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise FormatError(f"{self._op}: {self._where}/index.json: {name}: {error}") from error
            self._copy(shard["file"], f"{kind}/{name}", overlap, target, missing)
        if missing.any():
            raise FormatError(
                f"{self._op}: {self._where} has no file with {int(missing.sum())} elements of {name}"
            )

    def _copy(self, file: int, key: str, overlap: Any, target: Array, missing: Array) -> None:
        here, there, length = overlap
        if not here.size:
            return
        first, last = int(there.min()), int((there + length).max())
        found = self._open(file).elements(key, first, last)
        for a, b, n in zip(here.tolist(), there.tolist(), length.tolist(), strict=True):
            target[a : a + n] = found[b - first : b - first + n]
            missing[a : a + n] = False

    def _open(self, number: int) -> SafetensorsFile:
        if number not in self._files:
            path = self._where / self._index["files"][number]
            file = self._stack.enter_context(opened(self._op, path))
            self._files[number] = SafetensorsFile(self._op, path, file)
        return self._files[number]


def _kinds(parallel: DataParallel) -> dict[str, np.dtype[Any]]:
    """The arrays with an element for each parameter, and their dtypes."""
    return {kind: np.dtype(x.dtype) for kind, x in parallel.flat.buffers.items() if kind != "grads"}


def _own(parallel: DataParallel) -> Iterator[tuple[str, Slices, tuple[str, slice]]]:
    """What this rank has of each array: its name, which elements, and where they are in ``flat``."""
    division = parallel.division
    shapes = division.whole.shapes()
    for name, elements, piece, here in parallel.owned():
        axis, pieces = division.pieces(name)
        bounds = tuple((piece.start, piece.stop) for piece in pieces)
        yield name, Slices(shapes[name], axis, bounds, elements.start, elements.stop), (piece, here)


def _shards(parallel: DataParallel) -> tuple[dict[str, Array], dict[str, Any]]:
    """What this rank writes: nothing where another one has the same."""
    arrays: dict[str, Array] = {}
    described: dict[str, Any] = {}
    if parallel.stage == 0 and parallel.comm.rank:
        return arrays, described
    for name, part, (piece, here) in _own(parallel):
        described[name] = part.as_json()
        for kind in _kinds(parallel):
            arrays[f"{kind}/{name}"] = parallel.flat.views(kind)[piece][here]
    return arrays, described


def _read_index(op: str, where: Path) -> dict[str, Any]:
    path = where / "index.json"
    with opened(op, path) as file:
        try:
            index = json.load(file)
            if index["kind"] != _KIND or not isinstance(index["meta"], dict):
                raise ValueError(f"its kind is {index['kind']!r}, expected {_KIND!r}")
            for name in index["files"]:
                if Path(name).name != name:
                    raise ValueError(f"{name!r} is no file of the folder")
            index["dtypes"] = {kind: str(dtype) for kind, dtype in index["dtypes"].items()}
            index["next_step"] = int(index["next_step"])
            index["tensors"].keys()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{op}: {path} is no index of a sharded checkpoint: {error!r}") from error
    return dict(index)
