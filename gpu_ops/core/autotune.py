"""``autotune``: measure the candidate configurations of a problem on this GPU and keep the fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_ops.core.op import forget_calls, op_named
from gpu_ops.core.run import Linked, PreparedCall
from gpu_ops.errors import DeviceError, OptionError
from gpu_ops.kernels.program import lower

__all__ = ["Tuning", "autotune"]

_TUNABLE = ("attention", "attention_varlen", "attention_decode")
_TIE = 1.01  # times the least time: closer than that, the model decides
_NEAR = 1.5  # times the least time of the first measurement; slower candidates are not measured again
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 7, 30, 0.5  # rounds, and seconds spent on the fastest candidate


@dataclass(frozen=True)
class Tuning:
    """Result of :func:`autotune`: measured times and the winner; printable."""

    op: str
    problem: str
    device: str
    bucket: str
    """The problems that the winner is used for."""
    seconds: Mapping[str, float]
    """Median seconds of one call by candidate, in the model's order of preference."""
    failed: Mapping[str, str]
    """Candidates that could not run, and why."""
    winner: str
    model: str
    """The candidate that runs where nothing was measured."""
    path: Path | None
    """Where the winner is stored; None: nowhere, it holds for this process."""

    def __str__(self) -> str:
        width = max(map(len, (*self.seconds, *self.failed)))
        lines = [f"{self.op}: {self.problem}", f"  {self.device}"]
        for label, seconds in sorted(self.seconds.items(), key=lambda pair: pair[1]):
            notes = [
                name for name, which in (("winner", self.winner), ("model", self.model)) if which == label
            ]
            lines.append(f"  {label:{width}}  {1e6 * seconds:10.1f} us  {', '.join(notes)}".rstrip())
        lines += [f"  {label:{width}}  failed: {why}" for label, why in self.failed.items()]
        stored = self.path or "nowhere: no cache folder is writable, so it holds for this process"
        return "\n".join([*lines, f"  used for  {self.bucket}", f"  stored    {stored}"])

    __repr__ = __str__


def autotune(op: str | Callable[..., Any], *arrays: Any, **options: Any) -> Tuning:
    """Measure every sensible way to run this call on the GPU that holds its arrays; later calls take the fastest.

    Attention has choices: the tile, whether the heads of a group are packed into rows, and into how many parts the
    keys are split. By default a model of the card chooses. The result is stored in the cache folder. This and later
    processes use it for similar problems (see the report) on this card with these kernels.

    Takes seconds, most of them in the compiler. The call is run many times: ``out=``, if given, is written.

    Parameters
    ----------
    op : str or function
        A public op, or its name.
    arrays, options
        Arguments of that op; the arrays are on a CUDA device.

    Returns
    -------
    Tuning
        Times of all candidates, the winner, where it is stored; ``print`` it.

    Raises
    ------
    DeviceError
        The call would not run on arrays of a CUDA device: there is nothing to measure.
    OptionError
        There is no such op, or nothing to choose in it.

    Notes
    -----
    A time is measured by device events around a call. A fill before it empties the L2 cache and lasts until the call
    is enqueued. Candidates take turns, and their medians are compared. Within 1 % of the fastest, the candidate that
    the model prefers wins. A candidate that fails is reported and left out.

    Examples
    --------
    >>> import gpu_ops
    >>> print(gpu_ops.autotune("attention", q, k, v, causal=True))  # doctest: +SKIP
    """
    from gpu_ops.kernels.common import tuning

    entry = op_named("autotune", op)
    name, bound = entry.name, entry.binder(*arrays, **options)
    if name not in _TUNABLE:
        raise OptionError(
            f"autotune: {name} has nothing to choose: shapes decide its launch; {', '.join(_TUNABLE)} have"
        )
    if bound.choice.device == "emulator":
        raise DeviceError(
            f"autotune: {name} would run on the emulator, which counts what kernels do and has no times"
        )
    if bound.cuda is None:
        raise DeviceError(
            f"autotune: the arrays of {name} are in host memory; it measures on a GPU: copy them there first "
            "(cupy.asarray(q), q.cuda())"
        )
    prepared = PreparedCall(bound, entry.parameters, arrays, options)
    limits = prepared.limits()
    choices = lower(bound.spec, prepared.backend, limits)[1].choices
    if not choices:
        raise OptionError(
            f"autotune: {name} with backend {prepared.backend!r} has nothing to choose: shapes decide its launch"
        )
    candidates = choices[-1].candidates()

    def link(label: str) -> Linked:
        return prepared.link(lower(bound.spec, prepared.backend, limits, label)[0])

    def run(linked: Linked) -> None:
        prepared.use(linked)
        prepared.first(bound, arrays, options)

    with bound.cuda.active():  # the stream that the op takes: events are recorded there
        seconds, failed = _measure(name, list(candidates), link, run)
    if not seconds:
        raise DeviceError(f"autotune: no way to run {name} works here; {_first_of(failed)}")
    fastest = min(seconds.values())
    winner = next(label for label in candidates if seconds.get(label, math.inf) <= _TIE * fastest)
    path = tuning.keep(choices[-1], winner, {label: round(1e6 * s, 2) for label, s in seconds.items()})
    forget_calls()
    model = next(label for label, config in candidates.items() if config == choices[-1].model())
    problem = bound.problem if isinstance(bound.problem, str) else bound.problem()
    device = str(prepared.device)
    return Tuning(name, problem, device, choices[-1].bucket, seconds, failed, winner, model, path)


