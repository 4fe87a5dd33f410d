"""One benchmark case, and the helpers that build its inputs and calls."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
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
class Config:
    """The options of the command line. An empty tuple selects the bench's default."""

    device: str = "cpu"
    quick: bool = False
    dtypes: tuple[str, ...] = ()
    seqlens: tuple[int, ...] = ()
    use_torch: bool = True
    grid: str = ""
    """A named set of problems that replaces the bench's default one."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of ``dataclasses.asdict``, after a trip through JSON."""
        return cls(**{**data, "dtypes": tuple(data["dtypes"]), "seqlens": tuple(data["seqlens"])})


@dataclass(frozen=True)
class Case:
    """One row of the result table.

    ``flops`` and ``bytes`` are the least work the formula needs: arithmetic by the field's convention, and traffic
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

    @property
    def key(self) -> str:
        return " | ".join((self.op, self.name, self.shape, self.dtype))

    @property
    def in_flops(self) -> bool:
        """True where arithmetic is the natural unit (more than 16 operations per byte)."""
        return self.flops > 16 * self.bytes and not self.by_bytes

    def contender(self, name: str) -> Prepare:
        """``ours``, ``naive``, ``torch``, ``numba`` or one of ``peers``."""
        found: Prepare = self.peers[name] if name in self.peers else getattr(self, name)
        return found


# --- fields of a Case, to be passed as ``Case(..., **made_by(...), **calls(...))`` ---


def made_by(
    build: Callable[..., Inputs], size: Sequence[Any], small: Sequence[Any], *more: Any
) -> dict[str, Any]:
    """``make`` and ``make_small``: ``build(rng, *size, *more)`` and ``build(rng, *small, *more)``."""
    return {
        "make": lambda rng: build(rng, *size, *more),
        "make_small": lambda rng: build(rng, *small, *more),
    }


def backends(ours: Callable[..., Call]) -> dict[str, Any]:
    """``ours`` and ``numba``, where ``ours(inputs, **how)`` passes ``how`` on to the op."""
    return {"ours": ours, "numba": functools.partial(ours, backend="numba")}


def calls(
    function: Callable[..., Any],
    definition: Callable[..., Any],
    names: Sequence[str],
    keywords: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """``ours``, ``numba`` and ``reference`` of an op that takes the inputs ``names`` by position, those of
    ``keywords`` by keyword, and ``options``."""

    def bind(call: Callable[..., Any], x: Inputs, **more: Any) -> Call:
        arrays = {name: x[name] for name in keywords}
        return functools.partial(call, *(x[name] for name in names), **arrays, **options, **more)

    return backends(functools.partial(bind, function)) | {
        "reference": lambda x, precision: bind(definition, x, precision=precision)()
    }


# --- data ---


def normal(
    rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any], scale: float = 1.0
) -> np.ndarray:
    """Standard-normal data. Large arrays repeat a block of 4M values: the repetition does not change the timing,
    and drawing 700 MB of weights would take longer than measuring them."""
    size = int(np.prod(shape))
    block = rng.standard_normal(min(size, 1 << 22), dtype=np.float32)
    if scale != 1.0:
        block *= np.float32(scale)
    return np.resize(block.astype(dtype), shape)


def make_inputs(case: Case, config: Config, *, small: bool = False) -> Inputs:
    """The case's inputs, the same in every process: the seed comes from the case's key."""
    rng = np.random.default_rng(zlib.crc32(case.key.encode()))
    made = (case.make_small if small else case.make)(rng)
    if config.device == "cuda":
        from perf import cuda

        made = cuda.put(made)
    return made


def sample_rows(count: int, whole: Sequence[str], x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """``Case.sample`` of ops whose rows are independent: the last rows. The inputs ``whole`` have no rows."""
    rows = slice(-count, None)
    part = {name: array if name in whole else array[rows] for name, array in x.items()}
    return part, tuple(r[rows] for r in result) if isinstance(result, tuple) else result[rows]


def nbytes(value: Any) -> int:
    """Bytes of all arrays in an input: arrays, containers of arrays, TernaryMatrix."""
    if isinstance(value, Mapping):
        return sum(nbytes(v) for v in value.values())
    if isinstance(value, tuple | list):
        return sum(nbytes(v) for v in value)
    return int(getattr(value, "nbytes", 0))


def results(value: Any) -> tuple[Any, ...]:
    """One result or several, always as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def on_host(array: Any) -> Any:
    """A CuPy array as a NumPy array; anything else as it is."""
    get = getattr(array, "get", None)
    return get() if callable(get) else array


def to_float64(array: Any) -> np.ndarray:
    return np.asarray(on_host(array)).astype(np.float64)


def to_float32(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """NumPy has no fast 16-bit arithmetic: a careful user computes in float32."""
    return tuple(array.astype(np.float32, copy=False) for array in arrays)


# --- torch ---


def torch_view(array: Any) -> Any:
    """The same memory as a torch tensor, without a copy."""
    import torch

    if str(array.dtype) == "bfloat16":  # neither NumPy nor DLPack hands bfloat16 over
        return torch_view(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


def torch_gradient(function: Callable[..., Any], x: Inputs, names: Sequence[str], dy: str = "dy") -> Call:
    """The gradient of ``function(*tensors)`` by autograd; its forward pass is not timed."""
    import torch

    leaves = [torch_view(x[name]).requires_grad_() for name in names]
    y = function(*leaves)
    return functools.partial(torch.autograd.grad, y, leaves, torch_view(x[dy]), retain_graph=True)
