"""AdamW: one step of all parameters of a model, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call, CheckValues, Source
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops import seeds

__all__ = ["adamw_step"]

_TILE = 256  # elements of 8-bit moments that share a scale
_LARGEST_STEP = 2**53  # steps are numbers of float64 in kernels


@op(
    cuda=True,
    kernels="rows.adamw",
    written=("params", "m", "v", "master"),
    dynamic=("step", "lr", "grad_scale", "seed"),
)
def adamw_step(
    params: Any,
    grads: Any,
    m: Any,
    v: Any,
    *,
    step: Any,
    lr: Any,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: Any = None,
    grad_scale: Any = 1.0,
    skip: Any = None,
    master: Any = None,
    rounding: str = "nearest",
    seed: int = 0,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """One in-place step of AdamW (Loshchilov and Hutter 2019), for a whole model if its parameters are one array.

    In this order, as in torch.optim.AdamW(fused=True)::

        g = grad_scale * grads
        p = params - lr * weight_decay * params
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

    Parameters
    ----------
    params : array (...), C-contiguous
        float32 or float64. bfloat16 or float16 with ``master``, bfloat16 also with ``rounding="stochastic"``.
    grads : array (...)
        In params' dtype or float32; with float32 params also float16 or bfloat16.
    m, v : arrays (...), C-contiguous, float32 (float64 for float64)
        Moments; zeros before the first step. In 8 bits, both are pairs (codes, scale): codes int8 for m and uint8 for
        v, of params' shape; scale float32 (tiles,) for tiles of 256 elements, of which the last may be shorter.
    step : int, or int32 or int64 array ()
        Number of this step, from 1; skipped steps do not count.
    lr : number, or float32 or float64 array ()
        Learning rate, at least 0.
    betas : two numbers
        In [0, 1).
    eps : float
        At least 0; 0 is replaced by the smallest positive number.
    weight_decay : float
        At least 0.
    decay_mask : bool or uint8 array (...), optional
        Elements that decay; default: all.
    grad_scale : number, or float32 or float64 array ()
        Factor of the gradients: the clipping coefficient, or 1 / loss scale. With ``skip`` it need not be finite.
    skip : float32 or int32 array (), optional
        If not 0, nothing changes, because the gradients were not finite. On a GPU no call waits for it.
    master : float32 array (...), C-contiguous, optional
        Parameters in float32: the step updates them, and params receive the rounded result.
    rounding : str
        Rounding of 16-bit params: ``"nearest"``, or ``"stochastic"`` (bfloat16): at random, exact on average.
    seed : int
        Seed of stochastic rounding, in [0, 2**64). Random bits depend only on seed, step and the index in the array.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    None
        ``params``, ``m``, ``v`` and ``master`` are changed.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. Numbers in host memory are checked; on a GPU a step below 1 counts as 1.

    Notes
    -----
    Each operation is rounded to float32 (float64 for float64) and not fused with another: the same bits for any
    number of threads, and on every device. Moves each array once, 28 bytes per parameter in float32; a mask adds one.

    In 8 bits a code c represents scale * c * abs(c) / max_code^2, which is m in m and sqrt(v) in v, with the tile's
    largest magnitude as scale: codes are dense near 0, and need no table. A nonzero v never gets code 0. Moments take
    2.03 bytes per parameter instead of 8.

    Stochastic rounding does not change values that bfloat16 represents exactly, or that are not finite; no finite
    number becomes infinite. Without it a bfloat16 parameter loses every update below 1/256 of itself.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> params, grads, m, v = np.array([[1.0, -2.0], [0.5, -3.0], [0.0, 0.0], [0.0, 0.0]])
    >>> gpu_ops.adamw_step(params, grads, m, v, step=1, lr=0.1, weight_decay=0.01)
    >>> params
    array([ 0.899, -1.898])
    """
    call = Call("adamw_step", device, backend, workspace)
    grads_ = call.read("grads", grads, contiguous=True)
    mask = None if decay_mask is None else call.read("decay_mask", decay_mask, contiguous=True)
    counts = functools.partial(checks.integer, low=1, high=_LARGEST_STEP)
    _read_number(call, "step", step, counts, ("int32", "int64"))
    params_ = _update(call, "params", params)
    dtype = checks.float_dtype(call.op, params=params_)
    rate = functools.partial(checks.computable, dtype=dtype, low=0.0)
    _read_number(call, "lr", lr, rate, ("float32", "float64"))
    factor = functools.partial(_grad_scale if skip is None else _grad_scale_or_overflow, dtype)
    _read_number(call, "grad_scale", grad_scale, factor, ("float32", "float64"))
    if skip is not None:
        _read_number(call, "skip", skip, _no_number, ("float32", "int32"))
    rules: dict[str, Callable[..., Any]] = {"step": counts, "lr": rate, "grad_scale": factor}
    rules = {} if call.on_cuda else {name: rule for name, rule in rules.items() if name in call.views}
    acc_dtype = checks.computing_dtype(dtype)
    _check_grads(call, dtype, grads_)
    in_bytes = _update_moments(call, m, v, params_, acc_dtype)
    if master is not None:
        _update(call, "master", master, acc_dtype)
    if mask is not None and mask.dtype not in (np.bool_, np.uint8):
        raise DTypeError(f"{call.op}: decay_mask is {mask.dtype}, expected bool or uint8")
    for name in ("grads", "m", "v", "m codes", "v codes", "master", "decay_mask"):
        if name in call.views:
            checks.exactly(call.op, name, call.views[name], params_.shape)
    _read_rounding(call, dtype, rounding, seed)
    call.option(
        betas=_betas(call.op, betas),
        eps=checks.epsilon(call.op, eps, dtype),
        weight_decay=checks.computable(call.op, "weight_decay", weight_decay, dtype, low=0.0),
    )
    with_master = " with a master" * (master is not None) + ", moments in 8 bits" * in_bytes
    return call.bind(
        problem=lambda: f"{params_.size} parameters {dtype}{with_master}, gradients {grads_.dtype}",
        unsupported=checks.unsupported(dtype),
        finish=lambda views, device, give: None,
        check_values=_check_values(call.op, rules) if rules else None,
        flops=15.0 * params_.size,
    )


def _update(
    call: Call, name: str, x: Any, dtype: np.dtype[Any] | None = None, source: Source | None = None
) -> Array:
    """Declare a C-contiguous array that is changed in place."""
    view = call.update(name, x, dtype, source=source)
    checks.native(call.op, name, view)
    if not view.flags.c_contiguous:
        raise ShapeError(
            f"{call.op}: {name} is not contiguous (shape {view.shape}, strides {view.strides}); pass a C-contiguous "
            "array: it is changed in place"
        )
    return view


def _update_moments(call: Call, m: Any, v: Any, params: Array, kind: np.dtype[Any]) -> bool:
    """Declare the moments; return whether they are in 8 bits."""
    pairs = [isinstance(x, tuple) for x in (m, v)]
    if not any(pairs):
        _update(call, "m", m, kind)
        _update(call, "v", v, kind)
        return False
    if not all(pairs) or len(m) != 2 or len(v) != 2:
        raise OptionError(f"{call.op}: m and v must be two arrays, or two pairs (codes, scale)")
    if kind != np.float32:
        raise OptionError(
            f"{call.op}: moments in 8 bits are for params of at most 32 bits, and params is {params.dtype}"
        )
    tiles = (-(-params.size // _TILE),)
    for name, pair, dtype in (("m", m, np.int8), ("v", v, np.uint8)):
        _update(call, f"{name} codes", pair[0], np.dtype(dtype), Source(name, 0))
        scale = _update(call, f"{name} scale", pair[1], kind, Source(name, 1))
        checks.exactly(call.op, f"{name} scale", scale, tiles)
    return True


def _check_grads(call: Call, dtype: str, grads: Array) -> None:
    known = {"float32": ("float32", "bfloat16", "float16"), "float64": ("float64",)}
    allowed = known.get(dtype, (dtype, "float32"))
    if grads.dtype.name not in allowed:
        raise DTypeError(
            f"{call.op}: params is {dtype} and grads is {grads.dtype}; allowed beside {dtype} params: "
            f"{', '.join(allowed)}; cast one of them, for example grads.astype('{allowed[0]}')"
        )


def _read_rounding(call: Call, dtype: str, rounding: Any, seed: Any) -> None:
    op, has_master = call.op, "master" in call.views
    rounding = checks.one_of(op, "rounding", rounding, ("nearest", "stochastic"))
    if rounding == "stochastic" and dtype != "bfloat16":
        raise OptionError(f"{op}: rounding='stochastic' is for bfloat16 params, and params is {dtype}")
    if has_master and dtype in ("float32", "float64"):
        raise OptionError(f"{op}: master is for 16-bit params, and params is {dtype}; omit master=")
    if not has_master and rounding == "nearest" and dtype in ("bfloat16", "float16"):
        other = " or rounding='stochastic'" if dtype == "bfloat16" else ""
        raise OptionError(
            f"{op}: params is {dtype}, in which small updates vanish; pass master=, the parameters in float32{other}"
        )
    call.option(rounding=rounding)
    _seed(op, seed, None)
    if rounding == "stochastic":
        call.provide("seed", None, "seed", functools.partial(_seed, op))


def _seed(op: str, seed: Any, device: Any) -> int:
    return seeds.number(op, 0 if seed is None else seed)


def _betas(op: str, betas: Any) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise OptionError(f"{op}: betas must be two numbers, got {betas!r}")
    values = tuple(checks.number(op, f"betas[{i}]", beta, low=0.0) for i, beta in enumerate(betas))
    for i, beta in enumerate(values):
        if beta >= 1.0:
            raise OptionError(f"{op}: betas[{i}] must be less than 1, got {beta}")
    return values[0], values[1]


# ---- numbers that change from step to step -----------------------------------------------------------------


def _read_number(
    call: Call, name: str, value: Any, check: Callable[..., Any], allowed: tuple[str, ...]
) -> None:
    """Read a number, which ``check`` checks in every call, or an array without axes."""
    op = call.op
    if isinstance(value, np.generic) or not hasattr(value, "shape"):
        check(op, name, value)
        call.provide(name, None, name, lambda number, device: check(op, name, number))
        return
    x = call.read(name, value)
    checks.exactly(op, name, x, ())
    if x.dtype.name not in allowed:
        raise DTypeError(
            f"{op}: {name} is {x.dtype}; allowed: a number, or an array of {' or '.join(allowed)}"
        )


def _check_values(op: str, rules: Mapping[str, Callable[..., Any]]) -> CheckValues:
    """Hook that applies the rules of plain numbers to numbers in host arrays."""

    def check_values(views: Mapping[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        for name, rule in rules.items():
            rule(op, name, views[name][()])
        return {}, {}

    return check_values


def _no_number(op: str, name: str, value: Any) -> None:
    raise DTypeError(
        f"{op}: {name} is {type(value).__name__} {value!r}, not an array; expected a float32 array ()"
    )


def _grad_scale(dtype: str, op: str, name: str, value: Any) -> float:
    return 1.0 if value is None else checks.computable(op, name, value, dtype)


def _grad_scale_or_overflow(dtype: str, op: str, name: str, value: Any) -> float:
    """Check ``grad_scale``, which may be infinite or NaN: in a skipped step it is computed from a norm that
    overflowed. It is a number if NumPy multiplied two arrays of shape ()."""
    if isinstance(value, (float, np.floating)) and not np.isfinite(value):
        return float(value)
    return _grad_scale(dtype, op, name, value)


@lowers("adamw_step", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rows import adamw as reference

    fixed = {name: spec[name] for name in ("betas", "eps", "weight_decay", "rounding")}
    has_master, in_bytes = spec.get("master") is not None, spec.get("m") is None
    moments = ("m codes", "m scale", "v codes", "v scale") if in_bytes else ("m", "v")
    changed = ("params", *moments, "master") if has_master else ("params", *moments)

    def run(views: Mapping[str, Any]) -> None:
        arrays: list[Any] = [views[name] for name in ("params", "grads")]
        states = [views[name] for name in moments]
        arrays += [tuple(states[:2]), tuple(states[2:])] if in_bytes else states
        options: dict[str, Any] = fixed | {name: views[name] for name in ("step", "lr", "grad_scale")}
        options |= {name: views.get(name) for name in ("decay_mask", "skip", "master")}
        results = reference.adamw_step(*arrays, **options, seed=views.get("seed", 0))
        flat = [y for x in results for y in (x if isinstance(x, tuple) else (x,))]
        store(views, changed, flat)

    builder.call(run, "NumPy, float64")
