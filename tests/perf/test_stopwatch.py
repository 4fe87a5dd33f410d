"""Stopwatch of autotune(), tested on a log of its requests to the device."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

from gpu_ops.core import autotune as module


def test_the_stopwatch_keeps_the_device_busy_while_the_host_enqueues(monkeypatch):
    log, now = [], iter(range(1000))

    class Event:
        def record(self):
            self.at = next(now)
            log.append("record")

        def synchronize(self):
            log.append("wait")

    scratch = SimpleNamespace(fill=lambda value: log.append("fill"), max=lambda: log.append("read"))
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(attributes={"L2CacheSize": 40 << 20}),
        Event=Event,
        get_elapsed_time=lambda start, end: float(end.at - start.at),  # milliseconds: 1 between two records
    )
    sizes = []
    cupy = SimpleNamespace(cuda=cuda, uint8=np.uint8, empty=lambda n, dtype: sizes.append(n) or scratch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    host = iter([0, 0, 0, 0, 0, 0.0031, 0, 0])  # start and end of each call
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(host)))
    stopwatch = module.Stopwatch()
    assert sizes == [128 << 20]
    log.clear()
    assert stopwatch(lambda: log.append("run")) == 1e-3
    assert log == ["fill", "read", "record", "run", "record", "wait"]
    log.clear()
    stopwatch(lambda: log.append("run"))
    assert log == ["fill"] * 7 + ["read", "record", "run", "record", "wait"]  # 2 * 3.1 ms at 1 ms each
