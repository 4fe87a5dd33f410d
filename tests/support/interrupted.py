"""First calls of ops under interrupts at random times: ``python -m tests.support.interrupted SEED MEAN OP...``.

MEAN: seconds between interrupts, exponentially distributed; 0 for none. An interrupted call is called again until it
returns. Prints JSON: a digest of each op's results, the number of interrupts, and how late they came.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import time

import numpy as np

from tests.support.calls import call, results


def main(seed: int, mean: float, ops: list[str]) -> None:
    chance = random.Random(seed)
    # a timer of the system: it interrupts anywhere, as a user does; the handler is the one of Ctrl-C
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    digests, late, largest = {}, [], 0
    for op in chance.sample(ops, len(ops)):
        case, count = call(op), 0
        while True:
            due = np.inf
            try:
                try:
                    if mean:
                        delay = chance.expovariate(1 / mean) + 1e-6
                        due = time.perf_counter() + delay
                        signal.setitimer(signal.ITIMER_REAL, delay)
                    value = case()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                break
            except KeyboardInterrupt:
                late.append(time.perf_counter() - due)
                count += 1
        largest = max(largest, count)
        digests[op] = [
            hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16] for x in results(value)
        ]
    print(json.dumps({"digests": digests, "late": late, "most of one op": largest}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
