"""Frequencies of RoPE in the form that GPU kernels read.

The kernels compute cos and sin themselves. A table would be another 512 bytes to read per token at head_dim 128,
2.5 % of the traffic of q and k of Llama-3-8B, and the host would have to wait for positions on the device to know its
length.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.program import Builder, Layout, Spec, Tensor

__all__ = ["frequencies", "positions_of", "turns"]


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
