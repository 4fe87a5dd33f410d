"""Rotary position embedding of queries and keys, forward and backward, in one pass over both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.rope.frequencies import RotaryArguments
from gpu_ops.ops.rope.options import PositionsCheck, bind_axes, read_positions

__all__ = ["rope", "rope_backward"]


@op(cuda=True, kernels="rope.rope", dynamic=("positions",))
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
    workspace: Any = None,
) -> Bound:
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
        position of the first token; positions then count up along the sequence (packed: along all tokens).
        Default 0. Positions may be negative.
    theta
        Base of the frequencies. Default: the scaling's if ``RopeScaling.from_hf`` found one, else 10000.
    rotary_dim
        Number of components that rotate, even; the others are copied. Default: head_dim, times the scaling's
        partial_rotary_factor if ``RopeScaling.from_hf`` found one.
    interleaved
        Pair components ``2i, 2i + 1`` (GPT-J, Llama's own code) instead of ``i, i + rotary_dim / 2``
        (GPT-NeoX, Llama in Hugging Face).
    scaling
        A :class:`gpu_ops.RopeScaling`, for contexts longer than the model was trained with.
    seqlen
        The sequence length, on which the dynamic and longrope scalings depend. Default ``max(positions) + 1``: with
        these scalings a call waits for positions on a GPU. No other call waits.
    conjugate
        Rotate by the opposite angle: the inverse, if the scaling's attention factor is 1.
    layout
        ``"bhsd"``: axes 1 and 2 swapped, (batch, nheads, seqlen, head_dim). No copy is made.
    out
        An array for the result, or a pair with ``k``. Passing ``q`` (and ``k``) itself works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    Array like ``q``, or with ``k`` the pair of arrays like ``q`` and ``k``.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        Raised before anything is written.

    Notes
    -----
    Su et al., "RoFormer", arXiv 2104.09864, equation 34. Angles have float64 accuracy, so positions in the millions
    lose none. cos and sin are rounded to float32 (float64 for float64 inputs; in the CUDA C++ kernels their error is
    at most 8e-8), arithmetic is float32 (float64) and each result is rounded once. Reads and writes each element
    once.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q = np.ones((1, 3, 2, 4), np.float32)  # 3 tokens, 2 heads
    >>> gpu_ops.rope(q)[0, :, 0].round(3)
    array([[ 1.   ,  1.   ,  1.   ,  1.   ],
           [-0.301,  0.99 ,  1.382,  1.01 ],
           [-1.325,  0.98 ,  0.493,  1.02 ]], dtype=float32)
    """
    rotary = RotaryArguments(theta, rotary_dim, interleaved, scaling, seqlen)
    options = _Options(rotary, positions, conjugate, layout, out)
    return _bind(Call("rope", device, backend, workspace), {"q": q, "k": k}, options)


@op(cuda=True, kernels="rope.rope", dynamic=("positions",))
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
    workspace: Any = None,
) -> Bound:
    """Gradients of :func:`rope` with respect to its inputs, given those of its outputs.

    The map is linear, so this is its transpose: the opposite rotation with the same attention factor. With a factor
    other than 1 that is not the inverse. Nothing from the forward pass needs to be kept.

    Parameters
    ----------
    dq, dk
        Gradients of the rotated q and, if given there, k; same shapes and dtypes.
    positions, theta, rotary_dim, interleaved, scaling, seqlen, conjugate, layout
        Same as in the forward call.
    out
        An array for the result, or a pair with ``dk``. Passing ``dq`` (and ``dk``) itself works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    Array like ``dq``, or with ``dk`` the pair of arrays like ``dq`` and ``dk``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> dq = np.ones((1, 2, 1, 2), np.float32)
    >>> gpu_ops.rope_backward(dq)[0, :, 0].round(3)
    array([[ 1.   ,  1.   ],
           [ 1.382, -0.301]], dtype=float32)
    """
    rotary = RotaryArguments(theta, rotary_dim, interleaved, scaling, seqlen)
    options = _Options(rotary, positions, conjugate, layout, out, transpose=True)
    return _bind(Call("rope_backward", device, backend, workspace), {"dq": dq, "dk": dk}, options)


