"""``python -m perf --plan MODEL --cluster h100x64``: plans that spread a training step over many GPUs, on paper.

``plan_cluster.py`` has cards, links and messages, ``plan_step.py`` a layout's memory and time, ``plan_search.py`` the
layouts, and ``plan_anchors.py`` published runs to compare with.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gpu_ops.cli.terminal import make_console, print_table
from gpu_ops.core.checks import one_of
from gpu_ops.errors import GpuOpsError, OptionError
from gpu_ops.models.presets import PRESETS, find_config
from perf import plan_anchors
from perf.plan_cluster import KINDS, WHO, Cluster
from perf.plan_search import Found, least_memory, room, search
from perf.plan_step import EFFICIENCY, OVERLAP, USABLE, ClusterPlan, Job
from perf.report import make_table

SHOWN = 5
MOST_SEQLEN, MOST_TOKENS = 1 << 27, 1 << 40
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
CAPTION = (
    "micro: sequences of a microbatch · recompute: policy= of gpu_ops.models.block_forward · TFLOPS per GPU and MFU "
    "count nothing twice · limit: what keeps the layout from being faster · TP, CP, PP, DP: messages that are not "
    f"hidden by computation.\nAssumptions: layers reach {EFFICIENCY} of the card's peak at every size, fitted to one "
    f"tuned run; {OVERLAP:.0%} of what CP, PP and DP could hide is hidden, of TP nothing; {USABLE:.0%} of the memory "
    "is usable; no data loading, no stragglers, no failures. python -m perf --plan anchors: the same model on "
    "published runs."
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m perf",
        description="The fastest layouts of a training step on many GPUs that fit, from a model on paper.",
        epilog="Exit code: 0 fine, 1 nothing fits, 2 wrong usage.",
    )
    add = p.add_argument
    models = (
        f"{', '.join(PRESETS)}; or a folder or config.json; anchors: compare the model with published runs"
    )
    add("--plan", nargs="?", metavar="MODEL", help=models)
    add("--cluster", metavar="NAMExCOUNT", help=f"such as h100x64; names: {', '.join(KINDS)}")
    add("--seqlen", default="8192", metavar="N", help="such as 8192 or 128k (default %(default)s)")
    tokens = (
        "of a step: tokens with k, M or G (binary), such as 16M, or sequences without (default %(default)s)"
    )
    add("--batch", default="1M", metavar="N", help=tokens)
    add("--dtype", default="bf16", help="bf16, or fp8 for the matmuls of layers (default %(default)s)")
    return p


def main(argv: Sequence[str]) -> int:
    """Print the plans. Returns 1 if nothing fits, 2 with a line on stderr for invalid options."""
    args, console = parser().parse_args(argv), make_console()
    try:
        if args.plan == "anchors":
            print_table(console, plan_anchors.table())
            return 0
        return show(args.plan, search(read_job(args)), console)
    except GpuOpsError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


def read_job(args: argparse.Namespace) -> Job:
    if not args.plan:
        raise OptionError(f"{WHO}: --plan takes a model, such as llama3-70b; models: {', '.join(PRESETS)}")
    if args.cluster is None:
        raise OptionError(f"{WHO}: pass --cluster NAMExCOUNT, such as h100x64; names: {', '.join(KINDS)}")
    config, cluster = find_config(WHO, args.plan), Cluster.parse(args.cluster)
    seqlen = count("--seqlen", args.seqlen, MOST_SEQLEN)
    batch = count("--batch", args.batch, MOST_TOKENS)
    if args.batch.isdecimal():
        batch *= seqlen
    sequences, rest = divmod(batch, seqlen)
    if rest or batch > MOST_TOKENS:
        fix = f"no whole number of sequences of {seqlen:,}" if rest else f"more than {MOST_TOKENS:,}"
        raise OptionError(
            f"{WHO}: --batch {args.batch} is {batch:,} tokens, {fix}; without a unit it counts sequences: "
            f"--batch {max(1, min(batch, MOST_TOKENS) // seqlen)}"
        )
    return Job(config, cluster, seqlen, sequences, one_of(WHO, "--dtype", args.dtype, ("bf16", "fp8")))


def count(option: str, text: str, most: int) -> int:
    """
    >>> count("--seqlen", "128k", 1 << 20)
    131072
    """
    match = re.fullmatch(r"(\d{1,13})([kmg]?)", text, re.ASCII | re.IGNORECASE)
    value = int(match[1]) * UNITS[match[2].lower()] if match else 0
    if not 1 <= value <= most:
        raise OptionError(
            f"{WHO}: {option} {text!r} must be a whole number from 1 to {most:,}, or one with k, M or G "
            "(2^10, 2^20, 2^30)"
        )
    return value


def show(model: str, found: Found, console: Console) -> int:
    job = found.job
    gb = job.cluster.card.memory_gb
    title = (
        f"{model}, {job.parameters / 1e9:.3g}e9 parameters, {job.dtype}, batch {job.sequences:,} x {job.seqlen:,} = "
        f"{job.tokens:,} tokens\n{job.cluster}"
    )
    console.print(title, style="bold", markup=False, highlight=False)
    if not found.plans:
        least = least_memory(job)
        parts = {"state": sum(least.memory[name] for name in ("weights", "gradients", "optimizer"))}
        parts |= {name: least.memory[name] for name in ("activations", "buffers")}
        terms = ", ".join(f"{name} {nbytes / 1e9:.0f}" for name, nbytes in parts.items())
        console.print(
            f"nothing fits: least memory {least.nbytes / 1e9:.0f} GB ({terms}), usable {room(job) / 1e9:.0f} of "
            f"{gb:g} GB per GPU, with {least.layout}; take more GPUs, or "
            "larger ones",
            markup=False,
            highlight=False,
        )
        return 1
    plans = found.plans[:SHOWN]
    for table in (layout_table(found, plans), time_table(plans), memory_table(plans, gb)):
        print_table(console, table)
    console.print(
        f"{found.compared:,} layouts compared. {CAPTION}", style="dim", markup=False, highlight=False
    )
    return 0


def layout_table(found: Found, plans: Sequence[ClusterPlan]) -> Table:
    labels = ("", "TP", "CP", "PP", "VP", "DP", "ZeRO", "micro", "recompute")
    grid = make_table("the fastest layouts", labels, ("step s", "tokens/s", "TFLOPS", "MFU", "limit"))
    for i, plan in enumerate(plans, 1):
        lo = plan.layout
        grid.add_row(
            *map(str, (i, lo.tp, lo.cp, lo.pp, lo.vp, lo.dp, lo.zero, lo.micro, lo.policy)),
            *(f"{plan.step:.3g}", f"{plan.tokens_per_second:,.0f}", f"{plan.tflops:.0f}", f"{plan.mfu:.1%}"),
            found.limit(plan),
        )
    return grid


def time_table(plans: Sequence[ClusterPlan]) -> Table:
    grid = make_table("share of the step", ("",), tuple(plans[0].seconds))
    for i, plan in enumerate(plans, 1):
        grid.add_row(str(i), *(f"{time / plan.step:.1%}" for time in plan.seconds.values()))
    return grid


def memory_table(plans: Sequence[ClusterPlan], gb: float) -> Table:
    grid = make_table(f"GB of the fullest GPU, of {gb:g}", ("",), (*plans[0].memory, "total"))
    for i, plan in enumerate(plans, 1):
        grid.add_row(str(i), *(f"{nbytes / 1e9:.1f}" for nbytes in (*plan.memory.values(), plan.nbytes)))
    return grid
