"""rope and rope_backward: rotary position embedding of queries and keys, one pass over both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.device import Device
from gpu_ops.core.dispatch import Choice, Plan, choose, op
from gpu_ops.core.kinds import PLAIN
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.ops.rope_options import (
    BY_LENGTH,
    axes_of,
    inv_freq_of,
    later_tables,
    positions_of,
    rotary_dim_of,
    rows_of,
    scaling_of,
    theta_of,
)
from gpu_ops.ops.rope_tables import frequencies, rope_tables

PLAIN.add(RopeScaling)

__all__ = ["rope", "rope_backward"]


@op(cuda=True, late="positions")
def rope(
    q: Any,
    k: Any = None,
    *,
    positions: Any = None,
    theta: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    seqlen: int | None = None,
    conjugate: bool = False,
    layout: str = "bshd",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Rotary position embedding of ``q``, and of ``k`` in the same pass.

    Each pair ``(x1, x2)`` of a head's first ``rotary_dim`` components turns by the angle
    ``position * inv_freq[i]``, ``inv_freq[i] = theta ** (-2 i / rotary_dim)``::

        y1 = x1 cos - x2 sin
        y2 = x2 cos + x1 sin

    Parameters
    ----------
    q, k
        (batch, seqlen, nheads, head_dim) and (batch, seqlen, nheads_kv, head_dim); or packed sequences of
        3 axes, (total, nheads, head_dim). float16, bfloat16, float32 or float64, the same for both.
    positions
        Integers: (seqlen,), or (batch, seqlen) where batch may be 1; packed: (total,). Or one number, the
        position of the first token, from which they count up along the sequence (packed: along all of it).
        Default 0. Negative ones are allowed.
    theta
        The base. Default: the scaling's own where ``RopeScaling.from_hf`` found one, else 10000.
    rotary_dim
        Components that rotate, even; the others are copied. Default: head_dim, times the scaling's
        partial_rotary_factor where ``RopeScaling.from_hf`` found one.
    interleaved
        Pair components ``2i, 2i + 1`` (GPT-J, Llama's own code) instead of ``i, i + rotary_dim / 2``
        (GPT-NeoX, Llama in Hugging Face).
    scaling
        A :class:`gpu_ops.RopeScaling` for contexts longer than the model was trained with.
    seqlen
        The length that the dynamic and longrope scalings go by. Default ``max(positions) + 1``, for which a
        call with those scalings waits if positions lie on a GPU; no other call does.
    conjugate
        Rotate by the opposite angle: the inverse while the scaling's attention factor is 1.
    layout
        ``"bhsd"``: axes 1 and 2 swapped, (batch, nheads, seqlen, head_dim). No copy is made.
    out
        An array for the result, or a pair with ``k``; may be ``q`` (and ``k``) itself: in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    Array like ``q``, or with ``k`` the pair of arrays like ``q`` and ``k``.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        Before anything is written.

    Notes
    -----
    Su et al., "RoFormer", arXiv 2104.09864, equation 34. Angles have the accuracy of float64, so that positions
    of millions lose nothing. cos and sin are rounded to float32 (CUDA C++ kernels: off by 8e-8 at most; float64 for
    float64 inputs), the maths is float32 (float64) and each result is rounded once. Moves each element once in and
    once out.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q = np.ones((1, 3, 2, 4), np.float32)  # 3 tokens, 2 heads
    >>> gpu_ops.rope(q)[0, :, 0].round(3)
    array([[ 1.   ,  1.   ,  1.   ,  1.   ],
           [-0.301,  0.99 ,  1.382,  1.01 ],
           [-1.325,  0.98 ,  0.493,  1.02 ]], dtype=float32)
    """
    return _plan(
        "rope", {"q": q, "k": k}, out,
        positions=positions, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling,
        seqlen=seqlen, conjugate=conjugate, transpose=False, layout=layout, device=device, backend=backend,
    )  # fmt: skip


