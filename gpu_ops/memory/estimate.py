"""Estimates of memory before a run, of a Llama's training step or one call; choice of what to keep in a budget."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.checks import computing_dtype, instance, integer, one_of
from gpu_ops.core.op import op_named
from gpu_ops.errors import DTypeError, OptionError, OutOfMemoryError
from gpu_ops.memory.sizes import MOST_SEQUENCES, MOST_TOKENS
from gpu_ops.memory.trace import Trace
from gpu_ops.memory.weights import Weights, check_blocks, planned_model, trained_shapes
from gpu_ops.models import POLICIES, Llama, LlamaConfig, block_forward, lora_grads, loss_and_grads
from gpu_ops.models.block import recomputed_flops
from gpu_ops.ops.rows.global_norm import global_norm

__all__ = ["Estimate", "choose_policies", "estimate", "estimate_call", "read_dtype"]

_WHO = "memory.estimate"
_ARRAYS = Weights()
_MOMENT_BLOCK = 256  # moments in 8 bits with one scale


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step, of inference, or of one call."""

    parts: dict[str, int]
    """Bytes by term. Live throughout: weights, adapters, gradients, optimizer, KV cache, or arguments of a call.
    activations: the maximum in addition to these, including workspaces. For a call: results, workspaces."""
    largest: tuple[tuple[str, int], ...]
    """Labels and bytes at the peak, in addition to memory live throughout; the largest first."""
    workspaces: int = 0
    """Bytes of workspaces and scratch at the peak, counted in the activations."""

    @classmethod
    def of(cls, trace: Trace, parts: dict[str, int]) -> Estimate:
        """Make an estimate from ``parts`` and the peak of a trace."""
        at = [b for b in trace.at_peak() if not b.given]
        workspaces = sum(b.nbytes for b in at if b.is_workspace)
        return cls(parts, tuple((b.label, b.nbytes) for b in at), workspaces)

    @property
    def peak(self) -> int:
        """Sum of the bytes of all parts."""
        return sum(self.parts.values())

    @property
    def state(self) -> int:
        """Bytes that are live throughout."""
        return self.peak - sum(self.parts.get(name, 0) for name in ("activations", "results", "workspaces"))

    def __str__(self) -> str:
        lines = [f"{name:12} {n / 2**20:>10.1f} MiB" for name, n in {**self.parts, "peak": self.peak}.items()]
        at = [f"  {name:28} {n / 2**20:>10.1f} MiB" for name, n in self.largest[:5]]
        return "\n".join([*lines, "at the peak, the largest:", *at])


