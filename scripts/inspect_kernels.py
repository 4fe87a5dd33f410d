"""Resources of every GPU kernel on every architecture, without a GPU: registers, spills, shared memory, occupancy.

    python scripts/inspect_kernels.py                           all kernels, all architectures
    python scripts/inspect_kernels.py --kernel rmsnorm --arch sm_90a sm_120
    python scripts/inspect_kernels.py --json >kernels.json
    python scripts/inspect_kernels.py --check                   exit 1 where one spills or does not fit
    python scripts/inspect_kernels.py --check --each-on 2       each kernel on two of the architectures, in turn
    python scripts/inspect_kernels.py --check --issue-all       judge all kernels that memory bounds, not one per op

Kernels are those that ``kernels/<room>/<op>.py`` lists in ``variants(arch)``. Counts of machine instructions, and the
check that a memory-bound kernel issues them in less time than its bytes take (``issue_gate.py``), need nvdisasm
(``pip install nvidia-cuda-nvdisasm``).
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gpu_ops.cli.terminal import make_console, print_table
from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler import cubin, jit, progress, toolkit
from gpu_ops.kernels.compiler.kernel import short_label
from gpu_ops.presets import ARCHES
from scripts import issue_gate

PRESET_ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")

# Machine instructions to highlight: wide accesses, asynchronous copies, tensor cores, local memory.
HIGHLIGHTS = {
    "LDG.128": r"LDG\.\S*128",
    "LDG": r"LDG\b(?!\S*128)",
    "STG.128": r"STG\.\S*128",
    "STG": r"STG\b(?!\S*128)",
    "LDS.128": r"LDS\.\S*128",
    "STS.128": r"STS\.\S*128",
    "LDGSTS": r"LDGSTS",
    "TMA": r"U(?:TMA|BLK)\w+",
    "LDSM": r"LDSM",
    "MMA": r"[HIQD]MMA",
    "WGMMA": r"[HIQ]GMMA|U\w*MMA",
    "SHFL": r"SHFL",
    "MUFU": r"MUFU",
    "LOCAL": r"LDL|STL",
}


@dataclass(frozen=True)
class KernelReport:
    """One kernel on one architecture. ``problems`` is empty if it compiles, does not spill, and fits."""

    kernel: str
    arch: str
    threads: int
    seconds: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    local_bytes: int | None = None
    static_shared: int | None = None
    dynamic_shared: int | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    limiter: str = ""
    sass: str = ""
    issue_share: float | None = None  # of the time its bytes take; None: not judged
    issue_pipe: str = ""
    problems: tuple[str, ...] = ()


def inspect(variant: jit.Variant, arch: str, with_sass: bool, judged: Set[str] = frozenset()) -> KernelReport:
    """Compile one variant and read its resources. ``judged``: labels of kernels that memory must bound."""
    label, threads, dynamic = variant.kernel.label, variant.threads_per_block, variant.dynamic_shared_bytes
    try:
        compiled = jit.assemble(jit.compile_kernel(variant.kernel, arch), arch)
    except KernelCompileError as error:
        return KernelReport(label, arch, threads, problems=(str(error),))
    assert compiled.cubin is not None
    limits = ARCHES[arch.rstrip("af")]
    needs = cubin.resources(compiled.cubin, compiled.entry, compiled.log)
    fit = cubin.occupancy(needs, threads, dynamic, limits)
    judges = label in judged and arch in issue_gate.CARDS
    text = sass(compiled.cubin, compiled.entry) if with_sass or judges else ""
    verdict = issue_gate.judge(label, arch, text) if judges and text else None
    faults = list(problems(needs, fit, threads, dynamic, limits))
    if verdict and verdict.problem:
        faults.append(verdict.problem)
    return KernelReport(
        label,
        arch,
        threads,
        compiled.seconds,
        needs.registers,
        needs.spill_bytes,
        needs.local_bytes,
        needs.static_shared_bytes,
        dynamic,
        fit.blocks,
        fit.share,
        fit.limiter,
        sass_counts(text) if with_sass else "",
        verdict and verdict.share,
        verdict.pipe if verdict else "",
        tuple(faults),
    )


def problems(
    needs: cubin.Resources, fit: cubin.Occupancy, threads: int, dynamic: int, limits: cubin.Limits
) -> Iterator[str]:
    """Faults of a kernel: what it must not do."""
    if needs.spill_bytes is None:
        yield "ptxas' log does not say whether registers spill"
    elif needs.spill_bytes:
        yield f"spills {needs.spill_bytes} bytes per thread"
    shared, allowed = needs.static_shared_bytes + dynamic, limits.smem_per_block_optin
    if shared > allowed:
        yield f"{shared} bytes of shared memory per block, {allowed} are allowed"
    elif fit.blocks == 0:
        yield f"no block of {threads} threads fits on an SM: {fit.limiter}"
    if needs.max_threads is not None and threads > needs.max_threads:
        yield f"launched with {threads} threads, __launch_bounds__ says {needs.max_threads}"


def sass(image: bytes, entry: str) -> str:
    """Machine instructions of one kernel, a line each, with labels; empty without nvdisasm."""
    nvdisasm = toolkit.tool("nvdisasm")
    if nvdisasm is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        listing = subprocess.run(
            [nvdisasm, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    # `.section .text.<entry>,"ax",...`, then the instructions
    _, _, body = listing.partition(f".text.{entry},")
    return body.partition("\n\t.section\t")[0]  # not .sectioninfo, which is the kernel's own


def sass_counts(text: str) -> str:
    """Counts of the highlighted machine instructions of one kernel."""
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)
    counts = collections.Counter(
        name for opcode in opcodes for name, pattern in HIGHLIGHTS.items() if re.match(pattern, opcode)
    )
    return " ".join(f"{name}:{counts[name]}" for name in HIGHLIGHTS if counts[name])


def chosen(
    arches: Sequence[str], kernel: str, each_on: int, judged: Set[str] = frozenset()
) -> list[tuple[jit.Variant, str]]:
    """Every variant whose label contains ``kernel``, on ``each_on`` of the architectures that list it.

    The choice rotates with a hash of the label, so every architecture gets its share of every op, and a new kernel
    changes the choice of no other. Kernels of ``judged`` are on architectures that have a card to judge them on, if
    there are enough of those.
    """
    listed: dict[str, list[tuple[jit.Variant, str]]] = collections.defaultdict(list)
    for arch in arches:
        for variant in jit.all_variants(arch):
            label = variant.kernel.label
            if kernel in label or kernel in short_label(label):
                listed[label].append((variant, arch))
    tasks = []
    for label, variants in listed.items():
        if label in judged and len(on_cards := [t for t in variants if t[1] in issue_gate.CARDS]) >= each_on:
            variants = on_cards
        n = len(variants)
        start = zlib.crc32(label.encode()) * each_on
        tasks += [variants[(start + j) % n] for j in range(min(each_on, n))]
    return sorted(tasks, key=lambda task: arches.index(task[1]))


def inspect_all(
    tasks: list[tuple[jit.Variant, str]], with_sass: bool, judged: Set[str], console: Console
) -> list[KernelReport]:
    """Compile and read all variants.

    NVRTC compiles one program at a time per process, so this uses several processes. They are forked, since the
    functions of Numba kernels cannot be sent.
    """
    fork = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(os.cpu_count(), fork, _start_worker, (tasks, with_sass, judged)) as pool,
        Progress(console=console, transient=True) as bar,
    ):
        running = [pool.submit(_inspect_task, index) for index in range(len(tasks))]
        for _ in bar.track(as_completed(running), len(tasks), description="compiling"):
            pass
    return [future.result() for future in running]


_tasks: list[tuple[jit.Variant, str]] = []
_with_sass = False
_judged: Set[str] = frozenset()


def _start_worker(tasks: list[tuple[jit.Variant, str]], with_sass: bool, judged: Set[str]) -> None:
    global _tasks, _with_sass, _judged
    _tasks, _with_sass, _judged = tasks, with_sass, judged
    progress.silent = True  # the parent shows the progress of all


def _inspect_task(index: int) -> KernelReport:
    return inspect(*_tasks[index], _with_sass, _judged)


def table(rows: Sequence[KernelReport]) -> Table:
    """Table for reading, with one row per kernel and architecture."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("kernel")
    out.add_column("arch")
    for name in ("s", "regs", "spill", "local", "smem", "blocks/SM", "occupancy"):
        out.add_column(name, justify="right")
    out.add_column("limited by")
    out.add_column("issue/memory", justify="right")
    if any(row.sass for row in rows):
        out.add_column("machine instructions")
    for row in rows:
        if row.registers is None:
            out.add_row(short_label(row.kernel), row.arch, "[red]does not compile[/red]")
            continue
        shared = (row.static_shared or 0) + (row.dynamic_shared or 0)
        spill = f"[red]{row.spill_bytes}[/red]" if row.spill_bytes else str(row.spill_bytes)
        out.add_row(
            short_label(row.kernel),
            row.arch,
            f"{row.seconds:.2f}",
            str(row.registers),
            spill,
            str(row.local_bytes),
            str(shared),
            str(row.blocks_per_sm),
            f"{row.occupancy:.0%}",
            row.limiter,
            "" if row.issue_share is None else f"{row.issue_share:.2f} {row.issue_pipe}",
            *([row.sass] if row.sass else []),
        )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", nargs="+", default=PRESET_ARCHES, help="such as sm_80 sm_90a; default: all")
    parser.add_argument(
        "--kernel", default="", help="only kernels whose name contains this, such as bfloat16"
    )
    parser.add_argument(
        "--each-on",
        type=int,
        metavar="N",
        help="each kernel on N of the architectures, in turn; default: all",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="print problems only; exit 1 if there are any")
    parser.add_argument(
        "--issue-all", action="store_true", help="judge every memory-bound kernel, not one per op and dtype"
    )
    options = parser.parse_args(arguments)
    if unknown := [arch for arch in options.arch if arch.rstrip("af") not in ARCHES]:
        parser.error(f"unknown architecture {', '.join(unknown)}; there are: {', '.join(ARCHES)}")

    judged: set[str] = set()
    for arch in options.arch:
        judged |= issue_gate.judged((v.kernel.label for v in jit.all_variants(arch)), every=options.issue_all)
    tasks = chosen(options.arch, options.kernel, options.each_on or len(options.arch), judged)
    rows = inspect_all(tasks, not options.check, judged, Console(stderr=True))
    if not rows:
        named = f" whose name contains {options.kernel!r}" if options.kernel else ""
        print(f"inspect_kernels: no op lists a kernel{named}")
        return 1
    faulty = [row for row in rows if row.problems]
    if options.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        print()
    elif not options.check:
        print_table(make_console(), table(rows))
    else:
        for row in faulty:
            print(f"{short_label(row.kernel)} on {row.arch}: {'; '.join(row.problems)}")
        print(f"{len(rows)} kernels compiled on {', '.join(options.arch)}; {len(faulty)} with problems")
        if toolkit.tool("nvdisasm") is None:
            print("none judged against memory, which needs nvdisasm: pip install nvidia-cuda-nvdisasm")
        elif shares := [row.issue_share for row in rows if row.issue_share is not None]:
            print(
                f"{len(shares)} judged against memory: up to {max(shares):.2f} of the time that their bytes take"
            )
    return 1 if options.check and faulty else 0


if __name__ == "__main__":
    sys.exit(main())
