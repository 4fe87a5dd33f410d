"""Launch of LayerNorm on each backend. The GPU kernels are those of :mod:`.norm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from gpu_ops.kernels.common.arguments import as_line, as_rows
from gpu_ops.kernels.norm import norm
from gpu_ops.kernels.program import Builder, Spec, lowers

lowers("layernorm", "raw")(partial(norm.forward_raw, norm="layernorm"))
lowers("layernorm", "numba")(partial(norm.forward_numba, norm="layernorm"))
lowers("layernorm_backward", "raw")(partial(norm.backward_raw, norm="layernorm"))
lowers("layernorm_backward", "numba")(partial(norm.backward_numba, norm="layernorm"))


@lowers("layernorm", "cpu")
def forward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.common.cpu.parallel import items_per_task
    from gpu_ops.kernels.norm.cpu import layernorm

    x, eps = spec.tensor("x"), spec["eps"]
    size = math.prod(x.shape[:-1]), x.shape[-1]

    def run(views: Mapping[str, Any]) -> None:
        residual, s = views.get("residual"), views.get("s")
        layernorm.forward(
            as_rows(views["x"]),
            views["weight"],
            views.get("bias"),
            None if residual is None else as_rows(residual),
            as_rows(views["y"]),
            None if s is None else as_rows(s),
            as_line(views["mean"]),
            as_line(views["rstd"]),
            eps=eps,
        )

    builder.call(run, f"{items_per_task(*size)} rows per task")


@lowers("layernorm_backward", "cpu")
def backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.common.cpu.parallel import items_per_task
    from gpu_ops.kernels.norm.cpu import layernorm

    x = spec.tensor("x")
    size = math.prod(x.shape[:-1]), x.shape[-1]
    if norm.without_rows(spec, builder):
        return

    def run(views: Mapping[str, Any]) -> None:
        dresidual = views.get("dresidual")
        layernorm.backward(
            as_rows(views["dy"]),
            as_rows(views["x"]),
            views["weight"],
            as_line(views["mean"]),
            as_line(views["rstd"]),
            None if dresidual is None else as_rows(dresidual),
            as_rows(views["dx"]),
            views["dweight"],
            views["dbias"],
            added=spec["added"],
        )

    builder.call(run, f"{items_per_task(*size)} rows per task")
