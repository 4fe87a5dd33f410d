"""Times ours, the naive formula and a peer, interleaved, on the same data.

Each round gives every contender a slice of time in turn, so that a machine that slows down or a
neighbour that wakes up hits all of them; on a CPU so does the loop that runs at the limit of the case (peaks.py), the
share of which is then of two medians of the same moments. After a switch there is a pause, because BLAS pools keep
spinning for some milliseconds and would steal the next contender's cores, and one untimed call. Cases
bound by memory rotate over as many copies of their inputs as exceed the last-level cache.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from perf import accuracy
from perf.case import DTYPES, Call, Case, Config, Prepare, copy_inputs, make_inputs
from perf.limits import Limits, buffer_size
from perf.machine import memory_available, threads
from perf.memory import Growth, Probe
from perf.stats import Timing, summarise

MAX_SETS = 64
ALL_SCORES = "torch math"
"""The peer that holds the scores of all heads at once: its memory is what attention in O(N^2) takes."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: every contender gets ``rounds`` slices of ``slice_seconds``."""

    rounds: int = 7
    slice_seconds: float = 0.15
    slow_seconds: float = 12.0
    """A contender slower than this in all takes part in fewer rounds, and is timed twice at least."""
    pause: float = 0.03


THOROUGH = Effort()
QUICK = Effort(rounds=5, slice_seconds=0.04, slow_seconds=0.8, pause=0.02)
HURRIED = Effort(rounds=2, slice_seconds=0.01, slow_seconds=0.0, pause=0.02)
"""For the rest of a ``--quick`` run that a busy machine has made long."""


@dataclass
class Contender:
    """Rotates over its calls, one for each copy of the inputs."""

    name: str
    calls: Sequence[Call]
    position: int = 0

    def next(self) -> Call:
        call = self.calls[self.position % len(self.calls)]
        self.position += 1
        return call


@dataclass(frozen=True)
class Result:
    """Everything measured for one case."""

    case: Case
    timings: dict[str, Timing]
    limit_seconds: float
    limited_by: str
    error: accuracy.Error | None
    memory: dict[str, Growth]
    failure: str = ""
    seconds: float = 0.0
    """What measuring this case took, compilation and memory included."""
    limit: Timing | None = None
    """On a CPU: of the loop at the limit, in turns with the others; ``limit_seconds`` is by its median."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that cannot run this case on the GPU, with their own words."""

    @property
    def share_of_limit(self) -> float | None:
        ours = self.timings.get("ours")
        return self.limit_seconds / ours.median if ours else None

    def times(self, name: str) -> float | None:
        """How many times longer the named contender takes than ours."""
        ours, other = self.timings.get("ours"), self.timings.get(name)
        return other.median / ours.median if ours and other else None

    @property
    def passed(self) -> bool:
        return not self.failure and self.error is not None and self.error.ok

    def to_json(self) -> dict[str, Any]:
        case = self.case
        return {
            "key": case.key,
            "op": case.op,
            "name": case.name,
            "shape": case.shape,
            "dtype": case.dtype,
            "flops": case.flops,
            "bytes": case.bytes,
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
            "limit_seconds": self.limit_seconds,
            "limit": asdict(self.limit) if self.limit else None,
            "limited_by": self.limited_by,
            "share_of_limit": self.share_of_limit,
            "times_naive": self.times("naive"),
            "times_torch": self.times("torch"),
            "times_numba": self.times("numba"),
            "left_out": self.left_out,
            "memory": {name: asdict(growth) for name, growth in self.memory.items()},
            "error": asdict(self.error) if self.error else None,
            "passed": self.passed,
            "failure": self.failure,
            "seconds": self.seconds,
            "note": case.note,
        }


def timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(
    contenders: Sequence[Contender], effort: Effort, timer: Callable[[Call], float] = timed
) -> dict[str, Timing]:
    """Timings of all contenders, taken in turns. The first call of each is kept apart (compilation)."""
    first, estimate, rounds = {}, {}, {}
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    for contender in contenders:
        first[contender.name] = timer(contender.next())
        estimate[contender.name] = max(timer(contender.next()), 1e-7)
        affordable = int(effort.slow_seconds / estimate[contender.name])
        rounds[contender.name] = max(1, min(effort.rounds, affordable))
        if rounds[contender.name] == 1:
            samples[contender.name].append(estimate[contender.name])  # too slow to throw a warm call away
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(effort.rounds):
            for offset in range(len(contenders)):
                contender = contenders[(turn + offset) % len(contenders)]
                name = contender.name
                if turn >= rounds[name]:
                    continue
                time.sleep(effort.pause)
                count = max(1, min(200, int(effort.slice_seconds / estimate[name])))
                if count > 1:
                    timer(contender.next())
                samples[name].extend(timer(contender.next()) for _ in range(count))
    finally:
        if collecting:
            gc.enable()
    return {c.name: summarise(samples[c.name], first=first[c.name], sets=len(c.calls)) for c in contenders}


