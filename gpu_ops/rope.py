"""rope and rope_backward: rotary position embedding of queries and keys, one pass over both."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops import checks
from gpu_ops.arrays import Array, Arrays
from gpu_ops.checks import Axes
from gpu_ops.dispatch import Choice, Plan, choose, op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.rope_scaling import RopeScaling
from gpu_ops.rope_tables import rope_tables

__all__ = ["rope", "rope_backward"]

_EXACT = 2**53  # integers up to here are exact in float64
_PLAIN = RopeScaling("default")
_AXES = {
    "bshd": "batch seqlen {} head_dim",
    "bhsd": "batch {} seqlen head_dim",
    "packed": "total {} head_dim",
}


@op
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
        Integers: (seqlen,), or (batch, seqlen) where batch may be 1; packed: (total,). Default 0, 1, 2, ...
        along the sequence (packed: along all of it). Negative ones are allowed.
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
        The length that the dynamic and longrope scalings go by. Default ``max(positions) + 1``.
    conjugate
        Rotate by the opposite angle: the inverse while the scaling's attention factor is 1.
    layout
        ``"bhsd"``: axes 1 and 2 swapped, (batch, nheads, seqlen, head_dim). No copy is made.
    out
        An array for the result, or a pair with ``k``; may be ``q`` (and ``k``) itself: in place.

    Returns
    -------
    Array like ``q``, or with ``k`` the pair of arrays like ``q`` and ``k``.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        Before anything is written.

    Notes
    -----
    Su et al., "RoFormer", arXiv 2104.09864, equation 34. cos and sin are made in float64 and rounded to float32
    (float64 for float64 inputs), so that positions of millions lose nothing; the maths is float32 (float64) and
    each result is rounded once. Moves each element once in and once out.

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


@op
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

    Returns
    -------
    Array like ``dq``, or with ``dk`` the pair of arrays like ``dq`` and ``dk``.

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
    axes, layout = _axes(who, inputs, layout)
    interleaved = checks.flag(who, "interleaved", interleaved)
    conjugate = checks.flag(who, "conjugate", conjugate) != transpose  # the transpose turns the other way
    scaling = _scaling(who, scaling)
    theta = _theta(who, theta, scaling)
    rotary_dim = _rotary_dim(who, rotary_dim, axes["head_dim"], scaling)
    positions_, first, last = _positions(who, arrays, positions, axes, layout)
    # the length that dynamic and longrope go by
    longest = max(last + 1, 0) if seqlen is None else checks.integer(who, "seqlen", seqlen, low=0)
    inv_freq = scaling.inv_freq(rotary_dim, theta, longest)
    attention_factor = scaling.attention_factor_at(longest)
    outs = _outs(who, arrays, inputs, out)
    choice = choose(who, device, backend)

    def run() -> Any:
        results: list[Array]
        if choice.backend == "reference":
            from gpu_ops.reference import rope as reference

            rotated = reference.rope(
                *inputs.values(), positions=positions_[0] if layout == "packed" else positions_, theta=theta,
                rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling, seqlen=longest,
                conjugate=conjugate, layout=layout,
            )  # fmt: skip
            results = [rotated] if len(inputs) == 1 else list(rotated)
            for target, y in zip(outs, results, strict=True):
                if target is not None:
                    target[...] = y
        else:
            from gpu_ops.kernels.numba_cpu import rope as kernels

            pairs = zip(inputs.values(), outs, strict=True)
            results = [_empty_like(x) if target is None else target for x, target in pairs]
            computed = np.float64 if dtype == "float64" else np.float32
            cos, sin, rows = rope_tables(positions_, first, last, inv_freq, attention_factor, computed)
            kernels.rope(
                [_bshd(x, layout) for x in inputs.values()], [_bshd(y, layout) for y in results],
                cos, sin, rows, rotary_dim=rotary_dim, interleaved=interleaved, conjugate=conjugate,
            )  # fmt: skip
        if out is not None:
            return out if len(inputs) == 1 else tuple(out)
        given = tuple(arrays.give(y) for y in results)
        return given[0] if len(given) == 1 else given

    shapes = " and ".join(f"{name} {x.shape}" for name, x in inputs.items())
    pairing = "interleaved" if interleaved else "half-split"
    problem = f"{shapes} {dtype}, rotary_dim {rotary_dim} {pairing}, scaling {scaling.kind}"
    return Plan(who, choice, problem, _config(choice, [_bshd(x, layout) for x in inputs.values()]), run)


def _config(choice: Choice, inputs: list[Array]) -> str:
    if choice.backend == "reference":
        return "NumPy, float64"
    from gpu_ops.kernels.numba_cpu import rope as kernels

    return kernels.config(inputs)


def _axes(who: str, inputs: dict[str, Array], layout: Any) -> tuple[Axes, str]:
    """Checked axis lengths, and the layout: "bshd", "bhsd" or "packed"."""
    layout = checks.one_of(who, "layout", layout, ("bshd", "bhsd"))
    first, x = next(iter(inputs.items()))
    if x.ndim not in (3, 4):
        raise ShapeError(
            f"{who}: {first} has {x.ndim} axes, shape {x.shape}; expected (batch, seqlen, nheads, head_dim), or "
            f"packed (total, nheads, head_dim)"
        )
    if x.ndim == 3:
        if layout == "bhsd":
            raise OptionError(
                f"{who}: layout='bhsd' is for 4 axes; packed {first} is (total, nheads, head_dim)"
            )
        layout = "packed"
    axes = Axes(who)
    for (name, array), heads in zip(inputs.items(), ("nheads", "nheads_kv"), strict=False):
        axes.bind(name, array, _AXES[layout].format(heads))
    return axes, layout


def _scaling(who: str, scaling: Any) -> RopeScaling:
    if scaling is None:
        return _PLAIN
    if not isinstance(scaling, RopeScaling):
        hint = (
            "RopeScaling.from_hf(config)"
            if isinstance(scaling, dict)
            else "for example RopeScaling.linear(4.0)"
        )
        raise OptionError(f"{who}: scaling must be a RopeScaling, got {type(scaling).__name__}; use {hint}")
    return scaling


def _theta(who: str, theta: Any, scaling: RopeScaling) -> float:
    if theta is None:
        return 10000.0 if scaling.theta is None else scaling.theta
    return checks.number(who, "theta", theta, above=0.0)


def _rotary_dim(who: str, rotary_dim: Any, head_dim: int, scaling: RopeScaling) -> int:
    origin = "rotary_dim"
    if rotary_dim is None:
        partial = scaling.partial_rotary_factor
        rotary_dim = head_dim if partial is None else int(head_dim * partial)
        origin = "head_dim" if partial is None else f"rotary_dim = int({head_dim} * partial_rotary_factor)"
    size = checks.integer(who, "rotary_dim", rotary_dim)
    if not 2 <= size <= head_dim or size % 2:
        raise OptionError(
            f"{who}: {origin} is {size}; components rotate in pairs: pass rotary_dim=, an even number from 2 "
            f"to head_dim={head_dim}"
        )
    return size


def _positions(
    who: str, arrays: Arrays, positions: Any, axes: Axes, layout: str
) -> tuple[npt.NDArray[np.int64], int, int]:
    """Positions (batch or 1, seqlen) as int64, packed (1, total); the smallest and the largest."""
    tokens = axes["total" if layout == "packed" else "seqlen"]
    if positions is None:
        return np.arange(tokens)[None], 0, tokens - 1
    if isinstance(positions, (int, np.integer)):
        raise ShapeError(
            f"{who}: positions is the number {positions}; for a sequence that starts there pass "
            f"{positions} + np.arange({tokens})"
        )
    given = arrays.read("positions", positions)
    if given.dtype.kind not in "iu":
        raise DTypeError(f"{who}: positions is {given.dtype}; allowed: integers, for example np.int64")
    allowed = [(tokens,)] if layout == "packed" else [(tokens,), (axes["batch"], tokens), (1, tokens)]
    if given.shape not in allowed:
        names = "(total,)" if layout == "packed" else "(seqlen,), (batch, seqlen) or (1, seqlen)"
        raise ShapeError(
            f"{who}: positions has shape {given.shape}; expected {names}: "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))}"
        )
    first, last = (int(given.min()), int(given.max())) if given.size else (0, -1)
    if first < -_EXACT or last > _EXACT:
        raise OptionError(f"{who}: positions reach beyond 2**53, where angles in float64 mean nothing")
    as_int64 = given.astype(np.int64, copy=False)
    return as_int64 if given.ndim == 2 else as_int64[None], first, last


def _outs(who: str, arrays: Arrays, inputs: dict[str, Array], out: Any) -> list[Array | None]:
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


def _empty_like(x: Array) -> Array:
    """In the order of x's axes in memory, but with the last one innermost (a broadcast x has others there)."""
    y = np.empty_like(x)
    return y if y.shape[-1] == 1 or y.strides[-1] == y.itemsize else np.empty(x.shape, x.dtype)
