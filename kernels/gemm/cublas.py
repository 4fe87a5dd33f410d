"""Matrix products by cuBLAS, through CuPy, where it is faster than kernels of mma.sync.

``takes`` decides, by the first rule that applies:

1. the emulator: ours, as there is no other.
2. a card and dtype without a row in ``_LIBRARY``: ours.
   16 bits on sm_80 to sm_89 and sm_120: cuBLAS reaches their tensor cores by mma.sync as well, and our epilogues save
   a pass over gate, up and dh.
   float32 where 3 x TF32 on tensor cores, our way, is faster than the multiply-adds of cuBLAS. On GeForce and L40S it
   is not: a third of their TF32 rate is less than their float32 rate.
3. fewer than 128 rows or columns: ours. Reading the weights takes most of the time, and we read them once.
4. arrays that are not aligned to 16 bytes: ours. cuBLAS would fall back to slow kernels as well.
5. cuBLAS. wgmma (sm_90) reaches one and a half times, tcgen05 (sm_100) twice the throughput of mma.sync; passing the
   activation kernel over a chunk that was just written costs less.

``explain`` tells the reason. The rules are from data sheets and published measurements, not measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import same_memory
from gpu_ops.kernels.gemm import swiglu
from gpu_ops.kernels.gemm.args import Gemm, Operand, stride
from gpu_ops.kernels.gemm.sum import add_up
from gpu_ops.kernels.program import Builder, Tensor

__all__ = ["GemmEx", "run", "takes"]


def _half(by: str, times: str) -> dict[str, str]:
    return dict.fromkeys(("float16", "bfloat16"), f"by {by}, at {times} the throughput of mma.sync")


def _single(multiply_adds: float, tf32: float) -> dict[str, str]:
    """Rates in TFLOPS, as in the presets."""
    ours = f"{tf32 / 3:.3g} TFLOPS by 3 x TF32"
    return {"float32": f"by float32 multiply-adds, {multiply_adds:.3g} TFLOPS against {ours}"}


_WGMMA, _TCGEN05 = _half("wgmma", "1.5 times"), _half("tcgen05", "twice")
# Cases for the library, by row of gpu_ops.presets and dtype, with the reason; otherwise our kernels multiply.
_LIBRARY = {
    "H100 SXM": _WGMMA,
    "H100 PCIe": _WGMMA,
    "H200": _WGMMA,
    "sm_90": _WGMMA,
    "B200": _TCGEN05,
    "sm_100": _TCGEN05,
    "RTX 3090 Ti": _single(40, 40),
    "sm_86": _single(12.7, 12.7),
    "RTX 4090": _single(82.6, 82.6),
    "L40S": _single(91.6, 183),
    "sm_89": _single(15.1, 15.1),
    "RTX 5080": _single(56.3, 56.3),
    "RTX 5090": _single(104.8, 104.8),
    "sm_120": _single(19.2, 19.2),
}
_MIN_ROWS = 128
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0}  # cudaDataType
_DEFAULT_ALGORITHM = -1
_ZERO, _ONE = np.zeros(1, np.float32), np.ones(1, np.float32)  # in host memory, for alpha and beta


def takes(builder: Builder, g: Gemm) -> bool:
    """Whether cuBLAS computes this product."""
    library = _LIBRARY.get(builder.limits.preset, {}) if builder.card else {}
    return g.dtype.name in library and min(g.out[0].shape) >= _MIN_ROWS and g.is_aligned


def run(builder: Builder, g: Gemm) -> None:
    """Compute the results of ``gemm_sm80.cu`` with float32 sums. A ``total`` is added to in place."""
    a, b, out, total = g.a, g.b, g.out, g.total
    builder.note(f"cuBLAS multiplies {_LIBRARY[builder.limits.preset][g.dtype.name]}")
    if g.epilogue in ("kGate", "kGateKeep"):
        h = out[0]
        halves = out[1:] or (h, builder.scratch(h.shape, g.dtype, "up of cuBLAS"))
        for w, target in zip(b, halves, strict=True):
            _product(builder, a[0], w, target)
        swiglu.launch_raw(builder, "forward", g.activation, (*halves, h))
    elif g.epilogue == "kGateBackward":
        dgate, dup, h = out
        gate, up = a[1].array, b[1].array
        dh = builder.scratch(h.shape, g.dtype, "dh of cuBLAS")
        _product(builder, a[0], b[0], dh)
        swiglu.launch_raw(builder, "forward", g.activation, (gate, up, h))
        swiglu.launch_raw(builder, "backward", g.activation, (dh, gate, up, dgate, dup))
    elif g.pairs == "kTwo":
        for x, w, target in zip(a, b, out, strict=True):
            _product(builder, x, w, target)
    else:
        sums = total
        if sums is None:
            in_place = out[0].dtype == np.float32 and g.residual is None  # which may be out itself
            direct = in_place or (g.epilogue != "kLinear" and len(a) == 1)
            sums = out[0] if direct else builder.scratch(out[0].shape, np.float32, "sums of cuBLAS")
        for i, (x, w) in enumerate(zip(a, b, strict=True)):
            _product(builder, x, w, sums, add=i > 0 or total is not None)
        if g.epilogue == "kLinear" or not same_memory(sums, out[0]):
            add_up(builder, sums[None], out[0], residual=g.residual, bias=g.bias)


def _product(builder: Builder, a: Operand, b: Operand, c: Tensor, *, add: bool = False) -> None:
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
    builder.library(call, (b.array, a.array, c), f"cublasGemmEx: {m} x {n} x {a.k}, {layout}")


@dataclass(frozen=True)
class GemmEx:
    """Call of cublasGemmEx with three column-major matrices.

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

        # Through this attribute CuPy finds the library of a wheel; a plain import does not.
        cublas: Any = cupy.cuda.cublas
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
