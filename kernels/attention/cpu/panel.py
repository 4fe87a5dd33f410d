"""Product of a block of queries with one tile of keys, panel by panel; O and lse at the end of the block.

A panel is NR = 2 vectors of queries. Its scores take block_n * NR elements, 16 KiB (32 for pairs of bfloat16), so
that they go from the first product through the softmax to the second without leaving the L1 cache:

              NR queries                 K and V tiles and all panels of Q^T and O^T stay in the L2 cache;
             +----------+                a panel's Q^T (head_dim * NR) is in L1 while K runs past it
    block_n  |  S^T, P^T |
    keys     |  (L1)    |                causal: each panel takes only the keys that it sees, so the triangle
             +----------+                computed needlessly is NR wide
"""

from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.dropout import drop
from gpu_ops.kernels.attention.cpu.operands import element, is_pairs, k_unroll, operand, turned, weights
from gpu_ops.kernels.attention.cpu.special import finite_or_zero, noted, with_special
from gpu_ops.kernels.attention.cpu.tile import (
    block_visibility,
    finish_scores,
    is_plain,
    lse_of,
    make_terms,
    mask_block,
    mask_scores,
    place_lanes,
    place_terms,
    score_scale,
)
from gpu_ops.kernels.common.cpu.codegen.arena import arena_array
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.gemm import (
    copy_transposed_scaled,
    copy_vector,
    gemm_columns_scaled,
    gemm_rows,
    gemm_rows_largest,
    in_tiles,
    takes_tiles,
)
from gpu_ops.kernels.common.cpu.codegen.memory import lanes, larger, round_up, smaller
from gpu_ops.kernels.common.cpu.codegen.softmax import largest_scores, softmax_step
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, MR
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE
from gpu_ops.kernels.common.cpu.dtype import like, store, write_row
from gpu_ops.kernels.common.cpu.jit import device_function, generic, noinline_function
from gpu_ops.kernels.common.cpu.packing import steps


class Work(NamedTuple):
    """Scratch of one thread, in the layout of operands.py. m = block_m lanes, n = block_n keys."""

    qt: Any  # (panels * head_dim steps, NR)
    kt: Any  # (n, head_dim steps)
    vt: Any  # (n steps, head_dim_v)
    vd: Any  # V^T for tiles, or vt
    s: Any  # (n, NR) S^T of one panel
    p: Any  # P^T, the same memory
    ot: Any  # (panels * head_dim_v, NR)
    q_rows: Any  # one vector of rows, before they are transposed into qt
    o_rows: Any  # and after they are transposed out of ot
    row_max: Any  # (m) largest score; times ``factor`` it is in base 2
    row_sum: Any  # (m) sum of the weights
    taken: (
        Any  # (m) sum of the weights as P V takes them: rounded if in pairs of bfloat16, else the same memory
    )
    alpha: Any  # (m) larger row_max, then factor for older sums; at first the factor of Q, at last 1 / taken
    head: Any  # (m) and so on: see place_lanes
    query: Any
    low: Any
    high: Any
    special: Any  # (panels * head_dim_v, NR) elements of V that are not finite; valid if special_seen
    special_seen: Any  # (1)
    terms: Any  # see Terms
    seen: Any  # (panels, 4) first and last key that any lane sees; first and last that every lane does


