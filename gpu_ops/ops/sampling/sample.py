"""Sampling: the next token of each row of logits, drawn on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call, CheckValues
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.program import Builder, Spec, lowers

__all__ = ["sample", "sampling_number"]

_LARGEST = float(np.finfo(np.float32).max)
_LEAST = float(np.float32(1e-38))  # smallest divisor of logits: its reciprocal is finite
_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
# Allowed values of options, as text and as a test of numbers and arrays.
_ALLOWED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "temperature": (f"at least 0 and at most {_LARGEST:.8g}", lambda x: (x >= 0) & (x <= _LARGEST)),
    "top_k": ("at least 0, where 0 keeps all", lambda x: x >= 0),
    "top_p": ("in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
    "min_p": ("in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
    "repetition_penalty": (
        f"at least 1e-38 and at most {_LARGEST:.8g}",
        lambda x: (x >= _LEAST) & (x <= _LARGEST),
    ),
    "frequency_penalty": (f"at most {_LARGEST:.8g} in size", lambda x: abs(x) <= _LARGEST),
    "presence_penalty": (f"at most {_LARGEST:.8g} in size", lambda x: abs(x) <= _LARGEST),
}
_COUNTERS = ("seed", "step")


@op(cuda=True, kernels="sampling.sample", dynamic=(*_ALLOWED, *_COUNTERS))
def sample(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seed: Any,
    step: Any = 0,
    bias: Any = None,
    counts: Any = None,
    repetition_penalty: Any = 1.0,
    frequency_penalty: Any = 0.0,
    presence_penalty: Any = 0.0,
    return_logprob: bool = False,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Draw the next token of each row of logits.

    The steps, in this order, with tokens ordered by z and ties by index::

        z = logits
        z = z * repetition_penalty if z < 0 else z / repetition_penalty       where counts != 0
        z = z - frequency_penalty * counts - presence_penalty                 where counts > 0
        z = z + bias
        p = softmax(z / temperature)
        top_k   keeps the first top_k tokens
        top_p   keeps the fewest first tokens whose share of what top_k kept is at least top_p
        min_p   keeps tokens with p >= min_p * max(p)

    and a kept token is drawn with probability proportional to p. It is the same on every device and backend, for
    every layout and number of threads.

    Parameters
    ----------
    logits : array (..., vocab)
        float16, bfloat16, float32 or float64.
    temperature : number, or float32 array (...)
        At least 0; with 0 the token is the first one with the largest z.
    top_k : int, or int32 array (...)
        0 keeps all.
    top_p, min_p : number, or float32 array (...)
        In [0, 1]. A top_p of 1 and a min_p of 0 keep all; the first token is always kept.
    seed : int from 0 to 2**64 - 1, or uint64 or int64 array (...)
        An array has the seed of each request: its tokens do not depend on the rest of the batch or on its row. With
        an int, row r draws random number r; a request with a separate seed draws number 0.
    step : int from 0 to 2**64 - 1, or uint64 or int64 array (...)
        Index of the token in a request. The same seed and step draw the same random number.
    bias : array (vocab,) or like logits, float32 (float64 for float64), optional
        -inf excludes a token.
    counts : int32 array like logits, optional
        Number of times that each token was drawn; penalties need it. Negative: the token is only in the prompt, and
        counts for the repetition penalty.
    repetition_penalty, frequency_penalty, presence_penalty : number, or float32 array (...)
        The first is more than 0.
    return_logprob : bool
        Also return the log-probability of each token under ``softmax(logits)``, before penalties, bias, temperature
        and filters.
    out : array, or (tokens, logprob), optional
        Receives the results.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    tokens : int32 array (...)
        -1 in rows without a distribution: those whose z has a NaN or +inf, or only -inf.
    logprob : array (...), float32 (float64 for float64), only with ``return_logprob``; NaN where the token is -1

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. Options in arrays in host memory are checked. On a GPU they are not, since
        that would wait for them: a row with an option out of range gets -1.

    Notes
    -----
    No value is read on the host. top_k, top_p and min_p are applied in the order of Hugging Face transformers (vLLM
    has min_p first). Penalties are those of CTRL (Keskar et al. 2019, section 4.1) and of OpenAI's API, whose
    frequency and presence penalties do not count the prompt. The log-probability is vLLM's ``raw_logprobs``. Of equal
    tokens at the cutoff, the first ones are kept.

    Options are float32. Probabilities are integers, multiples of max(p) / 2**bits with bits = 45 for a vocabulary of
    128 Ki tokens, so that sums do not depend on their order; kernels find the cutoff by radix selection, without
    sorting. The random number is that of Philox 4x32-10 for (seed, step); ``gpu_ops.reference.sampling.sample`` has
    both. float32 and float64 logits of the same values may give different tokens if a sum is next to that number.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> logits = np.log(np.array([[1.0, 6.0, 3.0], [4.0, 4.0, 2.0]]))
    >>> gpu_ops.sample(logits, temperature=0.0, seed=0)
    array([1, 0], dtype=int32)
    >>> seeds = np.array([7, 8])  # of two requests
    >>> [gpu_ops.sample(logits, top_k=2, seed=seeds, step=step).tolist() for step in range(4)]
    [[1, 0], [1, 1], [1, 1], [1, 0]]
    """
    call = Call("sample", device, backend, workspace)
    x = call.read("logits", logits, rows=True)
    dtype = checks.float_dtype(call.op, logits=x)
    if x.ndim == 0:
        raise ShapeError(f"{call.op}: logits has no axes; expected (..., vocab)")
    if x.shape[-1] >= 2**31:
        raise ShapeError(
            f"{call.op}: logits has shape {x.shape}; tokens are int32, at most 2**31 - 1 of them"
        )
    rows, acc_dtype = x.shape[:-1], checks.computing_dtype(dtype)
    _read_by_token(call, x, bias, counts, acc_dtype)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    arrays = [
        name for name, value in options.items() if _read_option(call, name, value, rows, counts is not None)
    ]
    for name, value in (("seed", seed), ("step", step)):
        _read_counter(call, name, value, rows)
    results: dict[str, Any] = {"tokens": np.dtype(np.int32)}
    if checks.flag(call.op, "return_logprob", return_logprob):
        results["logprob"] = acc_dtype
    for item, (name, result) in enumerate(results.items()):
        checks.contiguous(call.op, name, call.write(name, rows, result, out, item=item))
    return call.bind(
        problem=lambda: f"{math.prod(rows)} rows of {x.shape[-1]} {dtype}",
        unsupported=checks.unsupported(dtype),
        check_values=None if call.on_cuda or not arrays else _check_values(call.op, arrays),
        flops=40.0 * x.size,
    )


