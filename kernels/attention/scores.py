"""Options of attention's scores, shared by all lowerings: :class:`Scores`.

    s = softmax_scale * q.k,   then softcap * tanh(s / softcap),   + ALiBi + bias,   masks (-inf)
    weights = softmax(s),   then dropout

A new option is a field here, and in :class:`Features` if kernels are compiled with or without it. The kernels'
parts are ``scores.cuh``, ``numba_cuda/forward.py`` and ``cpu/tile.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import float32, seed_argument
from gpu_ops.kernels.program import Dynamic, Spec, Tensor

__all__ = ["CUDA_SCORES", "LOG2E", "PLAIN", "Features", "Scores", "score_options"]

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
        """Numbers by the names of ``numba_cpu.attention_tile.Call``, in the order of the Numba kernel's arguments."""
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
