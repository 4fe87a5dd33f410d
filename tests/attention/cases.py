"""Problems for the attention tests: arrays and options drawn from named factors.

``pairwise(FACTORS)`` yields few rows that together hold every pair of factor levels, so that every
option meets every other one without testing the whole product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops import BlockMask
from gpu_ops.reference.attention import backward as reference_backward
from gpu_ops.reference.attention import forward as reference
from gpu_ops.reference.attention.core import DenseOptions
from gpu_ops.reference.precision import steps, textbook_product
from gpu_ops.reference.tolerance import GRADIENT, error_report, tolerance
from tests.support.calls import call, refusal
from tests.support.compare import assert_close

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window_size": (3, 0)},
    "band": {"window_size": (2, 1)},
    "right": {"window_size": (-1, 2)},
    "causal_left": {"causal": True, "window_size": (4, 9)},
    "beyond": {"window_size": (-1, 0), "causal": True},
}

MASKS_WIDE: dict[str, dict[str, Any]] = {
    "wide_left": {"window_size": (70, 0)},
    "wide_band": {"window_size": (65, 33)},
    "wide_right": {"window_size": (-1, 90), "causal": False},
}

# The field's odd shapes (seqlen_q, seqlen_k): off every tile size by a little, either side longer.
SHAPES = (
    *[(1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217)],
    *[(113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256)],
    *[(1024, 1024), (1023, 1024), (1024, 1023)],
)
SHAPES_SLOW = ((4096, 4096), (4224, 4224))
HEAD_DIMS = (
    *[(d, d) for d in (1, 8, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)],
    *[(192, 128), (64, 512), (576, 512)],
)

# Levels of every option; the first is the default.
FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": tuple(MASKS),
    "seqlens": ((5, 7), (7, 5), (6, 6), (1, 9)),
    "heads": ((4, 4), (4, 2), (3, 1)),  # MHA, GQA, MQA
    "head_dims": ((4, 4), (4, 6), (5, 3)),
    "softmax_scale": (None, 0.3),
    "softcap": (0.0, 1.5),
    "sinks": (False, True),
    "alibi": (None, "heads", "batch_heads"),
    "bias": (None, "full", "keys", "masks"),
    "block_mask": (None, "shared", "each"),
    "layout": ("bshd", "bhsd"),
}


# The same options at sizes that cross the tiles of a kernel.
KERNEL_FACTORS: dict[str, tuple[Any, ...]] = {
    **FACTORS,
    "dtype": ("float32", "bfloat16", "float16"),
    "mask": (*MASKS, *MASKS_WIDE),
    "seqlens": ((113, 203), (203, 113), (128, 128), (1, 300)),
    "heads": ((4, 4), (4, 2), (3, 1)),
    "head_dims": ((32, 32), (40, 24), (64, 80)),
    "blocks": ((64, 64), (16, 32), (5, 7), (128, 1)),
}


@dataclass
class AttentionInputs:
    """Inputs of one call. ``options`` are passed to attention unchanged."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    options: dict[str, Any]

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v


