"""Checks shared by the attention functions: inputs, options of the scores, scales of quantized pages, results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypedDict

import ml_dtypes
import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call, Finish
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.block_mask import BlockMask
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Spec
from gpu_ops.ops.seeds import read_seed

__all__ = [
    "INT32",
    "QUANTIZED",
    "DenseOptions",
    "ScoreOptions",
    "WeightOptions",
    "backward_flops",
    "backward_raw_unsupported",
    "check_scales",
    "describe",
    "forward_flops",
    "layout_hint",
    "raw_unsupported",
    "read_inputs",
    "read_options",
    "read_results",
    "read_scales",
    "reference_options",
    "results_dtypes",
    "store_gradients",
    "store_results",
    "takes",
    "update_scales",
    "visible_pairs",
    "write_forward",
    "write_gradients",
]

INT32 = np.dtype(np.int32)
MAX_START = (1 << 30) - 1  # limit of q_start and k_start: distances between positions stay in int32
P = ParamSpec("P")
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


class ScoreOptions(TypedDict, total=False):
    """Options of every attention function that determine the scores; :func:`attention` documents them."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    sinks: Any
    alibi_slopes: Any


class WeightOptions(ScoreOptions, total=False):
    """Options of the attention functions for training: scores and dropout of the weights."""

    dropout_p: float
    seed: Any


class DenseOptions(WeightOptions, total=False):
    """Options of the attention functions for training whose sequences all have one length."""

    bias: Any
    block_mask: Any
    q_start: int | None
    k_start: int | None


def takes(options: type[ScoreOptions]) -> Callable[[Callable[P, Bound]], Callable[P, Bound]]:
    """Decorate a function of ``**options``: list them in its signature and docstring. ``@op`` refuses others."""
    listed = [inspect.signature(read_options).parameters[name] for name in options.__annotations__]

    def decorate(binder: Callable[P, Bound]) -> Callable[P, Bound]:
        signature = inspect.signature(binder)
        parameters = [*list(signature.parameters.values())[:-1], *listed]
        binder.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        binder.__doc__ = (binder.__doc__ or "").replace("**options", ", ".join(options.__annotations__))
        return binder

    return decorate


def read_inputs(
    call: Call,
    scales: tuple[Any, Any] | None = None,
    *,
    paged: bool = False,
    layout: str = "",
    **inputs: tuple[Any, str],
) -> str:
    """Read q, k and v, each with the names of its axes; return their dtype's name, or q's over quantized pages.

    ``scales``: those of k and v, from functions that take quantized pages. ``layout``: of functions with that option.
    """
    views = {name: call.read(name, x) for name, (x, _) in inputs.items()}
    for name, (_, axes) in inputs.items():
        call.axes.bind(name, views[name], axes)
    heads, heads_kv = call.axes["nheads"], call.axes["nheads_kv"]
    if heads_kv == 0 or heads == 0 or heads % heads_kv:
        raise ShapeError(
            f"{call.op}: nheads={heads} of q must be a positive multiple of nheads_kv={heads_kv} of k and v"
            + (f" (layout {hint})" if layout and (hint := layout_hint(call, layout)) else "")
        )
    for name in ("head_dim", "head_dim_v"):
        if call.axes[name] == 0:
            raise ShapeError(f"{call.op}: {name} is 0; it must be at least 1")
    dtype = checks.float_dtype(call.op, q=views["q"])
    _, k, v = inputs
    quantized = scales is not None and read_scales(call, k, v, *scales, paged=paged)
    return dtype if quantized else checks.float_dtype(call.op, **views)


def layout_hint(call: Call, layout: str) -> str:
    """Hint at attention's other layout, if there are more heads than keys and it fits too; else an empty string."""
    axes = call.axes
    seqlen_q, seqlen_k = axes["seqlen_q"], axes["seqlen_k"]
    if axes["nheads_kv"] <= seqlen_k or not seqlen_k or seqlen_q % seqlen_k:
        return ""
    other, names = ("bhsd", "heads, seqlen") if layout == "bshd" else ("bshd", "seqlen, heads")
    return (
        f"{layout}: {axes['nheads']} heads of {seqlen_q} queries, {axes['nheads_kv']} heads of {seqlen_k} keys; "
        f"for arrays (batch, {names}, head_dim) pass layout={other!r}"
    )


