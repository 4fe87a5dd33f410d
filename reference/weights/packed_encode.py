"""Encoders of packed formats: float32 weights to the fields of blocks, by the rules of the formats' packages.

Every encoder takes weights (blocks, block). Those of ggml's types compute in float32 what its C code and
gguf-py do, in the same order, and so give the same bits; ``nf4`` and ``fp4`` follow bitsandbytes, and formats of
groups round to nearest as compressed-tensors does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = [
    "E2M1",
    "E4M3",
    "FP4",
    "GROUP_ENCODERS",
    "IQ4",
    "NF4",
    "PLAIN_ENCODERS",
    "Fields",
    "fp4",
    "iq4_nl",
    "mxfp4",
    "nf4",
    "q4_0",
    "q4_1",
    "q4_k",
    "q5_0",
    "q5_1",
    "q5_k",
    "q6_k",
    "q8_0",
    "ternary",
]

Array = np.ndarray[Any, Any]

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of E2M1, doubled; code 8 is 0, not -0, as in ggml."""

FP4 = (0.0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3)
"""Values of bitsandbytes' FP4, times 12."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
"""Quantiles of a normal distribution. Dettmers et al., "QLoRA", 2023, appendix E."""

E4M3 = tuple(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float).tolist())
"""Values of float8 e4m3fn; codes 127 and 255 are NaN."""

SILENCE = np.float32(1e-15)
"""Magnitude below which ggml takes all weights of a run for zeros."""

PIECE = 1 << 17
"""Weights that are encoded at a time: the arrays of a piece fit in a core's caches."""


class Fields(NamedTuple):
    """Fields of blocks, one row per block."""

    codes: Array  # (blocks, block) uint8; of plain floats their bytes
    scale: Any  # (blocks, 1), as stored: float16, float32, or uint8 for an exponent; None for plain floats
    run_scales: Any = None  # (blocks, runs) int8
    minimum: Any = None  # (blocks, 1) float16, subtracted
    run_minimums: Any = None  # (blocks, runs) uint8; without a minimum, zero points of the codes


Encoder = Callable[[Array], Fields]


