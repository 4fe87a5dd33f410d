"""Launch of a step of AdamW on each backend.

On GPUs one thread computes factors from the numbers that change from step to step, in float64, before the step: a
captured graph reads the current step, learning rate, scale and skip, and the host reads none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, KINDS, address, as_line, float32
from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.program import Builder, Dynamic, Spec, Tensor, lowers

__all__ = ["variants"]

_THREADS, _TILE, _VEC = 256, 256, 4  # as in adamw.cu and its twin: a warp has a tile
_ARRAYS = ("params", "grads", "m", "v", "m codes", "v codes", "master", "decay_mask")
_FACTORS = 6
_NUMBERS: dict[str, Any] = {"step": np.int64, "lr": np.float64, "grad_scale": np.float64, "skip": np.int32}
# Layout of a struct in adamw.cu.
_OPTIONS = np.dtype(
    [(name, "f4") for name in ("beta1", "rest1", "beta2", "rest2", "eps")]
    + [("masked", "i4"), ("is_stochastic", "i4")]
)
_GRADS = {  # dtypes of gradients by those of params
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
}


@lowers("adamw_step", "cpu")
def step_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.cpu import adamw

    eps, (beta1, beta2), is_stochastic = spec["eps"], spec["betas"], spec["rounding"] == "stochastic"
    in_bytes = spec.get("m") is None

    def numbers(views: Mapping[str, Any]) -> adamw.Numbers:
        step, lr, scale = int(views["step"]), float(views["lr"]), float(views["grad_scale"])
        size, correction = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
        return adamw.Numbers(
            scale, lr * spec["weight_decay"], size, correction, beta1, 1 - beta1, beta2, 1 - beta2, eps
        )

    def run(views: Mapping[str, Any]) -> None:
        if not views["params"].size or ("skip" in views and views["skip"] != 0):
            return
        lines = {name: as_line(x) for name, x in views.items() if name in _ARRAYS}
        if in_bytes:
            lines |= {name: (lines[f"{name} codes"], views[f"{name} scale"]) for name in ("m", "v")}
        arrays = [lines.get(name) for name in ("params", "grads", "m", "v", "master", "decay_mask")]
        random = (views["seed"], int(views["step"])) if is_stochastic else None
        adamw.adamw_step(arrays, numbers(views), random)

    builder.call(run, adamw.config(spec.tensor("params").size))


@lowers("adamw_step", "raw")
def step_raw(spec: Spec, builder: Builder) -> None:
    params, grads, *states, master, mask = _lines(spec)
    if not params.size:
        return
    factors = _factors(spec, builder, _FACTORS_KERNEL)
    weights = params if master is None else master
    vectors = (params, grads, *states[:2], weights)
    aligned = all(address(x) % (_VEC * x.itemsize) == 0 for x in vectors)
    names = params.dtype.name, grads.dtype.name
    kernel = _kernel(*names, master is not None, _bits(spec), _VEC if aligned else 1)
    beta1, beta2 = spec["betas"]
    numbers = map(float32, (beta1, 1 - beta1, beta2, 1 - beta2, spec["eps"]))
    flags = mask is not None, spec["rounding"] == "stochastic"
    options = np.array((*numbers, *flags), _OPTIONS)[()]
    optional = (factors if x is None else x for x in (master, mask))  # stand-ins for arrays that are not read
    args = (params, grads, *states, *optional, factors, _seed(spec), options, np.int64(params.size))
    blocks = -(-params.size // (_THREADS // 32 * _TILE))
    builder.launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), args)


@lowers("adamw_step", "numba")
def step_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.numba_cuda import adamw as twins

    params, grads, *states, master, mask = _lines(spec)
    if not params.size:
        return
    numbers = map(spec.get, _NUMBERS)
    dtypes = ["int32" if x is None else x.dtype.name for x in numbers]
    factors = _factors(spec, builder, twins.factors(*dtypes))
    beta1, beta2 = spec["betas"]
    options = map(np.float64, (beta1, 1 - beta1, beta2, 1 - beta2, spec["eps"]))
    flags = np.int32(mask is not None), np.int32(spec["rounding"] == "stochastic")
    kernel = twins.step(params.dtype.name, grads.dtype.name, master is not None, _bits(spec))
    stand_ins = states[2], factors.view(np.uint8)  # for arrays that are not read
    optional = (stand_in if x is None else x for x, stand_in in zip((master, mask), stand_ins, strict=True))
    args = (params, grads, *states, *optional, factors, _seed(spec), *options, *flags)
    builder.launch(kernel, (-(-params.size // _THREADS), 1, 1), (_THREADS, 1, 1), args)


def _lines(spec: Spec) -> tuple[Any, ...]:
    """params, grads, m, v, their scales, master, mask, with one axis; the last two are None if absent.

    Moments that are not in 8 bits stand in for scales.
    """
    lines = {name: x.ravel() for name in _ARRAYS if (x := spec.get(name)) is not None}
    if _bits(spec) == 8:
        moments = (lines["m codes"], lines["v codes"], spec.tensor("m scale"), spec.tensor("v scale"))
    else:
        moments = (lines["m"], lines["v"]) * 2
    mask = lines.get("decay_mask")
    mask = None if mask is None else mask.view(np.uint8)
    return lines["params"], lines["grads"], *moments, lines.get("master"), mask


def _bits(spec: Spec) -> int:
    """Bits of the moments."""
    return 8 if spec.get("m") is None else 32


def _factors(spec: Spec, builder: Builder, kernel: CudaKernel | NumbaKernel) -> Tensor:
    """Array of scale, decay, size, correction, whether to skip, step."""
    factors = builder.empty((_FACTORS,), np.float64, "factors")
    arrays: list[Tensor] = []
    values: list[Any] = []
    kinds: list[np.int32] = []
    for name, dtype in _NUMBERS.items():
        array = spec.get(name)
        arrays.append(factors.view(np.int32) if array is None else array.reshape(1))
        kinds.append(np.int32(KINDS["" if array is None else array.dtype.name]))
        if name != "skip":
            values.append(Dynamic(name, np.dtype(dtype)) if array is None else dtype(0))
    options = map(np.float64, (*spec["betas"], spec["weight_decay"]))
    builder.launch(kernel, (1, 1, 1), (1, 1, 1), (*arrays, *values, *kinds, *options, factors))
    return factors


def _seed(spec: Spec) -> Dynamic | np.uint64:
    return Dynamic("seed", np.dtype(np.uint64)) if spec["rounding"] == "stochastic" else np.uint64(0)


def _kernel(
    params: str, grads: str, has_master: bool, bits: int, access: int, which: str = "step"
) -> CudaKernel:
    defines = (
        ("PARAM", DTYPES[params]),
        ("GRAD", DTYPES[grads]),
        ("MASTER", int(has_master)),
        ("STATES", bits),
        ("ACCESS", access),
    )
    return CudaKernel("rows/adamw", f"adamw_{which}", defines)


_FACTORS_KERNEL = _kernel("float32", "float32", False, 32, 1, "factors")


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    yield Variant(_FACTORS_KERNEL, 1)
    for params, bits, access in itertools.product(_GRADS, (32, 8), (_VEC, 1)):
        masters = {"float32": (False,), "bfloat16": (False, True), "float16": (True,)}[params]
        for grads, has_master in itertools.product(_GRADS[params], masters):
            yield Variant(_kernel(params, grads, has_master, bits, access), _THREADS)
