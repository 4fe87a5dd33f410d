"""Changes of a valid call, for test_second_call.py: arrays aliased, moved, of other kinds; odd options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import gpu_ops
from tests.support import laws
from tests.support.calls import IN_PLACE, OUT, OpCall
from tests.support.laws import Labelled, filled, given_out, outs_like, sharing, takes_one

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

# fmt: off
NUMBERS = [
    True, False, 0, 1, -1, 2, 3, 8, 2**40, 2**70, 0.0, -0.0, 1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"),
    -float("inf"), np.float32(0.5), np.float64(1), np.float16(-0.0), np.int64(1), np.int8(1), np.uint64(2**63),
    np.bool_(True), np.timedelta64(1), 1j,
]
OTHERS = [
    None, "", "cpu", "reference", "silu", "gelu", "bshd", "bhsd", "llama", "absmean", "twn", "native", "base3", "w2",
    b"cpu", np.str_("silu"), (), [], {}, (1, 2), [1, 2], (-1, 0), (1, np.int64(2)), (0.0, 1), (True, 1), object,
    memoryview(b"12"), np.array(1), np.array(1.0), np.array([1, 2]), np.array("cpu"), np.ma.masked,
    gpu_ops.RopeScaling.linear(2.0), gpu_ops.RopeScaling.linear(2), gpu_ops.RopeScaling.dynamic(2.0, 4),
]
PLACES = ["cpu", "numba", "reference", "gpu", "raw", "", b"cpu", 1, np.array([1, 2]), np.array("cpu"), None, ("cpu",)]
ENVIRONMENT = [
    {}, {}, {}, {"GPU_OPS_DEVICE": "cpu"}, {"GPU_OPS_DEVICE": "gpu"}, {"GPU_OPS_BACKEND": "reference"},
    {"GPU_OPS_BACKEND": "raw"}, {"GPU_OPS_BACKEND": ""}, {"GPU_OPS_ARCH": "sm_90"},
]
OPTIONAL = ("residual", "residual_out", "dresidual", "bias", "mask", "sinks", "alibi_slopes", "positions")
# fmt: on
SETTINGS = ("device", "backend")


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


# ---- arrays of other kinds ---------------------------------------------------------------------------------


def swapped(x: Array) -> Array:
    return x.astype(x.dtype.newbyteorder()) if x.dtype.name != "bfloat16" else x


def repeated(x: Array) -> Array:
    """View in which all rows are the first one, with strides of 0."""
    return np.broadcast_to(x[:1], x.shape) if x.ndim else x


def repeated_column(x: Array) -> Array:
    return as_strided(x, x.shape, (*x.strides[:-1], 0)) if x.ndim else x


def matrix(x: Array) -> Array:
    return x.copy().view(np.matrix) if x.ndim == 2 else x


def masked(x: Array) -> Array:
    return np.ma.masked_array(x.copy(), mask=False)


def mapped(x: Array) -> Array:
    view = np.ndarray.__new__(np.memmap, x.shape, x.dtype)  # like np.memmap(file), but in memory
    view[...] = x
    return view


def owned(x: Array) -> Array:
    return x.copy()


def reversed_within(x: Array) -> Array:
    """View with rows in reverse order, in the same memory."""
    return x[::-1] if x.ndim else x


def shorter(x: Array) -> Array:
    return x[:-1] if x.ndim else x


def longer(x: Array) -> Array:
    return np.concatenate([x, x[:1]]) if x.ndim else x


def cast(x: Array) -> Array:
    return x.astype({"f": np.float64, "i": np.int64, "b": np.int8}.get(x.dtype.kind, np.float32))


def cast_down(x: Array) -> Array:
    return x.astype({"f": np.float16, "i": np.int32, "b": np.uint8}.get(x.dtype.kind, np.float32))


KINDS: tuple[Callable[[Array], Any], ...] = (
    *laws.VIEWS, swapped, repeated, repeated_column, matrix, masked, mapped, owned, reversed_within, shorter, longer,
    cast, cast_down, np.ndarray.tolist, lambda x: x[None], lambda x: x[..., None], lambda x: x.view(Labelled),
    lambda x: None, lambda x: 1.0, lambda x: x.astype(object),
)  # fmt: skip


OUT_KINDS: tuple[Callable[[Array], Any], ...] = (
    filled, laws.read_only, laws.unaligned, laws.apart, laws.every_other, laws.subclass, repeated, mapped, matrix,
    masked, swapped, cast, shorter, reversed_within, np.ndarray.tolist, lambda x: None,
)  # fmt: skip


def values(x: Array, rng: Rng) -> Array:
    """Change one number: a length, page or position out of range, an invalid trit, NaN."""
    x = x.copy()
    if x.size and x.dtype.isnative:
        odd = [-1, 0, 1, 2, 3, 7, 100, 2**31 - 1] if x.dtype.kind == "i" else [0, 1]
        where = np.unravel_index(int(rng.integers(x.size)), x.shape)
        x[where] = np.asarray(pick(rng, odd if x.dtype.kind in "iub" else [np.nan, np.inf, 0.0])).astype(
            x.dtype
        )
    return x


# ---- changes of a call -------------------------------------------------------------------------------------


def named(one: OpCall) -> dict[str, Any]:
    return {**one.arrays, **one.options}


def array_names(one: OpCall) -> list[str]:
    return [n for n, x in named(one).items() if type(x) is np.ndarray and x.dtype.kind in "iubfV" and x.ndim]


def another_kind(one: OpCall, rng: Rng) -> OpCall:
    names = array_names(one)
    if not names:
        return one
    name = pick(rng, names)
    return one.having(**{name: pick(rng, KINDS)(named(one)[name])})


def other_values(one: OpCall, rng: Rng) -> OpCall:
    names = [n for n in array_names(one) if named(one)[n].dtype.kind in "iub"] or array_names(one)
    if not names:
        return one
    name = pick(rng, names)
    return one.having(**{name: values(named(one)[name], rng)})


def one_array_twice(one: OpCall, rng: Rng) -> OpCall:
    """Replace an argument by another one, or by a view of it."""
    names = array_names(one)
    if not names:
        return one
    first, second = pick(rng, names), pick(rng, names)
    x, y = named(one)[first], named(one)[second]
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return one
    return one.having(**{second: pick(rng, (lambda x: x, lambda x: x[:], reversed_within))(x)})


def neighbours(one: OpCall, rng: Rng) -> OpCall:
    """Move two arrays into one block of memory, separate or with an element in common."""
    names = array_names(one)
    if len(names) < 2:
        return one
    first, second = (str(n) for n in rng.choice(names, 2, replace=False))
    x, y = named(one)[first], named(one)[second]
    if not x.size or not y.size:
        return one
    moved, other = sharing(x, y)
    if rng.random() < 0.5:
        block = np.zeros(x.nbytes + y.nbytes + 64, np.uint8)
        start = -(-x.nbytes // 16) * 16
        moved, other = block[: x.nbytes].view(x.dtype), block[start : start + y.nbytes].view(y.dtype)
        moved, other = moved.reshape(x.shape), other.reshape(y.shape)
        moved[...] = x
    other[...] = y
    return one.having(**{first: moved, second: other})


def outs_of(one: OpCall, found: Any) -> list[Any]:
    """Arrays that the call is given for its results, or new ones."""
    out = one.options.get(OUT[one.op][0])
    new = outs_like(one, found, filled)
    if takes_one(one):
        return [out] if isinstance(out, np.ndarray) else new
    return list(out) if isinstance(out, tuple) and len(out) == len(new) else new


def sound_out(one: OpCall, found: Any) -> OpCall:
    return one.having(**given_out(one, outs_of(one, found))) if one.op in OUT else one


def with_out(one: OpCall, rng: Rng, found: Any) -> OpCall:
    """Pass arrays for the results: valid ones, other kinds, inputs, arrays that share memory."""
    if one.op not in OUT:
        return one
    outs, keyword = outs_of(one, found), OUT[one.op][0]
    i = int(rng.integers(len(outs)))
    out = outs[i] if isinstance(outs[i], np.ndarray) else outs_like(one, found, filled)[i]
    inputs = [named(one)[name] for name in array_names(one)]
    allowed = [k for k in IN_PLACE.get(one.op, ()) if k in array_names(one)]
    how = rng.random()
    if how < 0.5:
        outs[i] = pick(rng, OUT_KINDS)(out)
    elif how < 0.65 and allowed:
        outs[i] = pick(rng, (lambda x: x, lambda x: x[:], reversed_within))(named(one)[pick(rng, allowed)])
    elif how < 0.75:
        outs[i] = within(pick(rng, [*inputs, out]), out)
    elif how < 0.85:
        one, outs[i] = over_what_is_held(one, rng, out)
    elif how < 0.95 and len(outs) > 1:
        outs[i] = within(outs[i - 1], out)
    else:
        return one.having(
            **{keyword: pick(rng, (outs, outs[0], (), tuple(outs[:-1]), 3, [None] * len(outs)))}
        )
    return one.having(**given_out(one, outs))


def over_what_is_held(one: OpCall, rng: Rng, out: Array) -> tuple[OpCall, Array]:
    """Put ``out`` into the memory of a mask, or of packed weights."""
    for name, x in named(one).items():
        if isinstance(x, gpu_ops.BlockMask):
            moved, over = sharing(np.asarray(x.visible), out)
            return one.having(**{name: gpu_ops.BlockMask(moved, block_q=x.block_q, block_k=x.block_k)}), over
        if isinstance(x, gpu_ops.TernaryMatrix):
            moved, over = sharing(x.codes, out)
            return one.having(**{name: gpu_ops.TernaryMatrix(moved, x.scale, x.shape, x.format)}), over
    return one, pick(rng, OUT_KINDS)(out)


def within(x: Array, out: Array) -> Array:
    """Array like ``out`` in the memory of ``x``, if it fits."""
    if (
        not isinstance(x, np.ndarray)
        or not x.flags.c_contiguous
        or x.dtype.hasobject
        or x.nbytes < out.nbytes
    ):
        return x if isinstance(x, np.ndarray) else out
    bits = np.asarray(x).reshape(-1).view(np.uint8)
    return bits[: out.nbytes].view(out.dtype).reshape(out.shape)


def other_option(one: OpCall, rng: Rng) -> OpCall:
    parameters = inspect.signature(getattr(gpu_ops, one.op)).parameters
    options = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and n not in SETTINGS]
    name = pick(rng, [n for n in options if n != "workspace"] or options)
    if name in array_names(one) and rng.random() < 0.5:
        return one
    return one.having(**{name: pick(rng, NUMBERS if rng.random() < 0.6 else OTHERS)})


def equal_options(one: OpCall, rng: Rng) -> tuple[OpCall, OpCall]:
    """Set an option to its default, or to a value of another type that equals it in Python."""
    parameters = inspect.signature(getattr(gpu_ops, one.op)).parameters
    name = pick(rng, [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and n not in SETTINGS])
    value = pick(rng, (parameters[name].default, 0, 1))
    if isinstance(value, tuple):
        return one.having(**{name: value}), one.having(**{name: tuple(pick(rng, (1, 2, x)) for x in value)})
    if not isinstance(value, (bool, int, float)):
        return one, one
    kinds = (
        bool,
        int,
        float,
        np.bool_,
        np.int64,
        np.int8,
        np.float64,
        np.float32,
        lambda x: -float(x),
        np.array,
    )
    return one.having(**{name: value}), one.having(**{name: pick(rng, kinds)(value)})


def pair(one: OpCall, rng: Rng, found: Any) -> tuple[OpCall, OpCall]:
    """Pair of a call that is likely to be valid, and one that differs from it slightly."""
    first = sound_out(one, found) if rng.random() < 0.5 else one
    how = rng.random()
    if how < 0.1:
        return equal_options(first, rng)
    if how < 0.4:
        first = change(first, rng, found)
    second = change(first, rng, found)
    return first, change(second, rng, found) if rng.random() < 0.2 else second


def other_setting(one: OpCall, rng: Rng) -> OpCall:
    return one.having(**{pick(rng, SETTINGS): pick(rng, PLACES)})


def other_way(one: OpCall, rng: Rng) -> OpCall:
    """Pass an array by keyword, an unknown option, or one array too few."""
    if not one.arrays:
        return one
    last = list(one.arrays)[-1]
    rest = {name: x for name, x in one.arrays.items() if name != last}
    how = rng.random()
    if how < 0.7:
        return OpCall(one.op, rest, {**one.options, last: one.arrays[last]}, one.axes)
    return one.having(wether=True) if how < 0.9 else OpCall(one.op, rest, one.options, one.axes)


def optional_array(one: OpCall, rng: Rng) -> OpCall:
    """Add an array like the first: a residual, a bias, a gradient."""
    parameters = inspect.signature(getattr(gpu_ops, one.op)).parameters
    names = [n for n in OPTIONAL if n in parameters and n not in one.options]
    arrays = array_names(one)
    if not names or not arrays or not named(one)[arrays[0]].size:
        return one
    x = named(one)[arrays[0]]
    return one.having(
        **{pick(rng, names): pick(rng, (x, x.copy(), x[:], x[..., 0], x[0], np.zeros_like(x), cast(x)))}
    )


def change(one: OpCall, rng: Rng, found: Any) -> OpCall:
    how = rng.random()
    if how < 0.25:
        return with_out(one, rng, found)
    changes = (
        another_kind,
        other_values,
        one_array_twice,
        neighbours,
        other_option,
        other_option,
        other_setting,
    )
    return pick(rng, (*changes, another_kind, other_way, optional_array))(one, rng)


def all_arrays(one: OpCall) -> list[Array]:
    """All NumPy arrays of a call, including those within tuples and other objects."""
    arrays: list[Array] = []
    for value in named(one).values():
        inside = getattr(value, "call_arrays", value if isinstance(value, (tuple, list)) else (value,))
        arrays += [np.asarray(x) for x in inside if isinstance(x, np.ndarray)]
    return arrays