@device_function
def make_work(memory, call, k, wide):
    unit = operand(k, wide)
    sample = arena_array(memory, (0, 0), unit)
    nr = 2 * lanes(arena_array(memory, (0, 0), wide))
    keys = round_up(call.block_n, k_unroll(sample))
    panels = (call.block_m + nr - 1) // nr
    depth, padded = steps(sample, call.head_dim), round_up(steps(sample, call.head_dim), lanes(sample))
    depth = padded if in_tiles(sample) else depth
    dim_v = round_up(call.head_dim_v, MAX_LANES)
    m = panels * nr
    vt, s = arena_array(memory, (steps(sample, keys), dim_v), unit), arena_array(memory, (keys, nr), wide)
    row_sum = arena_array(memory, m, wide)
    return Work(
        arena_array(memory, (panels * padded, nr), unit),
        arena_array(memory, (keys, depth), unit),
        vt,
        turned(memory, vt),
        s,
        weights(vt, s),
        arena_array(memory, (panels * dim_v, nr), wide),
        arena_array(memory, (lanes(sample), padded), unit),
        arena_array(memory, (lanes(s), dim_v), wide),
        arena_array(memory, m, wide),
        row_sum,
        arena_array(memory, m, wide) if is_pairs(vt) else row_sum,
        arena_array(memory, m, wide),
        arena_array(memory, m, np.int64(0)),
        arena_array(memory, m, np.int64(0)),
        arena_array(memory, m, np.int32(0)),
        arena_array(memory, m, np.int32(0)),
        arena_array(memory, (panels * dim_v, nr), np.uint8(0)),
        arena_array(memory, 1, np.int64(0)),
        make_terms(memory, 0, m, wide),
        arena_array(memory, (panels, 4), np.int64(0)),
    )


