"""Matrix products by cuBLAS, through CuPy, where it is faster than kernels of mma.sync.

``takes`` decides, by the first rule that applies:

1. the emulator: ours, there is no other.
2. a card and dtype without a row in ``_LIBRARY``: ours.
   float32: 3 x TF32 on tensor cores is several times as fast as cuBLAS' float32 multiply-adds.
   sm_80 to sm_89 and sm_120: cuBLAS reaches their tensor cores by mma.sync as well, and our epilogues save a pass
   over gate, up and dh.
3. fewer than 128 rows or columns: ours. Reading the weights takes most of the time, and we read them once.
4. arrays that are not aligned to 16 bytes: ours. cuBLAS would fall back to slow kernels as well.
5. cuBLAS. wgmma (sm_90) reaches one and a half times, tcgen05 (sm_100) twice the throughput of mma.sync; passing the
   activation kernel over a chunk that was just written costs less.

The rules are from data sheets and published measurements, not measured by this project.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.lower import swiglu
from gpu_ops.kernels.lower.arguments import same_memory
from gpu_ops.kernels.lower.gemm_args import Gemm, Operand, stride
from gpu_ops.kernels.lower.gemm_sum import add_up
from gpu_ops.kernels.program import Builder, Tensor

__all__ = ["GemmEx", "run", "takes"]

_HALF = {"float16": "cublas", "bfloat16": "cublas"}
# The library that multiplies, by row of gpu_ops.presets and dtype; where there is none, our kernels do.
_LIBRARY = {
    # wgmma
    "H100 SXM": _HALF,
    "H100 PCIe": _HALF,
    "H200": _HALF,
    "sm_90": _HALF,
    # tcgen05
    "B200": _HALF,
    "sm_100": _HALF,
}
_MIN_ROWS = 128
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0}  # cudaDataType
_DEFAULT_ALGORITHM = -1
_ZERO, _ONE = np.zeros(1, np.float32), np.ones(1, np.float32)  # in host memory, for alpha and beta


def takes(on: Builder, g: Gemm) -> bool:
    """Whether cuBLAS computes this."""
    library = _LIBRARY.get(on.limits.preset, {}) if on.card else {}
    return g.dtype.name in library and min(g.out[0].shape) >= _MIN_ROWS and g.is_aligned


def run(on: Builder, g: Gemm) -> None:
    """The same results as ``cuda/gemm_sm80.cu``; sums are float32. A ``total`` is added to in place."""
    a, b, out, total = g.a, g.b, g.out, g.total
    if g.epilogue == "kGate":
        up = on.scratch(out[0].shape, g.dtype, "up of cuBLAS")
        for w, target in zip(b, (out[0], up), strict=True):
            _product(on, a[0], w, target)
        swiglu.launch_raw(on, "forward", g.activation, (out[0], up, out[0]))
    elif g.epilogue == "kGateBackward":
        gate, up, h = out
        dh = on.scratch(h.shape, g.dtype, "dh of cuBLAS")
        _product(on, a[0], b[0], dh)
        swiglu.launch_raw(on, "forward", g.activation, (gate, up, h))
        swiglu.launch_raw(on, "backward", g.activation, (dh, gate, up, gate, up))
    elif g.pairs == "kTwo":
        for x, w, target in zip(a, b, out, strict=True):
            _product(on, x, w, target)
    else:
        sums = total
        if sums is None:
            direct = g.epilogue != "kLinear" and (len(a) == 1 or out[0].dtype == np.float32)
            sums = out[0] if direct else on.scratch(out[0].shape, np.float32, "sums of cuBLAS")
        for i, (x, w) in enumerate(zip(a, b, strict=True)):
            _product(on, x, w, sums, add=i > 0 or total is not None)
        if not same_memory(sums, out[0]):
            add_up(on, sums[None], out[0], residual=g.residual, bias=g.bias)


def _product(on: Builder, a: Operand, b: Operand, c: Tensor, *, add: bool = False) -> None:
    """``c = a b^T``, or ``c += a b^T``."""
    m, n = c.shape
    call = GemmEx(
        size=(n, m, a.k),
        transposed=(not b.across, a.across),
        types=(_TYPES[b.array.dtype.name], _TYPES[a.array.dtype.name], _TYPES[c.dtype.name]),
        leading=(stride(b.array), stride(a.array), stride(c)),
        add=add,
    )
    layout = f"{'NT'[a.across]}{'TN'[b.across]}"
    on.library(call, (b.array, a.array, c), f"cublasGemmEx: {m} x {n} x {a.k}, {layout}")


@dataclass(frozen=True)
class GemmEx:
    """cublasGemmEx of three column-major matrices. Called with their arrays.

    cuBLAS reads our row-major matrices as their transposes and computes ``c^T = b a^T``: b comes first, and an
    operand along k is transposed if it is b, not if it is a.
    """

    size: tuple[int, int, int]
    transposed: tuple[bool, bool]
    types: tuple[int, int, int]
    leading: tuple[int, int, int]
    add: bool

    def __call__(self, first: Any, second: Any, out: Any) -> None:
        import cupy

        cublas: Any = importlib.import_module("cupy_backends.cuda.libs.cublas")
        operations = (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
        types, leading = self.types, self.leading
        cublas.gemmEx(
            cupy.cuda.device.get_cublas_handle(),
            *(operations[t] for t in self.transposed),
            *self.size,
            _ONE.ctypes.data,
            *(first.data.ptr, types[0], leading[0]),
            *(second.data.ptr, types[1], leading[1]),
            (_ONE if self.add else _ZERO).ctypes.data,
            *(out.data.ptr, types[2], leading[2]),
            cublas.CUBLAS_COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )
