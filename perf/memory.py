"""Peak memory of one call, beyond the memory in use before it.

On the CPU the call runs in a worker process. The worker compiles the kernels on the small inputs, builds the full
ones, resets the system's high-water mark of resident memory (``/proc/self/clear_refs``), calls once and reads
``VmHWM``. malloc maps every large block separately, so freed memory returns to the system and shows as growth when it
is used again.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf.case import Case, RunOptions, find_case, make_inputs, nbytes
from perf.machine import ROOT, process_memory

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


@dataclass(frozen=True)
class Growth:
    """Growth in bytes."""

    peak: int
    results: int

    @property
    def working(self) -> int:
        """Bytes of the method itself: the peak without the results."""
        return max(0, self.peak - self.results)


def peak_growth(call: Callable[[], Any]) -> tuple[int, Any]:
    """Growth of this process's peak resident memory during ``call``, and the result of ``call``."""
    gc.collect()
    _trim()
    resettable = reset_peak()
    before = process_memory("VmRSS") if resettable else _lifetime_peak()
    value = call()
    after = process_memory("VmHWM") if resettable else _lifetime_peak()
    return max(0, after - before), value


def reset_peak() -> bool:
    """Reset the high-water mark to the present use. False where the system cannot (not Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return process_memory("VmHWM") > 0


class Probe:
    """Measures the growth of a case's contenders in a worker process, which it starts on first use."""

    def __init__(self) -> None:
        self.worker: subprocess.Popen[str] | None = None

    def growth(self, case: Case, config: RunOptions, contender: str) -> Growth:
        if config.device == "cuda":
            from perf import cuda

            return Growth(*cuda.peak_growth(case, config, contender))
        self.worker = self.worker or _start()
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        request = {"op": case.op, "key": case.key, "config": asdict(config), "contender": contender}
        self.worker.stdin.write(json.dumps(request) + "\n")
        self.worker.stdin.flush()
        line = self.worker.stdout.readline()
        if not line:
            code = self.worker.wait()
            self.close()
            raise RuntimeError(f"the memory probe died with exit code {code} on {case.key!r}, {contender}")
        reply = json.loads(line)
        if not reply.pop("resettable", True):
            self.close()  # a mark that only rises allows one measurement
        if "failure" in reply:
            raise RuntimeError(f"the memory probe failed on {case.key!r}, {contender}: {reply['failure']}")
        return Growth(**reply)

    def close(self) -> None:
        if self.worker is not None:
            with self.worker:  # closes the pipes; the worker ends when its stdin does
                pass
            self.worker = None

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.worker is not None and any(exc):
            self.worker.kill()  # it no longer answers
        self.close()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "perf.memory"],
        cwd=ROOT,
        env={**os.environ, **MALLOC},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Worker's side of one request."""
    config = RunOptions.from_json(request["config"])
    case = find_case(request["op"], request["key"], config)
    prepare = case.contender(request["contender"])
    prepare(make_inputs(case, config, small=True))()
    call = prepare(make_inputs(case, config))
    if case.tokens:
        call()  # transformers maps its weights: they enter memory at the first read
    peak, value = peak_growth(call)
    return {"peak": peak, "results": nbytes(value), "resettable": reset_peak()}


def serve() -> None:
    """Answer requests from stdin, one JSON object a line, until it closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what a kernel prints while it compiles out of the answers
    for line in sys.stdin:
        try:
            reply = measure(json.loads(line))
        except Exception as exc:  # the worker stays for the next request
            reply = {"failure": f"{type(exc).__name__}: {exc}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _lifetime_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _trim() -> None:
    """Return freed memory to the system, where malloc can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    serve()
