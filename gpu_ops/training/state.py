"""State of a training run in one file: arrays, exact to the bit, and numbers; the last states of a run in a folder.

The file is a safetensors file, which other programs can read too. Its metadata has the numbers as JSON, and a
checksum of the arrays, by which :func:`load_state` detects damage.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.checks import integer, one_of
from gpu_ops.core.state_arrays import StateArray, check_device, to_device
from gpu_ops.errors import DTypeError, FormatError, MissingFileError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, remove_temporary, system_errors, write_file
from gpu_ops.formats.safetensors import MOST_HEADER, NUMPY_DTYPES, SafetensorsFile, header_of
from gpu_ops.kernels.compiler.progress import visible

__all__ = [
    "MOST_STEP",
    "Checkpoints",
    "is_state",
    "load_state",
    "outdated",
    "read_meta",
    "save_state",
    "step_name",
    "steps_in",
]

_KIND, _META, _CHECKSUM = "gpu_ops.kind", "gpu_ops.meta", "gpu_ops.crc32"
_STATE = "training state 1"  # with the version of this layout
_SAVE, _LOAD = "save_state", "load_state"


@typed_memory_errors(_SAVE)
def save_state(path: Any, arrays: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> None:
    """Write arrays and numbers to a file, atomically.

    Parameters
    ----------
    path : path
        An existing file is replaced once the new one is on the disk; until then, and after an error, an interrupt or
        a kill, it is unchanged. Links and permissions are kept.
    arrays : mapping of str to array
        Arrays of any library, device, shape and strides: bool, integers, float16, bfloat16, float32, float64,
        complex64, ``ml_dtypes.float8_e4m3fn`` and ``float8_e5m2``. CUDA arrays are copied to the host one by one.
    meta : mapping, optional
        Values of JSON: the step, the seed, the state of a random number generator or of a scaler. Floats keep
        their bits, including NaN and infinity; NumPy's numbers become Python's, and tuples become lists.

    Raises
    ------
    OptionError
        Names that are not strings, ``meta`` that JSON cannot hold, or a header of more than 16 MiB.
    DTypeError
        A value is not an array, or of another dtype.
    FileError
        The file cannot be written; MissingFileError if there is no such folder.

    Examples
    --------
    >>> import tempfile
    >>> from gpu_ops.training import load_state, save_state
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/state", {"w": np.arange(3.0)}, {"step": 7})
    ...     arrays, meta = load_state(f"{folder}/state")
    >>> arrays["w"], meta
    (array([0., 1., 2.]), {'step': 7})
    """
    target = path_of(_SAVE, path)
    mapping = _mapped(_SAVE, "arrays", arrays)
    if "__metadata__" in mapping:
        raise OptionError(
            f"{_SAVE}: the file format keeps the name '__metadata__' for itself; rename the array"
        )
    states = {name: StateArray(_SAVE, name, x) for name, x in mapping.items()}
    tensors = {name: (_stored_dtype(name, a.dtype), a.shape) for name, a in states.items()}
    # the widest dtypes first, so that all arrays are aligned
    tensors = dict(sorted(tensors.items(), key=lambda item: -states[item[0]].dtype.itemsize))
    metadata = {_KIND: _STATE, _META: _json(meta), _CHECKSUM: f"{0:08x}"}
    header = header_of(tensors, metadata)
    if len(header) > MOST_HEADER:
        raise OptionError(
            f"{_SAVE}: names and meta take {len(header)} bytes; at most {MOST_HEADER}. Pass long lists as arrays"
        )
    checksum = 0

    def parts() -> Iterator[Any]:
        nonlocal checksum
        yield header
        for name in tensors:
            part = states[name].copied().reshape(-1).view(np.uint8)
            checksum = zlib.crc32(part.data, checksum)
            yield part

    with visible(f"gpu_ops: saving {target}"):
        write_file(
            _SAVE, target, parts(), head=lambda: header_of(tensors, metadata | {_CHECKSUM: f"{checksum:08x}"})
        )


@typed_memory_errors(_LOAD)
def load_state(
    path: Any, *, like: Mapping[str, Any] | None = None, device: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file of :func:`save_state`.

    Parameters
    ----------
    path : path
    like : mapping of str to array, optional
        Arrays to write into, on any device. Their names, shapes and dtypes must be those of the file.
    device : {"cpu", "cuda", "emulator"}, optional
        Without ``like``: "cuda" returns CuPy arrays, the others NumPy arrays.

    Returns
    -------
    arrays : dict of str to array
        Those of ``like``, if given.
    meta : dict

    Raises
    ------
    FormatError
        The file is not from :func:`save_state`, damaged, or truncated.
    ShapeError, DTypeError
        An array of ``like`` differs from the one in the file, or cannot be written.
    OptionError
        Names that only ``like`` or only the file has.
    FileError
        The file cannot be read; MissingFileError if there is none.

    Notes
    -----
    The whole file is read and checked before the first element of ``like`` is written, so memory must hold both.
    """
    where = path_of(_LOAD, path)
    target = one_of(_LOAD, "device", "cpu" if device is None else device, ("cpu", "cuda", "emulator"))
    if like is not None and device is not None:
        raise OptionError(f"{_LOAD}: device= is for new arrays; those of like= are where they are")
    check_device(_LOAD, target)
    targets = None if like is None else _mapped(_LOAD, "like", like)
    with visible(f"gpu_ops: loading {where}"), opened(_LOAD, where) as file:
        contents = SafetensorsFile(_LOAD, where, file)
        meta = _read_meta(where, contents)
        writers = None if targets is None else _matched(where, contents, targets)
        arrays, checksum = {}, 0
        for name in sorted(contents.tensors, key=lambda name: contents.tensors[name].start):
            arrays[name] = contents.read(name)
            checksum = zlib.crc32(arrays[name].reshape(-1).view(np.uint8).data, checksum)
        if f"{checksum:08x}" != contents.metadata.get(_CHECKSUM):
            raise FormatError(
                f"{_LOAD}: {where} is damaged: its arrays do not have the checksum saved with them"
            )
        if targets is None or writers is None:
            return {name: to_device(x, target) for name, x in arrays.items()}, meta
        for name, writer in writers.items():
            writer.write(arrays.pop(name))
    return targets, meta


