"""Ternary matmul: 2-bit weights against a dense matmul with the same weights in NumPy and torch.

``python perf/bench_ternary.py --device cpu --dtype float32 --seqlen 1 16 128`` (seqlen: tokens)

The peers get their weights dense and ready: what a user without packed weights would run. Their memory
traffic is 16 times ours (8 times with bfloat16 in torch), which is the point of the op. One token is bound by the
packed bytes, shown as GB/s; many by integer products, shown as operations per second. Where both are ternary, one
case keeps 2 % of the chunks of 128 weights: the others are skipped.
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: the repository root takes perf/'s place on the path
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import functools
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.precision import Precision
from gpu_ops.reference.ternary import ternary_matmul as reference_matmul
from gpu_ops.reference.ternary import ternary_product as reference_product
from perf.case import DTYPES, Call, Case, Config, Inputs, maker, normal, torch_view

WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336))  # Llama-3-8B: attention output, MLP up, MLP down
EMULATED = (
    (1024, 2048),
)  # enough for every SM of the card that the emulator stands for, and for its patience
SAMPLED = (16, 256)
SMALL = (3, 64, 128)


def cases(config: Config) -> list[Case]:
    tokens = config.seqlens or ((1, 16) if config.quick else (1, 4, 16, 128))
    weights = WEIGHTS[:1] if config.quick else WEIGHTS
    if config.device == "emulator":
        tokens, weights = tuple(sorted({1, 16, *tokens})), EMULATED
    elif config.device == "cuda" and not config.seqlens:
        tokens += () if config.quick else (4096,)
    found = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for n, k in weights:
            for m in tokens:
                found.append(case(m, n, k, dtype, "int8"))
                if m == min(tokens):
                    found.append(case(m, n, k, dtype, "native"))
    if "float32" in (config.dtypes or ("float32",)):
        found += [product(m, *weights[0], share) for m in tokens for share in (100, 2)]
    return found


def case(m: int, n: int, k: int, dtype: str, activations: str) -> Case:
    itemsize = DTYPES[dtype].itemsize

    def ours(x: Inputs, **how: str) -> Call:
        if not isinstance(x["x"], np.ndarray):
            gpu_ops.ternary_matmul(x["x"][:1], x["w"])  # takes the weights to the GPU
        return functools.partial(gpu_ops.ternary_matmul, x["x"], x["w"], activations=activations, **how)

    def against(x: Inputs, precision: Precision) -> Any:
        w = x["w"]
        return reference_matmul(x["x"], w.trits(), w.scale, activations=activations, precision=precision)

    return Case(
        op="ternary",
        name=f"matmul, {activations} activations",
        shape=f"{m} x {k} x {n}",
        dtype=dtype,
        flops=2.0 * m * n * k,
        bytes=n * k / 4 + itemsize * float(m * (n + k)),
        make=maker(data, m, n, k, DTYPES[dtype]),
        make_small=maker(data, *SMALL, DTYPES[dtype]),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive,
        torch=torch_matmul,
        reference=against,
        bandwidth="read",
        sample=sample_part,
        dense_bytes=4.0 * n * k,
        note="naive: dense float32 weights in NumPy; torch: dense weights in the case's dtype",
    )


def product(m: int, n: int, k: int, share: int) -> Case:
    """Ternary times ternary; ``share``: percent of the chunks of w that hold anything."""

    def ours(x: Inputs, **how: str) -> Call:
        call = functools.partial(gpu_ops.ternary_matmul, x["x"], x["w"], out=x["out"], **how)
        if not isinstance(x["out"], np.ndarray):
            call()  # takes the codes to the GPU
        return call

    def against(x: Inputs, precision: Precision) -> Any:
        return reference_product(x["x"].trits(), x["x"].scale, x["w"].trits(), x["w"].scale)

    return Case(
        op="ternary",
        name="matmul, both ternary" + (f", {share} % of chunks" if share < 100 else ""),
        shape=f"{m} x {k} x {n}",
        dtype="float32",
        flops=2.0 * m * n * k * share / 100,
        bytes=(n * share / 100 + m) * k / 4 + 4.0 * m * n,
        make=maker(product_data, m, n, k, share),
        make_small=maker(product_data, *SMALL, share),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive_product,
        reference=against,
        bandwidth="read",
        sample=sample_part,
        dense_bytes=4.0 * (n + m) * k,
        note="naive: both dense float32 in NumPy",
    )


def product_data(rng: np.random.Generator, m: int, n: int, k: int, share: int) -> Inputs:
    x, w = (
        gpu_ops.ternary_quantize(normal(rng, (rows, k), DTYPES["float32"]), device="cpu") for rows in (m, n)
    )
    kept = np.repeat(rng.random((n, -(-k // 128))) < share / 100, 128, axis=1)[:, :k]
    w = gpu_ops.TernaryMatrix.from_trits(w.trits() * kept, w.scale)
    return {"x": x, "w": w, "out": np.empty((m, n), np.float32)}


def data(rng: np.random.Generator, m: int, n: int, k: int, dtype: np.dtype[Any]) -> Inputs:
    w = normal(rng, (n, k), np.dtype(np.float32), k**-0.5)
    return {"x": normal(rng, (m, k), dtype), "w": gpu_ops.ternary_quantize(w, device="cpu")}


def sample_part(x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """The last tokens and output features: every element is a sum of its own."""
    tokens, features = (slice(-count, None) for count in SAMPLED)
    return {"x": rows_of(x["x"], tokens), "w": rows_of(x["w"], features)}, result[tokens, features]


def rows_of(x: Any, part: slice) -> Any:
    if isinstance(x, gpu_ops.TernaryMatrix):
        return gpu_ops.TernaryMatrix.from_trits(x.trits()[part], x.scale)
    return x[part]


def naive(x: Inputs) -> Call:
    dtype, weights = x["x"].dtype, x["w"].dequantize(np.float32).T
    if not isinstance(x["x"], np.ndarray):
        import cupy

        weights = cupy.asarray(weights)
    return lambda: (x["x"].astype(np.float32, copy=False) @ weights).astype(dtype, copy=False)


def naive_product(x: Inputs) -> Call:
    rows, weights = x["x"].dequantize(), x["w"].dequantize().T
    if not isinstance(x["out"], np.ndarray):
        import cupy

        rows, weights = cupy.asarray(rows), cupy.asarray(weights)
    return lambda: rows @ weights


def torch_matmul(x: Inputs) -> Call:
    import torch

    rows = torch_view(x["x"])
    weights = torch_view(x["w"].dequantize(x["x"].dtype)).to(rows.device)
    return lambda: torch.nn.functional.linear(rows, weights)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("ternary")
