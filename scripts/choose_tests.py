"""Choose the default tests by their cost: run them all once, then write ``tests/support/full_only.txt``.

    scripts/choose_tests.py costs.jsonl --record     # run the default tests, those of the file included, from a cold
                                                     # cache (GPU_OPS_CACHE_DIR), and choose
    scripts/choose_tests.py costs.jsonl              # choose; --seconds: CPU seconds of a cold run

A unit is a test on one backend. Its cost is the CPU time of its cases, and the compilation of kernels that no other
unit uses. The unit that costs most per case is left to ``scripts/test.sh --full``, and again, until the others fit.
Of the units left out, cases are kept that cover what nothing else covers, the cheapest first: every option and dtype
of every op on every backend, every source of a kernel, and every value of its macros. This file is also the pytest
plugin that records costs and features.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMPILATION = {"cpu": 2.5, "numba": 1.7, "raw": 0.35}
"""CPU seconds that compiling one kernel takes at least, by backend, if it was compiled before: means on a Zen 3."""

OVERHEAD = 50
"""CPU seconds of collection, in two workers and their controller."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("costs", type=Path, help="recorded costs, one JSON object per case")
    parser.add_argument("--record", action="store_true", help="run the tests and record, before choosing")
    parser.add_argument(
        "--seconds", type=float, default=450, help="CPU seconds of the units kept whole (450)"
    )
    options = parser.parse_args()
    if options.record:
        record(options.costs)
    cases = [json.loads(line) for line in options.costs.read_text(encoding="utf-8").splitlines()]
    full_only, seconds = choose(cases, options.seconds)
    kept, more = cover(cases, full_only)
    sys.path.insert(0, str(ROOT))
    from tests.support.choice import FULL_ONLY

    header = (
        "# Test, backend, and a case that the default run keeps; scripts/choose_tests.py writes this file.\n"
    )
    rows = [(*unit, case) for unit in full_only for case in kept.get(unit, [""])]
    FULL_ONLY.write_text(
        header + "".join("\t".join(row).rstrip() + "\n" for row in sorted(rows)), encoding="utf-8"
    )
    print(
        f"{len(full_only)} units are left to --full, but {sum(map(len, kept.values()))} cases: "
        f"{seconds + more:.0f} CPU seconds"
    )


def choose(cases: list[dict], limit: float) -> tuple[set[tuple[str, str]], float]:
    """Units to leave out, and the CPU seconds of a cold run of the others."""
    times, kernels, compilation = defaultdict(float), defaultdict(set), compilation_times(cases)
    for case in cases:
        unit = tuple(case["unit"])
        times[unit] += case["seconds"]
        kernels[unit] |= set(case["kernels"])
    counts = Counter(tuple(case["unit"]) for case in cases)
    users = Counter(kernel for used in kernels.values() for kernel in used)
    total = OVERHEAD + sum(times.values()) + sum(map(compilation.__getitem__, users))

    def cost(unit: tuple[str, str]) -> float:
        return times[unit] + sum(compilation[kernel] for kernel in kernels[unit] if users[kernel] == 1)

    left, full_only = set(times), set()
    while total > limit and left:
        worst = max(left, key=lambda unit: (cost(unit) / counts[unit], unit))
        total -= cost(worst)
        left.remove(worst)
        full_only.add(worst)
        users.subtract(kernels[worst])
    return full_only, total


def cover(
    cases: list[dict], full_only: set[tuple[str, str]]
) -> tuple[dict[tuple[str, str], list[str]], float]:
    """Cases of ``full_only`` to keep, by unit, and the seconds that they take: those with the lowest cost per feature
    that no other case has, until every feature is covered."""
    compilation, compiled, covered = compilation_times(cases), set(), set()
    candidates = []
    for case in cases:
        if tuple(case["unit"]) in full_only:
            candidates.append(case)
        else:
            compiled |= set(case["kernels"])
            covered |= features(case)

    def cost(case: dict) -> float:
        return 0.01 + case["seconds"] + sum(compilation[k] for k in case["kernels"] if k not in compiled)

    kept, total = defaultdict(list), 0.0
    remaining = {n: features(case) for n, case in enumerate(candidates)}
    while True:
        remaining = {n: new for n, new in ((n, new - covered) for n, new in remaining.items()) if new}
        if not remaining:
            return kept, total
        best = min(remaining, key=lambda n: (cost(candidates[n]) / len(remaining[n]), n))
        case = candidates[best]
        total += cost(case)
        kept[tuple(case["unit"])].append(case["case"])
        compiled |= set(case["kernels"])
        covered |= remaining[best]


def features(case: dict) -> set[str]:
    """Options of ops that a case passes, and the sources and flags of kernels that it runs. Sizes of tiles are none,
    and float16 and float64 are left to ``--full``: their kernels are those of bfloat16 and float32."""
    kernels = (feature for kernel in case["kernels"] for feature in kernel_features(kernel))
    return {feature for feature in (*case["options"], *kernels) if not UNCOUNTED.search(feature)}


