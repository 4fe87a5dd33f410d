"""scripts/fuzz.py: cases depend only on their numbers, and planted faults of every kind are found."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import GpuOpsError
from scripts import fuzz
from scripts.fuzzing import gated, kinds, maths
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.files import judge_files
from scripts.fuzzing.mistakes import judge_mistake
from scripts.fuzzing.trial import judge

MANY = 30


def swiglu_trials(count=MANY):
    """Valid calls of the forward op."""
    trials = (gated.swiglu(Draw((1, i))) for i in range(count))
    return [trial for trial in trials if trial.op == "swiglu" and trial.arguments["gate"].size > 8]


def test_a_case_follows_from_its_seed_and_number():
    for number in range(20):
        trial, other = (kinds.build((5, number)) for _ in range(2))
        assert trial.words() == other.words()
        assert [x.tobytes() for x in trial.draw.buffers] == [x.tobytes() for x in other.draw.buffers]
    assert kinds.build((5, 0)).words() != kinds.build((6, 0)).words()


def test_every_op_is_drawn():
    drawn = {kinds.build((7, number)).op for number in range(800)}
    ops = {name for name in gpu_ops.__all__ if hasattr(getattr(gpu_ops, name), "op")}
    assert ops == drawn


def test_nothing_is_found_in_right_calls():
    assert not any(map(judge, swiglu_trials(10)))


@pytest.mark.parametrize(
    "fault",
    [
        lambda y: y * 1.5 + 1,
        lambda y: np.where(np.arange(y.size).reshape(y.shape) == y.size - 1, np.inf, y).astype(y.dtype),
        lambda y: y.astype(np.float64 if y.dtype != np.float64 else np.float32),
        lambda y: y[..., :-1],
    ],
    ids=["value", "infinity", "dtype", "shape"],
)
def test_a_wrong_result_is_found(fault, monkeypatch):
    right = gpu_ops.swiglu
    monkeypatch.setattr(gpu_ops, "swiglu", functools.wraps(right)(lambda *a, **o: fault(right(*a, **o))))
    trials = swiglu_trials(12)
    assert len(trials) > 3
    assert all(map(judge, trials))


def test_an_element_written_beside_a_result_is_found(monkeypatch):
    right = gpu_ops.swiglu

    @functools.wraps(gpu_ops.swiglu)
    def beside(gate, *arguments, **options):
        y = right(gate, *arguments, **options)
        if "out" in options and options["out"].base is not None:
            options["out"].base.reshape(-1).view(np.uint8)[-1] ^= 1
        return y

    monkeypatch.setattr(gpu_ops, "swiglu", beside)
    trials = [t for t in swiglu_trials(200) if "out" in t.arguments and t.arguments["out"].base is not None]
    padded = [t for t in trials if t.arguments["out"].base.size > t.arguments["out"].size]
    assert len(padded) > 3
    assert "wrote into an input or beside a result" in map(judge, padded)


def test_an_accepted_mistake_is_found(monkeypatch):
    right = gpu_ops.swiglu

    @functools.wraps(gpu_ops.swiglu)
    def lenient(*arguments, **options):
        try:
            return right(*arguments, **options)
        except GpuOpsError:
            return arguments[0]

    monkeypatch.setattr(gpu_ops, "swiglu", lenient)
    faults = [judge_mistake(Draw((2, i)), trial)[0] for i, trial in enumerate(swiglu_trials())]
    assert all(faults)


def test_a_mistake_with_an_untyped_error_is_found(monkeypatch):
    @functools.wraps(gpu_ops.swiglu)
    def broken(*arguments, **options):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(gpu_ops, "swiglu", broken)
    wrong, _ = judge_mistake(Draw((2, 0)), swiglu_trials()[0])
    assert "IndexError" in wrong


def test_a_call_that_remembers_too_much_is_found(monkeypatch):
    """The faulty call takes its dtype and strides from the last call of this shape."""
    right, known = gpu_ops.swiglu, {}

    @functools.wraps(gpu_ops.swiglu)
    def forgetful(gate, *arguments, **options):
        key = getattr(gate, "shape", None)
        if key not in known:
            known[key] = right(gate, *arguments, **options)
        return known[key]

    monkeypatch.setattr(gpu_ops, "swiglu", forgetful)
    monkeypatch.setattr(kinds, "forget_calls", known.clear)
    monkeypatch.setattr(kinds, "build", lambda seed: gated.swiglu(Draw(seed)))
    numbers = (n for n in range(2 * MANY) if gated.swiglu(Draw((3, n))).op == "swiglu")
    faults = (kinds.check_pair(Draw((3, n, 9)), kinds.build((3, n)), (3, n))[0] for n in numbers)
    assert any(fault and "after a similar call" in fault for fault in faults)


def test_an_untyped_error_of_a_damaged_file_is_found(monkeypatch):
    read = gpu_ops.TernaryMatrix.load

    def brittle(path):
        try:
            return read(path)
        except GpuOpsError as error:
            raise KeyError("codes") from error

    monkeypatch.setattr(gpu_ops.TernaryMatrix, "load", brittle)
    faults = [judge_files(Draw((4, i))) for i in range(12)]
    assert any(fault and "KeyError" in fault for fault in faults)


def test_a_call_that_an_interrupt_breaks_is_found(monkeypatch):
    right, broken = gpu_ops.swiglu, []

    @functools.wraps(gpu_ops.swiglu)
    def fragile(*arguments, **options):
        try:
            y = right(*arguments, **options)
            return y * 2 if broken else y
        except KeyboardInterrupt:
            broken.append(True)
            raise

    monkeypatch.setattr(gpu_ops, "swiglu", fragile)
    wrong = None
    for i, trial in enumerate(swiglu_trials()):
        wrong = wrong or kinds.check_interrupt(Draw((6, i)), trial, ())[0]
    assert broken
    assert wrong is not None


def test_the_command_line(monkeypatch, capsys):
    assert fuzz.main(["--cases", "3", "--seed", "1"]) == 0
    assert "3 cases in" in capsys.readouterr().out
    assert "watch" not in {thread.name for thread in threading.enumerate()}  # it would end this process later
    monkeypatch.setattr(kinds, "judge_files", lambda draw: "planted")
    monkeypatch.setattr(kinds, "KINDS", ("files",))
    assert fuzz.main(["--case", "1:7"]) == 1
    out = capsys.readouterr().out
    assert "FOUND 1:7 files: planted" in out
    assert "replay: python scripts/fuzz.py --case 1:7" in out
    with pytest.raises(SystemExit) as usage:
        fuzz.main(["--case", "7"])
    assert usage.value.code == 2


def test_bfloat16_is_rounded_once():
    """The number is slightly above the middle of two numbers: float32 would lose the difference."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40, 1 + 2.0**-8, np.inf, np.nan, 1e39])
    actual = maths.nearest(x, maths.BFLOAT16).astype(np.float64)
    np.testing.assert_array_equal(actual, [1 + 2.0**-7, -1 - 2.0**-7, 1.0, np.inf, np.nan, np.inf])
