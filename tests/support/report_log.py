"""Pytest plugin, ``-p tests.support.report_log``: results as they arrive, and a selection of the most useful tests.

``GPU_OPS_TEST_LOG``: a file that gets a JSON line per test, so that an interrupted run keeps its results.
``GPU_OPS_TEST_FIRST=1``: one test per backend of each file; all of test_gpu.py and of test_models.py in its folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

BACKENDS = ("cuda-raw", "cuda-numba")


def pytest_configure(config):
    path = os.environ.get("GPU_OPS_TEST_LOG")
    # with xdist: in the process that gets the reports of all tests
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Log(path))


class _Log:
    def __init__(self, path):
        self._path = Path(path)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": report.duration,
            "properties": dict(report.user_properties),
            "message": "" if report.passed else report.longreprtext[-2000:],
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(config, items):
    if os.environ.get("GPU_OPS_TEST_FIRST") != "1":
        return
    chosen, seen = [], set()
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        backend = next((b for b in BACKENDS if b in item.name), "")
        place = "/".join(item.path.parts[-2:])
        if place in ("gpu/test_gpu.py", "gpu/test_models.py") or (item.path, backend) not in seen:
            seen.add((item.path, backend))
            chosen.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
