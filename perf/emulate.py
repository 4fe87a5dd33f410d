"""Counts for a case's GPU kernels, without a GPU: traffic, bank conflicts, registers, occupancy. No times.

Runs the ops on the emulator and shows the profile of each launch with the resources that ptxas reports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpu_ops import emulator
from gpu_ops.cli.terminal import print_table
from gpu_ops.emulator import Profile
from gpu_ops.emulator.counts import SECTOR
from gpu_ops.errors import GpuOpsError, KernelCompileError
from gpu_ops.kernels.compiler import cubin, toolkit
from gpu_ops.presets import select_preset
from perf.case import Case
from perf.report import make_table, short_dtype

CAPTION = (
    "once: bytes if every 32-byte sector moved once each way, over the least the formula needs · uncached: the same "
    "if the largest operands did not stay in the L2 cache, so a second read counts again · per 128 B: sectors moved "
    "per 128 bytes requested, 4 is perfect · replays: share of shared-memory waves lost to bank conflicts"
)
FIGURES = ("warp instr.", "once", "uncached", "per 128 B", "replays", "registers", "spills", "occupancy")
SEQLEN = 256  # the default: the emulator takes seconds where a GPU takes microseconds


@dataclass(frozen=True)
class EmulatedLaunch:
    """One kernel launch of a case."""

    case: Case
    profile: Profile
    needs: cubin.Resources | None  # None: no ptxas here
    occupancy: cubin.Occupancy | None
    label: str
    """The kernel, with the backend where that is not the first choice."""

    @property
    def once(self) -> float:
        return self.profile.least_bytes / self.case.bytes

    @property
    def uncached(self) -> float:
        largest = max((b.footprint for b in self.profile.buffers), default=0)
        return sum(self.profile.moved(SECTOR * largest - 1)) / self.case.bytes


def run(planned: Mapping[str, Sequence[Case]], console: Console) -> int:
    """Print a table per op. Returns the exit code."""
    console.print(f"[dim]{CAPTION}[/]")
    # The tests check the kernels; without the sanitizer the same counts take less time.
    with mock.patch.dict(os.environ, GPU_OPS_SANITIZE=os.environ.get("GPU_OPS_SANITIZE", "0")):
        passed = [run_op(op, cases, console) for op, cases in planned.items() if cases]
    if not passed:
        console.print(f"[yellow]no GPU kernels: {', '.join(planned)}[/]")
    return 0 if passed and all(passed) else 1


def run_op(op: str, cases: Sequence[Case], console: Console) -> bool:
    """Print the table of an op; False if a case failed."""
    done: list[EmulatedLaunch] = []
    failures: dict[str, list[str]] = {}
    for case in cases:
        try:
            done += launches(case)
        except GpuOpsError as error:
            failures.setdefault(str(error), []).append(f"{case.name} {case.shape} {case.dtype}")
    if done:
        print_table(console, table(op, done))
    for message, names in failures.items():
        console.print(f"[red]{op}: {escape(message)}[/] ({escape(', '.join(names))})")
    return not failures


def launches(case: Case) -> Iterator[EmulatedLaunch]:
    """Run a case once with each backend. Launches of its preparation do not count."""
    for prepare, suffix in ((case.ours, ""), (case.numba, ", Numba")):
        if prepare is None:
            continue
        call = prepare(case.make(np.random.default_rng(0)))
        with emulator.record() as profiles:
            call()
        for profile in profiles:
            yield EmulatedLaunch(case, profile, *fit(profile), profile.name + suffix)


def fit(profile: Profile) -> tuple[cubin.Resources | None, cubin.Occupancy | None]:
    """Resources of the launch on an SM."""
    try:
        image, log = toolkit.assemble(profile.ptx, profile.arch)
    except KernelCompileError:
        return None, None
    needs = cubin.resources(image, profile.kernel, log)
    threads = int(np.prod(profile.block))
    limits = select_preset(profile.arch).arch
    return needs, cubin.occupancy(needs, threads, profile.dynamic_shared_bytes, limits)


def table(op: str, done: Sequence[EmulatedLaunch]) -> Table:
    grid = make_table(op, ("case", "shape", "dtype", "kernel"), FIGURES)
    previous = None
    for launch in done:
        case = launch.case
        head = (case.name, case.shape, short_dtype(case.dtype)) if case is not previous else ("", "", "")
        grid.add_row(*map(escape, (*head, launch.label)), *figures(launch))
        previous = case
    return grid


def figures(launch: EmulatedLaunch) -> list[str]:
    counts, needs, occupancy = launch.profile.counts, launch.needs, launch.occupancy
    return [
        f"{counts.warps:,}",
        f"{launch.once:.2f}",
        f"{launch.uncached:.2f}",
        f"{counts.sectors_per_128_bytes:.2f}",
        f"{counts.replays / counts.waves:.0%}" if counts.waves else "-",
        str(needs.registers) if needs else "-",
        f"{needs.spill_bytes} B" if needs and needs.spill_bytes is not None else "-",
        f"{occupancy.share:.0%}, {occupancy.limiter}" if occupancy else "-",
    ]
