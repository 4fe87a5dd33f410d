"""``@op``: turns a function that binds its arguments into a public op, cached by call key.

Here are also :func:`explain`, and the names that other libraries use for options.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, overload

from gpu_ops.core.allocator import out_of_memory
from gpu_ops.core.arrays import in_place_of_array
from gpu_ops.core.call import Bound
from gpu_ops.core.call_key import ANY_NUMBER, call_key
from gpu_ops.core.checks import one_of
from gpu_ops.core.device import EmulatorDevice
from gpu_ops.core.dispatch import WITH_CUDA_KERNELS, Choice
from gpu_ops.core.run import PreparedCall, forget
from gpu_ops.errors import DTypeError, OutOfMemoryError, UnknownOptionError
from gpu_ops.kernels.program import lower_module

__all__ = ["Explanation", "Op", "explain", "forget_calls", "meant_by", "op", "op_named", "workspace_size"]

P = ParamSpec("P")

MAX_CALLS = 1024  # cached per op, some KB each

OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Explanation:
    """Description of what a call would do; printable."""

    bound: Bound
    prepared: PreparedCall
    values: dict[str, Any]

    @property
    def choice(self) -> Choice:
        """Device and backend, with the reason."""
        return self.bound.choice

    def __str__(self) -> str:
        b, choice = self.bound, self.bound.choice
        problem = b.problem if isinstance(b.problem, str) else b.problem()
        lines = [
            f"{b.op}: {problem}",
            f"  runs on   {choice.device}, backend {choice.backend} ({choice.reason})"
            + ("; arrays are copied there and back" if choice.copies else ""),
            "  config    " + "\n            ".join(self._config()),
        ]
        lines += [f"  not       {name}: {why}" for name, why in choice.passed_over.items()]
        return "\n".join(lines)

    __repr__ = __str__

    def _config(self) -> list[str]:
        device: Any = self.prepared.device
        if device is None:
            device = EmulatorDevice()
        program = self.prepared.program(self.values, device.limits)
        header = [] if self.bound.choice.device == "cpu" else [str(device)]
        return [*header, *str(program).splitlines()]


class Op:
    """A public function: binds a call the first time, then goes straight to its program.

    ``written``: arguments in addition to ``out`` that receive results. ``dynamic``: keyword arguments whose values,
    where they are numbers, are not part of the key.
    """

    def __init__(
        self, binder: Callable[..., Bound], written: tuple[str, ...], dynamic: tuple[str, ...]
    ) -> None:
        self.name, self.binder, self.dynamic = binder.__name__, binder, dynamic
        self.signature = inspect.signature(binder)
        self.parameters = tuple(self.signature.parameters)
        kinds = [p.kind for p in self.signature.parameters.values()]
        positional = self.parameters[: sum(k is not inspect.Parameter.KEYWORD_ONLY for k in kinds)]
        arrays = [n for n, p in self.signature.parameters.items() if not isinstance(p.default, bool)]
        named = [name for name in ("out", "residual_out", "grads", *written) if name in arrays]
        self._results = tuple(n for n in named if n not in positional)
        both = [n for n in named if n in positional and n in written]
        self._positional = tuple((self.parameters.index(n), n) for n in both)  # passed by position or by name
        self.known: dict[Any, PreparedCall] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._key(args, kwargs)
        prepared = self.known.get(key)
        if prepared is not None:
            result = prepared(args, kwargs)
            return result if prepared.tuple_argument is None else kwargs[prepared.tuple_argument]
        bound = self.bind(args, kwargs)
        prepared = PreparedCall(bound, self.parameters, args, kwargs)
        result = prepared.first(bound, args, kwargs)
        if key is not None:
            if len(self.known) >= MAX_CALLS:
                self.known.clear()
            self.known[key] = prepared
        return result if prepared.tuple_argument is None else kwargs[prepared.tuple_argument]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name in self.dynamic:
            if type(kwargs.get(name)) in ANY_NUMBER:
                kwargs = {**kwargs, name: ANY_NUMBER[type(kwargs[name])]}
        written: tuple[str | int, ...] = self._results
        if self._positional:
            written = (*written, *[i if i < len(args) else name for i, name in self._positional])
        return call_key(written, args, kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the validated call. A missing or surplus argument raises Python's own TypeError."""
        for name in kwargs:
            if name not in self.parameters:
                raise self._unknown(name)
        try:
            return self.binder(*args, **kwargs)
        except TypeError as error:
            first = next(iter((*args, *kwargs.values())), None)
            hint = in_place_of_array(first) if type(error) is TypeError else ""
            if not hint:
                raise
            raise DTypeError(
                f"{self.name}: {self.parameters[0]} is {type(first).__name__}, not an array; {hint}"
            ) from error

    def _unknown(self, name: str) -> UnknownOptionError:
        foreign = meant_by(name, self.parameters)
        near = difflib.get_close_matches(name, self.parameters, n=1)
        hint = f"; {foreign}" if foreign else f"; did you mean {near[0]!r}?" if near else ""
        kinds = self.signature.parameters.items()
        options = ", ".join(n for n, p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY)
        return UnknownOptionError(f"{self.name}: unknown argument {name!r}{hint}; options: {options}")

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        bound = self.bind(args, kwargs)
        prepared = PreparedCall(bound, self.parameters, args, kwargs)
        views = prepared.views(bound, args, kwargs)
        values = bound.check_values(views, prepared.backend)[0] if bound.check_values else {}
        return Explanation(bound, prepared, values)