def _in_pieces(encoder: Encoder) -> Encoder:
    """Encoder of any number of blocks that calls ``encoder`` on pieces of them, without NumPy's warnings."""

    @functools.wraps(encoder)
    def encode(weights: Array) -> Fields:
        count = max(1, PIECE // weights.shape[1])
        starts = range(0, max(1, len(weights)), count)
        with np.errstate(all="ignore"):  # reciprocals and float16 scales of tiny and of huge weights
            pieces = [encoder(weights[start : start + count]) for start in starts]
        if len(pieces) == 1:
            return pieces[0]
        columns = zip(*pieces, strict=True)
        fields: list[Any] = [None if column[0] is None else np.concatenate(column) for column in columns]
        return Fields(*fields)

    return encode


# ---- numbers -----------------------------------------------------------------------------------------------


def _reciprocal(scale: Array) -> Array:
    """1 / ``scale``, and 0 for a scale of 0."""
    return np.where(scale == 0, np.float32(0), 1 / scale)


def _finite(numbers: Array) -> Array:
    """Numbers with 0 in place of infinities and NaN: the low byte of what x86 converts them to."""
    return np.where(np.isfinite(numbers), numbers, np.float32(0))


def _codes(numbers: Array, top: int) -> Array:
    """Numbers, truncated, as codes from 0 to ``top``."""
    return np.clip(_finite(numbers), 0, top).astype(np.uint8)


def _rounded(numbers: Array) -> Array:
    """Nearest integers, halves away from zero; 0 for numbers that are not finite."""
    magnitude = np.abs(numbers)
    floor = np.floor(magnitude)
    return _finite(np.copysign(floor + (magnitude - floor >= 0.5), numbers))


def _nearest(table: Array, numbers: Array) -> Array:
    """Codes of the values of ``table`` nearest to numbers; midpoints of two values go to the lower."""
    order = np.argsort(table, kind="stable")
    values = table[order]
    midpoints = (values[:-1] + values[1:]) / 2
    return np.asarray(order.astype(np.uint8)[np.searchsorted(midpoints, numbers)])


def _nearest_iq4(numbers: Array) -> Array:
    """Codes of the values of :data:`IQ4` nearest to numbers; midpoints of two values go to the higher.

    Midpoints are multiples of a half, so a number has the code of the multiple of a half at or below it.
    """
    table = np.array(IQ4, np.float32)
    low, high = 2 * IQ4[0], 2 * IQ4[-1]
    codes = np.searchsorted(table[:-1] + table[1:], np.arange(low, high + 1), side="right").astype(np.uint8)
    halves = np.fmax(np.fmin(np.floor(2 * numbers), high), low)  # NaN gives high
    return np.asarray(codes[halves.astype(np.intp) - low])


def _extreme(weights: Array, axis: int) -> Array:
    """Signed weight of the largest magnitude along ``axis``, the first of equals; the axis keeps length 1."""
    index = np.abs(weights).argmax(axis=axis, keepdims=True)
    return np.asarray(np.take_along_axis(weights, index, axis=axis))


def _runs(weights: Array, run: int) -> Array:
    """Weights (run, runs): operations on a whole row are those of one step of ggml's loops over a run."""
    return np.ascontiguousarray(weights.reshape(-1, run).T)


def _sum(terms: Array) -> Array:
    """Sums over the first axis in float32, from the first term to the last; NumPy may add pairs first."""
    total = np.array(terms[0])
    for term in terms[1:]:
        total += term
    return total


def _without_silence(runs: Array) -> Array:
    """Runs with zeros in place of all weights of a run below :data:`SILENCE`."""
    return np.where(np.abs(runs).max(axis=0) < SILENCE, np.float32(0), runs)


# ---- a scale per block -------------------------------------------------------------------------------------


def _symmetric(weights: Array, half: int) -> Fields:
    """Codes around ``half``: the weight of the largest magnitude has code 0."""
    scale = _extreme(weights, 1) / -half
    codes = _codes(weights * _reciprocal(scale) + np.float32(half + 0.5), 2 * half - 1)
    return Fields(codes, scale.astype(np.float16))


@_in_pieces
def q4_0(weights: Array) -> Fields:
    return _symmetric(weights, 8)


@_in_pieces
def q5_0(weights: Array) -> Fields:
    return _symmetric(weights, 16)


def _affine(weights: Array, top: int) -> Fields:
    """Codes from the lowest weight, 0, to the highest, ``top``."""
    lowest, highest = weights.min(axis=1, keepdims=True), weights.max(axis=1, keepdims=True)
    scale = (highest - lowest) / top
    codes = _codes((weights - lowest) * _reciprocal(scale) + np.float32(0.5), top)
    return Fields(codes, scale.astype(np.float16), minimum=(-lowest).astype(np.float16))


@_in_pieces
def q4_1(weights: Array) -> Fields:
    return _affine(weights, 15)


@_in_pieces
def q5_1(weights: Array) -> Fields:
    return _affine(weights, 31)


@_in_pieces
def q8_0(weights: Array) -> Fields:
    """Codes 128 + the integer nearest to weight / scale."""
    scale = np.abs(weights).max(axis=1, keepdims=True) / 127
    return Fields(_codes(_rounded(weights * _reciprocal(scale)) + 128, 255), scale.astype(np.float16))


@_in_pieces
def ternary(weights: Array) -> Fields:
    """Codes 1 + the sign of weights from half of the largest magnitude, which is the scale, on; 1 below it.

    Ternary weights keep their values, if float16 holds the scale. Normal weights lose most of theirs.
    """
    scale = np.abs(weights).max(axis=1, keepdims=True)
    return Fields(_codes(_rounded(weights * _reciprocal(scale)) + 1, 2), scale.astype(np.float16))


@_in_pieces
def mxfp4(weights: Array) -> Fields:
    """Codes of the values nearest to weight / scale, the first of equals.

    Exponents of blocks below 2 ** -125 wrap to large ones, as in gguf-py; the codes of such blocks are 0.
    """
    largest = np.abs(weights).max(axis=1, keepdims=True)
    exponent = np.where(largest > 0, np.floor(np.log2(largest)) - 2 + 127, np.float32(0))
    exponent = exponent.astype(np.int32).astype(np.uint8)
    scale = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)
    codes, least = np.zeros(weights.shape, np.uint8), np.abs(weights)
    for code, value in enumerate(E2M1):
        error = np.abs(scale * np.float32(value) - weights)
        codes = np.where(error < least, np.uint8(code), codes)
        least = np.minimum(error, least)
    return Fields(codes, exponent)


def _table(weights: Array, table: Array) -> Fields:
    """Codes of the values nearest to weight / largest magnitude; a midpoint goes to the lower value."""
    scale = np.abs(weights).max(axis=1, keepdims=True)
    numbers = weights * (1 / np.maximum(scale, np.finfo(np.float32).tiny))
    return Fields(_nearest(table, np.clip(numbers, -1, 1)), scale)


@_in_pieces
def nf4(weights: Array) -> Fields:
    return _table(weights, np.array(NF4, np.float32))


@_in_pieces
def fp4(weights: Array) -> Fields:
    """Codes by the sorted values: weights just above 0 have code 8, the negative zero, and 0 has code 0."""
    return _table(weights, np.array(FP4, np.float32) / 12)


