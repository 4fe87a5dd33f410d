"""The scores of a panel: what its products become."""

import numpy as np

from gpu_ops.kernels.numba_cpu.attention_tile import (
    TINY_LOG2,
    finish_scores,
    is_plain,
    mask_block,
    mask_scores,
)
from gpu_ops.kernels.numba_cpu.codegen.memory import larger, smaller
from gpu_ops.kernels.numba_cpu.dtype import like
from gpu_ops.kernels.numba_cpu.jit import device_function, noinline_function


@device_function
def all_visible(w, panel, first, n_keys):
    """Whether every lane of the panel sees the keys."""
    return w.seen[panel, 2] <= first and first + n_keys - 1 <= w.seen[panel, 3]


@device_function
def finish_panel(w, s, call, b, panel, n, first, n_keys, seen, width, factor, bias, visible):
    """Whatever turns the products ``s`` of ``n_keys`` keys from ``first`` on into scores, and masks."""
    start = panel * w.s.shape[1]
    stop = smaller(n, start + w.s.shape[1])
    head, query, end = w.head[start:stop], w.query[start:stop], start + width
    low, high = w.low[start:end], w.high[start:end]
    if not is_plain(call):
        finish_scores(s, call, first, n_keys, start, stop - start, width, factor, w.terms, False, bias)
    if first < w.seen[panel, 2]:
        mask_scores(s, first, smaller(n_keys, w.seen[panel, 2] - first), width, low, high)
    if first + n_keys - 1 > w.seen[panel, 3]:
        clear = larger(w.seen[panel, 3] + 1 - first, 0)  # rows that all lanes see
        mask_scores(s[clear:], first + clear, n_keys - clear, width, low, high)
    if seen == 1:
        mask_block(s, visible, call, b, first, n_keys, stop - start, head, query)


@noinline_function
def weigh_visible(s, lse, n_keys, width):
    """A visible key never weighs exactly 0, so that its NaN shows; ``s`` and ``lse`` in base 2."""
    for j in range(n_keys):
        row = s[j]
        for c in range(width):
            least = lse[c] + like(lse[0], TINY_LOG2)
            if row[c] < least and row[c] != -np.inf and lse[c] != np.inf:
                row[c] = least
