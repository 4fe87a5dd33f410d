"""What the backward functions of attention read and write beside q, k and v."""

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
    """What the forward pass returned; ``dout`` has been read. With ``delta``, out is not looked at."""
    op, native, wide = call.op, checks.FLOAT_DTYPES[dtype], checks.computing_dtype(dtype)
    dout = call.views["dout"]
    checks.exactly(op, "dout", dout, shape, wide if dout.dtype == wide else native)
    if delta is None:
        if out is None:
            raise OptionError(f"{op}: out is None; pass the forward result, or delta=, sum(dout * out)")
        out_ = call.read("out", out)
        checks.exactly(op, "out", out_, shape, wide if out_.dtype == wide else native)
    lse_ = call.read("lse", lse)
    checks.exactly(op, "lse", lse_, lse_shape, lse_.dtype if lse_.dtype == np.float64 else wide)
    if delta is not None:
        checks.exactly(op, "delta", call.read("delta", delta), lse_shape, wide)


def write_gradients(
    call: Call, dtype: str, grads: Any, *, accumulate: Any = False, return_extra: Any = False
) -> Finish | None:
    """dq, dk and dv, and with ``return_extra`` the gradients of options; what makes the call's result of them."""
    op, wide = call.op, checks.computing_dtype(dtype)
    add, with_extra = checks.flag(op, "accumulate", accumulate), checks.flag(op, "return_extra", return_extra)
    if add and grads is None:
        raise OptionError(f"{op}: accumulate=True adds to arrays of yours; pass grads=(dq, dk, dv) of {wide}")
    in_wide = add or (isinstance(grads, (tuple, list)) and all(_dtype_name(x) == wide.name for x in grads))
    inputs = {f"d{name}": call.views[name] for name in ("q", "k", "v")}
    like = {name: (x.shape, wide if in_wide else x.dtype) for name, x in inputs.items()}
    call.write_each(like, grads, argument="grads", added=add)
    call.option(accumulate=add)
    extra = [name for name in ("bias", "sinks") if with_extra and name in call.views]
    for name in extra:
        x = call.views[name]
        call.write(f"d{name}", x.shape, x.dtype if name == "bias" else wide)

    def finish(views: dict[str, Any], device: Any, give: Any) -> tuple[Any, ...]:
        return (*map(give, ("dq", "dk", "dv")), {name: give(f"d{name}") for name in extra})

    return finish if with_extra else None


def _dtype_name(x: Any) -> str:
    """Of any library's array."""
    return str(getattr(x, "dtype", "")).removeprefix("torch.")


def store_gradients(
    spec: Spec, views: Mapping[str, Any], gradients: list[Any], extra: Mapping[str, Any]
) -> None:
    """What the reference returned; the gradients of options only where there are arrays for them."""
    if spec["accumulate"]:
        gradients = [views[name] + x for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)]
    store(views, ("dq", "dk", "dv"), gradients)
    for name, x in extra.items():
        if f"d{name}" in views:
            views[f"d{name}"][...] = x
