"""One benchmark case, its options and its inputs."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np

from gpu_ops.reference.precision import Precision

Inputs = dict[str, Any]
Call = Callable[[], Any]
Prepare = Callable[[Inputs], Call]
"""Does the untimed work (views, tables, a forward pass) and returns the call to time."""

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line. An empty tuple selects the bench's default."""

    device: str = "cpu"
    quick: bool = False
    tour: bool = False
    """Only the cases that a bench names in ``TOUR``."""
    dtypes: tuple[str, ...] = ()
    seqlens: tuple[int, ...] = ()
    use_torch: bool = True
    grid: str = ""
    """A named set of problems that replaces the bench's default one."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunOptions:
        """The inverse of ``dataclasses.asdict``, after a trip through JSON."""
        return cls(**{**data, "dtypes": tuple(data["dtypes"]), "seqlens": tuple(data["seqlens"])})


@dataclass(frozen=True)
class Case:
    """One row of the result table.

    ``flops`` and ``bytes`` are the minimum work of the formula: arithmetic by the field's convention, and traffic
    with every input read once and every result written once.
    """

    op: str
    name: str
    shape: str
    dtype: str
    flops: float
    bytes: float
    make: Callable[[np.random.Generator], Inputs]
    make_small: Callable[[np.random.Generator], Inputs]
    """The same problem at a size where the float64 reference takes milliseconds."""
    ours: Prepare
    reference: Callable[[Inputs, Precision], Any]
    """``(inputs, precision) -> results``, from gpu_ops.reference."""
    naive: Prepare | None = None
    torch: Prepare | None = None
    numba: Prepare | None = None
    """On a GPU, where ``ours`` is CUDA C++: the same call with the Numba kernels."""
    peers: Mapping[str, Prepare] = field(default_factory=dict)
    """More contenders by name, on CUDA only."""
    cpu_peers: Mapping[str, Prepare] = field(default_factory=dict)
    """Contenders by name that run on the CPU only."""
    by_bytes: bool = False
    """Show GB/s whatever the arithmetic. Decoding, for example, is bound by reading the cache."""
    bandwidth: Literal["copy", "read"] = "copy"
    """The measured bandwidth that bounds the case: ``read`` where the result is small."""
    sample: Callable[[Inputs, Any], tuple[Inputs, Any]] | None = None
    """Picks a part of the inputs and of the timed result that the reference can recompute on its own.
    None: the error is taken on ``make_small`` instead."""
    backward: bool = False
    dense_bytes: float | None = None
    """Working set of naive and torch where it differs from ours (ternary: dense weights)."""
    note: str = ""
    tokens: int = 0
    """That a call reads or makes: the rate is theirs per second, and the memory of torch is measured, too."""

    @property
    def key(self) -> str:
        return " | ".join((self.op, self.name, self.shape, self.dtype))

    @property
    def in_flops(self) -> bool:
        """True where arithmetic is the natural unit (more than 16 operations per byte)."""
        return self.flops > 16 * self.bytes and not self.by_bytes

    def contender(self, name: str) -> Prepare:
        """``ours``, ``naive``, ``torch``, ``numba`` or one of ``peers`` and ``cpu_peers``."""
        peers = {**self.peers, **self.cpu_peers}
        prepare: Prepare = peers[name] if name in peers else getattr(self, name)
        return prepare


def find_case(op: str, key: str, config: RunOptions) -> Case:
    """Find a case by its key: cases cannot be sent to another process."""
    cases = importlib.import_module(f"perf.bench_{op}").cases(config)
    return {case.key: case for case in cases}[key]


def make_inputs(case: Case, config: RunOptions, *, small: bool = False) -> Inputs:
    """Inputs of the case, identical in every process: the seed comes from the case's key."""
    rng = np.random.default_rng(zlib.crc32(case.key.encode()))
    made = (case.make_small if small else case.make)(rng)
    if config.device == "cuda":
        made = to_device(made)
    return made


def to_device(x: Inputs) -> Inputs:
    """Copy the arrays to the device. A TernaryMatrix moves itself."""
    import cupy

    return {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in x.items()
    }


def to_host(x: Inputs) -> Inputs:
    """Inverse of :func:`to_device`, for the reference."""
    import cupy

    return {
        name: cupy.asnumpy(value) if isinstance(value, cupy.ndarray) else value for name, value in x.items()
    }


def device_of(x: Inputs) -> str:
    """Device of a model: its weights start on the host, but its tokens, ``ids``, are where it runs."""
    return "cpu" if isinstance(x["ids"], np.ndarray) else "cuda"


def nbytes(value: Any) -> int:
    """Bytes of all arrays in an input: an array, a container of arrays or a TernaryMatrix."""
    if isinstance(value, Mapping):
        return sum(nbytes(v) for v in value.values())
    if isinstance(value, tuple | list):
        return sum(nbytes(v) for v in value)
    return int(getattr(value, "nbytes", 0))


def results(value: Any) -> tuple[Any, ...]:
    """One result or several, always as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def to_float64(array: Any) -> np.ndarray:
    get = getattr(array, "get", None)  # CuPy arrays are copied to the host
    return np.asarray(get() if callable(get) else array).astype(np.float64)
