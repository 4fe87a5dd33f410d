"""Launch of the kernels that merge two results of attention: axes of the rows, threads per row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, heads_alignment, power_of_two, strides_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["variants"]

_NAMES = ("out1", "lse1", "out2", "lse2", "out", "lse")
_BLOCK, _TWIN_BLOCK, _TWIN_LANES = 256, 128, 16  # threads of a block; lanes of a row
_LSE = {"float32": "f32", "float64": "f64"}

# MergeShape of merge.cu
_SHAPE = np.dtype(
    [("rows", "i8"), ("middle", "i8"), ("inner", "i8"), ("cols", "i8"), ("strides", "i8", (6, 3))]
)


@lowers("attention_merge", "cpu")
def merge_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.attention.cpu import merge as kernels

    layout, shape = spec["layout"], _by_rows(spec.tensor("out"), "out", spec["layout"]).shape

    def run(views: Mapping[str, Any]) -> None:
        kernels.merge(*(_by_rows(views[name], name, layout) for name in _NAMES))

    builder.call(run, kernels.config(math.prod(shape[:3]), shape[3]))


@lowers("attention_merge", "raw")
def merge_raw(spec: Spec, builder: Builder) -> None:
    arrays = _arrays(spec)
    (outer, middle, inner, cols), dtype = arrays["out"].shape, arrays["out"].dtype
    results = [x for name, x in arrays.items() if name.startswith("out")]
    vec = 16 // dtype.itemsize
    access = vec if heads_alignment(results) == 16 and cols % vec == 0 else 1
    lanes = min(power_of_two(-(-cols // access)), 32)  # a row is part of a warp
    shape = np.zeros((), _SHAPE)
    shape["rows"] = outer * middle * inner
    shape["middle"], shape["inner"], shape["cols"] = middle, inner, cols
    shape["strides"] = [strides_of(x)[:3] for x in arrays.values()]
    kernel = _kernel(dtype.name, arrays["lse1"].dtype.name, arrays["lse2"].dtype.name, access)
    grid = (-(-int(shape["rows"]) // (_BLOCK // lanes)) if cols else 0, 1, 1)
    builder.launch(kernel, grid, (lanes, _BLOCK // lanes, 1), (*arrays.values(), shape[()]))


@lowers("attention_merge", "numba")
def merge_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.attention.numba_cuda.merge import merge_kernel

    arrays = _arrays(spec)
    out = arrays["out"]
    kernel = merge_kernel(out.dtype.name, *(arrays[name].dtype.name for name in ("lse1", "lse2", "lse")))
    grid = (-(-math.prod(out.shape[:3]) // (_TWIN_BLOCK // _TWIN_LANES)) if out.size else 0, 1, 1)
    builder.launch(kernel, grid, (_TWIN_BLOCK, 1, 1), tuple(arrays.values()))


def _arrays(spec: Spec) -> dict[str, Tensor]:
    return {name: _by_rows(spec.tensor(name), name, spec["layout"]) for name in _NAMES}


def _by_rows(x: Any, name: str, layout: str) -> Any:
    """View (outer, middle, inner, cols), for lse (outer, middle, inner), in the order of out's axes."""
    if layout == "thd":
        x = x[None]
    return x.swapaxes(1, 2) if name.startswith("lse") and layout != "bhsd" else x


def _kernel(dtype: str, lse1: str, lse2: str, access: int) -> CudaKernel:
    defines = (("DTYPE", DTYPES[dtype]), ("LSE1", _LSE[lse1]), ("LSE2", _LSE[lse2]), ("ACCESS", access))
    return CudaKernel("attention/merge", "attention_merge", defines)


def variants(arch: str) -> Iterator[Variant]:
    """The CUDA C++ kernels of aligned arrays whose two lse have one dtype."""
    for dtype, lse in itertools.product(DTYPES, _LSE):
        yield Variant(_kernel(dtype, lse, lse, 4 if dtype == "float32" else 8), _BLOCK)
