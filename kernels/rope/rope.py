"""Launch of RoPE on each backend, forward and backward, and configuration of its CUDA C++ kernel.

Arrays are (batch, seqlen, nheads, head_dim) in any strides with the last axis contiguous. The CUDA C++ kernel is
``rope.cu``, its readable twin ``numba_cuda/rope.py``, the CPU kernel ``cpu/rope.py``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.common.arguments import DTYPES, heads_alignment, same_memory
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Dynamic, Layout, Spec, Tensor, lowers

__all__ = ["RopeConfig", "RopeShape", "frequencies", "positions_of", "select_config", "turns", "variants"]

_THREADS = 128  # of a block at most: __launch_bounds__ of rope.cu
_MAX_BLOCK_Z = 64
_RESIDENT = 10 * _THREADS  # threads that an SM has registers for

# Heads per thread. They share an angle, which costs 25 instructions; a pair costs about 8. As few as put all
# threads on the device at once; more than this gains little.
_MOST_HEADS = 16

_HEAD_STRIDES = np.dtype([("batch", "i8"), ("seqlen", "i8"), ("head", "i8")], align=True)
_SHAPE = np.dtype(
    [
        *[(name, _HEAD_STRIDES) for name in ("q", "k", "q_out", "k_out")],
        *[(name, "i8") for name in ("positions_batch", "positions_seqlen", "first")],
        *[(name, "u4") for name in ("tokens", "seqlen")],
        *[
            (name, "i4")
            for name in ("nheads", "nheads_kv", "q_blocks", "position_bytes", "rotary_dim", "tail")
        ],
        *[(name, "f4") for name in ("cos_scale", "sin_scale")],
    ],
    align=True,
)


@dataclass(frozen=True)
class RopeConfig:
    """Assignment of units, heads and tokens to threads."""

    vec: int  # elements per access
    block: tuple[int, int, int]  # units, heads, tokens
    grid: tuple[int, int, int]  # tokens, heads of q and then of k, units
    q_blocks: int  # of grid[1]


@dataclass(frozen=True)
class RopeShape:
    """Sizes of a problem with at least one element."""

    tokens: int
    nheads: int
    nheads_kv: int
    rotary_dim: int
    tail: int
    """Components to copy behind rotary_dim."""
    itemsize: int


def select_config(shape: RopeShape, *, alignment: int, tokens_inner: bool, sms: int) -> RopeConfig:
    """Configuration of the launch for a problem.

    ``alignment``: bytes that divide every address and stride. ``tokens_inner``: tokens, not heads, are neighbours in
    memory.
    """
    tokens, nheads, nheads_kv = shape.tokens, shape.nheads, shape.nheads_kv
    rotary_dim, tail, itemsize = shape.rotary_dim, shape.tail, shape.itemsize
    vec = math.gcd(16, alignment, rotary_dim // 2 * itemsize, tail * itemsize) // itemsize
    units = rotary_dim // (2 * vec) + -(-tail // (2 * vec))
    x = min(units, _THREADS)
    most_heads = max(nheads, nheads_kv)
    y = 1 if tokens_inner else max(1, min(32 // x, most_heads))  # a warp reads adjacent memory
    z = min(max(1, _THREADS // (x * y)), tokens, _MAX_BLOCK_Z)

    threads = tokens * (nheads + nheads_kv) * units  # one head each
    heads = min(_MOST_HEADS, -(-threads // (_RESIDENT * sms)))
    heads = max(heads, -(-2 * most_heads // (y * (MAX_GRID[1] - 1))))
    q_blocks, k_blocks = (-(-n // (y * heads)) for n in (nheads, nheads_kv))
    return RopeConfig(vec, (x, y, z), (-(-tokens // z), q_blocks + k_blocks, -(-units // x)), q_blocks)


@dataclass(frozen=True)
class _Problem:
    """q and k, or their gradients, as (batch, seqlen, nheads, head_dim); without k: q with no heads."""

    q: Tensor
    k: Tensor
    q_out: Tensor
    k_out: Tensor
    positions: Tensor | None
    rotary_dim: int
    tail: int
    """Components to copy behind rotary_dim."""
    first: int | None
    """Position of the first token; None: it is an argument of the call."""
    cos_scale: float
    sin_scale: float

    @classmethod
    def of(cls, spec: Spec) -> _Problem:
        names, results, arrange = _operands(spec)
        inputs, outputs = ([arrange(spec.tensor(name)) for name in each] for each in (names, results))
        (q, *ks), (q_out, *ks_out) = inputs, outputs
        in_place = all(map(same_memory, inputs, outputs))
        rotary_dim, scale = spec["rotary_dim"], spec["attention_factor"]
        return cls(
            q,
            ks[0] if ks else q[:, :, :0],
            q_out,
            ks_out[0] if ks else q_out[:, :, :0],
            positions_of(spec),
            rotary_dim,
            0 if in_place else q.shape[3] - rotary_dim,
            spec["first"],
            scale,
            -scale if spec["conjugate"] else scale,
        )

    @property
    def tokens(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def is_empty(self) -> bool:
        return not self.q.size and not self.k.size


@lowers("rope", "raw")
@lowers("rope_backward", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    p, interleaved = _Problem.of(spec), spec["interleaved"]
    if p.is_empty:
        return
    arrays = {"q": p.q, "k": p.k, "q_out": p.q_out, "k_out": p.k_out}
    nheads, nheads_kv = p.q.shape[2], p.k.shape[2]
    config = select_config(
        RopeShape(p.tokens, nheads, nheads_kv, p.rotary_dim, p.tail, p.q.itemsize),
        alignment=heads_alignment(arrays.values()),
        tokens_inner=_tokens_inner(p.q if nheads else p.k),
        sms=builder.sms,
    )
    fields: dict[str, Any] = {
        name: tuple(stride // x.itemsize for stride in x.strides[:3]) for name, x in arrays.items()
    }
    fields |= {
        "first": p.first or 0,
        "tokens": p.tokens,
        "seqlen": p.q.shape[1],
        "nheads": nheads,
        "nheads_kv": nheads_kv,
        "q_blocks": config.q_blocks,
        "rotary_dim": p.rotary_dim,
        "tail": p.tail,
        "cos_scale": p.cos_scale,
        "sin_scale": p.sin_scale,
    }
    if p.positions is not None:
        size = fields["position_bytes"] = p.positions.itemsize
        fields["positions_batch"] = p.positions.strides[0] // size if p.positions.shape[0] > 1 else 0
        fields["positions_seqlen"] = p.positions.strides[1] // size
    shape = np.zeros((), _SHAPE)
    for name, value in fields.items():
        shape[name] = value
    turns = frequencies(spec, builder, raw=True)
    pointers = (*arrays.values(), turns if p.positions is None else p.positions, turns)
    struct = Dynamic("first", _SHAPE, shape[()]) if p.first is None else shape[()]
    builder.launch(
        _kernel(config, p.q.dtype.name, interleaved), config.grid, config.block, (*pointers, struct)
    )


@lowers("rope", "numba")
@lowers("rope_backward", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rope.numba_cuda import rope as twins

    p = _Problem.of(spec)
    if p.is_empty:
        return
    twin = twins.kernel(p.q.dtype.name, "" if p.positions is None else p.positions.dtype.name)
    first = Dynamic("first", np.dtype(np.int64)) if p.first is None else p.first
    arrays = (p.q, p.k, p.q_out, p.k_out, 0 if p.positions is None else p.positions)
    numbers = (first, int(spec["interleaved"]), p.tail, p.cos_scale, p.sin_scale)
    args = (*arrays, frequencies(spec, builder, raw=False), *numbers)
    builder.launch(twin, (min(p.tokens, MAX_GRID[0]), 1, 1), (twins.THREADS, 1, 1), args)


@lowers("rope", "cpu")
@lowers("rope_backward", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rope.cpu import rope as cpu

    names, results, arrange = _operands(spec)
    how = {name: spec[name] for name in ("rotary_dim", "interleaved", "conjugate")}

    def run(views: Mapping[str, Any]) -> None:
        cpu.rope(
            [arrange(views[name]) for name in names],
            [arrange(views[name]) for name in results],
            views["cos"],
            views["sin"],
            views["rows"],
            **how,
        )

    builder.call(run, cpu.config([arrange(spec.tensor(name)) for name in names]))


def _operands(spec: Spec) -> tuple[list[str], list[str], Callable[[Any], Any]]:
    """Names of inputs and results, and a function that gives them the axes (batch, seqlen, nheads, head_dim)."""
    names = spec["inputs"]
    return list(names), [f"rotated {name}" for name in names], _ARRANGE[spec["layout"]]


_ARRANGE: dict[str, Callable[[Any], Any]] = {
    "bshd": lambda x: x,
    "bhsd": lambda x: x.swapaxes(1, 2),
    "packed": lambda x: x[None],
}


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``rope`` launches; the same on every architecture."""
    for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        for size, interleaved in itertools.product((16, 8, 4, 2), (False, True)):
            if size >= itemsize:
                shape = RopeShape(2**20, 32, 8, 128, 0, itemsize)
                config = select_config(shape, alignment=size, tokens_inner=False, sms=1)
                yield Variant(_kernel(config, dtype, interleaved), math.prod(config.block))


