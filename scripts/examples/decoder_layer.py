"""A Llama-style decoder layer on real text, through gpu_ops, checked against the same layer in plain NumPy.

The text is Python's own help pages (pydoc's topics), its bytes are the tokens, and the weights come from a fixed
seed. The run needs no download and is the same everywhere:

    x -> rmsnorm -> q, k, v projections -> rope -> causal attention -> output projection
      -> + x, rmsnorm (one fused op) -> swiglu_mlp -> + residual

    python scripts/examples/decoder_layer.py --seqlen 4096 --dtype bfloat16

Prints time, working memory and error of each op. Exits with 1 when an op is outside its tolerance: its error may be
at most twice that of textbook NumPy code in the same dtype on the same inputs.
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: perf is in the repository, beside gpu_ops
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import argparse
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import ml_dtypes
import numpy as np

import gpu_ops
from gpu_ops.reference import attention as reference_attention
from gpu_ops.reference import rmsnorm as reference_rmsnorm
from gpu_ops.reference import rope as reference_rope
from gpu_ops.reference import swiglu as reference_swiglu
from gpu_ops.reference.tolerance import tolerance
from gpu_ops.terminal import make_console, print_table
from perf.memory import peak_growth
from perf.report import make_table

Array = np.ndarray[Any, Any]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def linear(x: Array, weight: Array) -> Array:
    """``x @ weight.T``. NumPy has no fast 16-bit matmul: it multiplies in float32 and rounds once."""
    if x.dtype == np.float64:
        return x @ weight.T
    wide, weight = (array.astype(np.float32, copy=False) for array in (x, weight))
    return (wide @ weight.T).astype(x.dtype, copy=False)


def reference_linear(x: Array, weight: Array, *, precision: str) -> Array:
    if precision == "float64":
        return x.astype(np.float64) @ weight.astype(np.float64).T
    total = np.zeros((*x.shape[:-1], len(weight)), np.float32)  # textbook: a running sum in float32
    for i, column in enumerate(weight.astype(np.float32).T):
        total += x[..., i, None].astype(np.float32) * column
    return total.astype(x.dtype)


OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # name: (ours, the definition)
    "linear": (linear, reference_linear),
    "rmsnorm": (gpu_ops.rmsnorm, reference_rmsnorm.rmsnorm),
    "rope": (gpu_ops.rope, reference_rope.rope),
    "attention": (gpu_ops.attention, reference_attention.attention),
    "swiglu_mlp": (gpu_ops.swiglu_mlp, reference_swiglu.swiglu_mlp),
}


@dataclass(frozen=True)
class Config:
    hidden: int
    nheads: int
    nheads_kv: int
    ffn: int
    rope_theta: float = 500_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.nheads


def make_weights(config: Config, dtype: Any, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)

    def matrix(out_features: int, in_features: int) -> Array:
        return (rng.standard_normal((out_features, in_features)) / np.sqrt(in_features)).astype(dtype)

    kv = config.nheads_kv * config.head_dim
    return {
        "embedding": rng.standard_normal((256, config.hidden)).astype(dtype),
        "norm_1": (1 + 0.1 * rng.standard_normal(config.hidden)).astype(dtype),
        "q": matrix(config.hidden, config.hidden),
        "k": matrix(kv, config.hidden),
        "v": matrix(kv, config.hidden),
        "o": matrix(config.hidden, config.hidden),
        "norm_2": (1 + 0.1 * rng.standard_normal(config.hidden)).astype(dtype),
        "gate": matrix(config.ffn, config.hidden),
        "up": matrix(config.ffn, config.hidden),
        "down": matrix(config.hidden, config.ffn),
    }


def text_tokens(seqlen: int) -> Array:
    """The first bytes of Python's own help pages, repeated if there are too few."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return np.resize(np.frombuffer(text, np.uint8), seqlen)[None]


def decoder_layer(call: Callable[..., Any], x: Array, w: dict[str, Array], config: Config) -> Array:
    """The layer. ``call(label, op, *arrays, **options)`` runs one op of :data:`OPS`."""
    batch, seqlen, _ = x.shape
    h = call("rmsnorm", "rmsnorm", x, w["norm_1"])
    q = call("q projection", "linear", h, w["q"]).reshape(batch, seqlen, config.nheads, config.head_dim)
    k = call("k projection", "linear", h, w["k"]).reshape(batch, seqlen, config.nheads_kv, config.head_dim)
    v = call("v projection", "linear", h, w["v"]).reshape(batch, seqlen, config.nheads_kv, config.head_dim)
    q, k = call("rope (q, k)", "rope", q, k, theta=config.rope_theta)
    a = call("attention, causal", "attention", q, k, v, causal=True)
    a = call("output projection", "linear", a.reshape(batch, seqlen, config.hidden), w["o"])
    h, x = call("residual + rmsnorm", "rmsnorm", a, w["norm_2"], residual=x)
    return x + call("swiglu_mlp", "swiglu_mlp", h, w["gate"], w["up"], w["down"])