@device_function
def start_block(w, call, x, b, group, block, q_len, k_len):
    """Start a block of queries with empty sums. Returns (lanes used, first and last key that any of them sees)."""
    n, first, last = place_lanes(call, group, block, q_len, k_len, w.head, w.query, w.low, w.high)
    place_terms(w.terms, call, b, x.alibi, x.bias, n, k_len - q_len, w.head, w.query)
    nr = w.s.shape[1]
    for panel in range((n + nr - 1) // nr):
        any_low, any_high, all_low, all_high = k_len, -1, 0, k_len
        for c in range(panel * nr, smaller(n, panel * nr + nr)):
            low, high = np.int64(w.low[c]), np.int64(w.high[c])
            if low <= high:
                any_low, any_high = smaller(any_low, low), larger(any_high, high)
            all_low, all_high = larger(all_low, low), smaller(all_high, high)
        seen = w.seen[panel]
        seen[0], seen[1], seen[2], seen[3] = any_low, any_high, all_low, all_high
    w.row_max[:] = -np.inf
    w.row_sum[:] = 0
    w.taken[:] = 0
    w.ot[:] = 0
    w.special_seen[0] = 0
    return n, first, last


@device_function
def factors(call, p):
    """softmax_scale in two parts: the factor of Q, and the factor of the scores in the softmax.

    Pairs of bfloat16 are not scaled, only negated for a negative scale, so that the largest product is the largest
    score.
    """
    scale = score_scale(call)
    if is_pairs(p):
        size = abs(scale)
        return scale, size if size > 1e-30 else 1e-30  # 0 times the -inf of a mask would be NaN
    return scale, 1.0


@device_function
def add_tile(w, call, x, b, n, first, n_keys, seen, finite):
    """Update O^T, row_max and row_sum of ``n`` lanes with keys first..first + n_keys - 1, packed in w.kt and w.vt.

    ``seen`` 1: the block mask hides them from some lanes. ``finite``: V is.
    """
    nr, panels = w.s.shape[1], w.seen.shape[0]
    depth, dim_v = w.qt.shape[0] // panels, w.ot.shape[0] // panels
    ldk, group = w.kt.shape[1], k_unroll(w.vt)
    scale, here = like(w.s[0, 0], factors(call, w.p)[1]), seen
    for panel in range((n + nr - 1) // nr):
        lane = panel * nr
        if seen == 1:
            here = block_visibility(
                x.visible, call, b, first, smaller(n - lane, nr), w.head[lane:], w.query[lane:]
            )
            if here == 0:
                continue
        plain = is_plain(call) and here == 2
        skip = larger(w.seen[panel, 0] - first, 0) // group * group
        start = first + skip
        count = smaller(first + n_keys, w.seen[panel, 1] + 1) - start
        if count <= 0:
            continue
        rows, width = round_up(count, group), smaller(nr, round_up(n - panel * nr, lanes(w.s)))
        changed, factor = count < rows, scale
        restart(w, lane, width)
        gemm_rows_largest(
            w.s, 0, nr, w.kt, skip * ldk, ldk, w.qt, lane * depth, nr, rows, width, ldk, w.alpha, lane
        )
        if not (plain and all_visible(w, panel, start, count)):
            finish_panel(w, call, x, b, panel, n, start, count, here, width, factor)
            factor = factor if is_plain(call) else like(factor, 1.0)
            changed = True
        for j in range(count, rows):
            w.s[j] = -np.inf
        if not finite:
            if w.special_seen[0] == 0:
                w.special_seen[0] = 1
                w.special[:] = 0
            special = w.special[panel * dim_v : (panel + 1) * dim_v]
            note_special(special, w.vt, skip, w.s, call.head_dim_v, width, count)
        if changed:
            restart(w, lane, width)
            for c in range(0, width, lanes(w.s)):
                largest_scores(w.s, c, nr, rows, w.alpha, lane + c)
        for c in range(0, width, lanes(w.s)):
            softmax_step(w.s, c, nr, rows, w.p, factor, w.row_max, w.row_sum, w.taken, w.alpha, lane + c)
        if call.dropout_p > 0:
            head, query = w.head[lane : lane + nr], w.query[lane : lane + nr]
            drop(w.p, w.terms.words, call, b, start, count, width, head, query, x.seed, False)
        if finite:
            at, dim = panel * dim_v * nr, call.head_dim_v
            add_values(w.ot, at, nr, w.vt, w.vd, skip, w.p, dim, width, count, w.alpha, lane)
        else:
            rescale(w.ot, panel * dim_v, dim_v, width, w.alpha[lane : lane + nr])
            ot = w.ot[panel * dim_v : (panel + 1) * dim_v]
            add_finite(ot, w.vt[steps(w.vt, skip) :], w.p, call.head_dim_v, width, count)


@device_function
def all_visible(w, panel, first, n_keys):
    """Whether every lane of the panel sees the keys."""
    return w.seen[panel, 2] <= first and first + n_keys - 1 <= w.seen[panel, 3]


@device_function
def finish_panel(w, call, x, b, panel, n, first, n_keys, seen, width, factor):
    """Turn the products of ``n_keys`` keys from ``first`` into scores: the options, then the masks."""
    start, s = panel * w.s.shape[1], w.s
    stop = smaller(n, start + w.s.shape[1])
    head, query, end = w.head[start:stop], w.query[start:stop], start + width
    low, high = w.low[start:end], w.high[start:end]
    if not is_plain(call):
        finish_scores(s, call, first, n_keys, start, stop - start, width, factor, w.terms, False, x.bias)
    if first < w.seen[panel, 2]:
        mask_scores(s, first, smaller(n_keys, w.seen[panel, 2] - first), width, low, high)
    if first + n_keys - 1 > w.seen[panel, 3]:
        clear = larger(w.seen[panel, 3] + 1 - first, 0)  # rows that all lanes see
        mask_scores(s[clear:], first + clear, n_keys - clear, width, low, high)
    if seen == 1:
        mask_block(s, x.visible, call, b, first, n_keys, stop - start, head, query)


@device_function
def restart(w, lane, width):
    """Start the largest scores from those of the previous tiles."""
    for c in range(0, width, lanes(w.s)):
        copy_vector(w.alpha, lane + c, 0, w.row_max, lane + c, 0)


@noinline_function
def note_special(special, vt, skip, s, dim, width, n):
    """Note non-finite elements of rows skip..skip + n - 1 of V for the lanes whose scores are not -inf."""
    for j in range(n):
        for d in range(dim):
            x = element(vt, skip + j, d)
            if x - x != 0:
                for c in range(width):
                    if s[j, c] != -np.inf:
                        special[d, c] = noted(special[d, c], x)


@device_function
def add_finite(ot, vt, p, dim, width, n):
    """O^T += V^T P^T without elements of V that are not finite."""
    for j in range(n):
        for d in range(dim):
            x = finite_or_zero(element(vt, j, d))
            for c in range(width):
                ot[d, c] += x * element(p, j, c)


@device_function
def finish_block(w, call, x, b, n, split, q_start):
    """Write O and lse of the block's lanes, or of its part of the keys."""
    factor = factors(call, w.p)[1] if is_plain(call) else 1.0
    ob = 0 if call.packed else b
    for c in range(n):
        h, i = w.head[c], w.query[c]
        m, total = np.float64(w.row_max[c] * like(w.row_max[c], factor)), np.float64(w.row_sum[c])
        share = 1.0  # of the keys, without the sink
        if call.has_sinks and call.n_splits == 1 and x.sinks[h] != -np.inf:
            sink = x.sinks[h] * LOG2E
            new = sink if sink > m else m
            seen = total * 2.0 ** (m - new)
            total = seen + 2.0 ** (sink - new)
            share, m = seen / total, new
        w.alpha[c] = 0.0 if w.taken[c] == 0 else share / (w.taken[c] * (1.0 - call.dropout_p))
        if call.n_splits > 1:
            sums = x.part_sums[split, (b * call.nheads + h) * call.max_seqlen_q + i]
            sums[0], sums[1] = m, total
        else:
            x.lse[ob, h, q_start + i] = lse_of(m, total)
    nr, width = w.s.shape[1], lanes(w.s)
    dim_v = w.ot.shape[0] // w.seen.shape[0]
    for start in range(0, n, width):
        at = start // nr * dim_v * nr + start % nr
        for d in range(0, dim_v, width):
            copy_transposed_scaled(w.o_rows, d, dim_v, w.ot, at + d * nr, nr, w.alpha, start)
        for c in range(smaller(width, n - start)):
            h, i = w.head[start + c], w.query[start + c]
            if w.special_seen[0] != 0:
                column = w.special[start // nr * dim_v : (start // nr + 1) * dim_v, start % nr + c]
                for d in range(call.head_dim_v):
                    w.o_rows[c, d] = with_special(w.o_rows[c, d], column[d])
            if call.n_splits > 1:
                at_part = (b * call.nheads + h) * call.max_seqlen_q + i
                put_output(write_row(x.part_out, (split, at_part)), w.o_rows[c])
            else:
                put_output(write_row(x.out, (ob, q_start + i, h)), w.o_rows[c])


@noinline_function
def put_output(to, row):
    for d in range(len(to)):
        store(to, d, row[d])


@generic
def add_values(ot, at, nr, vt, vd, skip, p, dim, width, count, alpha, lane):
    """Add V^T P^T of keys skip..skip + count - 1, all finite, for ``width`` lanes at ``ot[at]`` and ``p``."""

    def tiles(ot, at, nr, vt, vd, skip, p, dim, width, count, alpha, lane):
        ld, rows, depth = vd.shape[1], round_up(dim, TILE), round_up(steps(vt, count), TILE)
        rescale(ot, at // nr, dim, width, alpha[lane : lane + width])
        gemm_rows(ot, at, nr, vd, steps(vt, skip), ld, p, 0, nr, rows, width, depth, True)

    def vectors(ot, at, nr, vt, vd, skip, p, dim, width, count, alpha, lane):
        ld, rows, depth = vt.shape[1], round_up(dim, MR), steps(vt, count)
        gemm_columns_scaled(
            ot, at, nr, vt, steps(vt, skip) * ld, ld, p, 0, nr, rows, width, depth, alpha, lane
        )

    return tiles if takes_tiles(vt) else vectors


@noinline_function
def rescale(ot, first, n, width, alpha):
    changed = False
    for c in range(width):
        changed |= alpha[c] != 1
    if not changed:
        return
    for d in range(first, first + n):
        row = ot[d]
        for c in range(width):
            row[c] *= alpha[c]
