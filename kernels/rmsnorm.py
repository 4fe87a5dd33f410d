"""RMSNorm on the GPU: which kernel, how many threads, and the launch. ``select_config`` needs no GPU.

Arrays are (rows, cols) with unit stride on the last axis; weight (cols,) and rstd (rows,) are contiguous.
The CUDA C++ kernels are ``cuda/rmsnorm.cu``, ``cuda/rmsnorm_backward.cu`` and ``cuda/rmsnorm_dweight.cu``, their
readable twins ``numba_cuda/rmsnorm.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpu_ops.kernels.cubin import smem_per_block_optin
from gpu_ops.kernels.jit import CudaKernel, NumbaKernel, Variant

__all__ = ["RowConfig", "backward", "forward", "select_config", "variants"]

Pass = Literal["forward", "backward"]
Keep = Literal["Registers", "Shared", "Global"]

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}

_WARP = 32
_BLOCK = 128  # threads of a block that has several rows
_SCRATCH = 256  # bytes of static shared memory: reduce.cuh
_RESERVED = 1024  # bytes of shared memory that the driver keeps per block
_MAX_GRID = 2**31 - 1

# Vectors of a row up to | threads per row, None: as many warps as it takes | vectors per thread, in registers.
# A vector is 16 bytes where cols allow. Two per thread are two loads in flight; a thread of a short row has two
# rather than one so that a warp has more rows, and a sum fewer shuffles.
_FORWARD = (
    (8, 4, 2),  # head_dim 64 in 16 bits: 8 rows per warp
    (16, 8, 2),  # head_dim 128, the commonest QK norm
    (32, 16, 2),
    (64, 32, 2),  # 512 columns: the last with its weights in registers
    (128, 32, 4),  # 1024 columns: a whole warp, and still no barrier
    (256, None, 2),  # more bytes in a warp's hands would leave it too few blocks: 128 threads
    (
        1024,
        None,
        4,
    ),  # 8192 columns: at most 256 threads, so that 5 blocks (48 registers) hide each other's barriers
)  # then shared memory, then global memory read twice
_BACKWARD = (
    (8, 4, 2),
    (16, 8, 2),
    (32, 16, 2),
    (64, 32, 2),
    (512, None, 2),  # x and dy of 4096 columns, 16 registers: 5 blocks of at most 256 threads
    # 32 registers: threads as below. Above 2304 vectors, 9216 columns of float32, one block of 1024: half of an SM's
    # 2048, but x and dy of two such rows would take all its registers.
    (4096, None, 4),
)  # then global memory read twice

_TABLES: dict[Pass, tuple[tuple[int, int | None, int], ...]] = {"forward": _FORWARD, "backward": _BACKWARD}

# Warps that fit on an SM in the backward by its registers, by vectors per thread: 48 and 56 registers.
_BACKWARD_WARPS = {2: 40, 4: 36}

# Roundings that a sum in dweight may suffer: 60 * 2^-24 of sum |dy n| is 3.6e-6.
_MAX_ROUNDINGS = 56


@dataclass(frozen=True)
class RowConfig:
    """How rows are laid out on threads, and what a block keeps where."""

    keep: Keep
    vec: int  # elements that a thread owns side by side
    access: int  # elements per memory access: vec, or 1 where an array is not aligned
    vecs: int  # vectors per thread in registers, else 0
    threads_per_row: int
    rows_per_block: int
    grid: int
    shared_bytes: int  # dynamic

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block


def select_config(
    which: Pass, rows: int, cols: int, itemsize: int, *, alignment: int, sms: int, smem_per_block_optin: int
) -> RowConfig:
    """The kernel for a problem.

    ``alignment``: bytes that divide every address and row stride. It decides how vectors are fetched, never who
    owns them, so that the same numbers give the same bits wherever they lie.
    """
    vec = 16 // itemsize if cols * itemsize % 16 == 0 else 1
    access = vec if alignment % (vec * itemsize) == 0 else 1
    n_vecs = cols // vec

    def fit(shared: int) -> int:
        """Blocks that an SM's shared memory has room for: it is given out in units of 128 bytes."""
        return (smem_per_block_optin + _RESERVED) // _round_up(shared + _SCRATCH + _RESERVED, 128)

    for limit, threads_per_row, vecs in _TABLES[which]:
        if n_vecs > limit:
            continue
        threads = threads_per_row or _round_up(-(-n_vecs // vecs), _WARP)
        rows_per_block = _BLOCK // threads if threads_per_row else 1
        shared = 0 if which == "forward" else _sums_bytes(n_vecs, vec, vecs, threads, rows_per_block)
        if shared + _SCRATCH > smem_per_block_optin:
            break
        if which == "backward":
            by_registers = _BACKWARD_WARPS[vecs] * _WARP // (threads * rows_per_block)
            blocks = min(by_registers, fit(shared))
            if vecs == 4:  # no more blocks fit, but more threads may: 288, 384, 576 rather than 256, 320, 512
                threads = min(1024, _BACKWARD_WARPS[vecs] // blocks * _WARP)
            resident = sms * blocks
        else:
            # Where the weights stay in registers a block goes through many rows; elsewhere it has one.
            resident = sms * 10 if rows_per_block > 1 and vecs == 2 else _MAX_GRID
        grid = _grid(which, rows, rows_per_block, resident)
        return RowConfig("Registers", vec, access, vecs, threads, rows_per_block, grid, shared)

    shared = n_vecs * max(4, vec * itemsize)
    if which == "forward" and shared + _SCRATCH <= smem_per_block_optin:
        # As many threads as 56 registers each allow, in as many blocks as their rows fit, at most three.
        blocks = min(3, fit(shared))
        threads = {1: 1024, 2: 576, 3: 384}[blocks]
        grid = _grid(which, rows, 1, _MAX_GRID)
        return RowConfig("Shared", vec, access, 0, threads, 1, grid, shared)

    # One block per SM in the backward: what it adds to in global memory should stay in L2.
    threads, resident = (512, _MAX_GRID) if which == "forward" else (1024, sms)
    return RowConfig("Global", vec, access, 0, threads, 1, _grid(which, rows, 1, resident), 0)


def _sums_bytes(n_vecs: int, vec: int, vecs: int, threads: int, rows_per_block: int) -> int:
    """The sums of dweight of a block's columns, laid out as ``rmsnorm_backward.cu`` says."""
    wave = 128 // min(16, 4 * vec)
    stride = threads * rows_per_block + threads % wave
    slots = n_vecs if rows_per_block == 1 else vecs * stride
    return 4 * vec * _round_up(slots, 8)


def _grid(which: Pass, rows: int, rows_per_block: int, resident: int) -> int:
    """Blocks: those that run at a time, or, in the backward, whole waves of them until the sums are short enough."""
    tiles = -(-rows // rows_per_block)
    waves = 1
    if which == "backward":
        waves = -(-tiles // ((_MAX_ROUNDINGS - rows_per_block) * resident))
    return min(tiles, waves * resident)


def forward(
    device: Any,
    backend: str,
    x: Any,
    weight: Any,
    residual: Any | None,
    y: Any,
    s: Any | None,
    rstd: Any,
    *,
    eps: float,
    weight_offset: float,
    casting: str,
) -> None:
    """Fills ``y``, ``rstd`` and, with ``residual``, ``s = x + residual``. ``y`` may be ``x``."""
    rows, cols = x.shape
    if rows == 0:
        return
    has_residual = residual is not None
    if not has_residual:
        residual, s = x, y  # stand-ins: the kernel without residual touches neither
    arrays = (x, weight, residual, y, s, rstd)
    llama = np.int32(casting == "llama")
    if backend == "numba":
        kernel = _twin("forward", x.dtype.name, has_residual)
        args = (*arrays, np.float64(eps), np.float64(weight_offset), llama)
        device.launch(kernel, (min(rows, _MAX_GRID), 1, 1), (_TWIN_THREADS, 1, 1), args)
        return
    config = _configure("forward", device, x, weight, residual, y, s)
    strides = map(_stride, (x, residual, y, s))
    # At least the smallest float32: 1 / sqrt(0) would make NaN of a row of zeros.
    numbers = (_float32(max(eps, 2.0**-149)), _float32(1 / cols), _float32(weight_offset), llama)
    args = (*arrays, np.int64(rows), np.int32(cols), *strides, *numbers)
    _launch(device, _kernel("forward", config, x.dtype.name, has_residual), config, args)


def backward(
    device: Any,
    backend: str,
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    dresidual: Any | None,
    dx: Any,
    dweight: Any,
    *,
    weight_offset: float,
    casting: str,
) -> None:
    """Fills ``dx``, which may be ``dy``, and ``dweight``; with no rows nothing runs, and the caller fills it."""
    rows, cols = x.shape
    if rows == 0:
        return
    has_dresidual = dresidual is not None
    if not has_dresidual:
        dresidual = dy  # a stand-in
    llama = np.int32(casting == "llama")
    if backend == "numba":
        grid = min(rows, 2 * device.sms)
        partial = device.empty((grid, cols), np.float64)
        kernel = _twin("backward", x.dtype.name, has_dresidual)
        args = (dy, x, weight, rstd, dresidual, dx, partial, np.float64(weight_offset), llama)
        device.launch(kernel, (grid, 1, 1), (_TWIN_THREADS, 1, 1), args)
        reduce = _twin("dweight", x.dtype.name, False)
        device.launch(reduce, (-(-cols // _TWIN_THREADS), 1, 1), (_TWIN_THREADS, 1, 1), (partial, dweight))
        return
    config = _configure("backward", device, x, weight, dy, dresidual, dx)
    partial = device.empty((config.grid, cols), np.float32)
    arrays = (dy, x, weight, rstd, dresidual, dx, partial)
    strides = map(_stride, (dy, x, dresidual, dx))
    numbers = (_float32(1 / cols), _float32(weight_offset), llama, np.int32(has_dresidual))
    args = (*arrays, np.int64(rows), np.int32(cols), *strides, *numbers)
    _launch(device, _kernel("backward", config, x.dtype.name), config, args)
    sizes = (np.int32(config.grid), np.int32(cols))
    device.launch(_DWEIGHT, (-(-cols // 32), 1, 1), (32, 32, 1), (partial, dweight, *sizes))


_DWEIGHT = CudaKernel("rmsnorm_dweight", "rmsnorm_dweight")
_TWIN_THREADS = 256

# Columns that need every way to keep a row, by vectors of 16 bytes and, the odd ones, of one element.
_SIZES = (1024, 2048, 4096, 8192, 16384, 2**20, 255, 1023, 4095, 16383, 2**20 + 1)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``forward`` and ``backward`` launch, with the threads of a long row in its reach."""
    optin = smem_per_block_optin(arch)
    seen = set()
    for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        for cols, alignment, which in itertools.product(_SIZES, (16, itemsize), _TABLES):
            c = select_config(
                which, 1, cols, itemsize, alignment=alignment, sms=1, smem_per_block_optin=optin
            )
            for residual in (False, True):
                kernel = _kernel(which, c, dtype, residual)
                if kernel not in seen:
                    seen.add(kernel)
                    yield Variant(kernel, c.threads, c.shared_bytes)
    yield Variant(_DWEIGHT, 1024)


def _kernel(which: Pass, config: RowConfig, dtype: str, residual: bool = False) -> CudaKernel:
    stem, entry = {
        "forward": ("rmsnorm", "rmsnorm_forward"),
        "backward": ("rmsnorm_backward", "rmsnorm_backward"),
    }[which]
    defines: dict[str, str | int] = {
        "DTYPE": _DTYPES[dtype],
        "VEC": config.vec,
        "ACCESS": config.access,
        "KEEP": f"k{config.keep}",
        "VECS": config.vecs,
    }
    if which == "forward":
        defines["RESIDUAL"] = int(residual)
    return CudaKernel(stem, entry, tuple(defines.items()))


def _twin(which: str, dtype: str, residual: bool) -> NumbaKernel:
    """The Numba kernel of this name, in this dtype."""
    from gpu_ops.kernels.numba_cuda import rmsnorm as twins

    return twins.kernel(which, dtype, residual)


def _configure(which: Pass, device: Any, x: Any, weight: Any, *others: Any) -> RowConfig:
    rows, cols = x.shape
    addresses = [_address(a) for a in (x, weight, *others)]
    strides = [a.strides[0] for a in (x, *others)] if rows > 1 else []
    return select_config(
        which,
        rows,
        cols,
        x.dtype.itemsize,
        alignment=math.gcd(16, *addresses, *strides),
        sms=device.sms,
        smem_per_block_optin=device.smem_per_block_optin,
    )


def _launch(device: Any, kernel: CudaKernel, config: RowConfig, args: tuple[Any, ...]) -> None:
    block = (config.threads_per_row, config.rows_per_block, 1)
    device.launch(kernel, (config.grid, 1, 1), block, args, shared=config.shared_bytes)


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)  # else CuPy's


def _stride(array: Any) -> np.int64:
    """Elements from one row to the next."""
    return np.int64(array.strides[0] // array.dtype.itemsize)


def _float32(value: float) -> np.float32:
    """Rounded; the largest float32 for what lies beyond."""
    largest = float(np.finfo(np.float32).max)
    return np.float32(min(max(value, -largest), largest))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