@_in_pieces
def iq4_nl(weights: Array) -> Fields:
    """Codes by the scale of 16 that leaves the least error, weighted by squared weights."""
    table, runs = np.array(IQ4, np.float32), _without_silence(_runs(weights, weights.shape[1]))
    extreme, importance = _extreme(runs, 0)[0], runs * runs
    scale, gain = np.zeros_like(extreme), np.full_like(extreme, -1)
    inverses = [1 / (-extreme / table[0]), *((trial + table[0]) / extreme for trial in range(-7, 8))]
    for inverse in inverses:
        values = table[_nearest_iq4(inverse * runs)]
        weighted = importance * values
        product, norm = _sum(weighted * runs), _sum(weighted * values)
        better = product * product > gain * norm
        scale = np.where(better, product / norm, scale)
        gain = np.where(better, scale * product, gain)
    scale = scale[:, None]
    codes = _nearest_iq4(_reciprocal(scale) * weights)
    return Fields(codes, scale.astype(np.float16))


# ---- a scale per run ---------------------------------------------------------------------------------------


def _search_affine(runs: Array, top: int, start: float, trials: int) -> tuple[Array, Array, Array]:
    """Codes (float32, as ``runs``), scale and lowest value of each run, of the least weighted squared error.

    Inverse scales (top + start), (top + start + 0.1), ... over the range of the run give codes, and least
    squares give their scale and lowest value. The best trial's lowest value replaces that of the range.
    """
    importance = np.sqrt(_sum(runs * runs) / len(runs)) + np.abs(runs)
    lowest, highest = np.minimum(runs.min(axis=0), np.float32(0)), runs.max(axis=0)
    sum_importance, sum_runs = _sum(importance), _sum(importance * runs)

    inverse = np.where(highest == lowest, np.float32(0), top / (highest - lowest))
    scale = _reciprocal(inverse)
    codes = np.clip(_finite(np.rint(inverse * (runs - lowest))), 0, top)
    least = _sum(importance * np.square(scale * codes + lowest - runs))
    for trial in range(trials):
        inverse = (np.float32(start) + np.float32(0.1) * np.float32(trial) + top) / (highest - lowest)
        trial_codes = np.clip(np.rint(inverse * (runs - lowest)), 0, top)
        weighted = importance * trial_codes
        sum_codes, sum_squares = _sum(weighted), _sum(weighted * trial_codes)
        sum_products = _sum(weighted * runs)
        determinant = sum_importance * sum_squares - sum_codes * sum_codes
        trial_scale = (sum_importance * sum_products - sum_runs * sum_codes) / determinant
        trial_lowest = (sum_squares * sum_runs - sum_codes * sum_products) / determinant
        positive = trial_lowest > 0
        trial_scale = np.where(positive, sum_products / sum_squares, trial_scale)
        trial_lowest = np.where(positive, np.float32(0), trial_lowest)
        error = _sum(importance * np.square(trial_scale * trial_codes + trial_lowest - runs))
        better = (determinant > 0) & (error < least)
        codes = np.where(better, trial_codes, codes)
        scale = np.where(better, trial_scale, scale)
        lowest = np.where(better, trial_lowest, lowest)
        least = np.where(better, error, least)
    return codes, scale, lowest


def _six_bits(numbers: Array) -> tuple[Array, Array]:
    """Numbers (blocks, 8) as multiples, 0 to 63, of a float16 per block."""
    largest = np.maximum(numbers.max(axis=1, keepdims=True), np.float32(0))
    inverse = np.where(largest > 0, 63 / largest, np.float32(0))
    return _codes(np.rint(inverse * numbers), 63), (largest / 63).astype(np.float16)


def _affine_runs(weights: Array, top: int, start: float, trials: int) -> Fields:
    """Codes by the best scale and lowest value of each run of 32, both as multiples of a block's."""
    codes, scales, lowest = _search_affine(_runs(weights, 32), top, start, trials)
    run_scales, scale = _six_bits(scales.reshape(-1, 8))
    run_minimums, minimum = _six_bits(-lowest.reshape(-1, 8))
    step = (scale.astype(np.float32) * run_scales.astype(np.float32))[:, :, None]
    offset = (minimum.astype(np.float32) * run_minimums.astype(np.float32))[:, :, None]
    numbers = np.rint((weights.reshape(-1, 8, 32) + offset) / step)
    # where all codes have one value, ggml keeps those of the trial
    numbers = np.where(step == 0, codes.T.reshape(-1, 8, 32), numbers)
    return Fields(
        _codes(numbers, top).reshape(weights.shape), scale, run_scales.view(np.int8), minimum, run_minimums
    )


@_in_pieces
def q4_k(weights: Array) -> Fields:
    return _affine_runs(weights, 15, -1.0, 21)


