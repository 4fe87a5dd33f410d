"""Options of losses over classes, shared by :func:`cross_entropy` and :func:`linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.bound import CheckValues
from gpu_ops.core.call import Call
from gpu_ops.errors import DTypeError, OptionError
from gpu_ops.kernels.program import Spec
from gpu_ops.ops.indices import check_indices, read_indices

__all__ = ["LossOptions", "as_loss", "is_number", "of_reference"]

_COUNTS = tuple(map(np.dtype, (np.int32, np.int64, np.float32, np.float64)))


def is_number(x: Any) -> bool:
    """Whether ``x`` is a number by value and not an array."""
    return isinstance(x, (int, float, np.number))


def as_loss(call: Call, name: str, x: Array, shape: tuple[int, ...], like: str) -> None:
    """Require that ``x`` has this shape, and the dtype of losses for the array ``like``."""
    checks.exactly(call.op, name, x, shape)
    dtype = call.views[like].dtype
    expected = checks.computing_dtype(dtype.name)
    if x.dtype != expected:
        raise DTypeError(
            f"{call.op}: {name} is {x.dtype}, expected {expected}, as {like} is {dtype}; "
            f"cast one of them, for example {name}.astype('{expected}')"
        )


@dataclass(frozen=True)
class LossOptions:
    """Options of a loss as the caller passed them."""

    ignore_index: Any
    label_smoothing: Any
    z_loss: Any
    softcap: Any
    class_weight: Any
    reduction: Any
    denominator: Any

    def read(self, call: Call, targets: Any, rows: tuple[int, ...], vocab: int, like: str) -> None:
        """Check targets and options. ``like``: name of the array that determines the dtype."""
        op, dtype = call.op, call.views[like].dtype.name
        read_indices(call, "targets", targets, rows)
        smoothing = checks.computable(op, "label_smoothing", self.label_smoothing, dtype, low=0.0)
        if smoothing > 1.0:
            raise OptionError(f"{op}: label_smoothing must lie in [0, 1], got {self.label_smoothing!r}")
        call.option(
            vocab=vocab,
            ignore_index=checks.integer(op, "ignore_index", self.ignore_index, low=-(2**63), high=2**63 - 1),
            label_smoothing=smoothing,
            z_loss=checks.computable(op, "z_loss", self.z_loss, dtype, low=0.0),
            softcap=checks.computable(op, "softcap", self.softcap, dtype, low=0.0, divides=True),
            reduction=checks.one_of(op, "reduction", self.reduction, ("mean", "sum", "none")),
        )
        weight = call.optional("class_weight", self.class_weight)
        if weight is not None:
            as_loss(call, "class_weight", weight, (vocab,), like)
        self._read_denominator(call, dtype)

    def _read_denominator(self, call: Call, dtype: str) -> None:
        value = self.denominator
        if value is not None and self.reduction != "mean":
            raise OptionError(
                f"{call.op}: denominator is what reduction='mean' divides by, and reduction is {self.reduction!r}"
            )
        if value is None or is_number(value):
            if value is not None:
                value = _checked_denominator(call.op, value, dtype)
            call.option(denominator=value)
            return
        array = call.read("denominator", value)
        if array.dtype not in _COUNTS:
            names = ", ".join(map(str, _COUNTS))
            raise DTypeError(
                f"{call.op}: denominator is {array.dtype}; allowed: a number, or an array of {names}"
            )
        checks.exactly(call.op, "denominator", array, ())
        call.option(denominator=None)

    def check_values(self, call: Call, vocab: int, like: str) -> CheckValues | None:
        """The hook that checks targets and a denominator in host memory."""
        if call.on_cuda:
            return None
        op, dtype = call.op, call.views[like].dtype.name
        check_targets = check_indices(op, "targets", vocab, int(self.ignore_index))

        def check_values(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
            if "denominator" in views:
                _checked_denominator(op, views["denominator"][()], dtype)
            return check_targets(views, backend)

        return check_values


def _checked_denominator(op: str, value: Any, dtype: str) -> float:
    return checks.computable(op, "denominator", value, dtype, low=0.0, divides=True)


def of_reference(spec: Spec, views: Mapping[str, Any]) -> dict[str, Any]:
    """The options as keyword arguments of a reference function."""
    names = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction")
    return {name: spec[name] for name in names} | {
        "class_weight": views.get("class_weight"),
        "denominator": views.get("denominator", spec["denominator"]),
    }