def _read_by_token(call: Call, x: Array, bias: Any, counts: Any, kind: np.dtype[Any]) -> None:
    if bias is not None:
        b = call.read("bias", bias, rows=True)
        checks.exactly(call.op, "bias", b, x.shape if b.ndim > 1 else x.shape[-1:], kind)
    if counts is not None:
        checks.exactly(call.op, "counts", call.read("counts", counts, rows=True), x.shape, np.dtype(np.int32))


def _read_option(call: Call, name: str, value: Any, rows: tuple[int, ...], has_counts: bool) -> bool:
    """Read a number, which may differ in every call, or an array; return whether it is an array."""
    if not _is_array(value):
        make = functools.partial(sampling_number, call.op, name, has_counts)
        make(value, None)
        call.provide(
            name, None, name, make, _PENALTIES.get(name, 1.0 if name in ("temperature", "top_p") else 0)
        )
        return False
    if name in _PENALTIES and not has_counts:
        raise OptionError(f"{call.op}: {name} needs counts=, how often each token was drawn")
    x = call.read(name, value, contiguous=True)
    checks.exactly(call.op, name, x, rows, np.dtype(np.int32 if name == "top_k" else np.float32))
    return True


def sampling_number(op: str, name: str, has_counts: bool, value: Any, device: Any = None) -> Any:
    """Check an option that is a number: ``temperature``, ``top_k``, ..., but not a counter."""
    if name == "top_k":
        return checks.integer(op, name, value, low=0, high=2**31 - 1)
    number = checks.number(op, name, value)
    words, is_allowed = _ALLOWED[name]
    if not is_allowed(number):
        raise OptionError(f"{op}: {name} must be {words}; got {number!r}")
    if name in _PENALTIES and not has_counts and number != _PENALTIES[name]:
        raise OptionError(f"{op}: {name} needs counts=, how often each token was drawn")
    return number


def _read_counter(call: Call, name: str, value: Any, rows: tuple[int, ...]) -> None:
    if not _is_array(value):
        check = functools.partial(_counter, call.op, name)
        check(value, None)
        call.provide(name, None, name, check, 0)
        return
    x = call.read(name, value, contiguous=True)
    checks.exactly(call.op, name, x, rows)
    if x.dtype not in (np.int64, np.uint64):
        raise DTypeError(
            f"{call.op}: {name} is {x.dtype}, expected an integer, or an array of uint64 or int64"
        )


def _counter(op: str, name: str, value: Any, device: Any) -> int:
    return checks.integer(op, name, value, low=0, high=2**64 - 1)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def _check_values(op: str, names: list[str]) -> CheckValues:
    """Hook that checks options in arrays in host memory."""

    def check_values(views: Mapping[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        for name in names:
            words, is_allowed = _ALLOWED[name]
            wrong = ~is_allowed(views[name])
            if wrong.any():
                index = tuple(int(i) for i in np.argwhere(wrong)[0])
                position = f"[{', '.join(map(str, index))}]" if index else ""
                raise OptionError(f"{op}: {name}{position} is {views[name][index]}; expected {words}")
        return {}, {}

    return check_values


@lowers("sample", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.sampling import sample as reference

    names = (*_ALLOWED, *_COUNTERS, "bias", "counts")

    def run(views: Mapping[str, Any]) -> None:
        options: dict[str, Any] = {name: views.get(name) for name in names}
        if "logprob" in views:
            results = reference.sample(views["logits"], **options, return_logprob=True)
            store(views, ("tokens", "logprob"), results)
        else:
            store(views, ("tokens",), reference.sample(views["logits"], **options))

    builder.call(run, "NumPy")
