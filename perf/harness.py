"""Times ours, the naive formula and a peer, interleaved, on the same data; checks the error.

Each round gives every contender a slice of time in turn, so that a slower clock or a busy neighbour affects all of
them. On a CPU the loop at the case's limit (peaks.py) takes turns too, so the share of the limit compares medians
of the same period. After a switch there is a pause and one untimed call: BLAS pools keep spinning for some
milliseconds and would steal the next contender's cores. Memory-bound cases rotate over copies of their inputs that
together exceed the last-level cache.
"""

from __future__ import annotations

import copy
import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gpu_ops.reference.tolerance import FORWARD, GRADIENT, tolerance
from perf.case import DTYPES, Call, Case, Prepare, RunOptions, make_inputs, results, to_float64, to_host
from perf.limits import buffer_size
from perf.machine import memory_available, threads
from perf.memory import Growth, Probe
from perf.stats import Limits, Power, Timing, summarise

MAX_SETS = 64
ALL_SCORES = "torch math"
"""The peer that holds the scores of all heads at once: its memory is that of attention in O(N^2)."""


@dataclass(frozen=True)
class Effort:
    """Length of a measurement: every contender gets ``rounds`` slices of ``slice_seconds``."""

    rounds: int = 7
    slice_seconds: float = 0.15
    slow_seconds: float = 12.0
    """A contender that would take longer in total runs fewer rounds, but is timed at least twice."""
    pause: float = 0.03
    power_seconds: float = 1.0


THOROUGH = Effort()
QUICK = Effort(rounds=5, slice_seconds=0.04, slow_seconds=0.8, pause=0.02, power_seconds=0.2)
HURRIED = Effort(rounds=2, slice_seconds=0.01, slow_seconds=0.0, pause=0.02, power_seconds=0.1)
"""For the rest of a ``--quick`` run that takes too long on a busy machine."""


@dataclass
class Contender:
    """Contender that rotates over its calls, one per copy of the inputs."""

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
    error: Error | None
    memory: dict[str, Growth]
    failure: str = ""
    seconds: float = 0.0
    """How long measuring this case took, including compilation and memory."""
    limit: Timing | None = None
    """On a CPU: the loop at the limit, in turns with the others. ``limit_seconds`` comes from its median."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that cannot run this case on the GPU, each with its error."""
    power: Power | None = None
    """Of ours, on a GPU."""

    @property
    def share_of_limit(self) -> float | None:
        ours = self.timings.get("ours")
        return self.limit_seconds / ours.median if ours else None

    def times(self, name: str) -> float | None:
        """Ratio of the named contender's time to ours."""
        ours, other = self.timings.get("ours"), self.timings.get(name)
        return other.median / ours.median if ours and other else None

    @property
    def passed(self) -> bool:
        return not self.failure and self.error is not None and self.error.ok

    def row(self) -> dict[str, Any]:
        """Row of the case in a saved run (runs.py). A contender's figures are in columns that start with its name."""
        case = self.case
        columns: dict[str, Any] = {
            name: getattr(case, name) for name in ("key", "op", "name", "shape", "dtype", "flops", "bytes")
        }
        if case.tokens and "ours" in self.timings:
            columns["tokens"] = case.tokens
            columns |= {
                f"{name}_tokens_per_second": case.tokens / t.median for name, t in self.timings.items()
            }
        for name, timing in self.timings.items():
            columns |= _columns(name, asdict(timing))
        if self.power is not None:
            columns |= _columns("ours", asdict(self.power))
        if self.limit is not None:
            columns |= _columns("limit", asdict(self.limit))
        columns |= {"limit_seconds": self.limit_seconds, "limited_by": self.limited_by}
        columns["share_of_limit"] = self.share_of_limit
        columns |= _columns("times", {name: self.times(name) for name in self.timings if name != "ours"})
        for name, growth in self.memory.items():
            columns |= _columns(name, asdict(growth))
        columns |= _columns("left_out", self.left_out)
        if self.error is not None:
            columns |= _columns("error", asdict(self.error))
        columns |= {
            "passed": self.passed,
            "failure": self.failure,
            "seconds": self.seconds,
            "note": case.note,
        }
        return {name: int(value) if isinstance(value, bool) else value for name, value in columns.items()}


def _columns(prefix: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}".replace(" ", "_"): value for name, value in figures.items()}


def timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(
    contenders: Sequence[Contender], effort: Effort, timer: Callable[[Call], float] = timed
) -> dict[str, Timing]:
    """Timings of all contenders, taken in turns. The first call of each is separate (compilation)."""
    first, spent, rounds = {}, {}, {}  # spent: by a timed call, all that its timer does included
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    for contender in contenders:
        first[contender.name] = timer(contender.next())
        start = time.perf_counter()
        second = timer(contender.next())
        spent[contender.name] = max(second, time.perf_counter() - start)
        affordable = int(effort.slow_seconds / spent[contender.name])
        rounds[contender.name] = max(1, min(effort.rounds, affordable))
        if rounds[contender.name] == 1:
            samples[contender.name].append(second)  # too slow to discard a warm call
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(effort.rounds):
            for offset in range(len(contenders)):
                contender = contenders[(number + offset) % len(contenders)]
                name = contender.name
                if number >= rounds[name]:
                    continue
                time.sleep(effort.pause)
                count = max(1, min(200, int(effort.slice_seconds / spent[name])))
                if count > 1:
                    timer(contender.next())
                samples[name].extend(timer(contender.next()) for _ in range(count))
    finally:
        if collecting:
            gc.enable()
    return {c.name: summarise(samples[c.name], first=first[c.name], sets=len(c.calls)) for c in contenders}


def copies_needed(case: Case, working_set: float, cold_bytes: int) -> int:
    """Number of copies of the inputs to rotate over; 1 where arithmetic, not memory, is the limit."""
    if case.in_flops or working_set <= 0:
        return 1
    return max(1, min(MAX_SETS, math.ceil(cold_bytes / working_set)))


