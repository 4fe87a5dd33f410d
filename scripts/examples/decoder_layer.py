"""A Llama-style decoder layer on real text, through gpu_ops, checked against the same layer in plain NumPy.

The text is Python's own help pages (pydoc's topics), its bytes are the tokens, and the weights come from a fixed
seed. The run needs no download and is the same everywhere:

    x -> rmsnorm -> q, k, v projections -> rope -> causal attention -> output projection
      -> + x, rmsnorm (one fused op) -> swiglu_mlp -> + residual

    python scripts/examples/decoder_layer.py --seqlen 4096 --dtype bfloat16

Prints time, memory and error of each op. Exits with 1 if an op is outside its tolerance: its error may be at most
twice that of textbook NumPy code in the same dtype on the same inputs.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import ml_dtypes
import numpy as np
from rich.table import Table

import gpu_ops
from gpu_ops import memory, models
from gpu_ops.cli.terminal import make_console, print_table
from gpu_ops.reference.attention import forward as attention
from gpu_ops.reference.gemm import linear, swiglu
from gpu_ops.reference.norm import rmsnorm
from gpu_ops.reference.rope import rope
from gpu_ops.reference.tolerance import tolerance

Array = np.ndarray[Any, Any]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # (ours, the definition)
    "rmsnorm": (gpu_ops.rmsnorm, rmsnorm.rmsnorm),
    "linear": (gpu_ops.linear, linear.linear),
    "rope": (gpu_ops.rope, rope.rope),
    "attention": (gpu_ops.attention, attention.attention),
    "swiglu_mlp": (gpu_ops.swiglu_mlp, swiglu.swiglu_mlp),
}


def text_tokens(seqlen: int) -> Array:
    """First bytes of Python's own help pages, repeated if there are too few."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return np.resize(np.frombuffer(text, np.uint8), seqlen)[None]


def decoder_layer(call: Callable[..., Any], x: Array, w: models.Block, config: models.LlamaConfig) -> Array:
    """Run the layer. ``call(label, op, *arrays, **options)`` runs one op of :data:`OPS`."""
    h = call("rmsnorm", "rmsnorm", x, w.attn_norm)
    heads = call("q, k, v projections", "linear", h, w.qkv).reshape(*x.shape[:2], -1, config.head_dim)
    q, k, v = (heads[:, :, part] for part in config.head_slices)
    q, k = call("rope (q, k)", "rope", q, k, theta=config.theta)
    a = call("attention, causal", "attention", q, k, v, causal=True)
    a = call("output projection", "linear", a.reshape(x.shape), w.o)
    h, x = call("residual + rmsnorm", "rmsnorm", a, w.mlp_norm, residual=x)
    gate, up = np.split(w.gate_up, 2)
    return x + call("swiglu_mlp", "swiglu_mlp", h, gate, up, w.down)


def listed(result: Any) -> list[Array]:
    return list(result) if isinstance(result, tuple) else [result]


def compare(found: Any, exact: Any, naive: Any, dtype: Any) -> tuple[float, float]:
    """Largest error of all results, and their tolerance by gpu_ops.reference.tolerance."""
    results = list(zip(listed(found), listed(exact), listed(naive), strict=True))
    error = max(float(np.abs(f.astype(np.float64) - e).max()) for f, e, _ in results)
    return error, max(tolerance(e, n, dtype) for _, e, n in results)


def measured(rows: list[tuple[Any, ...]], repeats: int, dtype: Any) -> Callable[..., Any]:
    """Run each op through gpu_ops, and measure its time, memory and error on the same inputs."""

    def call(label: str, op: str, *arrays: Array, **options: Any) -> Any:
        ours, definition = OPS[op]
        result = ours(*arrays, **options)  # compiles the kernels, or loads them from the cache
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            ours(*arrays, **options)
            times.append(time.perf_counter() - start)
        with memory.Trace("cpu") as trace:  # tracemalloc does not see gpu_ops' own memory
            ours(*arrays, **options)
        tracemalloc.start()
        naive = definition(*arrays, precision="naive", **options)
        textbook = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        judged = compare(result, definition(*arrays, precision="float64", **options), naive, dtype)
        rows.append((label, 1e3 * float(np.median(times)), trace.peak_bytes, textbook, *judged))
        return result

    return call


def through_definitions(precision: str) -> Callable[..., Any]:
    return lambda label, op, *arrays, **options: OPS[op][1](*arrays, precision=precision, **options)


def run(
    config: models.LlamaConfig, seqlen: int, dtype: Any, repeats: int, seed: int
) -> list[tuple[Any, ...]]:
    """Row of each op and of the layer: label, milliseconds, bytes, bytes of the textbook code, error, tolerance."""
    arrays = models.initial_weights(config, seed=seed, std=config.hidden**-0.5)
    layers = [
        models.Llama.of({n: x.astype(t) for n, x in arrays.items()}, config) for t in (dtype, np.float64)
    ]
    (w, embedding), (exact_w, _) = ((model.layers[0], model.embed) for model in layers)
    x, rows = embedding[text_tokens(seqlen)], []
    y = decoder_layer(measured(rows, repeats, dtype), x, w, config)
    exact = decoder_layer(through_definitions("float64"), x.astype(np.float64), exact_w, config)
    judged = compare(y, exact, decoder_layer(through_definitions("naive"), x, w, config), dtype)
    _, times, ours, textbook, *_ = zip(*rows, strict=True)
    return [*rows, ("whole layer", sum(times), max(ours), max(textbook), *judged)]


def report(rows: list[tuple[Any, ...]], title: str) -> None:
    table = Table("op", "time", "memory", "textbook NumPy's", "max error", "allowed", title=title)
    for label, milliseconds, ours, textbook, error, allowed in rows:
        sizes = (f"{nbytes / 2**20:.1f} MB" for nbytes in (ours, textbook))
        table.add_row(label, f"{milliseconds:.2f} ms", *sizes, f"{error:.1e}", f"{allowed:.1e}")
    print_table(make_console(), table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"hidden": 512, "nheads": 8, "nheads-kv": 2, "ffn": 1408, "seqlen": 1024, "repeats": 5, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    o = parser.parse_args(argv)
    if min(o.seqlen, o.repeats) < 1:
        parser.error("seqlen and repeats must be at least 1")
    shape = {"hidden": o.hidden, "nheads": o.nheads, "nheads_kv": o.nheads_kv, "ffn": o.ffn}
    try:
        config = models.LlamaConfig(vocab=256, nlayers=1, theta=500_000.0, **shape)
    except gpu_ops.errors.GpuOpsError as error:
        parser.error(str(error))
    rows = run(config, o.seqlen, DTYPES[o.dtype], o.repeats, o.seed)
    report(rows, f"{', '.join(f'{n} {v}' for n, v in shape.items())}, {o.seqlen} tokens, {o.dtype}")
    if failed := [label for label, *_, error, allowed in rows if not error <= allowed]:  # NaN fails
        print(f"outside the tolerance: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
