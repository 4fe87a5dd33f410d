"""A panel of queries against one tile of keys where tile registers multiply: by chunks of keys.

           NR queries
          +----------+
          | weights  |    The scores of a chunk take 4 KiB and are weighed while they are in the L1 cache. The weights
          |----------|    take half of their room, from the first chunk's on; all chunks together are one step of
    chunk |  scores  |    O^T += V^T P^T, which tile registers do as a whole.
          +----------+

row_max moves late: while no score is more than 2^LATE times as heavy, weights are as exact with the old one, and the
largest score is found on the way, without a pass of its own. Where it has to move, at the first keys that are seen
and seldom after, all scores of the panel come first. Then it moves once, and scales what has been summed before: O^T,
row_sum and the weights of older chunks.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.numba_cpu.attention_scores import all_visible, finish_panel
from gpu_ops.kernels.numba_cpu.attention_tile import is_plain
from gpu_ops.kernels.numba_cpu.attention_values import add_values, rescale
from gpu_ops.kernels.numba_cpu.dtype import bfloat16_of_float32, float32_of_bfloat16, like
from gpu_ops.kernels.numba_cpu.ir.gemm import copy_vector, takes_tiles
from gpu_ops.kernels.numba_cpu.ir.scalar import smaller
from gpu_ops.kernels.numba_cpu.ir.softmax import largest_scores, late_weights, move_up, rises
from gpu_ops.kernels.numba_cpu.ir.target import round_up
from gpu_ops.kernels.numba_cpu.ir.tiles import TILE, micro_2_1, micro_2_2
from gpu_ops.kernels.numba_cpu.jit import alone, overload, uncounted
from gpu_ops.kernels.numba_cpu.panels import steps

CHUNK = 2 * TILE


def add_late(w, call, b, panel, n, start, skip, count, seen, width, plain, scale, bias, visible):
    """O^T, row_max and row_sum of a panel; ``count`` keys from ``start`` on, ``skip`` into the tile. V is finite.

    Returns whether it has done so, which is where tile registers multiply.
    """
    raise TypeError("compiled code only")


@overload(add_late)
def _add_late(w, call, b, panel, n, start, skip, count, seen, width, plain, scale, bias, visible):
    def add(w, call, b, panel, n, start, skip, count, seen, width, plain, scale, bias, visible):
        nr, ldk, panels = w.s.shape[1], w.kt.shape[1], w.seen.shape[0]
        lane, dim_v = panel * nr, w.ot.shape[0] // panels
        at_q, factor = lane * (w.qt.shape[0] // panels), like(scale, scale if is_plain(call) else 1.0)
        rows, r, scored, late = round_up(count, CHUNK), 0, 0, is_plain(call)
        while r < rows:
            end = r + CHUNK if late else rows
            begin = scored
            while scored < end:
                at, at_k = scored * nr, (skip + scored) * ldk
                if width > TILE:
                    micro_2_2(w.s, at, nr, w.kt, at_k, ldk, w.qt, at_q, nr, ldk, False, ())
                else:
                    micro_2_1(w.s, at, nr, w.kt, at_k, ldk, w.qt, at_q, nr, ldk, False, ())
                scored += CHUNK
            first, used = start + begin, smaller(end, count) - begin
            if used > 0 and not (plain and all_visible(w, panel, first, used)):
                s = w.s[begin:]
                finish_panel(w, s, call, b, panel, n, first, used, seen, width, scale, bias, visible)
            for j in range(begin + used, end):
                w.s[j] = -np.inf
            if late and not _weigh_as_it_is(w, r, lane, width, factor):
                late = False
                continue
            if not late:
                _look(w, r, end - r, lane, width, factor)
                _move(w, panel, r, width, factor)
                _weigh(w, r, end - r, lane, width, factor)
            for c in range(width):
                w.row_sum[lane + c] += w.total[c]
            r = end
        at, dim = panel * dim_v * nr, call.head_dim_v
        add_values(w.ot, at, nr, w.vt, w.vd, skip, w.p, dim, width, count, w.alpha, lane)
        return True

    def elsewhere(w, call, b, panel, n, start, skip, count, seen, width, plain, scale, bias, visible):
        return False

    return add if takes_tiles(w.type_of("kt")) else elsewhere


@uncounted
def _weigh_as_it_is(w, r, lane, width, factor):
    """Weights of a chunk with the old row_max; whether they are of use. The first chunk's take the place of its
    scores."""
    if r == 0 and _look(w, r, CHUNK, lane, width, factor):
        return False
    return not _weigh(w, r, CHUNK, lane, width, factor)


@uncounted
def _look(w, r, rows, lane, width, factor):
    """The largest of the scores from row r on, and of row_max; whether that has to move."""
    found, nr = False, w.s.shape[1]
    for c in range(0, width, TILE):
        copy_vector(w.alpha, lane + c, 0, w.row_max, lane + c, 0)
        largest_scores(w.s, r * nr + c, nr, rows, w.alpha, lane + c)
        found |= rises(w.row_max, w.alpha, lane + c, factor)
    return found


@uncounted
def _weigh(w, r, rows, lane, width, factor):
    """The same, and the weights and their sum: of use if row_max need not move."""
    found, nr = False, w.s.shape[1]
    for c in range(0, width, TILE):
        to = steps(w.vt, r) * nr + c
        late_weights(w.s, r * nr + c, nr, rows, w.p, to, factor, w.row_max, w.alpha, lane + c, w.total, c)
        found |= rises(w.row_max, w.alpha, lane + c, factor)
    return found


@alone
def _move(w, panel, r, width, factor):
    """row_max to what has been found; and with it what there is of O^T, row_sum and weights."""
    nr, dim_v = w.s.shape[1], w.ot.shape[0] // w.seen.shape[0]
    lane = panel * nr
    for c in range(0, width, TILE):
        move_up(w.row_max, w.alpha, lane + c, factor, w.row_sum)
    rescale(w.ot, panel * dim_v, dim_v, width, w.alpha[lane : lane + nr])
    _rescale_weights(w.p, steps(w.vt, r), width, w.alpha[lane : lane + nr])


@alone
def _rescale_weights(p, n, width, factor):
    for j in range(n):
        for c in range(width):
            low = float32_of_bfloat16(p[j, c] & np.uint32(0xFFFF)) * factor[c]
            high = float32_of_bfloat16(p[j, c] >> np.uint32(16)) * factor[c]
            word = np.uint32(bfloat16_of_float32(high)) << np.uint32(16)
            p[j, c] = word | np.uint32(bfloat16_of_float32(low))
