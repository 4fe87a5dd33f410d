"""Random calls of every op and random files, judged by formulas that share no code with gpu_ops.

    python scripts/fuzz.py                              60 seconds, another seed each time
    python scripts/fuzz.py --seconds 600 --seed 1       the cases 1:0, 1:1, ... for ten minutes
    python scripts/fuzz.py --cases 500 --seed 1         a fixed number of them
    python scripts/fuzz.py --case 1:137                 one case again

A case is a valid call (on the CPU with both backends, a few on the emulator), a call after a similar one, an invalid
call, damaged model files, or a call after interrupts. It depends only on its seed and number, not on the time or on
earlier cases. Only the times of the interrupts differ between runs.

Exit code: 0 nothing found, 1 findings, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import collections
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence

from scripts.fuzzing.kinds import Finding, run_case

PROGRESS = 10.0  # seconds between lines
STUCK = 300.0  # seconds after which a case counts as hanging; compiling a kernel takes up to half a minute


class Watch:
    """Context in which a case that hangs ends the process, which no exception could do."""

    def __init__(self) -> None:
        self.case, self.since = "", time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, case: str) -> None:
        self.case, self.since = case, time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(1):
            if time.monotonic() - self.since > STUCK:
                say(f"FOUND {self.case}: hangs, more than {STUCK:.0f} s\n  replay: {replay(self.case)}")
                os._exit(1)


def say(line: str) -> None:
    print(line, flush=True)


def replay(case: str) -> str:
    return f"python scripts/fuzz.py --case {case}"


def fuzz(seed: int, numbers: range | None, seconds: float) -> int:
    """Run cases 0, 1, ... of a seed, or only ``numbers``. Returns the number of findings."""
    start = shown = time.monotonic()
    ran: collections.Counter[str] = collections.Counter()
    findings = 0
    number = numbers.start if numbers else 0
    try:
        with Watch() as watch:
            while number in numbers if numbers is not None else time.monotonic() - start < seconds:
                case = f"{seed}:{number}"
                watch.begin(case)
                try:
                    ran[run_case(seed, number)] += 1
                except Finding as finding:
                    findings += 1
                    ran["found"] += 1
                    say(f"FOUND {case} {finding}\n  replay: {replay(case)}")
                number += 1
                if time.monotonic() - shown > PROGRESS:
                    shown = time.monotonic()
                    say(
                        f"{shown - start:5.0f} s: {ran.total()} cases, {findings} findings; next {seed}:{number}"
                    )
    except KeyboardInterrupt:
        say("interrupted")
    kinds = collections.Counter[str]()
    for op, count in ran.items():
        kinds[op.split()[0]] += count
    say(f"{ran.total()} cases in {time.monotonic() - start:.0f} s: {findings} findings, seed {seed}")
    say("  " + ", ".join(f"{label} {count}" for label, count in kinds.most_common()))
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--cases", type=int, metavar="N", help="a number of cases, however long they take")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="one case again")
    options = parser.parse_args(arguments)
    if options.case:
        try:
            seed, number = map(int, options.case.split(":"))
        except ValueError:
            parser.error(f"--case {options.case}: expected SEED:NUMBER, such as 1:137")
        numbers: range | None = range(number, number + 1)
    else:
        seed = secrets.randbelow(10**6) if options.seed is None else options.seed
        numbers = None if options.cases is None else range(options.cases)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    say(f"seed {seed}; kernels that are not in the cache are compiled first, seconds each")
    return 1 if fuzz(seed, numbers, options.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