Row = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]], seed: int = 0, *, allowed: Callable[[Row], Row] = dict
) -> list[Row]:
    """Rows such that every two levels of different factors appear together in some row.

    ``allowed`` removes the levels of a row that its other levels exclude; the first factor that decides is "form".
    Pairs that never remain together are omitted.
    """
    rng = np.random.default_rng(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def repaired(row: dict[str, int]) -> dict[str, int]:
        levels = allowed({n: factors[n][i] for n, i in row.items()})
        return {n: factors[n].index(level) for n, level in levels.items()}

    def pairs(row: dict[str, int]) -> set[Any]:
        return set(itertools.combinations(row.items(), 2)) & missing

    forms = [{"form": i} for i in range(len(factors["form"]))] if "form" in factors else [{}]
    first = dict.fromkeys(names, 0)
    missing &= {
        pair
        for pair in missing
        for form in forms
        if set(pair) <= repaired({**first, **form, **dict(pair)}).items()
    }
    rows = []
    while missing:
        candidates, open_pairs = [], sorted(missing)
        for _ in range(30):
            row = {n: int(rng.integers(len(factors[n]))) for n in names}
            (a, i), (b, j) = open_pairs[rng.integers(len(missing))]
            row[a], row[b] = i, j
            candidates.append(repaired(row))
        best = max(candidates, key=lambda row: len(pairs(row)))
        missing -= pairs(best)
        rows.append({n: factors[n][i] for n, i in best.items()})
    return rows


def row_id(row: Mapping[str, Any]) -> str:
    """A readable pytest id: the levels that are not the default."""
    changed = {n: v for n, v in row.items() if n == "dtype" or v != FACTORS.get(n, (None,))[0]}
    return "-".join(f"{n}={v}" for n, v in changed.items()).replace(" ", "") or "default"


def make(
    *,
    mask: str = "full",
    seqlens: tuple[int, int] = (5, 7),
    heads: tuple[int, int] = (4, 4),
    head_dims: tuple[int, int] = (8, 8),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: str | None = None,
    bias: str | None = None,
    block_mask: str | None = None,
    layout: str = "bshd",
    batch: int = 2,
    dtype: str = "float64",
    blocks: tuple[int, int] = (2, 3),
    side_dtype: str = "float32",
    seed: int = 0,
    **extra: Any,
) -> AttentionInputs:
    """Standard-normal inputs with the requested options; ``extra`` options are passed through.

    ``side_dtype``: dtype of sinks, slopes and float32 biases; float64 is for finite differences.
    """
    rng = np.random.default_rng(seed)
    native = DTYPES[dtype]
    float_dtype = np.dtype(side_dtype)
    (seqlen_q, seqlen_k), (nheads, nheads_kv), (head_dim, head_dim_v) = seqlens, heads, head_dims

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape).astype(native)
        return x if layout == "bshd" else np.ascontiguousarray(x.swapaxes(1, 2))

    q = normal(batch, seqlen_q, nheads, head_dim)
    k = normal(batch, seqlen_k, nheads_kv, head_dim)
    v = normal(batch, seqlen_k, nheads_kv, head_dim_v)
    dout = normal(batch, seqlen_q, nheads, head_dim_v)

    options: dict[str, Any] = {**(MASKS | MASKS_WIDE)[mask], **extra}
    if layout != "bshd":
        options["layout"] = layout
    if softmax_scale is not None:
        options["softmax_scale"] = softmax_scale
    if softcap:
        options["softcap"] = softcap
    if sinks:
        options["sinks"] = rng.standard_normal(nheads).astype(float_dtype)
    if alibi is not None:
        shape = (nheads,) if alibi == "heads" else (batch, nheads)
        options["alibi_slopes"] = rng.uniform(0.05, 0.5, shape).astype(float_dtype)
    if bias == "full":
        options["bias"] = rng.standard_normal((batch, nheads, seqlen_q, seqlen_k)).astype(native)
    elif bias == "keys":
        options["bias"] = rng.standard_normal((batch, 1, 1, seqlen_k)).astype(float_dtype)
    elif bias == "masks":
        values = rng.standard_normal((nheads, seqlen_q, seqlen_k)).astype(float_dtype)
        values[rng.random(values.shape) < 0.3] = -np.inf
        values[:, seqlen_q // 2] = -np.inf  # one query sees nothing
        options["bias"] = values
    if block_mask is not None:
        lead = () if block_mask == "shared" else (batch, nheads)
        shape = (*lead, -(-seqlen_q // blocks[0]), -(-seqlen_k // blocks[1]))
        options["block_mask"] = BlockMask(rng.random(shape) < 0.6, *blocks)
    return AttentionInputs(q, k, v, dout, options)


@dataclass(frozen=True)
class Expected:
    """Expected results of a problem: exact values, and textbook values in its dtype (the yardstick)."""

    problem: AttentionInputs
    exact: dict[str, np.ndarray]
    naive: dict[str, np.ndarray]

    def check(self, name: str, actual: Any) -> None:
        """Check ``actual`` against the tolerance rule; float64 is held to float64 accuracy."""
        exact, dtype = self.exact[name], self.problem.q.dtype
        if dtype == np.float64:
            scale = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
            np.testing.assert_allclose(actual, exact, rtol=1e-11, atol=1e-13 * scale, err_msg=name)
            return
        if name == "lse":
            assert_lse(actual, exact, dtype, self.problem.options.get("softcap"))
        elif name.startswith("d"):
            assert_gradient(name, actual, exact, self.naive[name], dtype, self.exact["lse"])
        else:
            assert_close(actual, exact, self.naive[name], dtype, what=name)


def assert_gradient(
    name: str,
    actual: Any,
    exact: np.ndarray,
    naive: np.ndarray,
    dtype: Any,
    lse: np.ndarray,
    noise: float = 0.0,
) -> None:
    """Check the tolerance rule plus the half ulp that P loses because it is recomputed from a float32 lse.

    ``noise``: see :func:`cancellation`.
    """
    ulp = np.spacing(np.float32(np.abs(lse[np.isfinite(lse)]).max(initial=0.0)))
    bound = tolerance(exact, naive, dtype, GRADIENT) + 0.5 * float(ulp) * np.abs(exact).max(initial=0.0)
    problem = error_report(actual, exact, bound + noise)
    assert problem is None, f"{name}: {problem}"


def mixed(arrays: Sequence[np.ndarray], options: Mapping[str, Any]) -> list[np.ndarray]:
    """out, dq, dk and dv of q, k, v and dout by textbook code for tensor cores: a tighter naive_t for 16 bits.

    Factors of matrix products are rounded to the dtype of the inputs, all else to float32, so that it also measures
    scores that 16 bits cannot distinguish. It uses NumPy only: CPUs with and without bfloat16 products agree.
    """
    q, k, v, dout = arrays
    single, dense = steps("naive", np.float32), DenseOptions(**options)
    rounded = replace(single, matmul=lambda a, b: textbook_product(a.astype(q.dtype), b.astype(q.dtype)))
    out, _ = reference._forward(q, k, v, dense, rounded)
    return [out, *reference_backward._backward(dout, q, k, v, None, dense, rounded)[:3]]


def cancellation(
    name: str, dout: np.ndarray, out: np.ndarray, q: np.ndarray, k: np.ndarray, scale: float
) -> float:
    """Error allowed in dq and dk where a row sees one key.

    There ds = P (dP - delta) is 0: two sums of the same products. The naive reference forms both by one operation,
    which cancels exactly; a kernel sums each in a different order, which leaves a float32 ulp.
    """
    if name not in ("dq", "dk") or not q.size:
        return 0.0
    delta = np.abs((dout.astype(np.float64) * out).sum(axis=-1)).max(initial=0.0)
    other = np.abs((k if name == "dq" else q).astype(np.float64)).max(initial=0.0)
    return float(np.spacing(np.float32(delta)) * scale * other)


def assert_lse(actual: Any, exact: np.ndarray, dtype: Any = np.float32, softcap: float | None = None) -> None:
    """Check lse, a float32 sum whatever the inputs are: a few float32 roundings of error, -inf where -inf.

    16-bit kernels cap scores by tanh.approx, which errs by up to 2^-11 of the tanh: that moves each score, and lse.
    """
    scale = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
    of_cap = (softcap or 0.0) * 2.0**-11 if np.dtype(dtype).itemsize == 2 else 0.0
    np.testing.assert_allclose(actual, exact, rtol=0, atol=2e-6 * scale + of_cap, err_msg="lse")


def has_gradients(backend: Mapping[str, str]) -> bool:
    """Whether a backend runs attention_backward at all."""
    return backend["device"] == "cpu" or not _backward_refusal(backend["backend"])


@cache
def _backward_refusal(backend: str) -> str:
    return refusal(call("attention_backward"), backend)


@lru_cache(maxsize=4)
def _expected(settings: tuple[tuple[str, Any], ...], gradients: bool) -> Expected:
    problem = make(**dict(settings))
    exact, naive = ({}, {})
    for results, precision in ((exact, "float64"), (naive, "naive")):
        out, lse = reference.attention(
            *problem.arrays, **problem.options, return_lse=True, precision=precision
        )
        results |= {"out": out, "lse": lse}
        if gradients:
            dq, dk, dv, extra = reference.attention_backward(
                problem.dout,
                *problem.arrays,
                out,
                lse,
                **problem.options,
                return_extra=True,
                precision=precision,
            )
            results |= {"dq": dq, "dk": dk, "dv": dv} | {f"d{name}": x for name, x in extra.items()}
    return Expected(problem, exact, naive)


def expected(*, gradients: bool = False, **settings: Any) -> Expected:
    """Problem ``make(**settings)`` and its results by the reference; do not write into them."""
    return _expected(tuple(settings.items()), gradients)
