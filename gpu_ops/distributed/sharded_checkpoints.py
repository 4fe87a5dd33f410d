"""Checkpoints of several ranks: a file for each, and an index. Any division of the same model can load them.

A checkpoint is a folder, which gets its final name once it is complete::

    step-000000000010/
        index.json                       the shape of each array, and which elements each file has of it
        rank-00001-of-00004.safetensors  "m/layers.0.qkv", ...: those elements, of save_state
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.data_parallel import DataParallel
from gpu_ops.distributed.shard_index import KIND, Index, Reader, Slices, covers, read_index, runs_of
from gpu_ops.errors import (
    CommError,
    DTypeError,
    FormatError,
    GpuOpsError,
    MissingFileError,
    OptionError,
    ShapeError,
)
from gpu_ops.formats.files import path_of, sync_folder, system_errors, write_file
from gpu_ops.formats.safetensors import NUMPY_DTYPES
from gpu_ops.training.state import MOST_STEP, load_state, outdated, read_meta, save_state, step_name, steps_in

__all__ = ["ShardedCheckpoints"]

Array = npt.NDArray[Any]

_OP = "ShardedCheckpoints"
_UNFINISHED = ".gpu_ops-unfinished"
_WORDS = 500  # bytes of an error message that other ranks get


class ShardedCheckpoints:
    """Last states of a run of several ranks, in a folder that all of them see.

    Parameters
    ----------
    folder : path
        Folder of the checkpoints; the first save makes it. Only one run at a time may save to it.
    comm : Comm
        All ranks of the run, such as ``mesh.comm``: they make the same calls.
    keep : int
        Number of states to keep. A save needs disk space for one more.

    Notes
    -----
    A state is the parameters, their masters, the moments and the number of the next step, to the bit. Ranks that
    divide the model in one way (data and tensor parallelism, ZeRO stage, pipeline) can load a state saved by ranks
    that divided it in another; each rank reads its own elements. The data order of
    :class:`gpu_ops.training.Batches` is a function of seed and step, so a run continues from ``start=step``.

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
        checks.instance(_OP, "comm", comm, Comm)
        self.folder, self.comm = path_of(_OP, folder), comm
        self.keep = checks.integer(_OP, "keep", keep, low=1)

    def save(self, step: int, parallel: DataParallel, meta: Mapping[str, Any] | None = None) -> Path:
        """Write the state of all ranks to a folder of this step, completely or not at all; then remove the oldest.

        ``meta``: a dict that JSON can hold. That of rank 0 is saved.

        Raises
        ------
        OptionError
            A state of this step or a later one exists; moments are in 8 bits; the ranks do not have the whole
            model; JSON cannot hold ``meta``.
        FileError
            The folder or a file cannot be written.
        CommError
            Another rank failed; the message has its error.
        """
        op, rank = f"{_OP}.save", self.comm.rank
        checks.instance(op, "parallel", parallel, DataParallel)
        step = checks.integer(op, "step", step, low=0, high=MOST_STEP)
        if "m_scale" in parallel.flat.buffers:
            raise OptionError(f"{op}: moments of moment_bits=8 are not saved in shards; use moment_bits=32")
        if not isinstance(meta, Mapping | None):
            raise OptionError(f"{op}: meta must be a mapping, got {type(meta).__name__}")
        before = self._agreed(op)
        if before and step <= before[-1]:
            raise OptionError(
                f"{op}: {self.folder} holds step {before[-1]}, and this is step {step}; remove the later states, or "
                "choose another folder"
            )
        temporary, target = self.folder / _UNFINISHED, self.path(step)
        name = f"rank-{rank:05d}-of-{self.comm.size:05d}.safetensors"
        with self._together(op):
            if rank == 0:
                with system_errors(op, self.folder):
                    _remove(temporary)
                    temporary.mkdir(parents=True)
        with self._together(op):
            arrays, described = _shards(parallel)
            save_state(temporary / name, arrays, {"shards": described, "meta": meta or {}})
        with self._together(op):
            if rank == 0:
                self._write_index(op, temporary, parallel)
                with system_errors(op, target):
                    temporary.rename(target)
                    sync_folder(self.folder)
                    for old in outdated(before, self.keep):
                        self.path(old).rename(temporary)  # renamed first: a kill leaves no half of it
                        _remove(temporary)
        return target

    def load(self, parallel: DataParallel, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Read the state of a step, by default the last one, into ``parallel``; return the step and ``meta``.

        Raises
        ------
        MissingFileError
            No such state exists.
        ShapeError, DTypeError
            The state is of another model, or of other dtypes.
        FormatError
            The state is damaged.
        CommError
            Another rank failed; the message has its error.

        Notes
        -----
        All ranks check the index and the files before any of them writes to ``parallel``.
        """
        op = f"{_OP}.load"
        checks.instance(op, "parallel", parallel, DataParallel)
        step = None if step is None else checks.integer(op, "step", step)
        steps = self._agreed(op)
        if not steps or (step is not None and step not in steps):
            wanted = "none" if step is None else f"not step {step}, but {steps}"
            raise MissingFileError(errno.ENOENT, f"{op}: the folder holds {wanted}", str(self.folder))
        step = steps[-1] if step is None else step
        where = self.path(step)
        with contextlib.ExitStack() as stack:
            with self._together(op):
                index = read_index(op, where)
                _check_model(op, where, index, parallel)
                for name in index.files[self.comm.rank :: self.comm.size]:
                    load_state(where / name)  # verifies its checksum
                reader = Reader(op, where, index, stack)
                parts = [(name, reader.find(name, part), places) for name, part, places in _own(parallel)]
            for buffer in index.dtypes:
                views = parallel.flat.views(buffer)
                for name, overlaps, (piece, here) in parts:
                    reader.read(f"{buffer}/{name}", overlaps, views[piece][here])
        parallel.flat.state()["next_step"].fill(index.next_step)
        parallel.zero_grad()
        parallel.publish()
        return step, index.meta

    def steps(self) -> list[int]:
        """Saved steps, in order."""
        return steps_in(_OP, self.folder)

    def path(self, step: int) -> Path:
        """Folder of a step."""
        return self.folder / step_name(step)

    def _agreed(self, op: str) -> list[int]:
        """Steps that rank 0 finds: a folder may be added or removed before another rank looks."""
        steps: list[int] = []
        with self._together(op):
            steps = self.steps() if self.comm.rank == 0 else []
        count = int(self.comm.broadcast(np.array(len(steps)))[()])
        step_array = np.array(steps if self.comm.rank == 0 else [0] * count, np.int64)
        return [int(x) for x in self.comm.broadcast(step_array)]

    @contextlib.contextmanager
    def _together(self, op: str) -> Iterator[None]:
        """Let all ranks complete the block, or all of them raise: none waits for one that failed."""
        error: GpuOpsError | None = None
        try:
            yield
        except GpuOpsError as found:
            error = found
        words = np.zeros((1, _WORDS), np.uint8)
        text = f"{type(error).__name__}: {error}".encode()[:_WORDS] if error else b""
        words[0, : len(text)] = np.frombuffer(text, np.uint8)
        said = self.comm.all_gather(words)
        if error:
            raise error
        if (failed := said.any(axis=1)).any():
            rank = int(failed.argmax())
            text = bytes(said[rank]).rstrip(b"\0")
            raise CommError(f"{op}: rank {rank} of {self.comm.name!r}: {text.decode(errors='replace')}")

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
            meta = meta or saved["meta"]  # that of rank 0
            for tensor, part in saved["shards"].items():
                entry = tensors.setdefault(tensor, {"shape": list(shapes[tensor]), "shards": []})
                entry["shards"].append({"file": number, **part})
        for tensor, shape in shapes.items():
            shards = tensors.get(tensor, {"shards": []})["shards"]
            if not covers(math.prod(shape), [runs_of(Slices.from_json(shape, part)) for part in shards]):
                raise OptionError(
                    f"{op}: the {self.comm.size} ranks of {self.comm.name!r} do not have all of {tensor}; pass "
                    "ShardedCheckpoints the communicator of all ranks of the run, such as mesh.comm"
                )
        stored = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
        index = {
            "kind": KIND,
            "next_step": int(parallel.flat.state()["next_step"]),
            "meta": meta,
            "dtypes": {buffer: stored[dtype] for buffer, dtype in _kinds(parallel).items()},
            "files": files,
            "tensors": tensors,
        }
        write_file(op, folder / "index.json", [json.dumps(index).encode()])


def _kinds(parallel: DataParallel) -> dict[str, np.dtype[Any]]:
    """Dtypes of the buffers with an element for each parameter, by name."""
    return {buffer: np.dtype(x.dtype) for buffer, x in parallel.flat.buffers.items() if buffer != "grads"}


def _own(parallel: DataParallel) -> Iterator[tuple[str, Slices, tuple[str, slice]]]:
    """Elements of each array that this rank has: the array's name, the elements, and their place in ``flat``."""
    division = parallel.division
    shapes = division.whole.shapes()
    for name, elements, piece, here in parallel.owned():
        axis, pieces = division.pieces(name)
        bounds = tuple((piece.start, piece.stop) for piece in pieces)
        yield name, Slices(shapes[name], axis, bounds, elements.start, elements.stop), (piece, here)


def _shards(parallel: DataParallel) -> tuple[dict[str, Array], dict[str, Any]]:
    """Arrays and descriptions that this rank writes: none if another rank has the same."""
    arrays: dict[str, Array] = {}
    described: dict[str, Any] = {}
    if parallel.stage == 0 and parallel.comm.rank:
        return arrays, described
    for name, part, (piece, here) in _own(parallel):
        described[name] = part.as_json()
        for buffer in _kinds(parallel):
            arrays[f"{buffer}/{name}"] = parallel.flat.views(buffer)[piece][here]
    return arrays, described


def _remove(path: Path) -> None:
    """Remove a folder with its contents, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_model(op: str, where: Path, index: Index, parallel: DataParallel) -> None:
    """Check that the checkpoint is of this model, in its dtypes."""
    kinds = _kinds(parallel)
    if kinds != {buffer: NUMPY_DTYPES.get(dtype) for buffer, dtype in index.dtypes.items()}:
        expected = ", ".join(f"{buffer} {dtype}" for buffer, dtype in kinds.items())
        raise DTypeError(f"{op}: {where} holds {index.dtypes}, and this model {expected}")
    shapes = parallel.division.whole.shapes()
    for name, shape in shapes.items():
        if name not in index.tensors or index.tensors[name][0] != shape:
            actual = f"has {index.tensors[name][0]}" if name in index.tensors else "lacks it"
            raise ShapeError(f"{op}: {name} has shape {shape}, and {where} {actual}")
    if others := [name for name in index.tensors if name not in shapes]:
        raise ShapeError(f"{op}: {where} holds {others[0]}, which this model lacks: it is of another model")
