"""Attention and its gradients on NumPy arrays: two calls, no framework, no matrix of scores in memory.

    python scripts/examples/simple_attention.py
    python scripts/examples/simple_attention.py --seqlen 4096 --nheads 8

:func:`attend` is all that a program needs. The rest shows the benefit: time and peak memory compared with the
textbook formula, the largest error of both against float64, and the same two calls through the CUDA C++ kernels, on
the emulator. Exits with 1 if an error is more than twice (for a gradient: three times) that of the formula.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

import gpu_ops
from gpu_ops import memory
from gpu_ops.cli.terminal import make_console, print_table
from gpu_ops.core.device import compiler_missing
from gpu_ops.reference.tolerance import FORWARD, GRADIENT, tolerance

Array = np.ndarray[Any, Any]
FACTORS = {"out": FORWARD, "dq": GRADIENT, "dk": GRADIENT, "dv": GRADIENT}


def attend(q: Array, k: Array, v: Array, dout: Array, **where: Any) -> tuple[Array, ...]:
    """Attention of q, k and v, and their gradients for the gradient ``dout``."""
    out, lse = gpu_ops.attention(q, k, v, causal=True, return_lse=True, **where)
    dq, dk, dv = gpu_ops.attention_backward(dout, q, k, v, out, lse, causal=True, **where)
    return out, dq, dk, dv


def textbook(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
    """Same results by the formula, with all scores at once: (batch, nheads, seqlen, seqlen)."""
    q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    s = q @ k.swapaxes(-1, -2) * scale
    s[..., np.triu(np.ones(s.shape[-2:], bool), 1)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    results = (p @ v, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout)
    return tuple(x.swapaxes(1, 2) for x in results)


def seconds(call: Callable[..., Any], inputs: list[Array]) -> float:
    call(*inputs)  # compiles
    start = time.perf_counter()
    call(*inputs)
    return time.perf_counter() - start


def peak_of_textbook(inputs: list[Array]) -> int:
    tracemalloc.start()
    textbook(*inputs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def peak_of_ops(inputs: list[Array]) -> int:
    """Peak memory by the plan: tracemalloc does not see gpu_ops' pool."""
    with memory.Trace("cpu") as trace:
        attend(*inputs)
    return trace.peak_bytes


def errors(inputs: list[Array], **where: Any) -> tuple[list[float], list[float], bool]:
    """Largest errors, those of the formula, and whether the former are small enough compared with the latter."""
    exact = attend(*(x.astype(np.float64) for x in inputs), device="cpu", backend="reference")
    ours, naive = attend(*inputs, **where), textbook(*inputs)
    allowed = [tolerance(e, n, np.float32, f) for e, n, f in zip(exact, naive, FACTORS.values(), strict=True)]
    ours_errors, naive_errors = (
        [np.abs(a - e).max() for a, e in zip(x, exact, strict=True)] for x in (ours, naive)
    )
    return ours_errors, naive_errors, all(e <= limit for e, limit in zip(ours_errors, allowed, strict=True))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {"batch": 1, "seqlen": 2048, "nheads": 4, "head-dim": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tiny", action="store_true", help="a size that only shows that it runs")
    o = parser.parse_args(argv)
    if o.tiny:
        o.seqlen, o.nheads, o.head_dim = 128, 2, 32
    rng = np.random.default_rng(o.seed)
    inputs = [rng.standard_normal((o.batch, o.seqlen, o.nheads, o.head_dim), np.float32) for _ in range(4)]
    title = f"{o.seqlen} tokens, {o.nheads} heads of {o.head_dim}, causal, forward and backward, float32"
    table = Table("", "time", "peak memory", *(f"error of {name}" for name in FACTORS), title=title)
    ours_errors, naive_errors, good = errors(inputs)
    for name, call, nbytes, wrong in (
        ("textbook formula", textbook, peak_of_textbook(inputs), naive_errors),
        ("gpu_ops", attend, peak_of_ops(inputs), ours_errors),
    ):
        cost = f"{1e3 * seconds(call, inputs):.1f} ms", f"{nbytes / 2**20:.1f} MiB"
        table.add_row(name, *cost, *(f"{e:.1e}" for e in wrong))
    print_table(make_console(), table)
    if missing := compiler_missing("raw"):
        print(
            f"The CUDA C++ kernels were not tried: {missing}. pip install '.[emulator]' brings what they take."
        )
    else:
        ours_errors, _, same = errors([x[:, :64] for x in inputs], device="emulator", backend="raw")
        good &= same
        text = " ".join(f"{e:.1e}" for e in ours_errors)
        print(f"The CUDA C++ kernels on the emulator, the first {min(o.seqlen, 64)} tokens, errors: {text}")
    if good:
        return 0
    print("an error is larger than the formula's allows", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
