"""The scores of a panel: what its products become."""

from gpu_ops.kernels.numba_cpu.attention_tile import (
    cap_scores,
    finish_scores,
    is_plain,
    mask_block,
    mask_scores,
)
from gpu_ops.kernels.numba_cpu.ir.scalar import larger, smaller
from gpu_ops.kernels.numba_cpu.jit import uncounted


@uncounted
def all_visible(w, panel, first, n_keys):
    """Whether every lane of the panel sees the keys."""
    return w.seen[panel, 2] <= first and first + n_keys - 1 <= w.seen[panel, 3]


@uncounted
def finish_panel(w, s, call, b, panel, n, first, n_keys, seen, width, factor, offset, alibi, bias, visible):
    """Whatever turns the products ``s`` of ``n_keys`` keys from ``first`` on into scores, and masks."""
    start = panel * w.s.shape[1]
    stop = smaller(n, start + w.s.shape[1])
    head, query = w.head[start:stop], w.query[start:stop]
    low, high = w.low[start : start + width], w.high[start : start + width]
    if not is_plain(call):
        scale_scores(s, n_keys, width, factor)
        if call.softcap > 0:
            cap_scores(s, call.softcap, n_keys, width, s, False)
        finish_scores(s, call, b, first, n_keys, stop - start, width, head, query, offset, alibi, bias)
    if first < w.seen[panel, 2]:
        mask_scores(s, first, smaller(n_keys, w.seen[panel, 2] - first), width, low, high)
    if first + n_keys - 1 > w.seen[panel, 3]:
        clear = larger(w.seen[panel, 3] + 1 - first, 0)  # rows that all lanes see
        mask_scores(s[clear:], first + clear, n_keys - clear, width, low, high)
    if seen == 1:
        mask_block(s, visible, call, b, first, n_keys, stop - start, head, query)


@uncounted
def scale_scores(s, n, width, factor):
    if factor != 1:
        for j in range(n):
            for c in range(width):
                s[j, c] *= factor
