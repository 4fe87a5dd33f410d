"""An attention call as its kernels see it: :class:`Attention`, the options of its scores (:class:`Scores`,
:class:`Features`), and the structures that CUDA C++ kernels take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import codes_of, float32, seed_argument
from gpu_ops.kernels.program import Dynamic, Spec, Tensor

__all__ = [
    "ATTENTION_SHAPE",
    "BACKWARD_ROWS",
    "BACKWARD_SHAPE",
    "CUDA_SCORES",
    "LOG2E",
    "PLAIN",
    "UNLIMITED",
    "UNLIMITED_INT64",
    "Attention",
    "Features",
    "Scores",
    "as_bshd",
    "q_in_registers",
    "score_options",
    "sequence_table",
    "shared_bytes",
]

# Options of attention's scores, shared by all lowerings: :class:`Scores`.
#
#     s = softmax_scale * q.k,   then softcap * tanh(s / softcap),   + ALiBi + bias,   masks (-inf)
#     weights = softmax(s),   then dropout
#
# A new option is a field here, and in :class:`Features` if kernels are compiled with or without it. The kernels'
# parts are ``scores.cuh``, ``numba_cuda/forward.py``, ``numba_cuda/backward_tile.py`` and ``cpu/tile.py``.

LOG2E = math.log2(math.e)
_STEPS = 1 << 16  # of dropout_p: a weight has 16 random bits
_SMALLEST = 2.0**-126  # scale: a masked score is -inf times the scale, and -inf times 0 is NaN

# AttentionScores of scores.cuh
CUDA_SCORES = np.dtype(
    [
        *[(name, "f4") for name in ("scale_log2", "softcap_in", "softcap_log2")],
        ("negate", "i4"),
        ("ahead", "i4"),
        *[
            ("dropped", "u4"),
            ("keep_scale", "f4"),
            ("keep_scale_log2", "f4"),
            ("query0", "i4"),
            ("key0", "i4"),
        ],
    ],
    align=True,
)


@dataclass(frozen=True)
class Features:
    """Options that a GPU kernel is compiled with. An option that is False costs nothing."""

    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    bias: str = ""
    """Its dtype."""
    block_mask: bool = False
    dropout: str = ""
    """Place of dropout's seed: a "number" among the arguments, or an "array"."""

    @property
    def plain(self) -> bool:
        """Whether scores are softmax_scale * q.k and nothing else, but for masks."""
        return not (self.softcap or self.alibi or self.bias)

    @property
    def words(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name)]

    def macros(self, dtype: str) -> dict[str, str | int]:
        """Macros of the CUDA C++ kernels. ``dtype``: the dtype of q."""
        return {
            "BIAS": "kNone" if not self.bias else "kSame" if self.bias == dtype else "kFloat",
            "SOFTCAP": int(self.softcap),
            "ALIBI": int(self.alibi),
            "SINKS": int(self.sinks),
            "BLOCK_MASK": int(self.block_mask),
            "DROPOUT": int(bool(self.dropout)),
        }


PLAIN = Features()


@dataclass(frozen=True)
class Scores:
    """The options of one call, forward or backward."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float
    softcap: float
    """0: none."""
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    """(nheads,) or (batch, nheads)."""
    bias: Tensor | None
    """Broadcastable to (batch, nheads, seqlen_q, seqlen_k), as the blocks of ``visible``."""
    visible: Tensor | None
    block_q: int
    block_k: int
    ahead: int
    """Keys by which the diagonal is further right than with bottom-right alignment."""
    query0: int
    """Positions of the first query and key, by which dropout draws; ``ahead`` has those of scores."""
    key0: int
    dropout_p: float
    """0: none."""
    seed: Tensor | None
    """None with dropout: an integer of every call."""

    def features(self, *, sinks: bool = True) -> Features:
        """Features of the kernel. ``sinks``: False if the kernel that combines the parts adds them."""
        return Features(
            softcap=self.softcap > 0,
            sinks=sinks and self.sinks is not None,
            alibi=self.alibi_slopes is not None,
            bias="" if self.bias is None else self.bias.dtype.name,
            block_mask=self.visible is not None,
            dropout="" if not self.dropped else "number" if self.seed is None else "array",
        )

    @property
    def dropped(self) -> int:
        """Number of values of a weight's 16 bits that drop it, from 0 on. 1 / (1 - p) stays in float16's range."""
        return min(round(self.dropout_p * _STEPS), _STEPS - 2)

    @property
    def dropout_seed(self) -> Tensor | Dynamic | None:
        """Seed as an argument of GPU kernels: an array with one element, or a number; None without dropout."""
        return seed_argument(self.seed) if self.dropped else None

    def with_seed(self, shape: np.ndarray[Any, Any]) -> Any:
        """Structure argument of a CUDA C++ kernel; it includes the seed of each call if that is a number."""
        return Dynamic("seed", shape.dtype, shape[()]) if self.dropped and self.seed is None else shape[()]

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers by the names of ``cpu/tile.py``'s ``Call``, in the order of the Numba kernel's arguments."""
        return {
            "softmax_scale": float(self.softmax_scale),
            "softcap": float(self.softcap),
            "dropout_p": self.dropped / _STEPS,
            "ahead": self.ahead,
            "query0": self.query0,
            "key0": self.key0,
        }

    def cuda_numbers(self, *, signed: bool = False) -> np.ndarray[Any, Any]:
        """Fields of CUDA_SCORES. ``signed``: a negative scale is in the factors, for kernels that do not negate q."""
        scale = max(abs(self.softmax_scale), _SMALLEST)
        numbers = np.zeros((), CUDA_SCORES)
        numbers["scale_log2"] = float32(scale * LOG2E)
        numbers["negate"] = self.softmax_scale < 0
        numbers["ahead"] = self.ahead
        if self.softcap > 0:
            numbers["softcap_in"] = float32(scale / self.softcap)
            numbers["softcap_log2"] = float32(self.softcap * LOG2E)
        if self.dropped:
            keep_scale = _STEPS / (_STEPS - self.dropped)
            numbers["dropped"] = self.dropped << 16
            numbers["query0"], numbers["key0"] = self.query0, self.key0
            numbers["keep_scale"], numbers["keep_scale_log2"] = keep_scale, math.log2(keep_scale)
        if signed and numbers["negate"]:
            numbers["negate"] = 0
            numbers["scale_log2"], numbers["softcap_in"] = -numbers["scale_log2"], -numbers["softcap_in"]
        return numbers


