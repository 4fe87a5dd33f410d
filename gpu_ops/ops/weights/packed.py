"""Packed matrices as arguments of ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_ops.core.arrays import store
from gpu_ops.core.call import Call
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.kernels.program import Builder, Spec, lower_module, lowers

__all__ = ["cpu_only", "read_weight"]

for _name in ("packed_linear", "packed_linear_backward", "packed_embedding"):
    lower_module(_name, "gpu_ops.kernels.weights.packed")


def read_weight(call: Call, name: str, weight: Any, axes: str | None = None) -> Any:
    """Read a weight: a view of an array, or the packed matrix itself. ``axes`` names its axes. The option
    ``packed_<name>`` is its :class:`PackedShape`, or None."""
    if not isinstance(weight, PackedMatrix):
        call.option(**{f"packed_{name}": None})
        return call.read(name, weight, axes)
    call.option(**{f"packed_{name}": weight.packed_shape})
    call.provide(name, weight.device_layout, name, _on)
    for array in weight.call_arrays:
        call.hold(name, array)
    if axes is not None:
        call.axes.bind(name, weight, axes)  # type: ignore[arg-type]  # it has a shape
    return weight


def cpu_only(*weights: Any) -> dict[str, str]:
    """Backends without kernels for the weights: those of GPUs, if one has packed floats."""
    if not any(isinstance(weight, PackedMatrix) and weight.is_plain for weight in weights):
        return {}
    why = "packed floats have CPU kernels only; pass weight.dequantize(dtype)"
    return dict.fromkeys(("raw", "cuda numba", "emulator numba"), why)


def _on(weight: PackedMatrix, device: Any) -> Any:
    return weight.on(device)


@lowers("packed_linear", "reference")
def _linear(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.linear import linear
    from gpu_ops.reference.weights.packed import linear_int8

    def run(views: Mapping[str, Any]) -> None:
        x, weight, addends = views["x"], views["weight"], (views.get("bias"), views.get("residual"))
        if spec["activations"] == "int8":
            order = slice(None) if weight.columns is None else weight.columns
            stored = weight.dequantize()[:, order]
            result = linear_int8(x[..., order], stored, weight.activation_blocks, *addends)
        else:
            result = linear(x, weight.dequantize(x.dtype), addends[0], residual=addends[1])
        store(views, ("y",), result)

    builder.call(run, "NumPy, float64")


@lowers("packed_linear_backward", "reference")
def _linear_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.gemm.linear import linear_backward

    def run(views: Mapping[str, Any]) -> None:
        weight = views["weight"].dequantize(views["dy"].dtype)
        store(views, ("dx",), [linear_backward(views["dy"], views["x"], weight, only="dx")])

    builder.call(run, "NumPy, float64")


@lowers("packed_embedding", "reference")
def _embedding(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rows import embedding as reference

    def run(views: Mapping[str, Any]) -> None:
        rows = reference.embedding(views["ids"], views["weight"].dequantize(), scale=spec["scale"])
        store(views, ("x",), rows.astype(views["x"].dtype))

    builder.call(run, "NumPy, float64")
