"""An attention call as its kernels see it: :class:`Attention`, which the lowerings for the CPU and for GPUs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.attention.scores import Scores, score_options
from gpu_ops.kernels.common.arguments import codes_of
from gpu_ops.kernels.program import Spec, Tensor

__all__ = ["UNLIMITED", "UNLIMITED_INT64", "Attention", "as_bshd", "sequence_table"]

# Side of a window that hides nothing: longer than any sequence. On GPUs, sums with lengths stay in int32; CPU kernels
# count in int64, and may have sequences that are longer than 2^30.
UNLIMITED = 1 << 30
UNLIMITED_INT64 = 1 << 40


@dataclass(frozen=True)
class Attention(Scores):
    """One call of an attention function, forward or backward: score options and arrays.

    q, k, v and out are views of shape (batch, seqlen, nheads, head_dim) whatever the layout of the caller. With
    packed sequences ("thd") the batch axis has length 1. lse is (batch, nheads, seqlen_q).
    """

    q: Tensor
    k: Tensor
    """Keys; with ``block_table`` in pages, (num_pages, page_size, nheads_kv, head_dim). Likewise ``v``."""
    v: Tensor
    out: Tensor
    lse: Tensor | None
    batch: int
    seqlen_q: int
    """Length of the longest sequence, or a bound; likewise ``seqlen_k``."""
    seqlen_k: int
    cu_seqlens: tuple[Tensor, ...]
    """Starts of q's and k's packed sequences; of q's only, if keys are in pages."""
    seqused_k: Tensor | None
    """Number of keys in use, of a cache or of packed keys."""
    block_table: Tensor | None
    k_scale: Tensor | None
    """Scales of pages in one byte per element, (num_pages, page_size, nheads_kv); likewise ``v_scale``."""
    v_scale: Tensor | None
    num_splits: int
    """Parts of the keys; 0: chosen."""

    @classmethod
    def of(cls, spec: Spec) -> Attention:
        options = dict(spec.options)
        layout = options["layout"]
        k, v = ("k", "v") if spec.get("k_cache") is None else ("k_cache", "v_cache")
        # same shape: a backward pass with delta does not read out
        out = "dout" if spec.get("out") is None else "out"
        q_, k_, v_, out_ = (as_bshd(spec.tensor(name), layout) for name in ("q", k, v, out))
        lse = spec.get("lse")
        cu_seqlens = [x for name in ("cu_seqlens_q", "cu_seqlens_k") if (x := spec.get(name)) is not None]
        return cls(
            q=q_,
            k=codes_of(k_),
            v=codes_of(v_),
            out=out_,
            lse=lse[None] if lse is not None and lse.ndim == 2 else lse,
            batch=len(cu_seqlens[0]) - 1 if cu_seqlens else q_.shape[0],
            seqlen_q=options["max_seqlen_q"],
            seqlen_k=options["max_seqlen_k"],
            cu_seqlens=tuple(cu_seqlens),
            seqused_k=spec.get("seqused_k"),
            block_table=spec.get("block_table"),
            k_scale=spec.get("k_scale"),
            v_scale=spec.get("v_scale"),
            num_splits=options.get("num_splits", 0),
            **score_options(spec),
        )

    @property
    def nheads(self) -> int:
        return self.q.shape[2]

    @property
    def nheads_kv(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3]

    @property
    def codes(self) -> str:
        """Dtype of quantized pages, or an empty string."""
        return "" if self.k_scale is None else self.k.dtype.name

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        if self.lse is not None:
            return self.lse.dtype
        return np.dtype(np.float64 if self.q.dtype == np.float64 else np.float32)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.nheads, self.q.shape[1]

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed end to end."""
        return bool(self.cu_seqlens)

    @property
    def known_lengths(self) -> bool:
        """Whether the shapes alone determine the length of each sequence."""
        return not self.cu_seqlens and self.seqused_k is None

    def window(self, unlimited: int = UNLIMITED) -> tuple[int, int]:
        """Keys visible to the left and to the right of the bottom-right diagonal; ``unlimited``: all.

        Where the lengths are known, ``ahead`` is included, so that a side may be negative. A side is unlimited where
        it hides nothing, and at most as long as needed to hide everything.
        """
        left, right = (unlimited if side < 0 else min(side, unlimited) for side in self.window_size)
        if self.causal:
            right = min(right, 0)
        if not self.known_lengths:
            if self.seqlen_q == 1 and right >= 0:
                right = unlimited  # the only query sits on the last key
            return left, right
        if left < unlimited:
            left = max(left - self.ahead, -self.seqlen_q)
            left = unlimited if left >= self.seqlen_k - 1 else left  # the last query's is the first key
        if right < unlimited:
            right = max(right + self.ahead, -self.seqlen_k)
            right = unlimited if right >= self.seqlen_q - 1 else right
        return left, right

    def raw_positions_unsupported(self) -> str | None:
        """Reason why the CUDA C++ kernels cannot take these lengths and positions; None when they can."""
        seqlen = max(self.seqlen_q, self.seqlen_k)
        if seqlen >= UNLIMITED:
            return f"sequences of {seqlen}: at most {UNLIMITED - 1} tokens"
        if self.dropped and (self.query0 % 16 or self.key0 % 32):  # rows of accumulators share draws
            starts = f"q_start={self.query0} and k_start={self.key0}"
            return f"dropout from {starts} on: they have to be multiples of 16 and of 32"
        return None

    def cuda_sizes(self) -> dict[str, int]:
        """Sizes and windows, by their names in the structures of the CUDA C++ kernels."""
        left, right = self.window()
        return {
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "nheads": self.nheads,
            "group": self.nheads // self.nheads_kv,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "window_left": left,
            "window_right": right,
            "block_q": self.block_q,
            "block_k": self.block_k,
        }


def as_bshd(x: Any, layout: str) -> Any:
    """A view (batch, seqlen, nheads, head_dim) of a tensor or an array; pages have these axes in any layout."""
    if layout == "bshd" or (layout == "thd" and x.ndim == 4):
        return x
    return x[None] if layout == "thd" else x.swapaxes(1, 2)


def sequence_table(a: Attention) -> np.ndarray[Any, Any]:
    """int64 (batch, 4): q start, q length, k start, k length of each sequence, where the shapes determine them."""
    table = np.zeros((a.batch, 4), np.int64)
    table[:, 1], table[:, 3] = a.seqlen_q, a.seqlen_k
    return table