def copies_needed(case: Case, working_set: float, cold_bytes: int) -> int:
    """Copies of the inputs to rotate over; one where arithmetic, not memory, sets the pace."""
    if case.in_flops or working_set <= 0:
        return 1
    return max(1, min(MAX_SETS, math.ceil(cold_bytes / working_set)))


def prepare_contenders(
    case: Case, inputs: Any, config: Config, left_out: dict[str, str] | None = None
) -> list[Contender]:
    """Ours first. On CUDA a contender that cannot run is noted in ``left_out``: a library may have no kernel for a
    dtype, and what holds all scores may not fit."""
    on_cuda = config.device == "cuda"  # whose timer leaves the caches cold by itself
    cold_bytes = 0 if on_cuda else min(buffer_size(config.quick), memory_available() // 8)
    wanted: list[tuple[str, Prepare, float]] = [("ours", case.ours, case.bytes)]
    if on_cuda and case.numba is not None:
        wanted.append(("numba", case.numba, case.bytes))
    if case.naive is not None:
        wanted.append(("naive", case.naive, case.dense_bytes or case.bytes))
    if case.torch is not None and config.use_torch and have_torch():
        wanted.append(("torch", case.torch, case.dense_bytes or case.bytes))
        wanted += [(name, prepare, case.bytes) for name, prepare in case.peers.items() if on_cuda]
    counts = {name: copies_needed(case, size, cold_bytes) for name, _, size in wanted}
    sets = [inputs]
    while len(sets) < max(counts.values()):
        sets.append(copy_inputs(inputs))
    contenders = []
    for index, (name, prepare, _) in enumerate(wanted):
        try:
            calls = [prepare(one) for one in sets[: counts[name]]]
            if on_cuda and name != "ours":
                calls[0]()
        except Exception as error:
            if left_out is None or not on_cuda or name == "ours":
                raise
            left_out[name] = f"{type(error).__name__}: {error}"
            calls = []
        if not calls:
            release(config)  # only now does the error no longer hold what its frames did
            continue
        # every contender starts elsewhere, so that none finds what another has just read
        contenders.append(Contender(name, calls, position=index * len(calls) // len(wanted)))
    return contenders


def run_case(
    case: Case, config: Config, limits: Limits, probe: Probe | None = None, effort: Effort | None = None
) -> Result:
    """Measure one case. A contender or a check that raises ends up in ``failure``, not in a traceback."""
    start = time.perf_counter()
    effort = effort or (QUICK if config.quick else THOROUGH)
    half = DTYPES[case.dtype].itemsize == 2 and (config.device != "cpu" or case.dtype == "bfloat16")
    seconds, limited_by = limits.seconds(case.flops, case.bytes, case.bandwidth, half=half)
    timings: dict[str, Timing] = {}
    left_out: dict[str, str] = {}
    error, growths, failure, limit = None, {}, "", None
    try:
        release(config)
        inputs = make_inputs(case, config)
        contenders = prepare_contenders(case, inputs, config, left_out)
        if config.device == "cpu":
            from perf import peaks

            pacemaker = peaks.pacemaker(limited_by, buffer_size(config.quick), half=half)
            contenders.append(Contender("limit", [pacemaker.call]))
        timings = interleave(contenders, effort, timer_for(config))
        if config.device == "cpu":
            limit = timings.pop("limit")
            work = case.flops if limited_by == "matmul" else case.bytes
            seconds = work / pacemaker.amount * limit.median
        del contenders
        error = accuracy.check(case, inputs, config)
        del inputs
        if probe is not None:
            names = [name for name in ("ours", "naive", ALL_SCORES) if name in timings]
            growths = {name: probe.growth(case, config, name) for name in names}
    except Exception as exc:  # one broken case must not hide the others
        failure = f"{type(exc).__name__}: {exc}"
        if not str(exc) or isinstance(exc, AssertionError | AttributeError | NameError):
            failure += "\n" + traceback.format_exc()
    spent = time.perf_counter() - start
    return Result(case, timings, seconds, limited_by, error, growths, failure, spent, limit, left_out)


def release(config: Config) -> None:
    """On CUDA: memory that CuPy and torch keep for later goes back to the device, for the other one to use."""
    if config.device == "cuda":
        from perf import cuda

        cuda.release()


def timer_for(config: Config) -> Callable[[Call], float]:
    if config.device == "cuda":
        from perf import cuda

        return cuda.timed
    return timed


def have_torch() -> bool:
    """Whether the torch peer can run; sets it to the threads that gpu_ops uses."""
    try:
        import torch
    except ImportError:
        return False
    if torch.get_num_threads() != threads():
        torch.set_num_threads(threads())
    return True
