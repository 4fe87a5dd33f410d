"""Ternary matmul: 2-bit weights against a dense matmul with the same weights in NumPy and torch.

``python perf/bench_ternary.py --device cpu --dtype float32 --seqlen 1 16 128`` (seqlen: tokens)

The peers get dense weights, prepared in advance, as a user without packed weights would run them. Their memory
traffic is 16 times ours (8 times with bfloat16 in torch). One token is bound by the packed bytes, shown as GB/s; many
tokens are bound by integer products, shown as operations per second. When both operands are ternary, one case keeps
2 % of the chunks of 128 weights, and the kernel skips the rest. Packing, unpacking and quantising only move bytes.
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.precision import Precision
from gpu_ops.reference.weights import ternary as reference
from gpu_ops.reference.weights.ternary_formats import FORMATS
from perf.build import backends, made_by, normal, on_host, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336))  # Llama-3-8B: attention output, MLP up, MLP down
BITNET = ((2560, 2560), (6912, 2560), (2560, 6912))  # BitNet-2B, likewise
LARGE = ((8192, 8192), (28672, 8192))  # Llama-3-70B, on GPUs: dense for the peers the second takes a gigabyte
EMULATED = ((1024, 2048),)  # fills every SM of the emulated card and still runs in seconds
SAMPLED = (16, 256)
SMALL = (3, 64, 128)
SMALL_PACKED = (256, 256)  # fits every format


TOUR = (("matmul, int8 activations", "bfloat16"),)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    tokens = config.seqlens or ((1, 16) if config.quick else (1, 4, 16, 128))
    weights = WEIGHTS[:1] if config.quick else WEIGHTS
    if config.device == "emulator":
        tokens, weights = tuple(sorted({1, 16, *tokens})), EMULATED
    elif config.device == "cuda" and not config.seqlens:
        tokens += () if config.quick else (4096,)
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for n, k in weights:
            for m in tokens:
                result.append(matmul(m, n, k, dtype, "int8"))
                if m == min(tokens):
                    result.append(matmul(m, n, k, dtype, "native"))
    if not config.quick and config.device != "emulator" and "bfloat16" in (config.dtypes or ("bfloat16",)):
        more = BITNET + (LARGE if config.device == "cuda" else ())
        ends = sorted({min(tokens), max(tokens)})
        result += [matmul(m, n, k, "bfloat16", "int8") for n, k in more for m in ends]
    trained = 64 if config.device == "emulator" else max(tokens)
    for dtype in config.dtypes or (("bfloat16",) if config.quick else ("float32", "bfloat16")):
        result += [gradients(trained, n, k, dtype) for n, k in weights]
    if "float32" in (config.dtypes or ("float32",)):
        result += [product(m, *weights[0], share) for m in tokens for share in (100, 2)]
    if config.quick and config.device == "cpu":
        return result
    n, k = EMULATED[0] if config.quick else weights[0]
    if "float32" in (config.dtypes or ("float32",)):
        formats = ("w2", "tq1_0") if config.quick else FORMATS
        result += [packing(n, k, name, which) for name in formats for which in ("pack", "unpack")]
    for dtype in config.dtypes or ("float32", "bfloat16"):
        result += [quantizing(n, k, dtype, method) for method in ("absmean", "percentile")]
    return result


def matmul(m: int, n: int, k: int, dtype: str, activations: str) -> Case:
    itemsize = DTYPES[dtype].itemsize

    def ours(x: Inputs, **how: str) -> Call:
        if not isinstance(x["x"], np.ndarray):
            gpu_ops.ternary_matmul(x["x"][:1], x["w"])  # moves the weights to the GPU
        return functools.partial(gpu_ops.ternary_matmul, x["x"], x["w"], activations=activations, **how)

    def against(x: Inputs, precision: Precision) -> Any:
        w = x["w"].trits(), x["w"].scale
        return reference.ternary_matmul(x["x"], *w, activations=activations, precision=precision)

    return Case(
        op="ternary",
        name=f"matmul, {activations} activations",
        shape=f"{m} x {k} x {n}",
        dtype=dtype,
        flops=2.0 * m * n * k,
        bytes=n * k / 4 + itemsize * float(m * (n + k)),
        **made_by(data, (m, n, k), SMALL, DTYPES[dtype]),
        **backends(ours),
        naive=naive,
        torch=torch_matmul,
        peers={"cublas": cublas_matmul},
        reference=against,
        bandwidth="read",
        sample=sample_part,
        dense_bytes=4.0 * n * k,
        note="naive: dense float32 weights; torch: dense weights in the case's dtype; cublas: float16 ones, by CuPy; "
        f"weights take {n * k / 2**22:.1f} MiB, {n * k * itemsize / 2**20:.1f} MiB dense",
    )


def gradients(m: int, n: int, k: int, dtype: str) -> Case:
    """dx and dw. The error is measured on a smaller problem, because dw sums over all tokens."""

    def ours(x: Inputs, **how: str) -> Call:
        call = functools.partial(gpu_ops.ternary_matmul_backward, x["dy"], x["x"], x["w"], **how)
        return after_one(call, x["x"])

    def against(x: Inputs, precision: Precision) -> Any:
        arguments = (on_host(x["dy"]), on_host(x["x"]), x["w"].trits(), x["w"].scale)
        return reference.ternary_matmul_backward(*arguments, precision=precision)

    return Case(
        op="ternary",
        name="matmul backward, int8 activations",
        shape=f"{m} x {k} x {n}",
        dtype=dtype,
        flops=4.0 * m * n * k,
        bytes=n * k * 4.25 + DTYPES[dtype].itemsize * float(m * (n + 2 * k)),
        **made_by(gradient_data, (m, n, k), SMALL, DTYPES[dtype]),
        **backends(ours),
        naive=naive_gradients,
        reference=against,
        backward=True,
        dense_bytes=8.0 * n * k,
        note="naive: dense float32 weights, and x as it is",
    )


def product(m: int, n: int, k: int, share: int) -> Case:
    """Ternary times ternary; ``share``: percent of the chunks of w that are not all zero."""

    def ours(x: Inputs, **how: str) -> Call:
        call = functools.partial(gpu_ops.ternary_matmul, x["x"], x["w"], out=x["out"], **how)
        return after_one(call, x["out"])

    def against(x: Inputs, precision: Precision) -> Any:
        return reference.ternary_product(x["x"].trits(), x["x"].scale, x["w"].trits(), x["w"].scale)

    return Case(
        op="ternary",
        name="matmul, both ternary" + (f", {share} % of chunks" if share < 100 else ""),
        shape=f"{m} x {k} x {n}",
        dtype="float32",
        flops=2.0 * m * n * k * share / 100,
        bytes=(n * share / 100 + m) * k / 4 + 4.0 * m * n,
        **made_by(product_data, (m, n, k), SMALL, share),
        **backends(ours),
        naive=naive_product,
        reference=against,
        bandwidth="read",
        sample=sample_part,
        dense_bytes=4.0 * (n + m) * k,
        note="naive: both dense float32 in NumPy",
    )


def packing(n: int, k: int, format: str, which: str) -> Case:
    """Case that packs trits, one byte each, into a format, or unpacks them."""

    def bind(module: Any, x: Inputs, to: Any = lambda array: array, **how: str) -> Call:
        if which == "pack":
            return functools.partial(module.ternary_pack, to(x["trits"]), format, **how)
        return functools.partial(module.ternary_unpack, to(x["packed"]), x["trits"].shape, format, **how)

    return Case(
        op="ternary",
        name=f"{which} {format}",
        shape=f"{n} x {k}",
        dtype="float32",
        flops=float(n * k),
        bytes=n * k * (1 + FORMATS[format].bits_per_weight / 8),
        **made_by(packing_data, (n, k), SMALL_PACKED, format),
        **backends(functools.partial(bind, gpu_ops)),
        naive=lambda x: bind(reference, x, on_host),
        reference=lambda x, precision: bind(reference, x, on_host)(),
        by_bytes=True,
        note="naive: NumPy on the host",
    )


def quantizing(n: int, k: int, dtype: str, method: Any) -> Case:
    """Case that quantizes weights to format w2 with one scale. The check compares the scale."""

    def ours(x: Inputs, **how: str) -> Call:
        return lambda: gpu_ops.ternary_quantize(x["w"], method=method, **how).scale

    def by_numpy(x: Inputs, precision: Precision = "rounded") -> Any:
        return reference.ternary_quantize(on_host(x["w"]), method=method, precision=precision)[1]

    return Case(
        op="ternary",
        name=f"quantize, {method}",
        shape=f"{n} x {k}",
        dtype=dtype,
        flops=2.0 * n * k,
        bytes=n * k * (DTYPES[dtype].itemsize + 0.25),
        **made_by(weights_data, (n, k), SMALL_PACKED, DTYPES[dtype]),
        **backends(ours),
        naive=lambda x: functools.partial(by_numpy, x),
        reference=by_numpy,
        by_bytes=True,
        note="bytes as if the weights were read once; naive: NumPy on the host, without packing",
    )


def after_one(call: Call, array: Any) -> Call:
    """Call after a first one: on a GPU the first call moves the packed weights to the device."""
    if not isinstance(array, np.ndarray):
        call()
    return call


def packing_data(rng: np.random.Generator, n: int, k: int, format: str) -> Inputs:
    trits = rng.integers(-1, 2, (n, k), np.int8)
    return {"trits": trits, "packed": reference.ternary_pack(trits, format)}


def weights_data(rng: np.random.Generator, n: int, k: int, dtype: np.dtype[Any]) -> Inputs:
    return {"w": normal(rng, (n, k), dtype)}


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


def gradient_data(rng: np.random.Generator, m: int, n: int, k: int, dtype: np.dtype[Any]) -> Inputs:
    return data(rng, m, n, k, dtype) | {"dy": normal(rng, (m, n), dtype)}


def sample_part(x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """Last tokens and output features: every element is a separate sum."""
    tokens, features = (slice(-count, None) for count in SAMPLED)
    return {"x": rows_of(x["x"], tokens), "w": rows_of(x["w"], features)}, result[tokens, features]


def rows_of(x: Any, part: slice) -> Any:
    if isinstance(x, gpu_ops.TernaryMatrix):
        return gpu_ops.TernaryMatrix.from_trits(x.trits()[part], x.scale)
    return x[part]


def naive(x: Inputs) -> Call:
    weights = dense_like(x["x"], x["w"]).T
    return lambda: (to_float32(x["x"])[0] @ weights).astype(x["x"].dtype, copy=False)


def naive_gradients(x: Inputs) -> Call:
    weights = dense_like(x["x"], x["w"])

    def call() -> Any:
        dy, rows = to_float32(x["dy"], x["x"])
        return (dy @ weights).astype(x["x"].dtype, copy=False), dy.T @ rows

    return call


def cublas_matmul(x: Inputs) -> Call:
    rows, weights = x["x"].astype(np.float16), dense_like(x["x"], x["w"], np.float16).T
    return lambda: rows @ weights


def naive_product(x: Inputs) -> Call:
    rows, weights = (dense_like(x["out"], x[name]) for name in "xw")
    return lambda: rows @ weights.T


def dense_like(array: Any, weights: gpu_ops.TernaryMatrix, dtype: Any = np.float32) -> Any:
    """Dense weights on the device of ``array``."""
    return np.asarray(weights.dequantize(dtype), like=array)


def torch_matmul(x: Inputs) -> Call:
    import torch

    rows = torch_view(x["x"])
    weights = torch_view(x["w"].dequantize(x["x"].dtype)).to(rows.device)
    return lambda: torch.nn.functional.linear(rows, weights)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("ternary")
