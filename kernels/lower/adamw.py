"""How each backend runs a step of AdamW.

On GPUs one thread makes factors of the numbers that change from step to step, in float64, and the step follows: a
captured graph finds step, learning rate, scale and skip where they are then, and the host reads none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, KINDS, address, as_line, float32
from gpu_ops.kernels.program import Builder, Dynamic, Spec, Tensor, lowers

__all__ = ["variants"]

_THREADS, _TILE, _VEC = 256, 256, 4  # as in cuda/adamw.cu and its twin: a warp has a tile
_FACTORS = 6
_NUMBERS: dict[str, Any] = {"step": np.int64, "lr": np.float64, "grad_scale": np.float64, "skip": np.int32}
# As a struct in cuda/adamw.cu.
_OPTIONS = np.dtype(
    [(name, "f4") for name in ("beta1", "rest1", "beta2", "rest2", "eps")]
    + [("masked", "i4"), ("is_stochastic", "i4")]
)
_GRADS = {  # that go with params
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
}


@lowers("adamw_step", "cpu")
def step_cpu(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import adamw

    eps, (beta1, beta2), is_stochastic = spec["eps"], spec["betas"], spec["rounding"] == "stochastic"

    def numbers(views: Mapping[str, Any]) -> adamw.Numbers:
        step, lr, scale = int(views["step"]), float(views["lr"]), float(views["grad_scale"])
        size, correction = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
        return adamw.Numbers(
            scale, lr * spec["weight_decay"], size, correction, beta1, 1 - beta1, beta2, 1 - beta2, eps
        )

    def run(views: Mapping[str, Any]) -> None:
        if not views["m"].size or ("skip" in views and views["skip"] != 0):
            return
        names = ("params", "grads", "m", "v", "master", "decay_mask")
        arrays: list[Any] = [None if name not in views else as_line(views[name]) for name in names]
        random = (views["seed"], int(views["step"])) if is_stochastic else None
        adamw.adamw_step(arrays, numbers(views), random)

    on.call(run, adamw.config(spec.tensor("m").size))


@lowers("adamw_step", "raw")
def step_raw(spec: Spec, on: Builder) -> None:
    params, grads, m, v, master, mask = _lines(spec)
    if not m.size:
        return
    factors = _factors(spec, on, _FACTORS_KERNEL)
    weights = params if master is None else master
    aligned = all(address(x) % (_VEC * x.itemsize) == 0 for x in (params, grads, m, v, weights))
    kernel = _kernel(params.dtype.name, grads.dtype.name, master is not None, _VEC if aligned else 1)
    beta1, beta2 = spec["betas"]
    numbers = map(float32, (beta1, 1 - beta1, beta2, 1 - beta2, spec["eps"]))
    flags = mask is not None, spec["rounding"] == "stochastic"
    options = np.array((*numbers, *flags), _OPTIONS)[()]
    arrays = (params, grads, m, v, m if master is None else master, m if mask is None else mask, factors)
    blocks = -(-m.size // (_THREADS // 32 * _TILE))
    on.launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), (*arrays, _seed(spec), options, np.int64(m.size)))


@lowers("adamw_step", "numba")
def step_numba(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cuda import adamw as twins

    params, grads, m, v, master, mask = _lines(spec)
    if not m.size:
        return
    numbers = map(spec.get, _NUMBERS)
    dtypes = ["int32" if x is None else x.dtype.name for x in numbers]
    factors = _factors(spec, on, twins.factors(*dtypes))
    beta1, beta2 = spec["betas"]
    options = map(np.float64, (beta1, 1 - beta1, beta2, 1 - beta2, spec["eps"]))
    flags = np.int32(mask is not None), np.int32(spec["rounding"] == "stochastic")
    kernel = twins.step(params.dtype.name, grads.dtype.name, master is not None)
    given = factors.view(np.uint8) if mask is None else mask  # stand-ins for what is not read
    arrays = (params, grads, m, v, m if master is None else master, given, factors)
    blocks = -(-m.size // _THREADS)
    on.launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), (*arrays, _seed(spec), *options, *flags))


def _lines(spec: Spec) -> tuple[Any, ...]:
    """The arrays with one axis; None for master and mask that are not there."""
    found = [spec.get(name) for name in ("params", "grads", "m", "v", "master", "decay_mask")]
    *arrays, mask = (None if x is None else x.ravel() for x in found)
    return *arrays, None if mask is None else mask.view(np.uint8)


def _factors(spec: Spec, on: Builder, kernel: CudaKernel | NumbaKernel) -> Tensor:
    """scale, decay, size, correction, whether to skip, step."""
    factors = on.empty((_FACTORS,), np.float64, "factors")
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
    on.launch(kernel, (1, 1, 1), (1, 1, 1), (*arrays, *values, *kinds, *options, factors))
    return factors


def _seed(spec: Spec) -> Dynamic | np.uint64:
    return Dynamic("seed", np.dtype(np.uint64)) if spec["rounding"] == "stochastic" else np.uint64(0)


def _kernel(params: str, grads: str, has_master: bool, access: int, which: str = "step") -> CudaKernel:
    defines = (
        ("PARAM", DTYPES[params]),
        ("GRAD", DTYPES[grads]),
        ("MASTER", int(has_master)),
        ("ACCESS", access),
    )
    return CudaKernel("adamw", f"adamw_{which}", defines)


_FACTORS_KERNEL = _kernel("float32", "float32", False, 1, "factors")


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    yield Variant(_FACTORS_KERNEL, 1)
    for params, access in itertools.product(_GRADS, (_VEC, 1)):
        masters = {"float32": (False,), "bfloat16": (False, True), "float16": (True,)}[params]
        for grads, has_master in itertools.product(_GRADS[params], masters):
            yield Variant(_kernel(params, grads, has_master, access), _THREADS)
