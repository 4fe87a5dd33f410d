"""A call with its expected results; running and judging it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.errors import DeviceError, GpuOpsError
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FEW_VARIANTS, MANY_VARIANTS, Array, Formula, allowed, expected, fault

FORWARD, BACKWARD = 2.0, 3.0


@dataclass
class Trial:
    """A call with its expected results. ``results``: their dtypes in order; ``formula`` returns as many arrays.

    ``check``, where results are integers or objects: returns their fault. ``linked``: (argument, axis) whose length
    another argument has too. ``in_place``: results whose arrays are also inputs are in ``Draw.written``, and are
    restored before the buffers are compared.
    """

    op: str
    arguments: dict[str, Any]
    draw: Draw
    dtype: np.dtype[Any]
    results: tuple[Any, ...] = ()
    formula: Formula | None = None
    factor: float = FORWARD
    check: Callable[[list[Any]], str | None] | None = None
    linked: tuple[tuple[str, int], ...] = ()
    device: str = "cpu"
    backend: str = "numba"
    after: Callable[[], None] | None = None
    """Runs after the call, before what was written is put back."""

    def call(self, changed: dict[str, Any] | None = None) -> Any:
        """Make the call, with required arguments by position, as people write it."""
        named = {**self.arguments, "device": self.device, "backend": self.backend, **(changed or {})}
        function = getattr(gpu_ops, self.op)
        positional = []
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY or name not in named:
                break
            positional.append(named.pop(name))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return function(*positional, **named)

    def words(self, changed: dict[str, Any] | None = None) -> str:
        """Text of the call for a report."""
        named = {**self.arguments, **(changed or {})}
        return f"{self.op}({', '.join(f'{n}={_word(x)}' for n, x in named.items())}) on {self.device}, {self.backend}"


def _word(x: Any) -> str:
    if isinstance(x, np.ndarray):
        dense = (
            "" if x.flags.c_contiguous else f" strides {tuple(s // max(x.itemsize, 1) for s in x.strides)}"
        )
        return f"{x.dtype}{list(x.shape)}{dense}"
    if isinstance(x, tuple | list) and any(isinstance(element, np.ndarray) for element in x):
        return f"({', '.join(map(_word, x))})"
    if isinstance(x, gpu_ops.TernaryMatrix):
        return f"TernaryMatrix({x.shape}, {x.format}, scale {x.scale.shape})"
    return repr(x)[:80]


def flat(result: Any) -> list[Any]:
    """One or more results, dicts included, as a list."""
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, tuple | list):
        return [leaf for part in result for leaf in flat(part)]
    return [result]


def judge(trial: Trial) -> str | None:
    """Make the call and return its fault, or None."""
    draw = trial.draw
    before = [buffer.copy() for buffer in draw.buffers]
    held = [view.copy() for view in draw.written]
    try:
        results = flat(call_somewhere(trial))
    except DeviceError as error:
        return None if trial.device != "cpu" else f"refused: {error}"
    except GpuOpsError as error:
        return f"refused: {type(error).__name__}: {error}"
    results = [result.copy() if isinstance(result, np.ndarray) else result for result in results]
    if trial.after is not None:
        trial.after()
    for view, values in zip(draw.written, held, strict=True):
        view[...] = values
    if not same_bytes(draw.buffers, before):
        return "wrote into an input or beside a result"
    return compare(trial, results)


def call_somewhere(trial: Trial) -> Any:
    """Call on a backend; if it refuses the problem, another CPU backend must take it."""
    try:
        return trial.call()
    except DeviceError:
        if trial.device != "cpu":
            raise
        return trial.call({"backend": None})


def same_bytes(arrays: list[Array], others: list[Array]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(arrays, others, strict=True))


def compare(trial: Trial, found: list[Any]) -> str | None:
    """Compare the results with the formula."""
    if trial.check is not None:
        wrong = trial.check(found)
        if wrong or trial.formula is None:
            return wrong
    # a few variants are fast, but can all be right by luck
    return against_formula(trial, found, FEW_VARIANTS) and against_formula(trial, found, MANY_VARIANTS)


def against_formula(trial: Trial, found: list[Any], variants: int) -> str | None:
    assert trial.formula is not None
    exact, errors = expected(trial.formula, trial.dtype, variants)
    if len(found) < len(exact) or len(exact) != len(trial.results):
        return f"{len(found)} results, expected {len(trial.results)}"
    for i, (actual, want, error, dtype) in enumerate(zip(found, exact, errors, trial.results, strict=False)):
        if actual.dtype != dtype:
            return f"result {i} is {actual.dtype}, expected {dtype}"
        bound = allowed(want, error, np.dtype(dtype), trial.factor)
        if wrong := fault(actual, want, bound):
            return f"result {i}: {wrong}"
    return None
