"""Matrix products by cuBLAS, through CuPy, where it is faster than kernels of mma.sync.

``takes`` decides, by the first rule that applies:

1. no GPU (the emulator): ours, there is no other.
2. float32: ours. 3 x TF32 on tensor cores is several times as fast as cuBLAS' float32 multiply-adds.
3. sm_80 to sm_89 and sm_120: ours. mma.sync is the way to their tensor cores, cuBLAS' too, and the epilogues of ours
   save a pass over gate, up and dh.
4. fewer than 128 rows: ours. Reading the weights is what takes time, and that we do once.
5. arrays that are not aligned to 16 bytes: ours. cuBLAS would fall back to slow kernels as well.
6. sm_90, sm_100: cuBLAS. wgmma and tcgen05 reach half as much again, and twice, what mma.sync does; the passes of
   the activation kernel over a chunk that was just written take less.

The rules are from data sheets and published measurements, not measured by this project.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from gpu_ops.kernels.lower import swiglu
from gpu_ops.kernels.lower.arguments import address
from gpu_ops.kernels.lower.gemm_args import Operand, Work, stride

__all__ = ["run", "takes"]

Array = Any

_WITH_OTHER_TENSOR_CORES = ("sm_90", "sm_100", "sm_103")
_MIN_ROWS = 128
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0}  # cudaDataType
_DEFAULT_ALGORITHM = -1


def takes(device: Any, work: Work) -> bool:
    """Whether cuBLAS computes this."""
    return (
        bool(device.card)
        and work.dtype.itemsize == 2
        and device.arch in _WITH_OTHER_TENSOR_CORES
        and min(work.out[0].shape) >= _MIN_ROWS
        and work.is_aligned
    )


def run(device: Any, work: Work) -> None:
    """The same results as ``cuda/gemm_sm80.cu``; sums are float32. A ``total`` is added to where it lies."""
    a, b, out, total = work.a, work.b, work.out, work.total
    if work.epilogue == "kGate":
        up = device.empty(out[0].shape, work.dtype, "up")
        for w, target in zip(b, (out[0], up), strict=True):
            _product(device, a[0], w, target)
        swiglu.forward(device, "raw", out[0], up, out[0], activation=work.activation)
    elif work.epilogue == "kGateBackward":
        gate, up, h = out
        dh = device.empty(h.shape, work.dtype, "dh")
        _product(device, a[0], b[0], dh)
        swiglu.forward(device, "raw", gate, up, h, activation=work.activation)
        swiglu.backward(device, "raw", dh, gate, up, gate, up, activation=work.activation)
    elif work.pairs == "kTwo":
        for x, w, target in zip(a, b, out, strict=True):
            _product(device, x, w, target)
    else:
        sums = total
        if sums is None:
            direct = len(a) == 1 or out[0].dtype == np.float32
            sums = out[0] if direct else device.empty(out[0].shape, np.float32, "sums")
        for i, (x, w) in enumerate(zip(a, b, strict=True)):
            _product(device, x, w, sums, add=i > 0 or total is not None)
        if sums is not out[0]:
            from gpu_ops.kernels.lower.gemm import add_up

            add_up(device, sums[None], out[0])


def _product(device: Any, a: Operand, b: Operand, c: Array, *, add: bool = False) -> None:
    """``c = a b^T``, or ``c += a b^T``.

    cuBLAS' matrices are column-major, which makes c ``c^T = b a^T``: b comes first, and an operand along k is the one
    that is transposed if it is b, and is not if it is a.
    """
    m, n = c.shape
    launches = getattr(device, "launches", None)
    if launches is not None:  # of explain(), which runs nothing
        launches.append(f"cublasGemmEx: {m} x {n} x {a.k}, {'NT'[a.across]}{'TN'[b.across]}")
        return
    import cupy

    cublas: Any = importlib.import_module("cupy_backends.cuda.libs.cublas")
    transposed = (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
    one, beta = np.ones(1, np.float32), np.full(1, float(add), np.float32)
    cublas.gemmEx(
        cupy.cuda.device.get_cublas_handle(), transposed[not b.across], transposed[a.across], n, m, a.k,
        one.ctypes.data, address(b.array), _TYPES[b.array.dtype.name], stride(b.array),
        address(a.array), _TYPES[a.array.dtype.name], stride(a.array),
        beta.ctypes.data, address(c), _TYPES[c.dtype.name], stride(c),
        cublas.CUBLAS_COMPUTE_32F, _DEFAULT_ALGORITHM,
    )  # fmt: skip