@overload
def op(binder: Callable[P, Bound]) -> Callable[P, Any]: ...
@overload
def op(
    *, cuda: bool = False, kernels: str = "", written: tuple[str, ...] = (), dynamic: tuple[str, ...] = ()
) -> Callable[[Callable[P, Bound]], Callable[P, Any]]: ...
def op(
    binder: Callable[P, Bound] | None = None,
    *,
    cuda: bool = False,
    kernels: str = "",
    written: tuple[str, ...] = (),
    dynamic: tuple[str, ...] = (),
) -> Any:
    """Turn a function that binds its arguments into a public op.

    ``cuda``: the op has kernels for GPUs. ``kernels``: the module of ``kernels/`` that registers its programs.
    ``written``, ``dynamic``: see :class:`Op`.
    """
    if binder is None:
        return functools.partial(op, cuda=cuda, kernels=kernels, written=written, dynamic=dynamic)
    if kernels:
        lower_module(binder.__name__, f"gpu_ops.kernels.{kernels}")
    entry = OPS[binder.__name__] = Op(binder, written, dynamic)
    if cuda:
        WITH_CUDA_KERNELS.append(entry.name)

    @functools.wraps(binder)
    def public(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return entry(args, kwargs)
        except OutOfMemoryError:
            raise
        except MemoryError as error:  # from scratch, or a copy of an argument
            raise out_of_memory(entry.name, error) from error

    public.__signature__ = entry.signature.replace(return_annotation=inspect.Signature.empty)  # type: ignore[attr-defined]
    public.op = entry  # type: ignore[attr-defined]
    return public


def explain(op: str | Callable[..., Any], *arrays: Any, **options: Any) -> Explanation:
    """Explain how ``op``, a public function or its name, would run with these arguments: device, backend, tiles,
    and why. Runs nothing.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.ones((4, 64), np.float32)
    >>> print(gpu_ops.explain("rmsnorm", x, np.ones(64, np.float32), backend="reference"))
    rmsnorm: 4 rows of 64 float32, casting fp32
      runs on   cpu, backend reference (asked for)
      config    NumPy, float64
      not       numba: not asked for
    """
    return op_named("explain", op).explain(*arrays, **options)


def workspace_size(op: str | Callable[..., Any], *arrays: Any, **options: Any) -> int:
    """Bytes of ``workspace=`` that a call with these arguments needs; 0 on the CPU.

    Pass a uint8 array of this size to capture the call in a CUDA graph: with ``out=`` and ``workspace=`` it allocates
    nothing. The array must live as long as the graph.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.ones((4, 64), np.float32)
    >>> gpu_ops.workspace_size("rmsnorm", x, np.ones(64, np.float32))
    0
    """
    explanation = op_named("workspace_size", op).explain(*arrays, **options)
    if explanation.bound.choice.device == "cpu":
        return 0
    return explanation.prepared.program(explanation.values, explanation.prepared.limits()).workspace_bytes


def op_named(asked_by: str, op: str | Callable[..., Any]) -> Op:
    """Look up a public op by its function or name."""
    entry = getattr(op, "op", None)
    return entry if isinstance(entry, Op) else OPS[one_of(asked_by, "op", op, OPS)]


def forget_calls() -> None:
    """Drop all cached calls, so that later tuning or edits take effect."""
    for entry in OPS.values():
        entry.known.clear()
    forget()


_VARLEN = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_k")
_MASKS = ("bias", "block_mask", "mask")  # an op has some of these
_EQUIVALENTS: dict[str, tuple[str, ...]] = {
    "mask": _MASKS,
    "attn_mask": _MASKS,
    "attention_mask": _MASKS,
    "key_padding_mask": ("seqused_k", *_MASKS),
    "attn_bias": ("bias",),
    "alibi": ("alibi_slopes",),
    "s_aux": ("sinks",),
    "temp": ("temperature",),
    "is_causal": ("causal",),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "scaling": ("softmax_scale", "scale"),
    "dropout": ("dropout_p", "p"),
    "dropout_rate": ("dropout_p", "p"),
    "sliding_window": ("window_size",),
    "local_window_size": ("window_size",),
    "logits_soft_cap": ("softcap",),
    "soft_cap": ("softcap",),
    "return_softmax_lse": ("return_lse",),
    "return_attn_probs": ("return_lse",),
    "need_weights": ("return_lse",),
    "query": ("q",),
    "key": ("k", "k_cache"),
    "value": ("v", "v_cache"),
    "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k"),
    "cu_seqlens_kv": ("cu_seqlens_k",),
    "max_seqlen_kv": ("max_seqlen_k",),
    "cache_seqlens": ("seqused_k",),
    "block_tables": ("block_table",),
    "page_table": ("block_table",),
    "generator": ("seed",),
    "input": ("x", "logits", "ids", "q", "gate"),
    "hidden_states": ("x",),
    "gamma": ("weight",),
    "beta": ("bias",),
    "epsilon": ("eps",),
    "variance_epsilon": ("eps",),
    "base": ("theta",),
    "rope_theta": ("theta",),
    "position_ids": ("positions",),
    "labels": ("targets",),
    "lse_square_scale": ("z_loss",),
    "learning_rate": ("lr",),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "exp_avg": ("m",),
    "exp_avg_sq": ("v",),
    "inplace": ("out",),
    "dtype": ("out_dtype",),
}
_ADVICE = {
    "amsgrad": "omit it: no op keeps the largest v",
    "enable_gqa": "omit it: heads share keys wherever nheads is a multiple of nheads_kv",
    "dim": "omit it: the op works along the last axis",
    "axis": "omit it: the op works along the last axis",
}


def meant_by(keyword: str, arguments: Iterable[str]) -> str:
    """Text that names the equivalent of another library's keyword in an op with these arguments; "" if there is none.

    >>> meant_by("attn_mask", ("q", "k", "v", "bias", "block_mask"))
    "here it is 'bias' or 'block_mask'"
    """
    arguments = tuple(arguments)
    if keyword in _VARLEN and "causal" in arguments and "cu_seqlens_q" not in arguments:
        return "attention_varlen takes sequences of several lengths"
    ours = [repr(name) for name in _EQUIVALENTS.get(keyword, ()) if name in arguments]
    return f"here it is {' or '.join(ours)}" if ours else _ADVICE.get(keyword, "")