def read_options(
    call: Call,
    dtype: str,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    bias: Any = None,
    block_mask: Any = None,
    q_start: int | None = None,
    k_start: int | None = None,
) -> str:
    """Check the options of scores and weights, add them to the call, and return their text for ``explain``."""
    op, axes = call.op, call.axes
    if softmax_scale is None:
        softmax_scale = axes["head_dim"] ** -0.5
    sinks_ = call.optional("sinks", sinks)
    if sinks_ is not None:
        checks.exactly(op, "sinks", sinks_, (axes["nheads"],), np.dtype(np.float32))
    slopes = call.optional("alibi_slopes", alibi_slopes)
    if slopes is not None:
        shape = (axes["batch"], axes["nheads"]) if slopes.ndim == 2 else (axes["nheads"],)
        checks.exactly(op, "alibi_slopes", slopes, shape, np.dtype(np.float32))
    causal = checks.flag(op, "causal", causal)
    window_size = checks.window(op, window_size)
    softmax_scale = checks.computable(op, "softmax_scale", softmax_scale, dtype)
    softcap = checks.computable(op, "softcap", softcap, dtype, low=0.0, divides=True)
    call.option(causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap)
    dropout_p = _read_dropout(call, dropout_p, seed)
    if bias is not None:
        _read_bias(call, bias, checks.FLOAT_DTYPES[dtype])
    if block_mask is not None:
        _read_block_mask(call, block_mask)
    if q_start is not None or k_start is not None:
        starts = {"q_start": q_start, "k_start": k_start}
        for name, start in starts.items():
            starts[name] = 0 if start is None else checks.integer(op, name, start, low=0, high=MAX_START)
        call.option(**starts)
    words = [f"scale {softmax_scale:.4g}"]
    words += ["causal"] if causal else []
    words += [f"window {window_size}"] if window_size != (-1, -1) else []
    words += [f"softcap {softcap:g}"] if softcap else []
    words += [f"dropout {dropout_p:g}"] if dropout_p else []
    words += [
        f"{name} {start}" for name, start in (("q_start", q_start), ("k_start", k_start)) if start is not None
    ]
    arrays = {"sinks": sinks, "ALiBi": alibi_slopes, "bias": bias, "block mask": block_mask}
    return ", ".join([*words, *(word for word, x in arrays.items() if x is not None)])


def reference_options(spec: Spec, views: Mapping[str, Any]) -> dict[str, Any]:
    """The call's options as keyword arguments of the reference."""
    names = {*DenseOptions.__annotations__, "k_scale", "v_scale"}
    options = {name: x for name, x in (*spec.options, *views.items()) if name in names}
    if "block_mask.visible" in views:
        visible = views["block_mask.visible"]
        options["block_mask"] = BlockMask(visible, spec["block_q"], spec["block_k"])
    return options


def results_dtypes(views: Mapping[str, Any]) -> dict[str, Any]:
    """The dtypes of out and lse, as keyword arguments of the reference."""
    return {f"{name}_dtype": views[name].dtype for name in ("out", "lse") if name in views}


def store_results(views: Mapping[str, Any], found: tuple[Any, Any]) -> None:
    """Store the reference's out, and lse if it is returned."""
    views["out"][...] = found[0]
    if "lse" in views:
        views["lse"][...] = found[1]


def write_forward(
    call: Call, dtype: str, shapes: Shapes, out: Any, return_lse: bool, out_dtype: Any, lse_dtype: Any
) -> None:
    """Declare the results of a forward pass: ``out``, and ``lse`` with ``return_lse``. ``shapes``: their shapes."""
    computed = checks.computing_dtype(dtype)
    out_type = checks.result_dtype(call.op, "out_dtype", out_dtype, checks.FLOAT_DTYPES[dtype], computed)
    lse_type = checks.result_dtype(call.op, "lse_dtype", lse_dtype, computed, np.dtype(np.float64))
    if lse_dtype is not None and not return_lse:
        raise OptionError(f"{call.op}: lse_dtype is that of lse, which only return_lse=True returns")
    call.write("out", shapes[0], out_type, out, item=0)
    if return_lse:
        call.write("lse", shapes[1], lse_type, out, item=1)


