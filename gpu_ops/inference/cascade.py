"""Cascade attention: pages at the start of many sequences of a step are read once, for the queries of all of them.

Neighbours in a step that share their first pages form a group. For the shared pages the group is one sequence of many
queries; for the other pages each sequence is separate. The two results are merged by lse. Source: Juravsky et al.,
"Hydragen", 2024; Ye et al., "Cascade Inference" (FlashInfer), 2024.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.inference.step import Cascade, Step, sent

__all__ = ["MAX_QUERIES", "MIN_SEQUENCES", "MIN_TOKENS", "cascade_of"]

# Time of both parts and the merge over that of one call, decoding in float32 on two cores. With 32 queries of each
# sequence the ratios are 0.60 and 0.94, since products dominate.
#
#     sequences  shared tokens  8/8 heads of 64  32/8 heads of 128
#            16           2048             0.36               0.42
#            16            512             0.52               0.42
#            16            256             0.82               0.82
#             8            512             0.71               0.34
#             8            256             0.86               1.04
#             5           2048             0.62               0.96
MIN_SEQUENCES = 8
MIN_TOKENS = 512
MAX_QUERIES = 32


def cascade_of(step: Step, page_size: int, device: str) -> Cascade | None:
    """Groups of a step in host memory, without padding; None if no group is worth a cascade."""
    table, starts = step.block_table, step.cu_seqlens_q
    batch, width = table.shape
    if batch < MIN_SEQUENCES or width * page_size < MIN_TOKENS or step.max_seqlen_q > MAX_QUERIES:
        return None
    at = -(-MIN_TOKENS // page_size) - 1  # the last page that a group must share
    if np.count_nonzero((table[1:, at] == table[:-1, at]) & (table[1:, at] >= 0)) < MIN_SEQUENCES - 1:
        return None
    equal = (table[1:] == table[:-1]) & (table[1:] >= 0)
    # pages that a row shares with the previous one
    common = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
    first = np.flatnonzero(np.r_[True, common * page_size < MIN_TOKENS])  # rows that begin a group
    ends = np.r_[first[1:], batch]
    # Pages written in this step belong to one sequence each: shared pages end before every new token.
    shared = np.array(
        [common[a : b - 1].min() if b - a >= MIN_SEQUENCES else 0 for a, b in zip(first, ends, strict=True)]
    )
    if not shared.any():
        return None
    by_row = np.repeat(shared, ends - first)
    own_table = np.full((batch, width - int(by_row.min())), -1, np.int32)
    for row, pages, n in zip(own_table, table, by_row, strict=True):
        row[: width - n] = pages[n:]
    cu_seqlens_q = np.append(starts[first], starts[-1])
    arrays = {
        "cu_seqlens_q": cu_seqlens_q,
        "seqused_k": (shared * page_size).astype(np.int32),
        "block_table": table[first, : shared.max()],
        "own_seqused_k": (step.seqused_k - by_row * page_size).astype(np.int32),
        "own_block_table": own_table,
    }
    return Cascade(**sent(arrays, device), max_seqlen_q=int(np.diff(cu_seqlens_q).max()))