def is_state(path: Path) -> bool:
    """Whether a file is a complete one of :func:`save_state`; the checksum, which needs all bytes, is not checked."""
    try:
        read_meta(path)
    except (FormatError, MissingFileError):
        return False
    return True


def read_meta(path: Path) -> dict[str, Any]:
    """Read the numbers of a file of :func:`save_state`, without its arrays."""
    with opened(_LOAD, path) as file:
        return _read_meta(path, SafetensorsFile(_LOAD, path, file))


def _mapped(op: str, name: str, arrays: Any) -> dict[str, Any]:
    if not isinstance(arrays, Mapping):
        raise OptionError(f"{op}: {name} must be a mapping of names to arrays, got {type(arrays).__name__}")
    for key in arrays:
        if not isinstance(key, str):
            raise OptionError(f"{op}: {name} has the key {key!r:.80}; names are strings")
    return dict(arrays)


def _stored_dtype(name: str, dtype: np.dtype[Any]) -> str:
    for stored, known in NUMPY_DTYPES.items():
        if known == dtype:
            return stored
    allowed = ", ".join(map(str, NUMPY_DTYPES.values()))
    raise DTypeError(
        f"{_SAVE}: {name} is {dtype!r}; allowed: {allowed}, in the byte order of this machine. Cast it first"
    )


