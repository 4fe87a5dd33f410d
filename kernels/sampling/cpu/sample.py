"""Sampling on the CPU: one task is a run of rows. ``reference/sampling/sample.py`` defines weights, order and number.

A row is read by blocks that stay in the first cache: once for a top_k of up to MAX_COPIED, whose tokens are copied
and then serve as the row. Otherwise once to find its maximum, three times (float64: six) for each of top_k and top_p,
and up to twice to draw. Weights are integers, so that sums have no order.

The cutoff of top_k and top_p is found digit by digit of the logits' order-preserving bits, from the highest.
Bins hold the number of tokens, or the weight, of each digit. The bin in which the sum from above reaches its goal is
that of the cutoff; the next digit is read only where earlier digits equal the cutoff's. Of tokens with the cutoff's
logit the first ones are kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import bits, like, read_row
from gpu_ops.kernels.common.cpu.jit import Kernel, compute, device_function, inner, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.common.cpu.philox import philox4x32
from gpu_ops.kernels.loss.cpu import cross_entropy
from gpu_ops.kernels.loss.cpu.cross_entropy import LANES, loss_of_row
from gpu_ops.kernels.sampling.cpu.row import (
    Cut,
    Kept,
    Room,
    Row,
    Scale,
    as_key,
    count_kept,
    count_near,
    drop,
    fill,
    fill_keys,
    key_of,
    largest,
    of_key,
    total_of,
    weigh,
)

Array = np.ndarray[Any, Any]

BLOCK = 2048  # columns: 64 KB of scratch
MAX_COPIED = 1024  # largest top_k whose tokens are copied
GROUP = 64  # keys that are skipped together if none has the known digits
DIGIT = 11  # bits
BINS = 1 << DIGIT
PASSES = 8  # cost of a row's elements relative to other ops
DOMAIN = np.uint32(0xFFFFFFFE)
HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def config(rows: int, vocab: int) -> str:
    return f"{items_per_task(rows, PASSES * vocab)} rows per task"


def sample(
    logits: Array,
    by_token: list[Array | None],
    tokens: Array,
    logprob: Array | None,
    options: list[Array],
    exp2: Array,
    bits_of_weights: int,
    own: bool,
) -> None:
    """Sample. logits (rows, vocab). ``by_token``: bias and counts, (rows, vocab) or (1, vocab).

    ``options``: arrays of one number, or one for each row. ``own``: rows have separate seeds, and do not
    count their numbers in.
    """
    rows, vocab = logits.shape
    chunk = items_per_task(rows, PASSES * vocab)
    kinds: tuple[Any, ...] = (exp2.dtype, np.int32)
    by_token_arrays = [np.empty((1, 0), t) if x is None else x for x, t in zip(by_token, kinds, strict=True)]
    logprob = np.empty(0, exp2.dtype) if logprob is None else logprob
    lines = [x.reshape(-1) for x in options]
    arrays = bits(logits), *by_token_arrays, tokens, logprob, *lines, exp2
    launch(SAMPLE[logits.dtype], -(-rows // chunk), chunk, *arrays, bits_of_weights, own)


@device_function
def add_to_bins(room, n, start, cut, prefix, above, shift, first, by_weight):
    mask = np.int64((1 << (above - shift)) - 1)
    for group in range(0, n, GROUP):
        end = min(group + GROUP, n)
        if not first and count_near(room.keys, group, end, prefix, above) == 0:
            continue
        for j in range(group, end):
            key = np.int64(room.keys[j])
            if (key > cut.key or (key == cut.key and start + j <= cut.last)) and (
                first or key >> above == prefix
            ):
                digit = (key >> shift) + BINS // 2 if first else (key >> shift) & mask
                room.bins[digit] += room.weights[j] if by_weight else 1


@device_function
def index_of(row, key, before, place, room):
    """Index of the token with this key that follows ``before`` other tokens with it, from block ``place`` on."""
    vocab = len(row.logits)
    for start in range(place, vocab, BLOCK):
        n = min(BLOCK, vocab - start)
        fill(row, start, n, room.z)
        fill_keys(room.z, n, room.keys)
        tied = count_near(room.keys, 0, n, key, 0)
        if tied <= before:
            before -= tied
            continue
        for j in range(n):
            if room.keys[j] == key:
                if before == 0:
                    return start + j
                before -= 1
    return vocab


@inner
def count_above(keys, start, end, limit):
    count = 0
    for j in range(start, end):
        count += keys[j] > limit
    return count


@device_function
def copy_largest(row, need, lowest, room, kept):
    """Copy the tokens of the ``need`` largest keys, in order; of equal keys the first. Return their number."""
    vocab, count, limit = len(row.logits), 0, lowest - 1
    for start in range(0, vocab, BLOCK):
        n = min(BLOCK, vocab - start)
        fill(row, start, n, room.z)
        fill_keys(room.z, n, room.keys)
        edge = as_key(limit, room.keys[0])
        for group in range(0, n, GROUP):
            end = min(group + GROUP, n)
            if count_above(room.keys, group, end, edge) > 0:
                for j in range(group, end):
                    if room.keys[j] > edge:
                        kept.keys[count], kept.tokens[count] = room.keys[j], start + j
                        count += 1
        if count > len(kept.keys) - BLOCK:
            limit = least_of_largest(need, count, 8 * room.z.itemsize, kept)
            count = keep_largest(need, limit, count, kept)
    if count > need:
        limit = least_of_largest(need, count, 8 * room.z.itemsize, kept)
        count = keep_largest(need, limit, count, kept)
    return count


@device_function
def least_of_largest(need, count, above, kept):
    """The ``need``-th largest of keys of ``above`` bits, found digit by digit."""
    prefix, first = np.int64(0), True
    while above > 0:
        shift = max(above - DIGIT, 0)
        kept.bins[:] = 0
        mask = np.int64((1 << (above - shift)) - 1)
        for j in range(count):
            key = np.int64(kept.keys[j])
            if first:
                kept.bins[(key >> shift) + BINS // 2] += 1
            elif key >> above == prefix:
                kept.bins[(key >> shift) & mask] += 1
        digit = BINS - 1
        while need > kept.bins[digit]:
            need -= kept.bins[digit]
            digit -= 1
        prefix = np.int64(digit - BINS // 2) if first else prefix << (above - shift) | digit
        above, first = shift, False
    return prefix


@device_function
def keep_largest(need, limit, count, kept):
    """Move the first ``need`` tokens with keys of at least ``limit`` to the front; larger ones are all among them."""
    larger = 0
    for j in range(count):
        larger += kept.keys[j] > limit
    place, tied = 0, need - larger
    for j in range(count):
        key = kept.keys[j]
        if key > limit or (key == limit and tied > 0):
            tied -= key == limit
            kept.keys[place], kept.tokens[place] = key, kept.tokens[j]
            place += 1
    return place


@device_function
def narrowed(row, scale, cut, need, share, room):
    """Cut that keeps the first ``need`` tokens of those in ``cut``; 0: those with this share of its weight."""
    vocab, by_weight = len(row.logits), need == 0
    above = 8 * room.z.itemsize
    shift, first, prefix, before, tied = above - DIGIT, True, 0, 0, 0
    while True:
        room.bins[:] = 0
        for start in range(0, vocab, BLOCK):
            n = min(BLOCK, vocab - start)
            fill(row, start, n, room.z)
            fill_keys(room.z, n, room.keys)
            if count_kept(room.keys, n, start, cut) == 0:
                continue
            if by_weight and (first or count_near(room.keys, 0, n, prefix, above) > 0):
                weigh(n, scale, room)
            add_to_bins(room, n, start, cut, prefix, above, shift, first, by_weight)
        if need == 0:
            need = max(np.int64(math.ceil(np.float64(share) * np.float64(total_of(room.bins, BINS)))), 1)
        digit = BINS - 1
        while before + room.bins[digit] < need:
            before += room.bins[digit]
            digit -= 1
        tied = room.bins[digit]
        prefix = digit - BINS // 2 if first else prefix << (above - shift) | digit
        if shift == 0:
            break
        above, shift, first = shift, max(shift - DIGIT, 0), False
    each = 1
    if by_weight:
        room.z[0] = of_key(prefix, row.repetition)
        weigh(1, scale, room)
        each = room.weights[0]
    ties = (need - before + each - 1) // each
    if ties * each < tied:
        return Cut(prefix, index_of(row, prefix, ties - 1, 0, room))
    return Cut(prefix, cut.last if prefix == cut.key else vocab)


@device_function
def drawn(row, scale, cut, least, number, room):
    """Token into whose part of the kept weights the number falls, as a fraction of 2^64."""
    vocab, total, before, last = len(row.logits), 0, 0, False
    target = 0
    while True:
        for start in range(0, vocab, BLOCK):
            n = min(BLOCK, vocab - start)
            fill(row, start, n, room.z)
            fill_keys(room.z, n, room.keys)
            if count_kept(room.keys, n, start, cut) == 0:
                continue
            weigh(n, scale, room)
            drop(room.weights, room.keys, n, start, cut, least)
            block = total_of(room.weights, n)
            if last and before + block > target:
                j = 0
                while before + room.weights[j] <= target:
                    before += room.weights[j]
                    j += 1
                return start + j
            before += block
        total, before, last = before, 0, True
        target = np.int64(high_product(number, np.uint64(total)))


@device_function
def high_product(a, b):
    """Upper 64 bits of a product."""
    a0, a1, b0, b1 = a & LOW, a >> HALF, b & LOW, b >> HALF
    middle, other = a1 * b0 + (a0 * b0 >> HALF), a0 * b1
    return a1 * b1 + (middle >> HALF) + ((middle & LOW) + other >> HALF)


@device_function
def random_number(seed, step, row, words):
    words[0, 0], words[1, 0] = np.uint32(step), np.uint32(step >> HALF)
    words[2, 0], words[3, 0] = np.uint32(row), DOMAIN
    philox4x32(words[0], words[1], words[2], words[3], 1, np.uint32(seed), np.uint32(seed >> HALF))
    return np.uint64(words[0, 0]) | np.uint64(words[1, 0]) << HALF


@device_function
def place_of(x, r):
    """Index of row r in an array that all rows may share."""
    return r if len(x) > 1 else 0


@device_function
def of_row(x, r):
    return x[place_of(x, r)]


@device_function
def top_key(row, room):
    """Largest key, and the start of the first block that has it."""
    vocab, place = len(row.logits), 0
    top = np.int64(key_of(like(row.repetition, -np.inf)))
    for start in range(0, vocab, BLOCK):
        n = min(BLOCK, vocab - start)
        fill(row, start, n, room.z)
        fill_keys(room.z, n, room.keys)
        key = np.int64(largest(room.keys, n))
        if key > top:
            top, place = key, start
    return top, place


@device_function
def chosen(row, need, share, least, scale, number, room):
    """Token that is drawn from the first ``need`` tokens (0: all), a ``share`` of their weight, ``least`` each."""
    cut = Cut(np.int64(key_of(like(row.repetition, -np.inf))), len(row.logits))
    if need > 0:
        cut = narrowed(row, scale, cut, np.int64(need), share, room)
    if share < 1:
        cut = narrowed(row, scale, cut, 0, share, room)
    return drawn(row, scale, cut, least, number, room)


def _kernel() -> Kernel:
    def sample(
        state, n_tasks, chunk, logits, bias, counts, tokens, logprob, temperature, top_k, top_p, min_p,
        repetition, frequency, presence, seed, step, exp2, bits_of_weights, own,
    ):  # fmt: skip
        unit, vocab = exp2[len(exp2) - 1], logits.shape[1]
        line = np.full(BLOCK, unit)
        keys, weights, bins = (
            np.full(BLOCK, key_of(unit)),
            np.empty(BLOCK, np.int64),
            np.empty(BINS, np.int64),
        )
        room = Room(line, line.copy(), line.copy(), line.copy(), weights, keys, bins)
        space = cross_entropy.Room(room.z, room.part, np.full(LANES, unit))
        whole = cross_entropy.Options(-1, False, unit, unit - unit, unit, unit - unit, unit - unit)
        kept = Kept(np.full(2 * BLOCK, key_of(unit)), np.empty(2 * BLOCK, np.int64), np.empty(BINS, np.int64))
        copied, no_counts = np.full(MAX_COPIED, unit), np.empty(0, np.int32)
        words = np.zeros((4, 1), np.uint32)
        lowest, highest = np.int64(key_of(like(unit, -np.inf))), np.int64(key_of(like(unit, np.inf)))
        task = claim(state)
        while task < n_tasks:
            for r in range(task * chunk, min((task + 1) * chunk, len(tokens))):
                penalties = of_row(repetition, r), of_row(frequency, r), of_row(presence, r)
                t, k, p, least = of_row(temperature, r), of_row(top_k, r), of_row(top_p, r), of_row(min_p, r)
                factors = like(unit, penalties[0]), like(unit, penalties[1]), like(unit, penalties[2])
                added, seen = read_row(bias, (place_of(bias, r),)), read_row(counts, (place_of(counts, r),))
                row = Row(read_row(logits, (r,)), added, seen, *factors)
                copies, count, place = t > 0 and 0 < k <= MAX_COPIED and k < vocab, 0, 0
                if copies:
                    count = copy_largest(row, np.int64(k), lowest, room, kept)
                    top = np.int64(largest(kept.keys, count))
                else:
                    top, place = top_key(row, room)
                token = -1
                if lowest < top < highest and t == 0:
                    token = index_of(row, top, 0, place, room)
                elif lowest < top < highest:
                    factor = like(unit, 1.4426950408889634) / like(unit, t)
                    factor = factor if factor < np.inf else np.finfo(np.float32).max
                    scale = Scale(of_key(top, unit), like(unit, factor), exp2, bits_of_weights)
                    smallest = np.int64(math.ceil(np.float64(least) * np.float64(1 << bits_of_weights)))
                    number = random_number(of_row(seed, r), of_row(step, r), 0 if own else r, words)
                    if copies:
                        for j in range(count):
                            copied[j] = of_key(np.int64(kept.keys[j]), unit)
                        few = Row(copied[:count], copied[:0], no_counts, *factors)
                        token = kept.tokens[chosen(few, 0, p, smallest, scale, number, room)]
                    else:
                        token = chosen(row, k if k < vocab else 0, p, smallest, scale, number, room)
                tokens[r] = token
                if len(logprob):
                    logprob[r] = like(unit, np.nan)
                    if token >= 0:
                        logprob[r] = -loss_of_row(row.logits, token, row.bias, whole, space)[0]
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        c = compute(t)
        number, counter = read("float32", 1), read("uint64", 1)
        options = number, read("int32", 1), number, number, number, number, number, counter, counter
        matrices = read(t, 2), read(c.name, 2), read("int32", 2)
        results = write("int32", 1), write(c.name, 1)
        return types.int64, *matrices, *results, *options, read(c.name, 1), types.int64, types.boolean

    return kernel(signature)(sample)


SAMPLE = _kernel()