@dataclass
class Row:
    label: str
    milliseconds: float
    peak: int
    naive_peak: int
    error: float
    allowed: float

    @property
    def fails(self) -> bool:
        return not self.error <= self.allowed  # NaN fails


def compare(found: list[Array], exact: list[Array], naive: list[Array], dtype: Any) -> tuple[float, float]:
    """The largest error of all results, and their tolerance by gpu_ops.reference.tolerance."""
    error = max(float(np.abs(f.astype(np.float64) - e).max()) for f, e in zip(found, exact, strict=True))
    return error, max(tolerance(e, n, dtype) for e, n in zip(exact, naive, strict=True))


def keep_nothing() -> None:
    """Give freed memory back to the system, so that the memory of a call shows as growth. Some calls get slower."""
    os.environ["GPU_OPS_POOL_MB"] = "0"
    with contextlib.suppress(OSError, AttributeError):  # not glibc: reused memory does not show
        m_mmap_threshold = -3
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 128 << 10)


def listed(result: Any) -> list[Array]:
    return list(result) if isinstance(result, tuple) else [result]


def peak_bytes(run: Callable[[], Any]) -> tuple[list[Array], int]:
    """The results, and the peak growth of the process without them."""
    growth, result = peak_growth(run)
    return listed(result), max(0, growth - sum(a.nbytes for a in listed(result)))


def measured(rows: list[Row], repeats: int, dtype: Any) -> Callable[..., Any]:
    """Runs each op through gpu_ops, and measures its time, memory and error on the same inputs."""

    def call(label: str, op: str, *arrays: Array, **options: Any) -> Any:
        ours, definition = OPS[op]
        result = ours(*arrays, **options)  # compiles the kernels, or loads them from the cache
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            ours(*arrays, **options)
            times.append(time.perf_counter() - start)
        found, peak = peak_bytes(lambda: ours(*arrays, **options))
        naive, naive_peak = peak_bytes(lambda: definition(*arrays, precision="naive", **options))
        exact = listed(definition(*arrays, precision="float64", **options))
        error, allowed = compare(found, exact, naive, dtype)
        rows.append(Row(label, 1e3 * float(np.median(times)), peak, naive_peak, error, allowed))
        return result

    return call


def through_reference(precision: str) -> Callable[..., Any]:
    return lambda label, op, *arrays, **options: OPS[op][1](*arrays, precision=precision, **options)


def run(config: Config, seqlen: int, dtype: Any, repeats: int, seed: int) -> list[Row]:
    """One row per op, and one for the whole layer."""
    w = make_weights(config, dtype, seed)
    x = w["embedding"][text_tokens(seqlen)]
    rows: list[Row] = []
    y = decoder_layer(measured(rows, repeats, dtype), x, w, config)
    in_float64 = {name: array.astype(np.float64) for name, array in w.items()}
    exact = decoder_layer(through_reference("float64"), x.astype(np.float64), in_float64, config)
    naive = decoder_layer(through_reference("naive"), x, w, config)
    total = sum(row.milliseconds for row in rows)
    peak, naive_peak = max(r.peak for r in rows), max(r.naive_peak for r in rows)
    error, allowed = compare([y], [exact], [naive], dtype)
    return [*rows, Row("whole layer", total, peak, naive_peak, error, allowed)]


def report(rows: list[Row], title: str) -> None:
    caption = (
        "memory: peak of the process beyond inputs and outputs, ours and textbook NumPy in the same dtype; "
        "the projections are NumPy's own matmul"
    )
    table = make_table(title, ("op",), ("time", "memory", "textbook NumPy", "max error", "allowed"))
    for row in rows:
        if row is rows[-1]:
            table.add_section()
        table.add_row(
            row.label,
            f"{row.milliseconds:.2f} ms",
            f"{row.peak / 2**20:.1f} MB",
            f"{row.naive_peak / 2**20:.1f} MB",
            f"[{'red' if row.fails else 'green'}]{row.error:.1e}[/]",
            f"{row.allowed:.1e}",
        )
    console = make_console()
    print_table(console, table)
    console.print(caption, style="dim")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--nheads", type=int, default=8)
    parser.add_argument("--nheads-kv", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    if o.hidden % o.nheads or o.nheads % o.nheads_kv or o.hidden // o.nheads % 2:
        parser.error("hidden must be nheads x an even head_dim, and nheads a multiple of nheads_kv")
    if min(o.seqlen, o.repeats, o.ffn) < 1:
        parser.error("seqlen, repeats and ffn must be at least 1")
    config = Config(o.hidden, o.nheads, o.nheads_kv, o.ffn)
    keep_nothing()
    rows = run(config, o.seqlen, DTYPES[o.dtype], o.repeats, o.seed)
    shape = f"hidden {o.hidden}, {o.nheads}/{o.nheads_kv} heads of {config.head_dim}, ffn {o.ffn}"
    report(rows, f"decoder layer, {shape}, {o.seqlen} tokens, {o.dtype}")
    failed = [row.label for row in rows if row.fails]
    if failed:
        print(f"outside the tolerance: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