def _kernel(config: RopeConfig, dtype: str, interleaved: bool) -> CudaKernel:
    defines = (("DTYPE", DTYPES[dtype]), ("VEC", config.vec), ("INTERLEAVED", int(interleaved)))
    return CudaKernel("rope/rope", "rope", defines)


def _tokens_inner(x: Tensor) -> bool:
    return bool(x.shape[1] > 1 and x.shape[2] > 1 and abs(x.strides[1]) < abs(x.strides[2]))


# Frequencies of RoPE in the form that GPU kernels read.
#
# The kernels compute cos and sin themselves. A table would be another 512 bytes to read per token at head_dim
# 128, 2.5 % of the traffic of q and k of Llama-3-8B, and the host would have to wait for positions on the
# device to know its length.


def frequencies(spec: Spec, builder: Builder, *, raw: bool) -> Tensor:
    """Frequency of each pair: :func:`turns` for the CUDA C++ kernels, radians per position for the Numba kernels."""
    inv_freq: bytes = spec["inv_freq"]
    return builder.constant(turns(inv_freq) if raw else np.frombuffer(inv_freq), "frequencies")


def positions_of(spec: Spec) -> Tensor | None:
    """Positions (batch or 1, seqlen). The op's hook has widened dtypes other than int32 and int64."""
    x = spec.get("positions")
    if x is None:
        return None
    if x.dtype not in (np.int32, np.int64):
        x = Tensor.of("positions", Layout.contiguous(x.shape, np.int64))
    return x if x.ndim == 2 else x[None]


