"""Launch of sampling on each backend: one block per row on GPUs, runs of rows on the CPU, no workspace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common import arguments
from gpu_ops.kernels.common.arguments import DTYPES, as_line, as_rows, row_stride, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import Builder, Dynamic, Spec, Tensor, lowers

__all__ = ["EXP2", "OPTIONS", "variants"]

_THREADS, _TWIN_THREADS = 512, 256
# In the order of the kernels' arguments.
OPTIONS: dict[str, Any] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "presence_penalty": np.float32,
    "seed": np.uint64,
    "step": np.uint64,
}
# exp2 on [-1/2, 1/2], the highest power first; those of float32 are in sample.cu as well.
EXP2 = {
    "float32": (
        0.00015461444698564868, 0.001340042817761575, 0.009618056678524655, 0.05550327226670302,
        0.24022650922288757, 0.6931472067028326, 1.0,
    ),
    "float64": (
        4.45562673806549e-10, 7.074192559576437e-09, 1.0178058437521037e-07, 1.321543255347277e-06,
        1.5252733838008908e-05, 0.00015403530463664982, 0.001333355814641074, 0.00961812910758734,
        0.055504108664821604, 0.24022650695910158, 0.6931471805599453, 1.0,
    ),
}  # fmt: skip


def _bits(vocab: int) -> int:
    """Bits of the weight of the most likely token, so that the weights of a row sum to less than 2**63."""
    return 63 - vocab.bit_length()


@lowers("sample", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.sampling.cpu import sample

    rows, vocab = rows_of(spec, "logits").shape
    number = "float64" if spec.tensor("logits").dtype == np.float64 else "float32"
    exp2 = np.array(EXP2[number], number)
    names = ("bias", "counts")

    def run(views: Mapping[str, Any]) -> None:
        tokens = as_line(views["tokens"])
        if not len(tokens):
            return
        options = [np.asarray(views[name]).astype(dtype, copy=False) for name, dtype in OPTIONS.items()]
        by_token = [
            None if views.get(name) is None else as_rows(np.atleast_2d(views[name])) for name in names
        ]
        logprob = as_line(views["logprob"]) if "logprob" in views else None
        row_seeds = spec.get("seed") is not None
        sample.sample(
            as_rows(views["logits"]), by_token, tokens, logprob, options, exp2, _bits(vocab), row_seeds
        )

    builder.call(run, sample.config(rows, vocab))


@lowers("sample", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    x, tokens, logprob = rows_of(spec, "logits"), spec.tensor("tokens"), spec.get("logprob")
    if not tokens.size:
        return
    null = np.uint64(0)
    bias, counts = _by_token(spec, "bias"), _by_token(spec, "counts")
    arrays = (null if a is None else a for a in (bias, counts, tokens.ravel(), logprob))
    pairs = ((null, value) if array is None else (array, value) for array, value in _options(spec))
    rows, cols = x.shape
    aligned = arguments.alignment((x,), rows) == 16 and cols % (16 // x.itemsize) == 0
    access = 16 // x.itemsize if aligned else 1
    kernel = _kernel(x.dtype.name, access, bias is None and counts is None)
    strides = (np.int64(0) if a is None or len(a) == 1 else row_stride(a) for a in (bias, counts))
    sizes = np.int32(_bits(cols)), np.int64(cols), row_stride(x), *strides
    options = itertools.chain.from_iterable(pairs)
    builder.launch(kernel, (rows, 1, 1), (_THREADS, 1, 1), (x, *arrays, *options, *sizes))


@lowers("sample", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.sampling.numba_cuda import sample as twins

    x, tokens, logprob = rows_of(spec, "logits"), spec.tensor("tokens"), spec.get("logprob")
    if not tokens.size:
        return
    number = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    stand_in = tokens.ravel()[:0]  # stands in for absent arrays
    bias, counts = _by_token(spec, "bias"), _by_token(spec, "counts")
    stand_ins = stand_in.view(number).reshape(1, 0), stand_in.reshape(1, 0)
    by_token = (s if a is None else a for a, s in zip((bias, counts), stand_ins, strict=True))
    arrays, values = [], []
    for (array, value), dtype in zip(_options(spec), OPTIONS.values(), strict=True):
        arrays.append(stand_in.view(dtype) if array is None else array)
        values.append(value)
    results = tokens.ravel(), stand_in.view(number) if logprob is None else logprob.ravel()
    args = (x, *by_token, *results, *arrays, *values, np.int32(_bits(x.shape[1])))
    builder.launch(twins.kernel(x.dtype.name, EXP2[number.name]), (len(x), 1, 1), (_TWIN_THREADS, 1, 1), args)


def _by_token(spec: Spec, name: str) -> Tensor | None:
    """Bias or counts as (rows, vocab), or (1, vocab) for all rows."""
    x = spec.get(name)
    if x is None:
        return None
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _options(spec: Spec) -> Iterator[tuple[Tensor | None, Any]]:
    """Options: each an array or None, and the number of each call, which no kernel reads if there is an array."""
    for name, dtype in OPTIONS.items():
        array = spec.get(name)
        if array is None:
            yield None, Dynamic(name, np.dtype(dtype))
        else:
            yield array.ravel().view(dtype), dtype(0)


def _kernel(dtype: str, access: int, plain: bool) -> CudaKernel:
    defines = (("DTYPE", DTYPES[dtype]), ("ACCESS", access), ("PLAIN", int(plain)))
    return CudaKernel("sampling/sample", "sample", defines)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    for dtype, aligned, plain in itertools.product(DTYPES, (True, False), (True, False)):
        yield Variant(_kernel(dtype, (4 if dtype == "float32" else 8) if aligned else 1, plain), _THREADS)