def score_options(spec: Spec) -> dict[str, Any]:
    """The fields of :class:`Scores`, by name."""
    values: dict[str, Any] = {field.name: spec.get(field.name) for field in fields(Scores)}  # the arrays
    values |= {"visible": spec.get("block_mask.visible"), "block_q": 0, "block_k": 0, "dropout_p": 0.0}
    values |= {"ahead": 0, "query0": 0, "key0": 0}
    options = dict(spec.options)
    if "q_start" in options:
        values["query0"], values["key0"] = query0, key0 = options["q_start"], options["k_start"]
        values["ahead"] = query0 - key0 - (options["max_seqlen_k"] - options["max_seqlen_q"])
    return values | {name: x for name, x in options.items() if name in values}


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


_ROW_STRIDES = np.dtype([("batch", "i8"), ("row", "i8"), ("head", "i8")], align=True)

# AttentionShape of shape.cuh.
ATTENTION_SHAPE = np.dtype(
    [
        *[(name, _ROW_STRIDES) for name in ("q", "k", "v", "out", "k_scale", "v_scale")],
        *[(name, "i8") for name in ("lse_batch", "lse_head", "out_split", "lse_split")],
        *[(name, "i8", (4,)) for name in ("bias", "block_mask")],
        *[(name, "i8") for name in ("block_table_batch", "alibi_batch")],
        ("seed", "u8"),
        *[(name, "i4") for name in ("seqlen_q", "seqlen_k", "nheads", "group", "head_dim", "head_dim_v")],
        *[(name, "i4") for name in ("window_left", "window_right", "block_q", "block_k", "page_size")],
        ("num_splits", "i4"),
        ("scores", CUDA_SCORES),
    ],
    align=True,
)

BACKWARD_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

# BackwardShape of backward_shape.cuh.
BACKWARD_SHAPE = np.dtype(
    [
        *[(name, _ROW_STRIDES) for name in (*BACKWARD_ROWS, "wide_dout")],
        *[(name, "i8", (3,)) for name in ("lse", "delta")],
        *[(name, "i8", (4,)) for name in ("bias", "dbias", "block_mask")],
        *[(name, "i8") for name in ("alibi_batch", "padded_batch", "padded_head")],
        *[(name, "i8") for name in ("padded_batch_k", "padded_head_k", "padded_part")],
        ("seed", "u8"),
        *[(name, "i4") for name in ("parts", "part_heads", "batch")],
        ("bias_shape", "i4", (4,)),
        *[(name, "i4") for name in ("seqlen_q", "seqlen_k", "nheads", "group", "head_dim", "head_dim_v")],
        *[(name, "i4") for name in ("window_left", "window_right", "block_q", "block_k")],
        ("scale", "f4"),
        ("scores", CUDA_SCORES),
    ],
    align=True,
)


def q_in_registers(
    itemsize: int, block_m: int, block_n: int, warps_m: int, warps_n: int, head_dim: int, head_dim_v: int
) -> bool:
    """Whether a warp keeps its rows of Q in registers, by the kernel's own rule."""
    slabs, steps = block_m // warps_m // 16, head_dim * itemsize // 32
    return itemsize == 2 and 4 * slabs * (block_n // warps_n // 8 + head_dim_v // 8 + steps) <= 160


def shared_bytes(
    itemsize: int,
    block_m: int,
    block_n: int,
    warps_m: int,
    warps_n: int,
    head_dim: int,
    head_dim_v: int,
    *,
    one_k: bool = False,
    split: bool = False,
    quantized: bool = False,
) -> int:
    """Dynamic shared memory of a block; head_dim and head_dim_v are the kernel's HEAD_DIM and HEAD_DIM_V.

    ``one_k``: K has one buffer. ``split``: sums are written in float, as they are where out is float32.
    ``quantized``: K and V are followed by their codes, a byte each, and the scales of the keys.
    """
    q, k, v = (
        itemsize * rows * columns
        for rows, columns in ((block_m, head_dim), (block_n, head_dim), (block_n, head_dim_v))
    )
    in_registers = q_in_registers(itemsize, block_m, block_n, warps_m, warps_n, head_dim, head_dim_v)
    tiles = k + v + (q if one_k else max(k, q) if in_registers else k + q)
    if quantized:
        codes = (k + v) // itemsize + max(4 * block_n, 128)
        tiles = codes + (max(k + v, q) if in_registers else k + v + q)
    partial = split or warps_n > 1  # sums are written in float, those of warps with their row statistics
    out = block_m * head_dim_v * (4 * warps_n if partial else itemsize)
    return max(tiles, out + (8 * warps_n * block_m if partial else 0))
