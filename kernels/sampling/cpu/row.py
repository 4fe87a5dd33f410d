"""Rows of logits for sampling on the CPU, by blocks: order-preserving keys, and weights that are integers.

Operations are rounded as written, none fused with another: weights have the bits of other devices.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import as_float32, as_float64, as_int64, as_uint32, like, load
from gpu_ops.kernels.common.cpu.jit import exact, generic, inner, types

LEAST = -64.0  # lower exponents count as this

# Inputs of a row and its penalties. Its maximum, log2(e) / temperature, coefficients of exp2, bits of weights.
Row = namedtuple("Row", "logits bias counts repetition frequency presence")
Scale = namedtuple("Scale", "top factor exp2 bits")
# Scratch of a thread for a block: z, exponents, terms of exp2, weights and keys; and bins.
Room = namedtuple("Room", "z whole part power weights keys bins")
# The largest keys of a row so far, in the order of their tokens.
Kept = namedtuple("Kept", "keys tokens bins")
# Kept are tokens whose key is above, or equal with an index up to ``last``.
Cut = namedtuple("Cut", "key last")


@generic
def key_of(z):
    """Key of a number: integers in the order of the numbers, NaN above infinity."""
    if z == types.float64:

        def of_float64(z):
            word = as_int64(z)
            key = word ^ ((word >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))
            return key if z == z else np.int64(0x7FFFFFFFFFFFFFFF)

        return of_float64

    def of_float32(z):
        word = np.int32(as_uint32(z))
        key = np.int32(word ^ ((word >> 31) & np.int32(0x7FFFFFFF)))
        return key if z == z else np.int32(0x7FFFFFFF)

    return of_float32


@generic
def of_key(key, kind):
    """Number of a key, in the type of ``kind``."""
    if kind == types.float64:
        return lambda key, kind: as_float64(key ^ ((key >> 63) & np.int64(0x7FFFFFFFFFFFFFFF)))
    return lambda key, kind: as_float32(np.uint32(key ^ ((key >> 63) & np.int64(0x7FFFFFFF))))


@generic
def as_key(number, key):
    """``number`` in the type of ``key``."""
    return (
        (lambda number, key: np.int64(number))
        if key == types.int64
        else (lambda number, key: np.int32(number))
    )


@generic
def nearest(x):
    """Nearest integer, ties to even; |x| is at most 64."""
    if x == types.float64:
        return lambda x: (x + 1.5 * 2.0**52) - 1.5 * 2.0**52
    return lambda x: (x + np.float32(1.5 * 2.0**23)) - np.float32(1.5 * 2.0**23)


@generic
def power_of_two(n):
    if n == types.float64:
        return lambda n: as_float64((np.int64(n) + np.int64(1023)) << np.int64(52))
    return lambda n: as_float32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@exact
def fill(row, start, n, z):
    """Fill z with n logits with penalties and bias."""
    logits = row.logits[start : start + n]  # an index that may be negative is not vectorised
    for j in range(n):
        z[j] = load(logits, j)
    if len(row.counts):
        counts = row.counts[start : start + n]
        for j in range(n):
            count, x = counts[j], z[j]
            x = x * row.repetition if x < 0 else x / row.repetition
            drawn = (x - row.frequency * like(x, count)) - row.presence
            z[j] = drawn if count > 0 else x if count < 0 else z[j]  # < 0: in the prompt only
    if len(row.bias):
        bias = row.bias[start : start + n]
        for j in range(n):
            z[j] += bias[j]
    for j in range(n):
        z[j] += like(z[j], 0.0)  # -0 becomes 0


@exact
def weigh(n, scale, room):
    """Compute weights of n values of z."""
    whole, part, power = room.whole, room.part, room.power
    for j in range(n):
        x = (room.z[j] - scale.top) * scale.factor
        x = x if x > like(x, LEAST) else like(x, LEAST)
        whole[j] = nearest(x)
        part[j] = x - whole[j]
        power[j] = like(x, 0.0)
    for coefficient in scale.exp2:
        for j in range(n):
            power[j] = power[j] * part[j] + coefficient
    for j in range(n):
        room.weights[j] = np.int64(power[j] * power_of_two(whole[j] + like(power[j], scale.bits)))


@inner
def fill_keys(z, n, keys):
    for j in range(n):
        keys[j] = key_of(z[j])


@inner
def largest(keys, n):
    top = keys[0]
    for j in range(1, n):
        top = max(top, keys[j])
    return top


@inner
def count_kept(keys, n, start, cut):
    count = 0
    for j in range(n):
        count += (keys[j] > cut.key) | ((keys[j] == cut.key) & (start + j <= cut.last))
    return count


@inner
def count_near(keys, start, end, prefix, shift):
    """Number of keys that begin with these digits."""
    count = 0
    for j in range(start, end):
        count += keys[j] >> shift == prefix
    return count


@inner
def drop(weights, keys, n, start, cut, least):
    """Set weights of tokens that are not kept to 0."""
    for j in range(n):
        is_kept = (keys[j] > cut.key) | ((keys[j] == cut.key) & (start + j <= cut.last))
        weights[j] = weights[j] if is_kept & (weights[j] >= least) else 0


@inner
def total_of(weights, n):
    total = 0
    for j in range(n):
        total += weights[j]
    return total
