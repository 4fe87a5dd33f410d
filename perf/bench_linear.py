"""The linear layer: forward, with a bias and a residual, with a packed weight, backward.

``python perf/bench_linear.py --device cpu --dtype float32 --seqlen 16 1024`` (seqlen: tokens, of 1024 to 4096)

With a packed weight the bytes are the packed ones, and naive and torch multiply with the unpacked matrix.
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import replace

import numpy as np

import gpu_ops
from gpu_ops.reference.gemm import linear as reference
from gpu_ops.reference.precision import Precision
from gpu_ops.reference.weights.packed import quantized_activations
from gpu_ops.reference.weights.packed_formats import FORMATS
from perf.build import backends, calls, made_by, normal, sample_rows, to_float32, torch_gradient, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

IN, OUT = 1024, 4096
SMALL = (37, 96, 80)
SMALL_PACKED = (5, 256, 80)  # fits every format
PACKED = {  # formats and activations; codes of nf4 and e4m3 are floats
    **dict.fromkeys(("q8_0", "q4_0", "q4_k", "iq4_nl"), ("int8", "native")),
    **dict.fromkeys(("nf4", "nf4_nested", "e4m3_g128"), ("native",)),
}

TOUR = (("forward", "float32"), ("forward", "bfloat16"))  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for tokens in config.seqlens or ((256,) if config.quick else (1, 16, 1024)):
            result += [forward(tokens, dtype), forward(tokens, dtype, addends=True)]
            result += [backward(tokens, dtype)] if tokens > 1 else []
    for dtype in config.dtypes or ("bfloat16",):
        for tokens in config.seqlens or ((16,) if config.quick else (1, 16, 512)):
            for name in ("q8_0", "q4_k") if config.quick else PACKED:
                modes = PACKED[name] if config.device == "cpu" else ("native",)
                result += [packed(tokens, dtype, name, mode) for mode in modes]
    return result


def forward(tokens: int, dtype: str, addends: bool = False) -> Case:
    names = ("x", "weight", *(("bias",) if addends else ()))
    keywords = ("residual",) if addends else ()

    def torch(x: Inputs) -> Call:
        from torch.nn.functional import linear

        arrays = unpacked(x)
        tensors = [torch_view(arrays[name]) for name in names]
        if not addends:
            return functools.partial(linear, *tensors)
        residual = torch_view(x["residual"])
        return lambda: linear(*tensors) + residual

    return Case(
        op="linear",
        name="forward, bias, residual" if addends else "forward",
        shape=f"{tokens} x {IN} -> {OUT}",
        dtype=dtype,
        flops=2.0 * tokens * IN * OUT,
        bytes=(IN * OUT + tokens * (IN + (2 if addends else 1) * OUT)) * DTYPES[dtype].itemsize,
        **made_by(data, (tokens, IN, OUT), SMALL, dtype, (*names, *keywords)),
        **calls(gpu_ops.linear, reference.linear, names, keywords),
        naive=lambda x: functools.partial(naive, **unpacked(x)),
        torch=torch,
        bandwidth="read",
        sample=functools.partial(sample_rows, 32, ("weight", "bias")),
    )


def packed(tokens: int, dtype: str, format: str, activations: str) -> Case:
    """Forward with a packed weight. The definition of int8 activations quantises x too."""
    fmt, dense = FORMATS[format].for_columns(IN), forward(tokens, dtype)

    def ours(x: Inputs, **how: str) -> Call:
        call = functools.partial(gpu_ops.linear, **x, activations=activations, **how)
        call()  # the first one repacks the blocks, of every copy of the inputs
        return call

    def definition(x: Inputs, precision: Precision) -> np.ndarray:
        rows, weight = x["x"], unpacked(x)["weight"]
        if activations == "int8":
            rounded, weight = quantized_activations(rows, fmt.block), x["weight"].dequantize()
            rows = rounded.astype(rows.dtype) if precision == "naive" else rounded
        return reference.linear(rows, weight, precision=precision)

    itemsize = DTYPES[dtype].itemsize
    return replace(
        dense,
        name=f"forward, {format}, {activations} activations",
        bytes=dense.bytes - IN * OUT * (itemsize - fmt.bits_per_weight / 8),
        dense_bytes=dense.bytes,
        **made_by(packed_data, (tokens, IN, OUT), SMALL_PACKED, dtype, format),
        **backends(ours),
        reference=definition,
        note="naive, torch: with the unpacked matrix",
    )


def backward(tokens: int, dtype: str) -> Case:
    from_torch = ("x", "weight")

    def torch(x: Inputs) -> Call:
        from torch.nn.functional import linear

        return torch_gradient(linear, x, from_torch)

    return replace(
        forward(tokens, dtype),
        name="backward",
        flops=4.0 * tokens * IN * OUT,
        bytes=(2.0 * IN * OUT + tokens * (2 * IN + OUT)) * DTYPES[dtype].itemsize,
        **made_by(data, (tokens, IN, OUT), SMALL, dtype, ("dy", *from_torch)),
        **calls(gpu_ops.linear_backward, reference.linear_backward, ("dy", *from_torch)),
        naive=lambda x: functools.partial(naive_backward, **x),
        torch=torch,
        sample=None,
        bandwidth="copy",
        backward=True,
        note="our dweight is float32, torch's has the weight's dtype",
    )


def data(
    rng: np.random.Generator, tokens: int, cols: int, rows: int, dtype: str, names: tuple[str, ...]
) -> Inputs:
    shapes = {"x": (tokens, cols), "weight": (rows, cols), "bias": (rows,)}
    shapes |= dict.fromkeys(("residual", "dy"), (tokens, rows))
    scale = {"weight": cols**-0.5}
    return {name: normal(rng, shapes[name], DTYPES[dtype], scale.get(name, 1.0)) for name in names}


def packed_data(
    rng: np.random.Generator, tokens: int, cols: int, rows: int, dtype: str, format: str
) -> Inputs:
    arrays = data(rng, tokens, cols, rows, dtype, ("x", "weight"))
    return arrays | {"weight": gpu_ops.quantize(arrays["weight"], format)}


def unpacked(x: Inputs) -> Inputs:
    """Inputs of a dense product: the weights in the dtype of x."""
    weight = x["weight"]
    if not isinstance(weight, gpu_ops.PackedMatrix):
        return x
    return x | {"weight": np.asarray(weight.dequantize(x["x"].dtype), like=x["x"])}


def naive(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, residual: np.ndarray | None = None
) -> np.ndarray:
    x32, w = to_float32(x, weight)
    y = x32 @ w.T
    for addend in (bias, residual):
        if addend is not None:
            y += addend.astype(np.float32, copy=False)
    return y.astype(x.dtype, copy=False)


def naive_backward(dy: np.ndarray, x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gradient, x32, w = to_float32(dy, x, weight)
    return (gradient @ w).astype(x.dtype, copy=False), gradient.T @ x32


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("linear")