@_in_pieces
def q5_k(weights: Array) -> Fields:
    return _affine_runs(weights, 31, -0.5, 16)


def _search_symmetric(runs: Array, half: int) -> tuple[Array, Array]:
    """Codes (float32, as ``runs``) and scale of each run, of the least error weighted by squared weights."""
    extreme, importance = _extreme(runs, 0)[0], runs * runs
    weighted_runs = importance * runs
    scale, gain, codes = np.zeros_like(extreme), np.full_like(extreme, -1), np.zeros_like(runs)
    for trial in (0, *range(-9, 0), *range(1, 10)):
        inverse = -(half + np.float32(0.1) * np.float32(trial)) / extreme
        numbers = np.clip(np.rint(inverse * runs), -half, half - 1)
        product, norm = _sum(weighted_runs * numbers), _sum(importance * numbers * numbers)
        better = product * product > gain * norm
        codes = np.where(better, numbers + half, codes)
        scale = np.where(better, product / norm, scale)
        gain = np.where(better, scale * product, gain)
    return codes, scale


@_in_pieces
def q6_k(weights: Array) -> Fields:
    """Codes by the scale of 19 that leaves the least error in a run; scales are multiples of a block's."""
    codes, scales = _search_symmetric(_without_silence(_runs(weights, 16)), 32)
    scales = scales.reshape(-1, 16)
    extreme = _extreme(scales, 1)
    silent = ~(np.abs(extreme) >= SILENCE)  # NaN, of weights whose squares overflow, too
    inverse = -128 / extreme
    scale = np.where(silent, np.float32(0), 1 / inverse).astype(np.float16)
    run_scales = _finite(np.where(silent, np.float32(0), np.rint(inverse * scales)))
    run_scales = np.clip(run_scales, -128, 127).astype(np.int8)
    step = (scale.astype(np.float32) * run_scales.astype(np.float32))[:, :, None]
    numbers = _finite(np.rint(weights.reshape(-1, 16, 16) / step)) + 32
    # where all codes have one value, ggml keeps those of the trial
    numbers = np.where(step == 0, codes.T.reshape(-1, 16, 16), numbers)
    numbers = np.where(silent[:, :, None], np.float32(0), numbers)
    return Fields(_codes(numbers, 63).reshape(weights.shape), scale, run_scales)


# ---- floats ------------------------------------------------------------------------------------------------


def _plain(weights: Array, dtype: str) -> Fields:
    return Fields(weights.astype(dtype).view(np.uint8), None)


PLAIN_ENCODERS = {
    name: _in_pieces(functools.partial(_plain, dtype=name)) for name in ("bfloat16", "float16", "float32")
}
"""Encoders of formats of floats."""


# ---- groups ------------------------------------------------------------------------------------------------


def _group(weights: Array, bits: int) -> Fields:
    """``q = rint(w / s) + 2^(bits - 1)`` with ``s = 2 absmax / (2^bits - 1)``."""
    half = 1 << (bits - 1)
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(half - 0.5)
    codes = np.rint(_ratio(weights, scale)).clip(-half, half - 1) + half
    return Fields(codes.astype(np.uint8), scale)


def _group_with_zeros(weights: Array, bits: int) -> Fields:
    """``q = rint(w / s + z)`` with ``s = (max - min) / (2^bits - 1)`` and ``z = rint(-min / s)``, 0 in the range."""
    top = (1 << bits) - 1
    low = np.minimum(weights.min(axis=1, keepdims=True), 0)
    high = np.maximum(weights.max(axis=1, keepdims=True), 0)
    scale = high / np.float32(top) - low / np.float32(top)
    zero = np.rint(_ratio(-low, scale)).clip(0, top)
    codes = np.rint(_ratio(weights, scale) + zero).clip(0, top)
    return Fields(codes.astype(np.uint8), scale, run_minimums=zero.astype(np.uint8))


def _ratio(weights: Array, scale: Array) -> Array:
    """``weights / scale``, and 0 for a scale of 0."""
    return np.where(scale == 0, np.float32(0), weights / scale)


def _e4m3(weights: Array) -> Fields:
    """``q = e4m3(w / s)`` with ``s = absmax / 448``."""
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(448)
    codes = _ratio(weights, scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return Fields(codes.view(np.uint8), scale)


GROUP_ENCODERS = {
    "int4": _in_pieces(functools.partial(_group, bits=4)),
    "uint4": _in_pieces(functools.partial(_group_with_zeros, bits=4)),
    "int8": _in_pieces(functools.partial(_group, bits=8)),
    "uint8": _in_pieces(functools.partial(_group_with_zeros, bits=8)),
    "e4m3": _in_pieces(_e4m3),
}
"""Encoders of formats of groups."""
