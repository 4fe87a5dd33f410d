"""Calls for a type checker: test_types.py runs mypy on this file, and the file itself is never run.

A comment that ignores an error is itself an error where there is none, so mypy has to find the mistakes.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import gpu_ops
from gpu_ops import errors
from gpu_ops.core.arrays import AnyArray
from gpu_ops.models import Block, LlamaConfig, block_forward

Float32 = NDArray[np.float32]


class HostArray:
    """Array of any library in host memory."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        raise NotImplementedError


class DeviceArray:
    """Array of any library on a GPU."""

    __cuda_array_interface__: dict[str, object]


def numpy_arrays(x: Float32, half: NDArray[np.float16]) -> None:
    assert_type(gpu_ops.softmax(x), Float32)
    assert_type(gpu_ops.rmsnorm(half, half), NDArray[np.float16])
    assert_type(gpu_ops.rmsnorm(half, half, return_rstd=True), tuple[NDArray[np.float16], NDArray[Any]])
    assert_type(gpu_ops.attention(x, x, x, causal=True), NDArray[Any])
    assert_type(gpu_ops.sample(x, seed=1), NDArray[np.int32])
    assert_type(gpu_ops.global_norm([x, half]), tuple[NDArray[Any], NDArray[Any]])
    assert_type(gpu_ops.cross_entropy(x, x), NDArray[Any])
    w = gpu_ops.ternary_quantize(x)
    assert_type(w, gpu_ops.TernaryMatrix)
    assert_type(gpu_ops.ternary_matmul(w, w), NDArray[Any])
    assert_type(gpu_ops.ternary_pack(w.trits(), "base3"), NDArray[np.uint8])


def axes(scores: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    """The number of axes is kept where the result has the same number."""
    assert_type(gpu_ops.softmax(scores).shape, tuple[int, int])
    assert_type(gpu_ops.sample(scores, seed=1).shape, tuple[Any, ...])
    assert_type(gpu_ops.rmsnorm(scores, scores, return_rstd=True)[1].shape, tuple[Any, ...])


def arrays_of_other_libraries(x: HostArray, on_gpu: DeviceArray, either: AnyArray) -> None:
    assert_type(gpu_ops.softmax(x), HostArray)
    assert_type(gpu_ops.softmax(on_gpu), DeviceArray)
    assert_type(gpu_ops.attention(on_gpu, on_gpu, on_gpu, return_lse=True), tuple[DeviceArray, DeviceArray])
    assert_type(gpu_ops.embedding(x, x), HostArray)
    assert_type(gpu_ops.global_norm([x, x]), tuple[HostArray, HostArray])
    assert_type(gpu_ops.softmax(either), AnyArray)


def options_that_make_a_tuple(x: Float32, y: HostArray) -> None:
    assert_type(gpu_ops.attention(x, x, x, return_lse=True), tuple[NDArray[Any], NDArray[Any]])
    *_, extra = gpu_ops.attention_backward(x, x, x, x, x, x, return_extra=True)
    assert_type(extra, dict[str, NDArray[Any]])
    assert_type(gpu_ops.rmsnorm(y, y, residual=y), tuple[HostArray, HostArray])
    assert_type(gpu_ops.rmsnorm(y, y, residual=y, return_sum=False), HostArray)
    assert_type(gpu_ops.layernorm(y, y, return_stats=True), tuple[HostArray, HostArray, HostArray])
    assert_type(gpu_ops.rope(x), Float32)
    assert_type(gpu_ops.rope(x, x), tuple[Float32, Float32])
    assert_type(gpu_ops.swiglu_backward(y, y), HostArray)
    assert_type(gpu_ops.swiglu_backward(y, y, up=y), tuple[HostArray, HostArray])
    assert_type(gpu_ops.swiglu_mlp(y, y, y, y, keep="gate_up"), tuple[HostArray, HostArray])
    assert_type(gpu_ops.linear_backward(y, y, y, only="dx"), HostArray)
    assert_type(gpu_ops.linear_cross_entropy(y, y, y, grads=True), tuple[HostArray, HostArray, HostArray])


def values_that_nobody_knows(x: Float32, flag: bool, anything: Any, residual: Float32 | None) -> None:
    assert_type(gpu_ops.attention(x, x, x, return_lse=flag), Any)
    assert_type(gpu_ops.rmsnorm(anything, anything, return_rstd=True), Any)
    assert_type(gpu_ops.rmsnorm(x, x, residual=residual), Float32 | tuple[Float32, Float32])


def numbers_or_arrays(x: Float32, lr: Float32) -> None:
    gpu_ops.adamw_step(x, x, x, x, step=1, lr=lr)
    gpu_ops.adamw_step(x, x, (x, x), (x, x), step=1, lr=0.1)
    gpu_ops.rope(x, positions=3, out=x)
    gpu_ops.attention_merge(x, x, x, x, out=(x, x))


def mistakes(x: Float32) -> None:
    gpu_ops.attention(x, x, x, casual=True)  # type: ignore[call-overload]
    gpu_ops.softmax(x, scal=2.0)  # type: ignore[call-arg]
    gpu_ops.softmax([1.0, 2.0])  # type: ignore[type-var]
    gpu_ops.rmsnorm(x)  # type: ignore[call-overload]
    gpu_ops.sample(x)  # type: ignore[call-overload]
    gpu_ops.rms_norm(x, x)  # type: ignore[attr-defined]


def other_names(x: HostArray, block: Block, config: LlamaConfig) -> None:
    assert_type(block_forward(x, block, config)[0], HostArray)
    assert_type(gpu_ops.__version__, str)
    assert_type(gpu_ops.workspace_size("softmax", x), int)
    assert_type(gpu_ops.explain(gpu_ops.softmax, x).choice.device, str)
    assert_type(errors.ShapeError("no").args, tuple[Any, ...])
    assert_type(gpu_ops.RopeScaling.linear(2.0), gpu_ops.RopeScaling)
    gpu_ops.emulator.record()