def describe(call: Call, dtype: str, seqlens: tuple[int, int], options: str) -> str:
    """Describe the problem for ``explain``. ``seqlens``: lengths of the longest sequences."""
    axes = call.axes
    pages = f", pages of {axes['page_size']}" if "block_table" in call.views else ""
    if "k_scale" in call.views:
        pages += " in " + call.views["k_cache" if "k_cache" in call.views else "k"].dtype.name
    return (
        f"batch {axes['batch']}, seqlen {seqlens[0]} x {seqlens[1]}{pages}, "
        f"heads {axes['nheads']}/{axes['nheads_kv']}, "
        f"head_dim {axes['head_dim']}/{axes['head_dim_v']}, {dtype}, {options}"
    )


def visible_pairs(
    seqlens: tuple[int, int],
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    q_start: int | None = None,
    k_start: int | None = None,
    **_: Any,
) -> int:
    """Number of (query, key) pairs of a head that causal and windows leave visible."""
    seqlen_q, seqlen_k = seqlens
    offset = seqlen_k - seqlen_q
    if q_start is not None or k_start is not None:
        offset = (q_start or 0) - (k_start or 0)
    left, right = window_size

    def keys_before(first: int) -> int:
        """Number of keys before key first + i, summed over all queries i."""

        def sum_below(stop: int) -> int:  # sum of min(x, seqlen_k) for x < stop
            stop = max(stop, 0)
            limit = min(stop, seqlen_k)
            return limit * (limit - 1) // 2 + (stop - limit) * seqlen_k

        return sum_below(first + seqlen_q) - sum_below(first)

    seen = keys_before(offset + (0 if causal else right) + 1) if causal or right >= 0 else seqlen_q * seqlen_k
    return seen - (keys_before(offset - left) if left >= 0 else 0)


def forward_flops(call: Call, pairs: float) -> float:
    """Flops of a forward pass. ``pairs``: (query, key) pairs that a head sees, in all sequences."""
    return 2 * pairs * call.axes["nheads"] * (call.axes["head_dim"] + call.axes["head_dim_v"])


def backward_flops(call: Call, pairs: float) -> float:
    """Flops of a backward pass: five products instead of two, as the scores are recomputed."""
    return 2.5 * forward_flops(call, pairs)


@uninterrupted  # it imports
def raw_unsupported(spec: Spec) -> Mapping[str, str]:
    """Reason why the CUDA C++ kernels cannot run this call, by backend."""
    from gpu_ops.kernels.attention.forward import raw_unsupported

    why = raw_unsupported(spec)
    return {"raw": why} if why else {}


@uninterrupted  # as above
def backward_raw_unsupported(spec: Spec) -> Mapping[str, str]:
    """Reason why the CUDA C++ kernels cannot run this backward call, by backend."""
    from gpu_ops.kernels.attention.backward_raw import raw_unsupported

    why = raw_unsupported(spec)
    return {"raw": why} if why else {}


def _read_dropout(call: Call, dropout_p: Any, seed: Any) -> float:
    op = call.op
    p = checks.number(op, "dropout_p", dropout_p, low=0.0)
    if p >= 1:
        raise OptionError(f"{op}: dropout_p must be at least 0 and less than 1, got {p:g}")
    if p:
        call.option(dropout_p=p)
    if seed is None:
        if p:
            raise OptionError(
                f"{op}: dropout_p={p:g} needs seed=, an integer from 0 to 2**64 - 1 that is another in "
                "every layer and step, and the same forward and backward"
            )
    else:
        read_seed(call, seed)
    return p


def _read_bias(call: Call, bias: Any, dtype: np.dtype[Any]) -> None:
    bias_ = call.read("bias", bias)
    if bias_.dtype not in (dtype, np.float32):
        allowed = "float32, as q is" if dtype == np.float32 else f"q's {dtype} or float32"
        cast = "cast it: bias.astype('float32')"
        if bias_.dtype == np.bool_:
            cast = "make one of a mask (True: visible) by np.where(mask, 0, -np.inf).astype('float32')"
        raise DTypeError(f"{call.op}: bias is {bias_.dtype}, expected {allowed}; {cast}")
    axes = call.axes
    full = (axes["batch"], axes["nheads"], axes["seqlen_q"], axes["seqlen_k"])
    if not _broadcasts(bias_, full):
        raise ShapeError(
            f"{call.op}: bias has shape {bias_.shape}, not broadcastable to "
            f"(batch, nheads, seqlen_q, seqlen_k) = {full}"
        )