@typed_memory_errors(_WHO)
def estimate(
    config: LlamaConfig,
    *,
    batch: int,
    seqlen: int,
    dtype: npt.DTypeLike = np.float32,
    policy: str | Sequence[str] = "none",
    optimizer: str | None = "adamw",
    moment_bits: int = 32,
    device: str | None = None,
    chunk: int = 0,
    weights: Weights = _ARRAYS,
) -> Estimate:
    """Estimate the memory of a training step: loss, gradients, norm and optimizer.

    It traces :func:`gpu_ops.models.loss_and_grads` under a :class:`Trace`, so the plan is that of the program itself.

    Parameters
    ----------
    config : LlamaConfig
    batch, seqlen : int
    dtype : dtype
        Dtype of weights and activations. 16-bit weights have float32 masters.
    policy : str, or one for each layer
        See :func:`gpu_ops.models.block_forward`.
    optimizer : str or None
        ``"adamw"``: two states per weight. None: no states.
    moment_bits : int
        Bits of a state, 32 or 8, as in :meth:`gpu_ops.training.FlatParams.from_shapes`.
    device : str, optional
        ``"cpu"``, ``"cuda"`` (the installed card) or a card of the presets, such as ``"H100 SXM"``.
    chunk : int
        As in :func:`gpu_ops.linear_cross_entropy`.
    weights : Weights
        LoRA adapters that are trained, over a frozen base of arrays or packed matrices (QLoRA). Default: all weights
        are arrays, and trained.

    Examples
    --------
    >>> from gpu_ops import memory, models
    >>> config = models.LlamaConfig(vocab=32000, hidden=1024, ffn=2816, nlayers=8, nheads=16)
    >>> none = memory.estimate(config, batch=4, seqlen=2048, dtype="float16")
    >>> layer = memory.estimate(config, batch=4, seqlen=2048, dtype="float16", policy="layer")
    >>> layer.parts["activations"] / none.parts["activations"] < 0.45
    True
    """
    one_of(_WHO, "optimizer", optimizer or "adamw", ("adamw",))
    weight_dtype = np.dtype(dtype)
    state_dtype = computing_dtype(weight_dtype.name)
    if integer(_WHO, "moment_bits", moment_bits) not in (8, 32):
        raise OptionError(f"{_WHO}: moment_bits must be 8 or 32, got {moment_bits}")
    batch = integer(_WHO, "batch", batch, low=1, high=MOST_SEQUENCES)
    seqlen = integer(_WHO, "seqlen", seqlen, low=1, high=MOST_TOKENS)
    instance(_WHO, "weights", weights, Weights)
    check_blocks(_WHO, weights, config)
    if weights.format is not None and weights.rank is None:
        raise OptionError(
            f"{_WHO}: weights in {weights.format} are frozen; pass Weights(..., rank=) of adapters"
        )
    shapes = trained_shapes(weights, config)
    with Trace(device) as trace:
        ids = trace.empty((batch, seqlen), np.int32, "token ids")
        model, parts = planned_model(weights, trace, config, weight_dtype)
        grads = {name: trace.empty(shape, state_dtype, "gradients") for name, shape in shapes.items()}
        into = Llama.of(grads, config) if weights.rank is None else lora_grads(model, grads)
        state = trace.live_bytes
        loss_and_grads(ids, ids, model, config, grads=into, policy=policy, chunk=chunk)
        global_norm(list(grads.values()))
    numbers = sum(map(math.prod, shapes.values()))
    masters = numbers * state_dtype.itemsize if weight_dtype != state_dtype else 0
    moment = numbers * state_dtype.itemsize
    if moment_bits == 8:
        moment = numbers + state_dtype.itemsize * -(-numbers // _MOMENT_BLOCK)
    states = 2 * moment if optimizer else 0
    parts |= {
        "gradients": numbers * state_dtype.itemsize,
        "optimizer": masters + states,
        "activations": trace.peak_bytes - state,
    }
    return Estimate.of(trace, parts)


def choose_policies(
    config: LlamaConfig,
    *,
    batch: int,
    seqlen: int,
    budget: int,
    dtype: npt.DTypeLike = np.float32,
    **more: Any,
) -> list[str]:
    """Choose a policy for each layer that keeps a training step within a budget and recomputes as little as possible.

    Parameters
    ----------
    config, batch, seqlen, dtype
        As in :func:`estimate`; ``more``: its other options.
    budget : int
        Bytes for the whole step: weights, gradients, states and activations.

    Raises
    ------
    OutOfMemoryError
        No choice fits; ``required`` is the size of the smallest.

    Examples
    --------
    >>> from gpu_ops import memory, models
    >>> config = models.LlamaConfig(vocab=256, hidden=256, ffn=688, nlayers=4, nheads=4)
    >>> budget = memory.estimate(config, batch=4, seqlen=256).peak
    >>> memory.choose_policies(config, batch=4, seqlen=256, budget=budget)
    ['none', 'none', 'none', 'none']
    """
    ladder = _ladder(config, batch, seqlen, dtype, more.get("device"))
    steps = [
        [after] * n + [before] * (config.nlayers - n)
        for before, after in itertools.pairwise(ladder)
        for n in range(config.nlayers)
    ] + [[ladder[-1]] * config.nlayers]

    def peak(i: int) -> int:
        return estimate(config, batch=batch, seqlen=seqlen, dtype=dtype, policy=steps[i], **more).peak

    least = peak(len(steps) - 1)
    if least > budget:
        raise OutOfMemoryError(
            f"memory.choose_policies: a step of batch {batch}, seqlen {seqlen} takes {least} bytes even where "
            f"layers keep nothing but their inputs, and the budget is {budget}; take a smaller batch",
            least,
            budget,
        )
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle) <= budget else (middle + 1, high)
    return steps[low]


def _ladder(
    config: LlamaConfig, batch: int, seqlen: int, dtype: npt.DTypeLike, device: str | None
) -> list[str]:
    """Efficient policies, starting with the one that keeps most: those on the convex hull of bytes kept and flops
    recomputed."""
    points = [
        (recomputed_flops(policy, config, seqlen), -kept_bytes(policy, config, batch, seqlen, dtype), policy)
        for policy in POLICIES
        if policy != "offload"
    ]
    hull: list[tuple[float, int, str]] = []
    for flops, kept, policy in sorted(points):
        while len(hull) > 1 and _above(hull[-2], hull[-1], (flops, kept)):
            hull.pop()
        if not hull or kept > hull[-1][1]:
            hull.append((flops, kept, policy))
    on_gpu = device not in (None, "cpu")
    return [policy for _, _, policy in hull] + ["offload"] * on_gpu


