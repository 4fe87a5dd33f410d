"""Ternary matmul: 2-bit weights against a dense matmul with the same weights in NumPy and torch.

``python perf/bench_ternary.py --device cpu --dtype float32 --seqlen 1 16 128`` (seqlen: tokens)

The peers get their weights dense and ready: what a user without packed weights would run. Their memory
traffic is 16 times ours (8 times with bfloat16 in torch), which is the point of the op. One token is bound by the
packed bytes, shown as GB/s; many by integer products, shown as operations per second. Where both are ternary, one
case keeps 2 % of the chunks of 128 weights: the others are skipped. Packing, unpacking and quantising move bytes.
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
from gpu_ops.reference import ternary as reference
from gpu_ops.reference.precision import Precision
from gpu_ops.reference.ternary import ternary_matmul as reference_matmul
from gpu_ops.reference.ternary import ternary_product as reference_product
from gpu_ops.reference.ternary_formats import FORMATS
from perf.case import DTYPES, Call, Case, Config, Inputs, maker, normal, torch_view

WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336))  # Llama-3-8B: attention output, MLP up, MLP down
BITNET = ((2560, 2560), (6912, 2560), (2560, 6912))  # BitNet-2B, likewise
LARGE = ((8192, 8192), (28672, 8192))  # Llama-3-70B, on GPUs: dense for the peers the second takes a gigabyte
EMULATED = (
    (1024, 2048),
)  # enough for every SM of the card that the emulator stands for, and for its patience
SAMPLED = (16, 256)
SMALL = (3, 64, 128)
SMALL_PACKED = (256, 256)  # which every format takes


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
    if not config.quick and config.device != "emulator" and "bfloat16" in (config.dtypes or ("bfloat16",)):
        more = BITNET + (LARGE if config.device == "cuda" else ())
        ends = sorted({min(tokens), max(tokens)})
        found += [case(m, n, k, "bfloat16", "int8") for n, k in more for m in ends]
    trained = 64 if config.device == "emulator" else max(tokens)
    for dtype in config.dtypes or (("bfloat16",) if config.quick else ("float32", "bfloat16")):
        found += [gradients(trained, n, k, dtype) for n, k in weights]
    if "float32" in (config.dtypes or ("float32",)):
        found += [product(m, *weights[0], share) for m in tokens for share in (100, 2)]
    if config.quick and config.device == "cpu":
        return found
    n, k = EMULATED[0] if config.quick else weights[0]
    if "float32" in (config.dtypes or ("float32",)):
        formats = ("w2", "tq1_0") if config.quick else FORMATS
        found += [packing(n, k, name, which) for name in formats for which in ("pack", "unpack")]
    for dtype in config.dtypes or ("float32", "bfloat16"):
        found += [quantizing(n, k, dtype, method) for method in ("absmean", "percentile")]
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
        peers={"cublas": cublas_matmul},
        reference=against,
        bandwidth="read",
        sample=sample_part,
        dense_bytes=4.0 * n * k,
        note="naive: dense float32 weights; torch: dense weights in the case's dtype; cublas: float16 ones, by CuPy; "
        f"weights take {n * k / 2**22:.1f} MiB, {n * k * itemsize / 2**20:.1f} MiB dense",
    )


def gradients(m: int, n: int, k: int, dtype: str) -> Case:
    """The step back of training: dx and dw, whose error is taken on a smaller problem."""
    itemsize = DTYPES[dtype].itemsize

    def ours(x: Inputs, **how: str) -> Call:
        call = functools.partial(gpu_ops.ternary_matmul_backward, x["dy"], x["x"], x["w"], **how)
        if not isinstance(x["x"], np.ndarray):
            call()  # takes the weights to the GPU
        return call

    def against(x: Inputs, precision: Precision) -> Any:
        given = (on_host(x["dy"]), on_host(x["x"]), x["w"].trits(), x["w"].scale)
        return reference.ternary_matmul_backward(*given, precision=precision)

    return Case(
        op="ternary",
        name="matmul backward, int8 activations",
        shape=f"{m} x {k} x {n}",
        dtype=dtype,
        flops=4.0 * m * n * k,
        bytes=n * k * 4.25 + itemsize * float(m * (n + 2 * k)),
        make=maker(gradient_data, m, n, k, DTYPES[dtype]),
        make_small=maker(gradient_data, *SMALL, DTYPES[dtype]),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive_gradients,
        reference=against,
        backward=True,
        dense_bytes=8.0 * n * k,
        note="naive: dense float32 weights, and x as it is",
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


def packing(n: int, k: int, format: str, which: str) -> Case:
    """Trits to a format, or back: a byte of each trit, and the packed ones."""

    def ours(x: Inputs, **how: str) -> Call:
        if which == "pack":
            return functools.partial(gpu_ops.ternary_pack, x["trits"], format, **how)
        return functools.partial(gpu_ops.ternary_unpack, x["packed"], x["trits"].shape, format, **how)

    def by_numpy(x: Inputs) -> Any:
        if which == "pack":
            return reference.ternary_pack(on_host(x["trits"]), format)
        return reference.ternary_unpack(on_host(x["packed"]), x["trits"].shape, format)

    return Case(
        op="ternary",
        name=f"{which} {format}",
        shape=f"{n} x {k}",
        dtype="float32",
        flops=float(n * k),
        bytes=n * k * (1 + FORMATS[format].bits_per_weight / 8),
        make=maker(packing_data, n, k, format),
        make_small=maker(packing_data, *SMALL_PACKED, format),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=lambda x: functools.partial(by_numpy, x),
        reference=lambda x, precision: by_numpy(x),
        by_bytes=True,
        note="naive: NumPy on the host",
    )


def quantizing(n: int, k: int, dtype: str, method: Any) -> Case:
    """Weights to w2, a scale of the tensor; the scale is what is compared."""

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
        make=maker(weights_data, n, k, DTYPES[dtype]),
        make_small=maker(weights_data, *SMALL_PACKED, DTYPES[dtype]),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=lambda x: functools.partial(by_numpy, x),
        reference=by_numpy,
        by_bytes=True,
        note="bytes as if the weights were read once; naive: NumPy on the host, without packing",
    )


def packing_data(rng: np.random.Generator, n: int, k: int, format: str) -> Inputs:
    trits = rng.integers(-1, 2, (n, k), np.int8)
    return {"trits": trits, "packed": reference.ternary_pack(trits, format)}


def weights_data(rng: np.random.Generator, n: int, k: int, dtype: np.dtype[Any]) -> Inputs:
    return {"w": normal(rng, (n, k), dtype)}


def on_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


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
    """The last tokens and output features: every element is a sum of its own."""
    tokens, features = (slice(-count, None) for count in SAMPLED)
    return {"x": rows_of(x["x"], tokens), "w": rows_of(x["w"], features)}, result[tokens, features]


def rows_of(x: Any, part: slice) -> Any:
    if isinstance(x, gpu_ops.TernaryMatrix):
        return gpu_ops.TernaryMatrix.from_trits(x.trits()[part], x.scale)
    return x[part]


def naive(x: Inputs) -> Call:
    dtype, weights = x["x"].dtype, dense_like(x, np.float32).T
    return lambda: (x["x"].astype(np.float32, copy=False) @ weights).astype(dtype, copy=False)


def naive_gradients(x: Inputs) -> Call:
    dtype, weights = x["x"].dtype, dense_like(x, np.float32)

    def call() -> Any:
        dy, rows = (x[name].astype(np.float32, copy=False) for name in ("dy", "x"))
        return (dy @ weights).astype(dtype, copy=False), dy.T @ rows

    return call


def cublas_matmul(x: Inputs) -> Call:
    rows, weights = x["x"].astype(np.float16), dense_like(x, np.float16).T
    return lambda: rows @ weights


def dense_like(x: Inputs, dtype: Any) -> Any:
    """The weights dense, where the activations are."""
    weights = x["w"].dequantize(dtype)
    if isinstance(x["x"], np.ndarray):
        return weights
    import cupy

    return cupy.asarray(weights)


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