@functools.lru_cache(maxsize=64)
def turns(inv_freq: bytes) -> npt.NDArray[np.uint64]:
    """Turns per position: ``inv_freq / (2 pi)`` in units of 2^-64, rounded, without whole turns.

    A position times this, modulo 2^64, is the angle without its whole turns, with error ``position * 2^-65`` turns.
    """
    values = []
    for numerator, denominator in map(float.as_integer_ratio, np.frombuffer(inv_freq).tolist()):
        scaled, unit = numerator * _TURNS_PER_RADIAN, denominator << (_BITS - 64)
        values.append((scaled + unit // 2) // unit % 2**64)
    result = np.array(values, np.uint64)
    result.flags.writeable = False  # it is shared
    return result


def _turns_per_radian(bits: int) -> int:
    """``2**bits / (2 pi)``, by Machin's formula: pi / 4 = 4 arctan(1 / 5) - arctan(1 / 239)."""

    def arctan_of_inverse(n: int) -> int:
        power = total = (1 << 2 * bits) // n
        k = 1
        while power:
            power //= -n * n
            k += 2
            total += power // k
        return total

    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    return (1 << 3 * bits) // (2 * pi)


_BITS = 256  # 64 of them are kept; the rest covers frequencies up to 2**100, and rounding
_TURNS_PER_RADIAN = _turns_per_radian(_BITS)
