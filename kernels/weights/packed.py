"""Launch of products with packed weights (``views["weight"]`` has ``panels``): CPU kernels, cpu/packed.py.

forward     y = x weight^T + bias + residual
backward    dx = dy weight, of the unpacked matrix
embedding   rows of the matrix
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import as_line, as_rows
from gpu_ops.kernels.program import Builder, Spec, lowers

__all__: list[str] = []


@lowers("packed_linear", "cpu")
def _forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels
    from gpu_ops.kernels.weights.cpu.ternary_ir import LANES

    y = spec.tensor("y")
    if not y.size:
        return
    tokens = math.prod(y.shape[:-1])
    mode, dtype, cols = spec["activations"], y.dtype.name, spec["cols"]

    def run(views: Mapping[str, Any]) -> None:
        residual, bias = views.get("residual"), views.get("bias")
        x, out = as_rows(views["x"]), as_rows(views["y"])
        addends = None if residual is None else as_rows(residual), None if bias is None else bias[None]
        kernels.forward(x, views["weight"].panels(LANES), addends, out, mode)

    text = kernels.config(tokens, dtype, spec["formats"], mode)
    builder.call(run, text, kernels.scratch_bytes(tokens, spec["rows"], cols, dtype, mode))


@lowers("packed_linear_backward", "cpu")
def _backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels
    from gpu_ops.kernels.weights.cpu.ternary_ir import LANES

    dx = spec.tensor("dx")
    if not dx.size or not spec["rows"]:
        builder.zero(dx)
        return

    def run(views: Mapping[str, Any]) -> None:
        dy, out = as_rows(views["dy"]), as_rows(views["dx"])
        kernels.backward_input(dy, views["weight"].panels(LANES), out)

    sizes = math.prod(dx.shape[:-1]), spec["rows"], spec["cols"], dx.dtype.name
    builder.call(run, "one product with the unpacked matrix", kernels.backward_scratch_bytes(*sizes))


@lowers("packed_embedding", "cpu")
def _embedding_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels
    from gpu_ops.kernels.weights.cpu.ternary_ir import LANES

    x, scale = spec.tensor("x"), spec["scale"]
    if not x.size:
        return

    def run(views: Mapping[str, Any]) -> None:
        panels = views["weight"].panels(LANES)
        ids = as_line(views["ids"]).astype(np.int64, copy=False)
        kernels.embedding(ids, panels, scale, as_rows(views["x"]))

    builder.call(run, "the panels of the rows")
