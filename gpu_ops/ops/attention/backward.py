"""Results of the forward pass and gradients, as the backward functions of attention read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.bound import Finish
from gpu_ops.core.call import Call
from gpu_ops.errors import OptionError
from gpu_ops.kernels.program import Spec

__all__ = ["read_results", "store_gradients", "write_gradients"]


def read_results(
    call: Call,
    dtype: str,
    out: Any,
    lse: Any,
    delta: Any,
    shape: tuple[int, ...],
    lse_shape: tuple[int, ...],
) -> None:
    """Read the results of the forward pass, after ``dout``. With ``delta``, ``out`` is not read."""
    op, in_dtype, acc_dtype = call.op, checks.FLOAT_DTYPES[dtype], checks.computing_dtype(dtype)
    dout = call.views["dout"]
    checks.exactly(op, "dout", dout, shape, acc_dtype if dout.dtype == acc_dtype else in_dtype)
    if delta is None:
        if out is None:
            raise OptionError(f"{op}: out is None; pass the forward result, or delta=, sum(dout * out)")
        out_ = call.read("out", out)
        checks.exactly(op, "out", out_, shape, acc_dtype if out_.dtype == acc_dtype else in_dtype)
    lse_ = call.read("lse", lse)
    checks.exactly(op, "lse", lse_, lse_shape, lse_.dtype if lse_.dtype == np.float64 else acc_dtype)
    if delta is not None:
        checks.exactly(op, "delta", call.read("delta", delta), lse_shape, acc_dtype)


def write_gradients(
    call: Call, dtype: str, grads: Any, *, accumulate: Any = False, return_extra: Any = False
) -> Finish | None:
    """Declare dq, dk and dv, and with ``return_extra`` the gradients of options; return the function that collects
    them into the call's result."""
    op, acc_dtype = call.op, checks.computing_dtype(dtype)
    add, with_extra = checks.flag(op, "accumulate", accumulate), checks.flag(op, "return_extra", return_extra)
    if add and grads is None:
        raise OptionError(
            f"{op}: accumulate=True adds to arrays of yours; pass grads=(dq, dk, dv) of {acc_dtype}"
        )
    in_acc_dtype = add or (
        isinstance(grads, (tuple, list)) and all(_dtype_name(x) == acc_dtype.name for x in grads)
    )
    inputs = {f"d{name}": call.views[name] for name in ("q", "k", "v")}
    layouts = {name: (x.shape, acc_dtype if in_acc_dtype else x.dtype) for name, x in inputs.items()}
    call.write_each(layouts, grads, argument="grads", added=add)
    call.option(accumulate=add)
    extra = [name for name in ("bias", "sinks") if with_extra and name in call.views]
    for name in extra:
        x = call.views[name]
        call.write(f"d{name}", x.shape, x.dtype if name == "bias" else acc_dtype)

    def finish(views: dict[str, Any], device: Any, give: Any) -> tuple[Any, ...]:
        return (*map(give, ("dq", "dk", "dv")), {name: give(f"d{name}") for name in extra})

    return finish if with_extra else None


def _dtype_name(x: Any) -> str:
    """Dtype name of any library's array."""
    return str(getattr(x, "dtype", "")).removeprefix("torch.")


def store_gradients(
    spec: Spec, views: Mapping[str, Any], gradients: list[Any], extra: Mapping[str, Any]
) -> None:
    """Store the reference's gradients; those of options only where there are arrays for them."""
    if spec["accumulate"]:
        gradients = [views[name] + x for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)]
    store(views, ("dq", "dk", "dv"), gradients)
    for name, x in extra.items():
        if f"d{name}" in views:
            views[f"d{name}"][...] = x