@op(cuda=True, late="positions")
def rope_backward(
    dq: Any,
    dk: Any = None,
    *,
    positions: Any = None,
    theta: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    seqlen: int | None = None,
    conjugate: bool = False,
    layout: str = "bshd",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gradients of :func:`rope` with respect to its inputs, given those of its outputs.

    The map is linear, so this is its transpose: the opposite rotation with the same attention factor (with a
    factor other than 1, not the inverse). Nothing of the forward pass need be kept.

    Parameters
    ----------
    dq, dk
        Gradients of the rotated q and, if it took part, k; shapes and dtypes as there.
    positions, theta, rotary_dim, interleaved, scaling, seqlen, conjugate, layout
        As in the forward call.
    out
        An array for the result, or a pair with ``dk``; may be ``dq`` (and ``dk``) itself: in place.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    Array like ``dq``, or with ``dk`` the pair of arrays like ``dq`` and ``dk``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> dq = np.ones((1, 2, 1, 2), np.float32)
    >>> gpu_ops.rope_backward(dq)[0, :, 0].round(3)
    array([[ 1.   ,  1.   ],
           [ 1.382, -0.301]], dtype=float32)
    """
    return _plan(
        "rope_backward", {"dq": dq, "dk": dk}, out,
        positions=positions, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling,
        seqlen=seqlen, conjugate=conjugate, transpose=True, layout=layout, device=device, backend=backend,
    )  # fmt: skip


def _plan(
    who: str, named: dict[str, Any], out: Any, *,
    positions: Any, theta: Any, rotary_dim: Any, interleaved: Any, scaling: Any, seqlen: Any, conjugate: Any,
    transpose: bool, layout: Any, device: str | None, backend: str | None,
) -> Plan:  # fmt: skip
    """What both functions share. ``named``: the arrays under the names that the caller knows."""
    arrays = Arrays(who)
    inputs = {}
    for i, (name, x) in enumerate(named.items()):
        if i == 0 or x is not None:
            inputs[name] = arrays.read(name, x)
    dtype = checks.float_dtype(who, **inputs)
    axes, layout = axes_of(who, inputs, layout)
    interleaved = checks.flag(who, "interleaved", interleaved)
    conjugate = checks.flag(who, "conjugate", conjugate) != transpose  # the transpose turns the other way
    scaling = scaling_of(who, scaling)
    theta = theta_of(who, theta, scaling)
    rotary_dim = rotary_dim_of(who, rotary_dim, axes["head_dim"], scaling)
    where = positions_of(who, arrays, positions, axes, layout)
    if not arrays.on_cuda:
        where.check_bounds(who)
    if seqlen is not None:
        longest = checks.integer(who, "seqlen", seqlen, low=0)
    else:  # only some scalings go by it, and on a device it has to be waited for
        longest = max(where.bounds[1] + 1, 0) if scaling.kind in BY_LENGTH or not arrays.on_cuda else 0
    inv_freq = inv_freq_of(who, scaling, rotary_dim, theta, longest)
    attention_factor = scaling.attention_factor_at(longest)
    outs = _outs(arrays, inputs, out)
    choice = choose(who, device, backend, arrays, cannot=_cannot(dtype, where.tokens))
    views = [_bshd(x, layout) for x in inputs.values()]
    computed = checks.computing_dtype(dtype)

    def compute(on: Device | None) -> list[Array]:
        results = [
            _like(arrays, x, f"rotated {name}") if target is None else target
            for (name, x), target in zip(inputs.items(), outs, strict=True)
        ]
        targets = [_bshd(y, layout) for y in results]
        if choice.backend == "reference":
            from gpu_ops.reference import rope as reference

            rotated = reference.rope(
                *views, positions=where.on_host(), theta=theta, rotary_dim=rotary_dim, interleaved=interleaved,
                scaling=scaling, seqlen=longest, conjugate=conjugate,
            )  # fmt: skip
            for target, y in zip(targets, [rotated] if len(views) == 1 else rotated, strict=True):
                target[...] = y
        elif on is None:
            from gpu_ops.kernels.numba_cpu import rope as cpu

            tables = rope_tables(where.on_host(), *where.bounds, inv_freq, attention_factor, computed)
            cpu.rope(
                views, targets, *tables, rotary_dim=rotary_dim, interleaved=interleaved, conjugate=conjugate
            )
        else:
            from gpu_ops.kernels.lower import rope as gpu

            gpu.rope(
                on, choice.backend, views, targets, where.on_device(), frequencies(on, choice.backend, inv_freq),
                first=where.first, interleaved=interleaved, cos_scale=attention_factor,
                sin_scale=-attention_factor if conjugate else attention_factor,
            )  # fmt: skip
        return results

    def run() -> Any:
        with arrays.on(choice) as on:
            results = compute(on)
            if out is not None:
                return out if len(inputs) == 1 else tuple(out)
            given = tuple(arrays.give(y) for y in results)
            return given[0] if len(given) == 1 else given

    def problem() -> str:
        shapes = " and ".join(f"{name} {x.shape}" for name, x in inputs.items())
        pairing = "interleaved" if interleaved else "half-split"
        return f"{shapes} {dtype}, rotary_dim {rotary_dim} {pairing}, scaling {scaling.kind}"

    def again() -> Callable[..., Any]:
        from gpu_ops.kernels.numba_cpu import rope as cpu

        names, lone, new = tuple(named), len(inputs) == 1, Arrays(who)
        how = {"rotary_dim": rotary_dim, "interleaved": interleaved, "conjugate": conjugate}
        rows = rows_of(who, where, positions)
        tables = later_tables(who, scaling, rotary_dim, theta, longest, computed, lasting=seqlen is not None)

        def rotate(*given: Any, positions: Any = None, out: Any = None, **options: Any) -> Any:
            xs = [x for x in (*given, *map(options.get, names)) if x is not None]
            if out is None:
                results = tuple([_like(new, x, "the result") for x in xs])
            else:
                results = (out,) if lone else out
            views = [_bshd(x, layout) for x in xs], [_bshd(y, layout) for y in results]
            cpu.rope(*views, *tables(*rows(positions)), **how)
            return results[0] if lone else results

        return rotate

    config = functools.partial(_config, choice, views, arrays, compute)
    return Plan(who, choice, problem, config, run, again=again if choice.compiled else None)


def _cannot(dtype: str, tokens: int) -> dict[str, str]:
    if dtype == "float64":
        return {"raw": "float64 has Numba kernels only"}
    return {} if tokens < 2**31 else {"raw": f"{tokens} tokens; its limit is 2**31 - 1"}


def _config(
    choice: Choice, views: list[Array], arrays: Arrays, compute: Callable[[Device | None], Any]
) -> str:
    if choice.device != "cpu":
        return arrays.launches(choice, compute)
    if choice.backend == "reference":
        return "NumPy, float64"
    from gpu_ops.kernels.numba_cpu import rope as kernels

    return kernels.config(views)


def _outs(arrays: Arrays, inputs: dict[str, Array], out: Any) -> list[Array | None]:
    """Writable views of ``out``, one per input, or None for each."""
    if out is None:
        return [None] * len(inputs)
    if len(inputs) == 1:
        ((name, x),) = inputs.items()
        return [arrays.write("out", out, x.shape, x.dtype, in_place=name)]
    like = {name: (x.shape, x.dtype) for name, x in inputs.items()}
    return [*arrays.write_each("out", out, like, in_place={name: name for name in inputs})]


def _bshd(x: Array, layout: str) -> Array:
    """A view with the axes (batch, seqlen, nheads, head_dim)."""
    return x[None] if layout == "packed" else x.swapaxes(1, 2) if layout == "bhsd" else x


def _like(arrays: Arrays, x: Array, name: str) -> Array:
    """A result like x, with tokens and heads in the order in which they lie in x's memory."""
    tokens, heads = x.ndim - 3, x.ndim - 2
    inner = min(x.shape[tokens], x.shape[heads]) > 1 and 0 < abs(x.strides[tokens]) < abs(x.strides[heads])
    if not inner:
        return arrays.new(x.shape, x.dtype, name)
    shape = (*x.shape[:tokens], x.shape[heads], x.shape[tokens], x.shape[-1])
    return arrays.new(shape, x.dtype, name).swapaxes(tokens, heads)
