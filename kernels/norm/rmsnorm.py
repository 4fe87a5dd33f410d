"""Launch of RMSNorm on each backend. The GPU kernels are those of :mod:`.norm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from gpu_ops.kernels.common.arguments import as_line, as_rows
from gpu_ops.kernels.norm import norm
from gpu_ops.kernels.program import Builder, Spec, lowers

lowers("rmsnorm", "raw")(partial(norm.forward_raw, norm="rmsnorm"))
lowers("rmsnorm", "numba")(partial(norm.forward_numba, norm="rmsnorm"))
lowers("rmsnorm_backward", "raw")(partial(norm.backward_raw, norm="rmsnorm"))
lowers("rmsnorm_backward", "numba")(partial(norm.backward_numba, norm="rmsnorm"))


@lowers("rmsnorm", "cpu")
def forward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.norm.cpu import rmsnorm

    x, options = spec.tensor("x"), dict(spec.options)
    size = math.prod(x.shape[:-1]), x.shape[-1]

    def run(views: Mapping[str, Any]) -> None:
        residual, s = views.get("residual"), views.get("s")
        rmsnorm.forward(
            as_rows(views["x"]),
            views["weight"],
            None if residual is None else as_rows(residual),
            as_rows(views["y"]),
            None if s is None else as_rows(s),
            as_line(views["rstd"]),
            **options,
        )

    builder.call(run, rmsnorm.config(*size))


@lowers("rmsnorm_backward", "cpu")
def backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.norm.cpu import rmsnorm

    x, options = spec.tensor("x"), dict(spec.options)
    size = math.prod(x.shape[:-1]), x.shape[-1]
    if norm.without_rows(spec, builder):
        return

    def run(views: Mapping[str, Any]) -> None:
        dresidual = views.get("dresidual")
        rmsnorm.backward(
            as_rows(views["dy"]),
            as_rows(views["x"]),
            views["weight"],
            as_line(views["rstd"]),
            None if dresidual is None else as_rows(dresidual),
            as_rows(views["dx"]),
            views["dweight"],
            **options,
        )

    builder.call(run, rmsnorm.config(*size))