def _json(meta: Any) -> str:
    """``meta`` as JSON; a value that JSON would change is an error."""
    if meta is None:
        meta = {}
    if not isinstance(meta, Mapping):
        raise OptionError(f"{_SAVE}: meta must be a mapping, got {type(meta).__name__}")
    try:
        _check_keys(meta)
        return json.dumps(dict(meta), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{_SAVE}: meta cannot be written as JSON: {error}") from error


def _check_keys(value: Any) -> None:
    """Refuse keys that are not strings: JSON would convert them."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r:.80} is no string")
            _check_keys(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check_keys(part)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic) and isinstance(value.item(), (bool, int, float, str)):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    hint = "; pass it among the arrays" if hasattr(value, "shape") else ""
    raise TypeError(f"{type(value).__name__} {value!r:.80} is no value of JSON{hint}")


def _read_meta(where: Path, contents: SafetensorsFile) -> dict[str, Any]:
    stored_kind = contents.metadata.get(_KIND)
    if stored_kind != _STATE:
        raise FormatError(
            f"{_LOAD}: {where} is no file of save_state: its {_KIND!r} is {stored_kind!r:.80}; expected {_STATE!r}"
        )
    for name, stored in contents.tensors.items():
        if stored.dtype not in NUMPY_DTYPES:
            raise FormatError(
                f"{_LOAD}: {where}: {name[:80]!r} has the dtype {stored.dtype!r:.80}, which is not read"
            )
    try:
        meta = json.loads(contents.metadata.get(_META, ""))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{_LOAD}: {where}: {_META} is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise FormatError(f"{_LOAD}: {where}: {_META} is no object")
    return meta


def _matched(where: Path, contents: SafetensorsFile, targets: dict[str, Any]) -> dict[str, StateArray]:
    """Arrays to write into, checked against those of the same names in the file."""
    missing = sorted(targets.keys() - contents.tensors.keys())
    extra = sorted(contents.tensors.keys() - targets.keys())
    if missing or extra:
        raise OptionError(
            f"{_LOAD}: {where} and like= have different names: only in like= {missing!r:.300}; "
            f"only in the file {extra!r:.300}"
        )
    writers = {name: StateArray(_LOAD, f"like[{name!r}]", x) for name, x in targets.items()}
    for name, writer in writers.items():
        stored = contents.tensors[name]
        if writer.shape != stored.shape:
            raise ShapeError(f"{writer.label} has shape {writer.shape}, but {stored.shape} in {where}")
        if writer.dtype != NUMPY_DTYPES[stored.dtype]:
            raise DTypeError(f"{writer.label} is {writer.dtype}, but {NUMPY_DTYPES[stored.dtype]} in {where}")
        writer.check_writable()
    return writers


MOST_STEP = 10**12 - 1


class Checkpoints:
    """Last states of a run, in a separate folder.

    Parameters
    ----------
    folder : path
        Created by the first save. Only one process at a time may save to it.
    keep : int
        Number of states to keep. A save needs space for one more.

    Examples
    --------
    >>> import tempfile
    >>> from gpu_ops.training import Checkpoints, load_state
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = Checkpoints(folder, keep=2)
    ...     for step in (10, 20, 30):
    ...         path = checkpoints.save(step, {"w": np.full(2, step)}, {"step": step})
    ...     checkpoints.steps(), load_state(checkpoints.latest())
    ([20, 30], ({'w': array([30, 30])}, {'step': 30}))
    """

    def __init__(self, folder: Any, *, keep: int = 2) -> None:
        self.folder = path_of("Checkpoints", folder)
        self.keep = integer("Checkpoints", "keep", keep, low=1)

    def save(self, step: int, arrays: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Path:
        """Call :func:`save_state` for this step, remove the oldest states, and return the file.

        A step before the last one is an error: a run that goes back must use another folder, or remove the later
        files first.
        """
        name = "Checkpoints.save"
        step = integer(name, "step", step, low=0, high=MOST_STEP)
        before = self.steps()
        if before and step < before[-1]:
            raise OptionError(
                f"{name}: step {step} comes before step {before[-1]}, which {self.folder} holds; "
                "remove the later files, or choose another folder"
            )
        with system_errors(name, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_temporary(self.folder)
        path = self.path(step)
        save_state(path, arrays, meta)
        with system_errors(name, self.folder):
            others = [s for s in before if s != step]
            for old in outdated(others, self.keep):
                self.path(old).unlink(missing_ok=True)
        return path

    def latest(self) -> Path | None:
        """Return the file of the last step, for :func:`load_state`; None before the first save."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def steps(self) -> list[int]:
        """Return the saved steps, in order, without damaged or truncated files."""
        return [step for step in steps_in("Checkpoints", self.folder, _ENDING) if is_state(self.path(step))]

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"{step_name(step)}{_ENDING}"


_ENDING = ".safetensors"


def step_name(step: int) -> str:
    """Name of a step's file or folder, without the suffix."""
    return f"step-{step:012d}"


def steps_in(op: str, folder: Path, ending: str = "") -> list[int]:
    """Steps of the names in a folder, in order; none if there is no such folder."""
    pattern = re.compile(r"step-([0-9]{12})" + re.escape(ending))
    with system_errors(op, folder):
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


def outdated(steps: Sequence[int], keep: int) -> Sequence[int]:
    """Steps to remove when one more is saved and ``keep`` stay."""
    return steps[: max(len(steps) + 1 - keep, 0)]