def prepare_contenders(
    case: Case, inputs: Any, config: RunOptions, left_out: dict[str, str] | None = None
) -> list[Contender]:
    """Contenders, ours first. On CUDA one that cannot run is put into ``left_out``: a library may have no kernel for
    a dtype, and all scores at once may not fit."""
    on_cuda = config.device == "cuda"  # its timer leaves the caches cold
    cold_bytes = 0 if on_cuda else min(buffer_size(config.quick), memory_available() // 8)
    wanted: list[tuple[str, Prepare, float]] = [("ours", case.ours, case.bytes)]
    if on_cuda and case.numba is not None:
        wanted.append(("numba", case.numba, case.bytes))
    if case.naive is not None:
        wanted.append(("naive", case.naive, case.dense_bytes or case.bytes))
    if case.torch is not None and config.use_torch and have_torch():
        wanted.append(("torch", case.torch, case.dense_bytes or case.bytes))
        wanted += [(name, prepare, case.bytes) for name, prepare in case.peers.items() if on_cuda]
    if not on_cuda:
        wanted += [(name, prepare, case.bytes) for name, prepare in case.cpu_peers.items()]
    counts = {name: copies_needed(case, size, cold_bytes) for name, _, size in wanted}
    sets = [inputs]
    while len(sets) < max(counts.values()):
        sets.append(copy.deepcopy(inputs))
    contenders = []
    for index, (name, prepare, _) in enumerate(wanted):
        try:
            calls = [prepare(arrays) for arrays in sets[: counts[name]]]
            if on_cuda and name != "ours":
                calls[0]()
        except Exception as error:
            if left_out is None or not on_cuda or name == "ours":
                raise
            left_out[name] = f"{type(error).__name__}: {error}"
            calls = []
        if not calls:
            release(config)  # only here, where the error no longer keeps its frames' arrays alive
            continue
        # every contender starts at a different copy, so that none reads what another has just cached
        contenders.append(Contender(name, calls, position=index * len(calls) // len(wanted)))
    return contenders


Stage = Callable[[str], AbstractContextManager[Any]]
"""Shows what a part of a case's measurement does, while it runs."""


def run_case(
    case: Case,
    config: RunOptions,
    limits: Limits,
    probe: Probe | None = None,
    effort: Effort | None = None,
    stage: Stage = nullcontext,
) -> Result:
    """Measure one case. An exception of a contender or a check is recorded in ``failure``."""
    start = time.perf_counter()
    effort = effort or (QUICK if config.quick else THOROUGH)
    half = DTYPES[case.dtype].itemsize == 2 and (config.device != "cpu" or case.dtype == "bfloat16")
    seconds, limited_by = limits.seconds(case.flops, case.bytes, case.bandwidth, half=half)
    timings: dict[str, Timing] = {}
    left_out: dict[str, str] = {}
    error, growths, failure, limit, power = None, {}, "", None, None
    try:
        release(config)
        with stage("making inputs, preparing contenders"):
            inputs = make_inputs(case, config)
            contenders = prepare_contenders(case, inputs, config, left_out)
        if config.device == "cpu":
            from perf import peaks

            pacemaker = peaks.pacemaker(limited_by, buffer_size(config.quick), half=half)
            contenders.append(Contender("limit", [pacemaker.call]))
        with stage(f"timing {', '.join(c.name for c in contenders)}"):
            timings = interleave(contenders, effort, timer_for(config))
        if config.device == "cpu":
            limit = timings.pop("limit")
            work = case.flops if limited_by == "matmul" else case.bytes
            seconds = work / pacemaker.amount * limit.median
        if config.device == "cuda":
            from perf import cuda

            with stage("measuring energy"):
                power = cuda.power(contenders[0].calls[0], effort.power_seconds)
        del contenders
        with stage("checking the result against the reference"):
            error = check(case, inputs, config)
        del inputs
        if probe is not None:
            measured = ("ours", "naive", ALL_SCORES, *(("torch",) if case.tokens else ()))
            names = [name for name in measured if name in timings]
            with stage("measuring memory"):
                growths = {name: probe.growth(case, config, name) for name in names}
    except Exception as exc:  # one broken case must not hide the others
        failure = f"{type(exc).__name__}: {exc}"
        if not str(exc) or isinstance(exc, AssertionError | AttributeError | NameError):
            failure += "\n" + traceback.format_exc()
    spent = time.perf_counter() - start
    return Result(case, timings, seconds, limited_by, error, growths, failure, spent, limit, left_out, power)


def release(config: RunOptions) -> None:
    """Return the cached memory of CuPy and torch to the device (CUDA only)."""
    if config.device == "cuda":
        from perf import cuda

        cuda.release()


def timer_for(config: RunOptions) -> Callable[[Call], float]:
    if config.device == "cuda":
        from perf import cuda

        return cuda.timed
    return timed


def have_torch() -> bool:
    """True if torch is installed. Sets it to as many threads as gpu_ops uses."""
    try:
        import torch
    except ImportError:
        return False
    if torch.get_num_threads() != threads():
        torch.set_num_threads(threads())
    return True


ATTENTION_FLOAT32_MEAN = 1e-5
"""float32 attention must also have a mean absolute error below this."""


@dataclass(frozen=True)
class Error:
    """Error of the result that is worst relative to its tolerance."""

    largest: float
    mean: float
    tolerance: float
    naive_largest: float
    """The error of the same formula in NumPy with every intermediate rounded to the dtype."""
    worst: str
    ok: bool
    sampled: str
    """``part of the benched result`` or ``a smaller problem``."""

    @property
    def share(self) -> float:
        """Largest error as a share of its tolerance."""
        return self.largest / self.tolerance if self.tolerance else math.inf if self.largest else 0.0


def check(case: Case, inputs: Any, config: RunOptions) -> Error:
    if case.sample is not None:
        # recomputes part of the result that was timed
        inputs, ours = case.sample(inputs, case.ours(inputs)())
        sampled = "part of the benched result"
    else:
        inputs = make_inputs(case, config, small=True)
        ours = case.ours(inputs)()
        sampled = "a smaller problem"
    if config.device == "cuda":
        inputs = to_host(inputs)
    exact = [to_float64(r) for r in results(case.reference(inputs, "float64"))]
    naive = [to_float64(r) for r in results(case.reference(inputs, "naive"))]
    return compare(results(ours), exact, naive, case=case, sampled=sampled)


def compare(
    ours: Sequence[Any], exact: Sequence[np.ndarray], naive: Sequence[np.ndarray], *, case: Case, sampled: str
) -> Error:
    if len(ours) != len(exact):
        raise AssertionError(f"{case.key}: {len(ours)} results, the reference gives {len(exact)}")
    triples = enumerate(zip(ours, exact, naive, strict=True))
    errors = [_error(f"result {i}", *arrays, case, sampled) for i, arrays in triples]
    return max(errors, key=lambda error: (not error.ok, error.largest / max(error.tolerance, 1e-300)))


def _error(name: str, ours: Any, exact: np.ndarray, naive: np.ndarray, case: Case, sampled: str) -> Error:
    actual = to_float64(ours)
    if actual.shape != exact.shape:
        raise AssertionError(f"{case.key}, {name}: shape {actual.shape}, the reference gives {exact.shape}")
    with np.errstate(invalid="ignore"):
        difference = np.where(actual == exact, 0.0, np.abs(actual - exact))  # equal infinities have no error
    difference[np.isnan(difference)] = np.inf
    # a result's own dtype: lse and dweight are float32 for any inputs
    dtype = DTYPES.get(str(ours.dtype), DTYPES[case.dtype])
    allowed = tolerance(exact, naive, dtype, GRADIENT if case.backward else FORWARD)
    at = np.unravel_index(int(difference.argmax()), difference.shape) if difference.size else ()
    largest = float(difference.max(initial=0.0))
    mean = float(difference.mean()) if difference.size else 0.0
    ok = largest <= allowed
    if case.op == "attention" and case.dtype == "float32":
        ok = ok and mean < ATTENTION_FLOAT32_MEAN
    return Error(
        largest=largest,
        mean=mean,
        tolerance=float(allowed),
        naive_largest=float(np.abs(naive - exact).max(initial=0.0)),
        worst=f"{name} at {tuple(int(i) for i in at)}: {actual[at]:.9g}, reference {exact[at]:.9g}",
        ok=bool(ok),
        sampled=sampled,
    )
