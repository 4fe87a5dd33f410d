"""What one benchmark case is, and the helpers that build its inputs."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import ml_dtypes
import numpy as np

from gpu_ops.reference.precision import Precision

Inputs = dict[str, Any]
Call = Callable[[], Any]
Prepare = Callable[[Inputs], Call]
"""Does everything that is not timed (views, tables, a forward pass) and returns the call that is."""

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Config:
    """What the command line asked for. An empty tuple means the bench's own default."""

    device: str = "cpu"
    quick: bool = False
    dtypes: tuple[str, ...] = ()
    seqlens: tuple[int, ...] = ()
    use_torch: bool = True
    grid: str = ""
    """A named set of problems that a bench offers in place of its default one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        values = dict(data)
        for name in ("dtypes", "seqlens"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Case:
    """One row of the result table.

    ``flops`` and ``bytes`` are the least work the formula needs: arithmetic by the convention of
    ``attention_flops``, traffic with every input read once and every result written once.
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
    """``(inputs, precision) -> results`` of gpu_ops.reference."""
    naive: Prepare | None = None
    torch: Prepare | None = None
    numba: Prepare | None = None
    """On CUDA, where ``ours`` is CUDA C++: the same with the Numba kernels."""
    peers: Mapping[str, Prepare] = field(default_factory=dict)
    """On CUDA: more to compare with, by name."""
    by_bytes: bool = False
    """Bytes are the natural unit whatever the arithmetic: the limit of decoding is how fast the cache is read."""
    bandwidth: Literal["copy", "read"] = "copy"
    """Which measured bandwidth bounds the case: ``read`` where the result is small."""
    sample: Callable[[Inputs, Any], tuple[Inputs, Any]] | None = None
    """Picks a part of the benched inputs and result that the reference can recompute on its own;
    None: the error is taken on ``make_small`` instead."""
    backward: bool = False
    dense_bytes: float | None = None
    """Working set of naive and torch where it differs from ours (ternary: dense weights)."""
    note: str = ""
    tags: tuple[str, ...] = field(default=())

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


def normal(
    rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any], scale: float = 1.0
) -> np.ndarray:
    """Standard-normal data. Large arrays repeat a block of 4M values: timing does not care,
    and drawing 700 MB of weights would take longer than measuring them."""
    size = int(np.prod(shape))
    block = rng.standard_normal(min(size, 1 << 22), dtype=np.float32)
    if scale != 1.0:
        block *= np.float32(scale)
    out = np.empty(size, dtype=dtype)
    block = block.astype(dtype)
    for start in range(0, size, block.size):
        part = out[start : start + block.size]
        part[:] = block[: part.size]
    return out.reshape(shape)


def nbytes(value: Any) -> int:
    """Bytes of all arrays in an input: arrays, containers of arrays, TernaryMatrix."""
    if isinstance(value, Mapping):
        return sum(nbytes(v) for v in value.values())
    if isinstance(value, tuple | list):
        return sum(nbytes(v) for v in value)
    return int(getattr(value, "nbytes", 0))


def copy_inputs(inputs: Inputs) -> Inputs:
    """A second set of buffers with the same contents."""
    return copy.deepcopy(inputs)


def results(value: Any) -> tuple[Any, ...]:
    """One result or several, always as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def to_float64(array: Any) -> np.ndarray:
    get = getattr(array, "get", None)  # CuPy arrays come back to the host
    return np.asarray(get() if callable(get) else array).astype(np.float64)


def torch_view(array: Any) -> Any:
    """The same memory as a torch tensor, without a copy."""
    import torch

    if isinstance(array, np.ndarray):
        if array.dtype == DTYPES["bfloat16"]:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if str(array.dtype) == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def make_inputs(case: Case, config: Config, *, small: bool = False) -> Inputs:
    """The case's inputs, the same in every process: the seed comes from the case's key."""
    rng = np.random.default_rng(zlib.crc32(case.key.encode()))
    inputs = (case.make_small if small else case.make)(rng)
    if config.device == "cuda":
        from perf import cuda

        inputs = cuda.put(inputs)
    return inputs


def attention_pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """Visible (query, key) pairs: query i sees keys up to i + seqlen_k - seqlen_q when causal."""
    if not causal:
        return seqlen_q * seqlen_k
    visible = np.arange(seqlen_q, dtype=np.int64) + (seqlen_k - seqlen_q + 1)
    return int(np.clip(visible, 0, seqlen_k).sum())


def attention_flops(
    batch: int,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    causal: bool,
    backward: bool = False,
) -> float:
    """4 per visible pair and channel (two matmuls); backward five matmuls, so 2.5 times that.

    The field's convention: the recomputation of the scores is counted, softmax is not.
    """
    forward = 4.0 * batch * nheads * attention_pairs(seqlen_q, seqlen_k, causal) * head_dim
    return 2.5 * forward if backward else forward


def maker(build: Callable[..., Inputs], *args: Any, **kwargs: Any) -> Callable[[np.random.Generator], Inputs]:
    """``build(rng, *args, **kwargs)`` as a function of the generator alone."""
    return partial(_build, build, args, kwargs)


def _build(build: Callable[..., Inputs], args: Any, kwargs: Any, rng: np.random.Generator) -> Inputs:
    return build(rng, *args, **kwargs)