@dataclass(frozen=True)
class _Options:
    """Arguments of both functions other than q and k, as the caller passed them."""

    rotary: RotaryArguments
    positions: Any
    conjugate: Any
    layout: Any
    out: Any
    transpose: bool = False
    """Whether to apply the transpose: the rotation by the opposite angle."""


def _bind(call: Call, named: dict[str, Any], o: _Options) -> Bound:
    """Bind the call. ``named``: q and k under the caller's argument names."""
    inputs = {
        name: call.read(name, x) for i, (name, x) in enumerate(named.items()) if i == 0 or x is not None
    }
    dtype = checks.float_dtype(call.op, **inputs)
    layout = bind_axes(call, inputs, o.layout)
    conjugate = checks.flag(call.op, "conjugate", o.conjugate) != o.transpose
    frequencies = o.rotary.check(call, dtype)
    positions = read_positions(call, o.positions, layout)
    is_number = positions is None and o.positions is not None
    call.option(inputs=tuple(inputs), layout=layout, conjugate=conjugate, first=None if is_number else 0)
    _write(call, inputs, o.out)
    seqlen = call.axes["total" if layout == "packed" else "seqlen"]
    tokens = seqlen if layout == "packed" else seqlen * call.axes["batch"]
    shapes = " and ".join(f"{name} {x.shape}" for name, x in inputs.items())
    return call.bind(
        problem=f"{shapes} {dtype}, {frequencies.rotation}",
        unsupported=_unsupported(dtype, tokens),
        check_values=PositionsCheck(call.op, seqlen, frequencies).for_call(
            call, positions, counts_up=is_number
        ),
    )


def _write(call: Call, inputs: Mapping[str, Array], out: Any) -> None:
    """Declare a result like each input, which it may overwrite in place."""
    if len(inputs) == 1:
        ((name, x),) = inputs.items()
        call.write(f"rotated {name}", x.shape, x.dtype, out, in_place=name, axes=_memory_order(x))
        return
    call.write_each(
        {f"rotated {name}": (x.shape, x.dtype) for name, x in inputs.items()},
        out,
        in_place={f"rotated {name}": name for name in inputs},
        axes={f"rotated {name}": _memory_order(x) for name, x in inputs.items()},
        labels=tuple(inputs),
    )


def _memory_order(x: Array) -> tuple[int, ...] | None:
    """Order of axes for a result with tokens and heads in the same memory order as x; None: the axes' own order."""
    tokens, heads = x.ndim - 3, x.ndim - 2
    inner = min(x.shape[tokens], x.shape[heads]) > 1 and 0 < abs(x.strides[tokens]) < abs(x.strides[heads])
    return (*range(tokens), heads, tokens, x.ndim - 1) if inner else None


def _unsupported(dtype: str, tokens: int) -> dict[str, str]:
    reasons = {"raw": f"{tokens} tokens; its limit is 2**31 - 1"} if tokens >= 2**31 else {}
    return reasons | checks.unsupported(dtype)


@lowers("rope", "reference")
@lowers("rope_backward", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rope.rope import rope as reference

    names, layout = spec["inputs"], spec["layout"]
    results = [f"rotated {name}" for name in names]
    options = ("theta", "rotary_dim", "interleaved", "conjugate", "scaling")
    fixed = {name: spec[name] for name in options} | {"layout": "bhsd" if layout == "bhsd" else "bshd"}

    def run(views: Mapping[str, Any]) -> None:
        positions = views["rows"][0] if layout == "packed" else views["rows"]
        rotated = reference(*[views[n] for n in names], positions=positions, seqlen=views["seqlen"], **fixed)
        store(views, results, rotated)

    builder.call(run, "NumPy, float64")