def _read_block_mask(call: Call, mask: Any) -> None:
    op, axes = call.op, call.axes
    if not isinstance(mask, BlockMask):
        raise DTypeError(
            f"{op}: block_mask is {type(mask).__name__}; pass gpu_ops.BlockMask(visible, block_q, block_k)"
        )
    full = (axes["batch"], axes["nheads"], *mask.num_blocks(axes["seqlen_q"], axes["seqlen_k"]))
    if not _broadcasts(mask.visible, full):
        raise ShapeError(
            f"{op}: block_mask.visible has shape {mask.visible.shape}, expected (batch, nheads, "
            f"ceil(seqlen_q / {mask.block_q}), ceil(seqlen_k / {mask.block_k})) = {full}; "
            "any of them may be 1, batch and nheads may be left out"
        )
    call.read("block_mask.visible", mask.visible)
    call.option(block_q=mask.block_q, block_k=mask.block_k)


def _broadcasts(x: Array, to: tuple[int, ...]) -> bool:
    if x.ndim > len(to):
        return False
    return all(n in (1, m) for n, m in zip(reversed(x.shape), reversed(to), strict=False))


QUANTIZED: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_CODES = (*QUANTIZED.values(), np.dtype(np.uint8))  # uint8 holds the bits of e4m3 numbers
_AXES = "num_pages page_size nheads_kv"
_FLOAT32 = np.dtype(np.float32)


def read_scales(call: Call, k: str, v: str, k_scale: Any, v_scale: Any, *, paged: bool) -> bool:
    """Read the scales if ``k`` and ``v``, names of views, are quantized pages; return whether they are."""
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    views = call.views
    if not check_scales(call, {k: views[k], v: views[v]}, scales, views["q"].dtype, paged=paged):
        return False
    for name, scale in scales.items():
        _check_scale(call, name, call.read(name, scale))
    return True


def update_scales(call: Call, k_scale: Any, v_scale: Any) -> None:
    """Declare the scales of pages that the call writes, after :func:`check_scales`."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(call, name, call.update(name, scale, _FLOAT32))


def check_scales(
    call: Call, pages: dict[str, Array], scales: dict[str, Any], dtype: np.dtype[Any], *, paged: bool
) -> bool:
    """Whether ``pages`` are quantized. ``dtype``: q's. ``paged``: whether the call has a page table or slots."""
    op, (k, v) = call.op, pages
    names = [name for name, scale in scales.items() if scale is not None]
    if not any(x.dtype in _CODES for x in pages.values()):
        if names:
            raise OptionError(
                f"{op}: {names[0]} is for pages of {', '.join(map(str, _CODES))}, and {k} is {pages[k].dtype}; "
                "omit it"
            )
        return False
    if pages[k].dtype != pages[v].dtype:
        raise DTypeError(
            f"{op}: {v} is {pages[v].dtype} but {k} is {pages[k].dtype}; both need one dtype of page"
        )
    if not paged:
        raise OptionError(
            f"{op}: {k} is {pages[k].dtype}; a quantized cache lies in pages: pass block_table="
        )
    if len(names) < 2:
        missing = next(name for name in scales if name not in names)
        raise OptionError(
            f"{op}: {k} is {pages[k].dtype} and {missing} is missing; pass k_scale= and v_scale=, float32 "
            "(num_pages, page_size, nheads_kv)"
        )
    if dtype == np.float64:
        raise DTypeError(
            f"{op}: q is float64, and quantized pages take float16, bfloat16 or float32; cast it, or keep the "
            "pages in float64"
        )
    return True


def _check_scale(call: Call, name: str, scale: Array) -> None:
    call.axes.bind(name, scale, _AXES)
    checks.exactly(call.op, name, scale, scale.shape, _FLOAT32)


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