def _first_of(failed: Mapping[str, str]) -> str:
    return next((f"{label}: {why}" for label, why in failed.items()), "there is none")


def _measure(
    op: str, labels: list[str], link: Callable[[str], Linked], run: Callable[[Linked], None]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return (seconds by candidate, reason by candidate that cannot run)."""
    import statistics

    from gpu_ops.kernels.compiler.progress import steps

    stopwatch = Stopwatch()
    linked: dict[str, Linked] = {}
    first: dict[str, float] = {}
    failed: dict[str, str] = {}

    def timed(label: str) -> float:
        return stopwatch(lambda: run(linked[label]))

    def begin(label: str) -> float:
        linked[label] = link(label)  # compiles it
        timed(label)
        return min(timed(label) for _ in range(3))

    def attempt(measure: Callable[[str], float], label: str) -> float | None:
        """Return None for a candidate that fails; it is then dropped."""
        try:
            return measure(label)
        except Exception as error:  # from the compiler, the driver or the allocator
            failed[label] = str(error).partition("\n")[0] or type(error).__name__
            return None

    with steps(f"gpu_ops: measuring {len(labels)} ways to run {op}", len(labels)) as advance:
        for label in labels:
            if (seconds := attempt(begin, label)) is not None:
                first[label] = seconds
            advance()
        fastest = min(first.values(), default=math.inf)
        samples: dict[str, list[float]] = {
            label: [] for label, seconds in first.items() if seconds <= _NEAR * fastest
        }
        for _ in range(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(_SECONDS / fastest)))):
            for label in list(samples):
                if (seconds := attempt(timed, label)) is None:
                    del first[label], samples[label]
                else:
                    samples[label].append(seconds)
    return first | {label: statistics.median(times) for label, times in samples.items()}, failed


class Stopwatch:
    """Timer of calls: seconds that the current device spends on one, on CuPy's current stream.

    Before the call the device fills more memory than the L2 cache holds, for twice as long as it took to enqueue the
    previous call, and reads it. The call then starts with a cold cache that has nothing to write back, and does
    not wait for the host.
    """

    def __init__(self) -> None:
        import cupy

        self._event, self._elapsed = cupy.cuda.Event, cupy.cuda.get_elapsed_time
        self._scratch = cupy.empty(
            max(2 * int(cupy.cuda.Device().attributes["L2CacheSize"]), 128 << 20), cupy.uint8
        )
        self._fills = 0
        self._fill_seconds = math.inf
        self(self._fill)  # loads CuPy's kernel
        self._fill_seconds = self(self._fill)

    def __call__(self, run: Callable[[], Any]) -> float:
        start, end = self._event(), self._event()
        for _ in range(self._fills):
            self._fill()
        self._scratch.max()
        start.record()
        began = time.perf_counter()
        run()
        enqueued = time.perf_counter() - began
        end.record()
        end.synchronize()
        self._fills = max(1, min(100, math.ceil(2 * enqueued / self._fill_seconds)))
        return float(self._elapsed(start, end)) / 1e3

    def _fill(self) -> None:
        self._scratch.fill(0)
