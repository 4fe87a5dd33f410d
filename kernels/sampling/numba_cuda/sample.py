"""Sampling for Numba: the readable twin of sample.cu.

A block takes one row. Weights of tokens are integers, so that sums have no order; reference/sampling/sample.py
defines them, and the random number. top_k and top_p keep the first tokens by descending logit; the cutoff is found
digit by digit of the logits' order-preserving bits: bins hold the number of tokens, or the weight, of each digit.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import cuda, float64, int32, int64, uint32, uint64
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.philox import SAMPLE_DOMAIN, philox4x32
from gpu_ops.kernels.common.numba_cuda.reduce import WARPS, over_block, plus
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["kernel"]

DIGIT = 11  # bits
BINS = 1 << DIGIT
LOG2E = math.log2(math.e)
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
BEFORE, WEIGHT, FOUND = range(3)  # result of a search: the sum before a place, its weight, its index
INFINITY, NOT_A_NUMBER, LARGEST = math.inf, math.nan, float(np.finfo(np.float32).max)

block_sum = over_block(plus)
block_max = over_block(cuda.jit(device=True)(lambda a, b: a if a > b else b))


@cache
def _search(weigh):
    """Device function for the first of n places up to which weigh(i, state) sums to more than a target.

    Each warp has a run of places.
    """

    @cuda.jit(device=True)
    def total(n, state, sums):
        """Sum of all weights, for all threads. `find` needs the ``sums`` that it leaves behind."""
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        run = (n + WARPS * 32 - 1) // (WARPS * 32) * 32
        sum_ = int64(0)
        for i in range(warp * run + lane, min((warp + 1) * run, n), 32):
            sum_ += weigh(i, state)
        for shift in (16, 8, 4, 2, 1):
            sum_ += cuda.shfl_xor_sync(0xFFFFFFFF, sum_, shift)
        cuda.syncthreads()  # all have read the sums of the search before
        if lane == 0:
            sums[warp] = sum_
        cuda.syncthreads()
        whole = int64(0)
        for w in range(WARPS):
            whole += sums[w]
        return whole

    @cuda.jit(device=True)
    def find(target, n, state, sums, result):
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        run = (n + WARPS * 32 - 1) // (WARPS * 32) * 32
        before = int64(0)
        for w in range(warp):
            before += sums[w]
        if before <= target and target < before + sums[warp]:
            i, searching = warp * run + lane, True
            while searching:
                mine = weigh(i, state) if i < n else int64(0)
                up_to = mine
                for offset in (1, 2, 4, 8, 16):
                    other = cuda.shfl_up_sync(0xFFFFFFFF, up_to, offset)
                    if lane >= offset:
                        up_to += other
                up_to += before
                if up_to > target and up_to - mine <= target:
                    result[BEFORE], result[WEIGHT], result[FOUND] = up_to - mine, mine, i
                before = cuda.shfl_sync(0xFFFFFFFF, up_to, 31)
                searching = before <= target
                i += 32
        cuda.syncthreads()
        return result[FOUND]

    return total, find


@cache
def _keys(dtype: str):
    """Device functions from numbers to int64 keys in their order, NaN above infinity, and back."""
    if dtype == "float64":

        @cuda.jit(device=True)
        def key_of_float64(z):
            word = libdevice.double_as_longlong(z)
            if z != z:
                return int64(0x7FFFFFFFFFFFFFFF)
            return word ^ ((word >> int64(63)) & int64(0x7FFFFFFFFFFFFFFF))

        @cuda.jit(device=True)
        def of_key_float64(key):
            return libdevice.longlong_as_double(key ^ ((key >> int64(63)) & int64(0x7FFFFFFFFFFFFFFF)))

        return key_of_float64, of_key_float64

    @cuda.jit(device=True)
    def key_of(z):
        word = int64(libdevice.float_as_int(z))
        if z != z:
            return int64(0x7FFFFFFF)
        return word ^ ((word >> int64(63)) & int64(0x7FFFFFFF))

    @cuda.jit(device=True)
    def of_key(key):
        return libdevice.int_as_float(int32(key ^ ((key >> int64(63)) & int64(0x7FFFFFFF))))

    return key_of, of_key


@cuda.jit(device=True)
def are_allowed(options, top_k):
    finite = options[TEMPERATURE] < INFINITY and options[REPETITION] < INFINITY
    finite = finite and abs(options[FREQUENCY]) < INFINITY and abs(options[PRESENCE]) < INFINITY
    shares = options[TOP_P] >= 0 and options[TOP_P] <= 1 and options[MIN_P] >= 0 and options[MIN_P] <= 1
    return finite and shares and options[TEMPERATURE] >= 0 and top_k >= 0 and options[REPETITION] > 0


@cuda.jit(device=True)
def keeps(cut_key, cut_last, key, c):
    """Whether top_k and top_p keep the token in column c."""
    return key > cut_key or (key == cut_key and c <= cut_last)


@cuda.jit(device=True)
def of_bin(i, bins):
    return bins[BINS - 1 - i]


total_of_bins, find_bin = _search(of_bin)


@cache
def _of_token(dtype: str, exp2: tuple[float, ...]):
    """Device functions for a token in a row, whose logits, bias, counts and penalties are one tuple."""
    load, _, number, *_ = functions(dtype)
    letter, size = ("d", np.float64) if dtype == "float64" else ("f", np.float32)
    mul, add, div = (getattr(libdevice, f"{letter}{name}_rn") for name in ("mul", "add", "div"))
    powers, order = np.array(exp2, size), len(exp2)

    if dtype == "float64":
        near = cuda.jit(device=True)(lambda x: libdevice.rint(x))
        power_of_two = cuda.jit(device=True)(
            lambda n: libdevice.longlong_as_double(int64(n + int32(1023)) << int64(52))
        )
    else:
        near = cuda.jit(device=True)(lambda x: libdevice.rintf(x))
        power_of_two = cuda.jit(device=True)(lambda n: libdevice.int_as_float(int32((n + 127) << 23)))

    @cuda.jit(device=True)
    def logit(c, row):
        """Logit with penalties and bias, each operation rounded."""
        logits, bias, counts, repetition, frequency, presence = row
        z = number(load(logits[c]))
        if len(counts):
            seen = counts[c]
            if seen != 0:
                z = mul(z, repetition) if z < number(0.0) else div(z, repetition)
            if seen > 0:  # not only in the prompt
                z = add(add(z, -mul(frequency, number(seen))), -presence)
        if len(bias):
            z = add(z, bias[c])
        return add(z, number(0.0))  # -0 becomes 0

    @cuda.jit(device=True)
    def weight_of(z, top, factor, bits):
        x = mul(add(z, -top), factor)
        x = x if x > number(-64.0) else number(-64.0)
        whole = near(x)
        part, p = add(x, -whole), number(0.0)
        for i in range(order):
            p = add(mul(p, part), powers[i])
        return int64(mul(p, power_of_two(int32(whole) + bits)))

    return logit, weight_of, div


@cache
def _row(dtype: str, exp2: tuple[float, ...]):
    """Device function that draws the token of a row."""
    number = functions(dtype)[2]
    logit, weight_of, div = _of_token(dtype, exp2)
    key_of, of_key = _keys(dtype)
    infinity = (np.float64 if dtype == "float64" else np.float32)(math.inf)
    first_shift = (64 if dtype == "float64" else 32) - DIGIT

    @cuda.jit(device=True)
    def tied(c, state):
        row, key = state
        return int64(1) if key_of(logit(c, row)) == key else int64(0)

    @cuda.jit(device=True)
    def kept(c, state):
        row, cut_key, cut_last, least, top, factor, bits = state
        z = logit(c, row)
        w = weight_of(z, top, factor, bits)
        return w if w >= least and keeps(cut_key, cut_last, key_of(z), c) else int64(0)

    total_of_tied, find_tied = _search(tied)
    total_of_kept, find_kept = _search(kept)

    @cuda.jit(device=True)
    def narrowed(row, cut_key, cut_last, need, share, top, factor, bits, bins, sums, result):
        """Cut that keeps the first `need` tokens; 0: those whose weight is this share of the kept weight."""
        cols, by_weight = len(row[0]), need == 0
        shift, above, prefix, before, searching = first_shift, first_shift + DIGIT, int64(0), int64(0), True
        while searching:
            cuda.syncthreads()  # all have read the bins of the digit before
            for b in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
                bins[b] = 0
            cuda.syncthreads()
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                z = logit(c, row)
                key = key_of(z)
                is_near = shift == first_shift or key >> above == prefix
                if is_near and keeps(cut_key, cut_last, key, c):
                    digit = (key >> shift) + BINS // 2
                    if shift < first_shift:
                        digit = (key >> shift) & ((int64(1) << (above - shift)) - 1)
                    cuda.atomic.add(bins, digit, weight_of(z, top, factor, bits) if by_weight else int64(1))
            cuda.syncthreads()
            whole = total_of_bins(BINS, bins, sums)
            if need == 0:
                need = max(int64(math.ceil(float64(share) * float64(whole))), int64(1))
            digit = BINS - 1 - find_bin(need - 1 - before, BINS, bins, sums, result)
            before += result[BEFORE]
            prefix = digit - BINS // 2 if shift == first_shift else prefix << (above - shift) | digit
            searching = shift > 0
            above, shift = shift, max(shift - DIGIT, 0)
        each, tie = int64(1), result[WEIGHT]
        if by_weight:
            each = weight_of(of_key(prefix), top, factor, bits)
        ties = (need - before + each - 1) // each
        last = cut_last if prefix == cut_key else int64(cols)
        if ties * each < tie:
            total_of_tied(cols, (row, prefix), sums)
            last = find_tied(ties - 1, cols, (row, prefix), sums, result)
        return prefix, last

    @cuda.jit(device=True)
    def token_of(row, options, top_k, bits, random, bins, sums, result):
        cols = len(row[0])
        top_key = key_of(-infinity)
        for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
            top_key = max(top_key, key_of(logit(c, row)))
        top_key = block_max(top_key, sums)
        if not are_allowed(options, top_k) or top_key <= key_of(-infinity) or top_key >= key_of(infinity):
            return int64(-1)
        if options[TEMPERATURE] == 0:
            total_of_tied(cols, (row, top_key), sums)
            return find_tied(int64(0), cols, (row, top_key), sums, result)
        top = of_key(top_key)
        factor = div(number(LOG2E), number(options[TEMPERATURE]))
        factor = min(factor, number(LARGEST))
        cut_key, cut_last = key_of(-infinity), int64(cols)
        share = options[TOP_P]
        if top_k > 0 and top_k < cols:
            cut_key, cut_last = narrowed(
                row, cut_key, cut_last, int64(top_k), share, top, factor, bits, bins, sums, result
            )
        if share < 1:
            cut_key, cut_last = narrowed(
                row, cut_key, cut_last, int64(0), share, top, factor, bits, bins, sums, result
            )
        least = int64(math.ceil(float64(options[MIN_P]) * float64(int64(1) << bits)))
        state = row, cut_key, cut_last, least, top, factor, bits
        target = int64(libdevice.umul64hi(random, uint64(total_of_kept(cols, state, sums))))
        return find_kept(target, cols, state, sums, result)

    return token_of


@cache
def kernel(dtype: str, exp2: tuple[float, ...]) -> NumbaKernel:
    load, _, number, element, statistics = functions(dtype)
    token_of = _row(dtype, exp2)
    lowest = float(np.finfo(np.float64 if dtype == "float64" else np.float32).min)

    @cuda.jit(device=True)
    def logprob_of(row, token, scratch):
        """Log-probability of ``token`` under softmax(logits)."""
        top, total = number(lowest), number(0.0)
        for c in range(cuda.threadIdx.x, len(row), cuda.blockDim.x):
            x = number(load(row[c]))
            if x > top:
                total, top = total * math.exp(top - x), x
            total += math.exp(x - top)
        row_max = block_max(top, scratch)
        total = block_sum(total * math.exp(top - row_max), scratch)
        if token < 0:
            return number(NOT_A_NUMBER)
        return (number(load(row[token])) - row_max) - math.log(total)

    def sample(
        logits, bias, counts, tokens, logprob, temperature, top_k, top_p, min_p, repetition, frequency, presence,
        seed, step, temperature_value, top_k_value, top_p_value, min_p_value, repetition_value, frequency_value,
        presence_value, seed_value, step_value, bits,
    ):  # fmt: skip
        bins, sums = cuda.shared.array(BINS, int64), cuda.shared.array(WARPS, int64)
        result, scratch = cuda.shared.array(3, int64), cuda.shared.array(WARPS, number)
        r = cuda.blockIdx.x
        k = top_k[r] if len(top_k) else top_k_value
        key = seed[r] if len(seed) else seed_value
        at = step[r] if len(step) else step_value
        options = (
            temperature[r] if len(temperature) else temperature_value,
            top_p[r] if len(top_p) else top_p_value,
            min_p[r] if len(min_p) else min_p_value,
            repetition[r] if len(repetition) else repetition_value,
            frequency[r] if len(frequency) else frequency_value,
            presence[r] if len(presence) else presence_value,
        )
        # rows with separate seeds draw the same numbers wherever they are
        low, high, _, _ = philox4x32(
            uint32(at), uint32(at >> uint64(32)), uint32(0 if len(seed) else r), uint32(SAMPLE_DOMAIN),
            uint32(key), uint32(key >> uint64(32)),
        )  # fmt: skip
        row = (
            logits[r],
            bias[r if len(bias) > 1 else 0],
            counts[r if len(counts) > 1 else 0],
            number(options[REPETITION]),
            number(options[FREQUENCY]),
            number(options[PRESENCE]),
        )
        random = uint64(low) | uint64(high) << uint64(32)
        token = token_of(row, options, k, bits, random, bins, sums, result)
        if cuda.threadIdx.x == 0:
            tokens[r] = token
        if len(logprob):
            value = logprob_of(logits[r], token, scratch)
            if cuda.threadIdx.x == 0:
                logprob[r] = value

    matrices = f"{element}[:, :], {statistics}[:, :], int32[:, :], int32[::1], {statistics}[::1]"
    reals, real = ", ".join(["float32[::1]"] * 5), ", ".join(["float32"] * 5)
    arrays = f"float32[::1], int32[::1], {reals}, uint64[::1], uint64[::1]"
    values = f"float32, int32, {real}, uint64, uint64"
    return NumbaKernel(sample, f"void({matrices}, {arrays}, {values}, int32)", f"sample_{dtype}")
