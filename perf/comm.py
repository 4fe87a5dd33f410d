"""``python -m perf --op comm``: cost of a message between ranks on this machine, compared with a copy in memory.

Each collective of ``gpu_ops.distributed`` is timed under mpiexec for arrays of 1 KiB to 64 MiB. A fit of
``seconds = alpha + bytes / beta`` over all sizes gives its latency alpha and bandwidth beta.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gpu_ops.cli.terminal import print_table, waiting
from gpu_ops.kernels.compiler.progress import several
from gpu_ops.kernels.compiler.toolkit import install_command
from perf import machine
from perf.report import make_table

COPY = "memcpy"
ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 900
STEPS = 60  # of the fit; it takes about ten


@dataclass(frozen=True)
class Fit:
    """``seconds = alpha + bytes / beta``. ``worst``: the largest factor between it and a measurement."""

    alpha: float
    beta: float
    worst: float

    @classmethod
    def of(cls, sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
        """Least squares of the logarithms: sizes and times span decades, and each counts alike.

        >>> fit = Fit.of([1e3, 1e5, 1e7], [1e-5 + n / 1e9 for n in (1e3, 1e5, 1e7)])
        >>> round(fit.alpha * 1e6, 6), round(fit.beta / 1e9, 6), round(fit.worst, 6)
        (10.0, 1.0, 1.0)
        """
        n, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
        logs = np.log([t[0], t[-1] / n[-1]])  # of alpha and 1 / beta: Gauss-Newton from the ends
        for _ in range(STEPS):
            terms = np.exp(logs) * np.stack([np.ones_like(n), n], axis=1)
            model = terms.sum(axis=1)
            step = np.linalg.lstsq(terms / model[:, None], np.log(t / model), rcond=None)[0]
            logs += step.clip(-1, 1)
        model = np.exp(logs[0]) + n * np.exp(logs[1])
        return cls(*np.exp(logs * (1, -1)).tolist(), float(np.exp(np.abs(np.log(t / model)).max())))


def missing() -> str | None:
    """Reason why ranks cannot be started here; None if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {install_command('mpi')}"
    if shutil.which("mpiexec", path=_path()) is None:
        return f"no mpiexec in PATH: {install_command('mpi')} brings one"
    return None


def _path() -> str:
    """PATH for the launcher, with the folder of this Python's scripts first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def measure(ranks: int, *, quick: bool = False) -> dict[str, Any]:
    """Start the ranks, and return what rank 0 has written (comm_ranks.py)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = ["scripts/launch.sh", str(ranks), sys.executable, "-m", "perf.comm_ranks", str(path)]
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            cwd=ROOT,
            env={**os.environ, "PATH": _path(), "PYTHONPATH": str(ROOT), "GPU_OPS_COMM_CHECK": "0"},
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        read: dict[str, Any] = json.loads(path.read_text())
        return read


def fits(times: Mapping[str, Mapping[str, float]]) -> dict[str, Fit]:
    """Fit of each operation of {operation: {bytes: seconds}}."""
    return {name: Fit.of([float(n) for n in line], list(line.values())) for name, line in times.items()}


def run(ranks: int, console: Console, *, quick: bool = False, save: str = "", plot: bool = False) -> int:
    """Measure and print; save and draw on request. Returns the exit code."""
    reason = missing()
    if reason:
        console.print(f"comm: skipped, {reason}", style="yellow", markup=False)
        return 0
    with waiting(console, f"timing collectives on {several(ranks, 'rank')}"):
        facts = measure(ranks, quick=quick)
    facts["machine"] = machine.describe("cpu")
    lines = fits(facts["times"])
    facts["fits"] = {name: asdict(fit) for name, fit in lines.items()}
    title = f"{facts['world']}, {several(ranks, 'rank')} on {facts['machine']['cpu']}, load {os.getloadavg()[0]:.1f}"
    largest = max(facts["times"][COPY], key=int)
    figures = ["alpha us", "beta GB/s", "64 KiB us", "16 MiB ms", "sent / byte", "of memcpy", "fit"]
    table = make_table(title, ["collective"], figures)
    for name, fit in lines.items():
        line, share = facts["times"][name], facts["sent"][name]
        some = [
            f"{line[n] * scale:.3g}" if n in line else "" for n, scale in (("65536", 1e6), ("16777216", 1e3))
        ]
        of_copy = share * facts["times"][COPY][largest] / line[largest]
        table.add_row(
            *(name, f"{fit.alpha * 1e6:.1f}", f"{fit.beta / 1e9:.2f}", *some),
            *(f"{share:g}", f"{of_copy:.0%}", f"x{fit.worst:.1f}"),
        )
    print_table(console, table)
    console.print(
        "Bytes: of one rank's array. Time: of the slowest rank, the median of the calls. "
        "Of memcpy: bytes that a rank sends per second, of the largest array. "
        "Fit: the largest factor between a time and alpha + bytes / beta.",
        style="dim",
    )
    folder = Path(save or "perf-pictures")
    if save:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"comm-{ranks}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n")
        console.print(f"saved {path}")
    if plot:
        from perf.pictures import comm as picture
        from perf.pictures.style import settings

        with settings():
            console.print(f"drew {picture.draw(facts, title).save(folder / f'comm-{ranks}.svg')}")
    return 0
