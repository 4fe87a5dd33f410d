"""P and dS of a tile of the attention backward pass with every option, in floats; see attention_gradient_tile.py."""

import numpy as np

from gpu_ops.kernels.numba_cpu.attention_gradient_operands import (
    pair_tile,
    pair_tile_keys,
    product_words,
    unscaled,
)
from gpu_ops.kernels.numba_cpu.attention_gradient_tile import (
    clear,
    is_coarse,
    load_keys,
    multiply_scores,
    next_tile,
)
from gpu_ops.kernels.numba_cpu.attention_operands import k_unroll
from gpu_ops.kernels.numba_cpu.attention_scores import weigh_visible
from gpu_ops.kernels.numba_cpu.attention_tile import finish_scores, is_plain, mask_scores, score_scale
from gpu_ops.kernels.numba_cpu.codegen.attention_gradient import PANEL
from gpu_ops.kernels.numba_cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.numba_cpu.codegen.memory import round_up
from gpu_ops.kernels.numba_cpu.dtype import like
from gpu_ops.kernels.numba_cpu.fastmath import exp2
from gpu_ops.kernels.numba_cpu.jit import device_function, noinline_function


@device_function
def any_scores(w, call, n, first, n_keys, bias):
    """S^T in base 2, masked, into w.s, and dP^T."""
    width, rows = round_up(n, PANEL), round_up(n_keys, k_unroll(w.p))
    words, words_v = product_words(w.q, call.head_dim), product_words(w.q, call.head_dim_v)
    multiply_scores(w, w.s, w.dp, 0, rows, 0, width, words, words_v)
    factor = like(w.lse2[0], unscaled(w.q, score_scale(call)))
    if is_plain(call):
        scale_scores(w.s, n_keys, width, factor)
    else:
        finish_scores(w.s, call, first, n_keys, 0, n, width, factor, w.terms, True, bias)
    mask_scores(w.s, first, n_keys, width, w.low, w.top)


@device_function
def scale_scores(s, n, width, factor):
    if factor != 1:
        for j in range(n):
            for c in range(width):
                s[j, c] *= factor


@device_function
def split_lse(w, call, b, head_kv, n, first, last, k, v, sequences, sinks, bias, visible):
    """Of rows with a coarse lse: w.lse2 the largest score, and w.rest the log2 of the sum of the weights beside it.

    float32 of -1e9 + log 100 is -1e9: keys that all have such a bias would weigh 1 each.
    """
    for c in range(n):
        if is_coarse(w.lse2[c]):
            has_sink = call.has_sinks and sinks[w.head[c]] != -np.inf
            w.lse2[c] = sinks[w.head[c]] * LOG2E if has_sink else -np.inf
            w.rest[c] = 1 if has_sink else 0  # the sum, for now
        else:
            w.rest[c] = -1
    while first <= last:
        n_keys, seen = next_tile(w, call, b, n, first, last, visible)
        if seen:
            load_keys(w, call, b, head_kv, first, n_keys, k, v, sequences)
            any_scores(w, call, n, first, n_keys, bias)
            for c in range(n):
                if w.rest[c] >= 0:
                    sum_weights(w, c, n_keys)
        first += n_keys
    for c in range(n):
        w.rest[c] = np.log2(w.rest[c]) if w.rest[c] > 0 else 0


@noinline_function
def sum_weights(w, c, n_keys):
    top, total = w.lse2[c], w.rest[c]
    for j in range(n_keys):
        score = w.s[j, c]
        if score > top:
            total, top = total * exp2(top - score), score
        if score != -np.inf:
            total += exp2(score - top)
    w.lse2[c], w.rest[c] = top, total


@device_function
def any_gradients(w, call, n, first, n_keys, finite, bias):
    """P^T and dS^T with every option, in floats: w.s, w.dp and (before softcap's slope) w.dscore."""
    width, rows = round_up(n, PANEL), round_up(n_keys, k_unroll(w.p))
    any_scores(w, call, n, first, n_keys, bias)
    if not finite:
        weigh_visible(w.s, w.lse2, n_keys, width)
    lse, rest, delta, zero = w.lse2, w.rest, w.delta, like(w.lse2[0], 0.0)
    for j in range(n_keys):
        s, dp = w.s[j], w.dp[j]
        for c in range(width):
            score, weight = s[c], exp2(s[c] - lse[c] - rest[c])
            p = weight if score != -np.inf else zero  # lse may be NaN
            gradient = p * (dp[c] - delta[c])
            s[c], dp[c] = p, gradient if p != 0 else zero  # p = 0 may face a NaN behind a mask
    if call.softcap > 0:
        for j in range(n_keys):
            dp, dscore, slope = w.dp[j], w.dscore[j], w.terms.cap_slope[j]
            for c in range(width):
                dscore[c] = dp[c]
                dp[c] = dp[c] * slope[c]
    clear(w.s, n_keys, rows)
    clear(w.dp, n_keys, rows)


@device_function
def pair_gradients(w, width, n_keys):
    """The operands of the products from P^T and dS^T in floats."""
    rows = round_up(n_keys, k_unroll(w.p))
    pair_tile(w.p, w.s, rows, width)
    pair_tile(w.ds, w.dp, rows, width)
    pair_tile_keys(w.ds_keys, w.dp, rows, width)
    for i in range(len(w.rows)):
        w.rows[i, 0], w.rows[i, 1] = 0, rows
