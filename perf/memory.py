"""Peak memory of one call, beyond what was there before it.

On the CPU the call runs in a worker process, with its kernels already compiled: the worker warms up on
the small inputs, builds the full ones, resets the system's high-water mark of resident memory
(``/proc/self/clear_refs``), calls once and reads ``VmHWM``. malloc is told to map every large block on its
own, so that what an earlier call has freed is not mistaken for memory that was always there.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf.case import Case, Config, make_inputs, nbytes
from perf.machine import ROOT


@dataclass(frozen=True)
class Growth:
    """Bytes. ``working`` is the peak without the results: what the method itself needs."""

    peak: int
    results: int

    @property
    def working(self) -> int:
        return max(0, self.peak - self.results)


def peak_growth(call: Callable[[], Any]) -> tuple[int, Any]:
    """Growth of this process's peak resident memory while ``call`` runs, and its result."""
    gc.collect()
    _trim()
    if reset_peak():
        before = _status("VmRSS")
        value = call()
        return max(0, _status("VmHWM") - before), value
    before = _lifetime_peak()
    value = call()
    return max(0, _lifetime_peak() - before), value


def reset_peak() -> bool:
    """Set the high-water mark back to the present; False where the system cannot (not Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _status("VmHWM") > 0


class Probe:
    """Asks a worker process for the growth of a case's contenders; starts it on first use."""

    def __init__(self) -> None:
        self.worker: subprocess.Popen[str] | None = None

    def growth(self, case: Case, config: Config, contender: str) -> Growth:
        if config.device == "cuda":
            from perf import cuda

            return Growth(*cuda.peak_growth(case, config, contender))
        worker = self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        request = {"op": case.op, "key": case.key, "config": config.to_json(), "contender": contender}
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        if not line:
            code = worker.wait()
            self.close()
            raise RuntimeError(f"the memory probe died with exit code {code} on {case.key!r}, {contender}")
        reply = json.loads(line)
        if not reply.pop("resettable", True):
            self.close()  # a mark that only ever rises is good for one measurement
        if "failure" in reply:
            raise RuntimeError(f"the memory probe failed on {case.key!r}, {contender}: {reply['failure']}")
        return Growth(**reply)

    def _start(self) -> subprocess.Popen[str]:
        if self.worker is None:
            environment = {
                **os.environ,
                "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
                "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
            }
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "perf.memory"],
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self.worker

    def close(self) -> None:
        if self.worker is not None:
            with self.worker:  # closes the pipes; the worker ends when its stdin does
                pass
            self.worker = None

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The worker's side of one question."""
    config = Config.from_json(request["config"])
    bench = importlib.import_module(f"perf.bench_{request['op']}")
    cases: dict[str, Case] = {case.key: case for case in bench.cases(config)}
    case = cases[request["key"]]
    prepare = case.contender(request["contender"])
    prepare(make_inputs(case, config, small=True))()
    call = prepare(make_inputs(case, config))
    peak, value = peak_growth(call)
    return {**asdict(Growth(peak, nbytes(value))), "resettable": reset_peak()}


def serve() -> None:
    """Answer questions from stdin, one JSON object a line, until it closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a kernel prints while it compiles must not end up among the answers
    for line in sys.stdin:
        try:
            reply = measure(json.loads(line))
        except Exception as exc:  # the worker stays for the next question
            reply = {"failure": f"{type(exc).__name__}: {exc}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _status(field: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _lifetime_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _trim() -> None:
    """Give freed memory back to the system (glibc); elsewhere there is nothing to ask."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    serve()
