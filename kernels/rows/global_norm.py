"""Launch of the norm of several arrays on each backend: one for the blocks of each array, one for all blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, address, as_line
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["variants"]

_BLOCK, _THREADS, _TOTAL_THREADS, _VEC = 16384, 64, 512, 4  # as in global_norm.cu and its twins


@lowers("global_norm", "cpu")
def forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.cpu import global_norm

    names, ends = spec["arrays"], _ends(spec)

    def run(views: Mapping[str, Any]) -> None:
        norms = np.empty(ends[-1])
        for name, (start, end) in zip(names, itertools.pairwise(ends), strict=True):
            if start < end:
                global_norm.block_norms(as_line(views[name]), norms[start:end])
        global_norm.total(norms, as_line(views["norm"]), as_line(views["found_inf"]))

    builder.call(run, f"{ends[-1]} blocks of {_BLOCK} elements")


@lowers("global_norm", "raw")
def forward_raw(spec: Spec, builder: Builder) -> None:
    norms = builder.empty((_ends(spec)[-1],), np.float64, "norms of blocks")
    for x, part in _parts(spec, norms):
        access = _VEC if address(x) % (_VEC * x.itemsize) == 0 else 1
        args = (x, part, np.int64(x.size))
        builder.launch(_kernel("blocks", x.dtype.name, access), (len(part), 1, 1), (_THREADS, 1, 1), args)
    results = spec.tensor("norm"), spec.tensor("found_inf")
    builder.launch(_TOTAL, (1, 1, 1), (_TOTAL_THREADS, 1, 1), (norms, *results, np.int64(len(norms))))


@lowers("global_norm", "numba")
def forward_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.numba_cuda import global_norm as twins

    norms = builder.empty((_ends(spec)[-1],), np.float64, "norms of blocks")
    for x, part in _parts(spec, norms):
        builder.launch(twins.blocks(x.dtype.name), (len(part), 1, 1), (_THREADS, 1, 1), (x.ravel(), part))
    norm = spec.tensor("norm")
    args = (norms, norm.ravel(), spec.tensor("found_inf").ravel())
    builder.launch(twins.total(norm.dtype.name), (1, 1, 1), (_TOTAL_THREADS, 1, 1), args)


def _ends(spec: Spec) -> list[int]:
    """Cumulative number of blocks of the arrays, from 0."""
    sizes = (spec.tensor(name).size for name in spec["arrays"])
    return list(itertools.accumulate((-(-n // _BLOCK) for n in sizes), initial=0))


def _parts(spec: Spec, norms: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each array, and the norms of its blocks."""
    for name, (start, end) in zip(spec["arrays"], itertools.pairwise(_ends(spec)), strict=True):
        yield spec.tensor(name), norms[start:end]


def _kernel(which: str, dtype: str, access: int) -> CudaKernel:
    return CudaKernel(
        "rows/global_norm", f"global_norm_{which}", (("DTYPE", DTYPES[dtype]), ("ACCESS", access))
    )


_TOTAL = _kernel("total", "float32", 1)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    yield Variant(_TOTAL, _TOTAL_THREADS)
    for dtype, access in itertools.product(DTYPES, (_VEC, 1)):
        yield Variant(_kernel("blocks", dtype, access), _THREADS)