def _above(first: Any, second: Any, third: Any) -> bool:
    """Whether a mix of the first and the third saves more than the second at the same work."""
    return bool(
        (second[1] - first[1]) * (third[0] - first[0]) <= (third[1] - first[1]) * (second[0] - first[0])
    )


def kept_bytes(policy: str, config: LlamaConfig, batch: int, seqlen: int, dtype: npt.DTypeLike) -> int:
    """Bytes that a layer keeps between forward and backward."""
    one_layer = replace(config, nlayers=1, layers=config.layers[:1])
    with Trace() as trace:
        arrays = {name: trace.empty(shape, dtype) for name, shape in one_layer.shapes().items()}
        x = trace.empty((batch, seqlen, config.hidden), dtype)
        _, saved = block_forward(x, Llama.of(arrays, one_layer).layers[0], one_layer, policy=policy)
        return saved.nbytes


_ESTIMATE_CALL = "memory.estimate_call"


def estimate_call(
    op: str | Callable[..., Any],
    *args: Any,
    dtype: npt.DTypeLike = np.float32,
    device: str | None = None,
    **kwargs: Any,
) -> Estimate:
    """Estimate the memory of one call, its arguments, results and workspaces, from its program, without running it.

    Parameters
    ----------
    op : str or function
        ``"attention"``, or ``gpu_ops.attention``.
    *args, **kwargs
        Arguments of the op, by position or name. An array is given as its shape, a tuple, and has ``dtype``; as
        ``(shape, dtype)``, which is also the form for keyword options such as ``bias``; or as a NumPy array. Index
        arrays whose values a call checks (``cu_seqlens``, ``seqused_k``) must be real arrays.
    dtype : dtype
    device : str, optional
        ``"cpu"``, ``"cuda"`` (the installed card) or a card of the presets, such as ``"H100 SXM"``.

    Returns
    -------
    Estimate
        ``parts`` are ``arguments`` (given as shapes), ``results`` and ``workspaces``; ``peak`` is their sum.

    Examples
    --------
    >>> from gpu_ops import memory
    >>> shape = (1, 8192, 32, 128)
    >>> call = memory.estimate_call("attention", q=shape, k=shape, v=shape, causal=True, dtype="bfloat16")
    >>> call.parts["results"] >> 20  # without the 4 GiB of scores, which are never stored
    64
    """
    named_op, default_dtype = op_named(_ESTIMATE_CALL, op), read_dtype(_ESTIMATE_CALL, dtype)
    named = dict(named_op.signature.parameters)
    by_place = [p for p in named.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    with Trace(device) as trace:
        arrays = [_array(trace, p, x, default_dtype) for p, x in zip(by_place, args, strict=False)]
        arrays += args[len(by_place) :]  # too many: the op raises an error
        options = {
            n: _array(trace, named[n], x, default_dtype) if n in named else x for n, x in kwargs.items()
        }
        arguments = trace.live_bytes
        result = named_op(tuple(arrays), options)
        results = trace.live_bytes - arguments
        parts = {"arguments": arguments, "results": results}
        parts["workspaces"] = trace.peak_bytes - arguments - results
        estimated = Estimate.of(trace, parts)
        del result
    return estimated


def read_dtype(op: str, dtype: Any) -> np.dtype[Any]:
    """Read a dtype argument."""
    try:
        result: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(
            f"{op}: dtype={dtype!r} is none; pass one such as 'float16' or 'bfloat16'"
        ) from error
    return result


def _array(trace: Trace, parameter: inspect.Parameter, value: Any, dtype: np.dtype[Any]) -> Any:
    """Make an array without memory for a shape, a shape and a dtype, or lists of these; others stay unchanged."""
    name = parameter.name
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple):
        return _empty(trace, name, value[0], read_dtype(_ESTIMATE_CALL, value[1]))
    takes_arrays = parameter.kind is not inspect.Parameter.KEYWORD_ONLY and parameter.annotation == "Any"
    if takes_arrays and isinstance(value, tuple):
        return _empty(trace, name, value, dtype)
    if takes_arrays and isinstance(value, list):
        return [_array(trace, parameter, x, dtype) for x in value]
    return value


def _empty(trace: Trace, name: str, shape: tuple[Any, ...], dtype: np.dtype[Any]) -> Any:
    sizes = tuple(integer(_ESTIMATE_CALL, f"{name}: an axis", n, low=0) for n in shape)
    if dtype.hasobject:
        raise DTypeError(f"{_ESTIMATE_CALL}: {name} cannot have dtype {dtype}")
    return trace.empty(sizes, dtype, name)