UNCOUNTED = re.compile(r"((^|[=|_])(float16|float64|f16|f64|int16)|=\d\d+|=[2-9])$")


def kernel_features(kernel: str) -> Iterator[str]:
    """Backend and source of a kernel, and these with each of its macros or dtypes."""
    backend, name, variant, *_ = kernel.split("|")
    yield f"{backend}|{name}"
    for part in re.split(r"[][, -]+", variant):
        yield f"{backend}|{name}|{part}"


def compilation_times(cases: list[dict]) -> dict[str, float]:
    """CPU seconds of compiling each kernel: its share of what its first case compiled, or what is usual if more."""
    times: dict[str, float] = {}
    for case in cases:
        new = {k: COMPILATION[k.partition("|")[0]] for k in case["kernels"] if k not in times}
        ratio = max(1, case["compiling"] / (sum(new.values()) or 1))
        times |= {kernel: usual * ratio for kernel, usual in new.items()}
    return times


def record(costs: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COSTS": folder, "OPENBLAS_NUM_THREADS": "1"}
        flags = "-p scripts.choose_tests -n auto --dist worksteal"
        subprocess.run(
            [sys.executable, "-m", "pytest", *flags.split()], cwd=ROOT, env=environment, check=True
        )
        costs.write_text("".join(path.read_text() for path in Path(folder).iterdir()), encoding="utf-8")


def pytest_configure(config) -> None:
    from tests.support import choice

    choice.full_only = dict
    if os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(_Recorder())


class _Recorder:
    """Writes a line per case: its unit, its CPU seconds without compilation, and the kernels that it launched."""

    def __init__(self) -> None:
        self.path = Path(os.environ["COSTS"], f"{os.getpid()}.jsonl")
        self.kernels: set[str] = set()
        self.options: set[str] = set()
        self.compiling = 0.0
        self.patched = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        from gpu_ops.core.op import forget_calls
        from tests.support.choice import case_of, unit

        if not self.patched:
            self._patch()
        forget_calls()  # a replayed call asks for no kernel
        self.kernels.clear()
        self.options.clear()
        self.compiling, before = 0.0, cpu_seconds()
        result = yield
        seconds = cpu_seconds() - before - self.compiling
        line = {
            "unit": unit(item),
            "case": case_of(item),
            "seconds": round(seconds, 3),
            "compiling": round(self.compiling, 3),
            "kernels": sorted(self.kernels),
            "options": sorted(self.options),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result

    def _patch(self) -> None:
        """Note options of calls, each kernel that is looked up or launched, and the time of each compilation."""
        from gpu_ops.core.emulator_device import EmulatorDevice
        from gpu_ops.core.op import Op
        from gpu_ops.kernels.common.cpu.jit import Kernel
        from gpu_ops.kernels.compiler import jit
        from gpu_ops.kernels.compiler.kernel import CudaKernel, spelled

        self.patched = True
        bind = Op.bind

        def noted_bind(entry, args, kwargs):
            bound = bind(entry, args, kwargs)
            where = f"{entry.name}|{bound.choice.device}-{bound.choice.backend}"
            passed = {**dict(zip(entry.parameters, args, strict=False)), **kwargs}
            self.options |= {f"{where}|{name}={value_class(value)}" for name, value in passed.items()}
            return bound

        Op.bind = noted_bind
        look_up, launch = Kernel.__getitem__, EmulatorDevice._launch

        def noted_look_up(kernel, variant):
            parts = variant if isinstance(variant, tuple) else (variant,)
            self.kernels.add(
                f"cpu|{kernel.name}|" + "-".join(getattr(part, "name", str(part)) for part in parts)
            )
            return look_up(kernel, variant)

        def noted_launch(device, launched, views):
            kernel, arch = launched.kernel, device.limits.arch
            if isinstance(kernel, CudaKernel):
                self.kernels.add(f"raw|{kernel.stem}|{spelled(kernel.defines)}|{arch}")
            else:
                self.kernels.add(f"numba|{kernel.function.__name__}|{kernel.label}|{arch}")
            return launch(device, launched, views)

        def timed(build):
            def call(*arguments):
                before = cpu_seconds()
                try:
                    return build(*arguments)
                finally:
                    self.compiling += cpu_seconds() - before

            return call

        Kernel.__getitem__, EmulatorDevice._launch = noted_look_up, noted_launch
        Kernel._compile = timed(Kernel._compile)
        jit._run_nvrtc, jit._run_numba = timed(jit._run_nvrtc), timed(jit._run_numba)


def value_class(value: object) -> str:
    """Class of argument values that run the same code: a dtype, a type, a name or a flag."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        return str(dtype)
    if value is None or isinstance(value, bool | str):
        return str(value)
    return type(value).__name__


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
