"""Kinds of cases. A case depends only on its seed and number."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import gpu_ops.core.dispatch
from gpu_ops.core.device import compiler_missing
from gpu_ops.core.op import forget_calls
from scripts.fuzzing import attention, gated, linear, loss, rotary, rows, sampling, ternary, training
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.files import judge_files
from scripts.fuzzing.mistakes import change, judge_mistake, outcome
from scripts.fuzzing.trial import Trial, call_somewhere, judge

MAKERS = (
    *attention.TRIALS,
    *rows.TRIALS,
    *gated.TRIALS,
    *linear.TRIALS,
    *loss.TRIALS,
    *rotary.TRIALS,
    *sampling.TRIALS,
    *ternary.TRIALS,
    *training.TRIALS,
)
EMULATED = 0.03  # share of the calls: the emulator takes seconds for what a CPU does in microseconds
REFERENCE = 0.12
KINDS = ("call",) * 11 + ("pair",) * 4 + ("mistake",) * 3 + ("files",) + ("interrupt",)


class Finding(Exception):
    """Fault, and the call that has it."""


def run_case(seed: int, number: int) -> str:
    """Run a case and return its kind and op. Raises :class:`Finding`."""
    draw = Draw((seed, number))
    kind = draw.pick(*KINDS)
    forget_calls()  # so that a case replays alone, regardless of earlier cases
    name, described = kind, ""
    try:
        if kind == "files":
            wrong = judge_files(draw)
        else:
            trial = build((seed, number, 1), emulated=kind == "call")
            name, described = f"{kind} {trial.op}", trial.words()
            wrong, described = CHECKS[kind](draw, trial, (seed, number, 1))
    except Exception as error:
        raise Finding(f"{name}: {type(error).__name__}: {error}\n  {described}\n{trace(error)}") from error
    if wrong is not None:
        raise Finding(f"{name}: {wrong}\n  {described}")
    return name


def trace(error: Exception) -> str:
    """Origin of an error: the last few frames."""
    return "".join(traceback.format_exception(error, limit=-3)).rstrip()


def build(seed: Sequence[int], emulated: bool = False) -> Trial:
    """Build a valid call, the same each time. ``emulated``: some are for the emulator."""
    first = Draw(seed)
    maker = first.pick(*MAKERS)
    small = emulated and first.chance(EMULATED)
    trial = maker(Draw((*seed, 2), small))
    if small and trial.op in gpu_ops.core.dispatch.WITH_CUDA_KERNELS:
        backend = first.pick("raw", "numba")
        if compiler_missing(backend) is None:
            trial.device, trial.backend = "emulator", backend
    elif first.chance(REFERENCE):
        trial.backend = "reference"
    return trial


def check_call(draw: Draw, trial: Trial, seed: Sequence[int]) -> tuple[str | None, str]:
    return judge(trial), trial.words()


def check_mistake(draw: Draw, trial: Trial, seed: Sequence[int]) -> tuple[str | None, str]:
    """Check an invalid call, sometimes after a valid one, which must not make the later call pass."""
    if draw.chance(0.5):
        judge(trial)
    wrong, changed = judge_mistake(draw, trial)
    return wrong, trial.words(changed)


def check_pair(draw: Draw, trial: Trial, seed: Sequence[int]) -> tuple[str | None, str]:
    """Check that the second of two calls that differ in one argument has the same outcome as alone."""
    judge(trial)
    outcomes = []
    for alone in (False, True):
        again = build(seed)
        changed = change(Draw((*seed, 3)), again)
        if alone:
            forget_calls()
        outcomes.append(outcome(again, changed))
    if outcomes[0] == outcomes[1]:
        return None, ""
    words = [f"{result[0]} {result[1:3] if result[0] == 'refused' else ''}" for result in outcomes]
    words = words if words[0] != words[1] else ["other bytes", "than alone"]
    return f"after a similar call: {words[0]}, alone: {words[1]}", trial.words(changed)


def check_interrupt(draw: Draw, trial: Trial, seed: Sequence[int]) -> tuple[str | None, str]:
    """Check that after Ctrl-C at any time the next call is right."""
    delays = [10 ** draw.rng.uniform(-5, -2) for _ in range(6)]
    before = [buffer.copy() for buffer in trial.draw.buffers]

    def restore() -> None:
        for buffer, values in zip(trial.draw.buffers, before, strict=True):
            buffer[...] = values

    def call() -> None:
        restore()  # a call in place, made over and over, would overflow
        call_somewhere(trial)

    for delay in delays:
        if not interrupted(call, delay):
            return "an interrupt was lost", trial.words()
    restore()
    return judge(trial), trial.words()


def interrupted(call: Callable[[], object], delay: float) -> bool:
    """Call until a KeyboardInterrupt after ``delay`` seconds; False if it never arrives, as in a finalizer."""
    sent, due = threading.Event(), threading.Event()

    def send() -> None:
        time.sleep(delay)
        sent.set()
        _thread.interrupt_main()
        due.set()

    sender = threading.Thread(target=send)
    try:
        sender.start()
        lost = False
        while not lost:
            lost = due.is_set()
            call()
        return False
    except KeyboardInterrupt:
        if not sent.is_set():
            raise  # the user's
        sender.join()
        return True
    except BaseException:
        with contextlib.suppress(KeyboardInterrupt):  # it may still arrive
            sender.join()
            time.sleep(0.1)
        raise


CHECKS = {"call": check_call, "pair": check_pair, "mistake": check_mistake, "interrupt": check_interrupt}
