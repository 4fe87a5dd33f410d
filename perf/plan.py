"""``python -m perf --plan MODEL --cluster h100x64``: plans that spread a training step over many GPUs, on paper.

``plan_step.py`` has clusters, links and messages, and a layout's memory and time; this module has the search for
layouts, the command, and published runs to compare with.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from gpu_ops.cli.terminal import make_console, print_table
from gpu_ops.core.checks import one_of
from gpu_ops.errors import GpuOpsError, OptionError
from gpu_ops.models.presets import PRESETS, find_config
from perf.plan_step import EFFICIENCY, KINDS, OVERLAP, USABLE, WHO, Cluster, ClusterPlan, Job, Layout, memory
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
            print_table(console, table())
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
    console.print(error_range(), style="dim", markup=False, highlight=False)
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


_LLAMA = "Llama 3, arXiv 2407.21783, table 4"
_BRIDGE = "Megatron-Bridge 25.11, performance summary"
_TITAN = "torchtitan, benchmarks of 2024-12"
MEMORY_BOUND = "the model counts no memory-bound ops, which weigh most in a small model on a fast card"
OTHER_CARD = "slower cards (500 W and 2.4 TB/s, not 700 and 3.35), which explain a part"


@dataclass(frozen=True)
class Anchor:
    """Published run. ``tflops``: published, per GPU. ``note``: why the model is off by more than 15 %."""

    model: str
    cluster: str
    layout: Layout
    seqlen: int
    sequences: int
    dtype: str
    tflops: float
    source: str
    note: str = ""

    def plan(self) -> ClusterPlan:
        job = Job(
            find_config("plan", self.model),
            Cluster.parse(self.cluster),
            self.seqlen,
            self.sequences,
            self.dtype,
        )
        return ClusterPlan.of(job, self.layout)

    @property
    def error(self) -> float:
        """Error of the model's TFLOPS, relative to the published ones."""
        return self.plan().tflops / self.tflops - 1


# VP of Llama 3's runs is not published: one layer per chunk. Gradients were reduced in float32, once per step.
ANCHORS = (
    Anchor("llama-3-405b", "h100x8192", Layout(8, 1, 16, 8, 64), 8192, 2048, "bf16", 430, _LLAMA, "fitted"),
    Anchor("llama-3-405b", "h100x16384", Layout(8, 1, 16, 8, 128), 8192, 2048, "bf16", 400, _LLAMA),
    Anchor("llama-3-405b", "h100x16384", Layout(8, 16, 16, 8, 8), 131072, 128, "bf16", 380, _LLAMA),
    Anchor("llama-3-405b", "h100x1024", Layout(8, 2, 8, 8, 8), 8192, 512, "fp8", 737, _BRIDGE),
    Anchor("llama-3-70b", "h100x64", Layout(4, 1, 8, 5, 2), 8192, 128, "fp8", 719, _BRIDGE),
    Anchor("llama-3-8b", "h100x8", Layout(dp=8, zero=3), 8192, 128, "fp8", 744, _BRIDGE),
    Anchor("llama-3-405b", "b200x128", Layout(4, 2, 8, 8, 2), 8192, 64, "fp8", 1667, _BRIDGE),
    Anchor("llama-3-8b", "b200x8", Layout(dp=8, micro=2), 8192, 128, "fp8", 1576, _BRIDGE, MEMORY_BOUND),
    # 6,667, 6,514, 829 and 100 tokens/s per GPU. The first two recompute every second matmul, the rest all.
    Anchor("llama-3-8b", "h100x8", Layout(dp=8, zero=3, micro=2, policy="mlp"), 8192, 16, "bf16", 343, _TITAN,
           OTHER_CARD),
    Anchor("llama-3-8b", "h100x128", Layout(dp=128, zero=3, micro=2, policy="mlp"), 8192, 256, "bf16", 335, _TITAN,
           OTHER_CARD),
    Anchor("llama-3-70b", "h100x256", Layout(8, dp=32, zero=3, micro=16, policy="layer"), 8192, 512, "fp8", 372,
           _TITAN, OTHER_CARD),
    Anchor("llama-3-405b", "h100x512", Layout(8, 1, 8, 1, 8, policy="layer"), 8192, 256, "fp8", 252, _TITAN,
           OTHER_CARD),
)  # fmt: skip


def error_range() -> str:
    """Line that says how far the model is from published runs: those it describes, and those with a note."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for anchor in ANCHORS:
        errors[anchor.note in (MEMORY_BOUND, OTHER_CARD)].append(anchor.error)
    plain, other = errors[False], errors[True]
    return (
        f"TFLOPS of {len(plain)} published runs are {min(plain):+.0%} to {max(plain):+.0%} off; of {len(other)} with "
        f"slower cards or memory-bound models {min(other):+.0%} to {max(other):+.0%} (--plan anchors)"
    )


def table() -> Table:
    labels = ("model", "cluster", "dtype", "TP CP PP VP DP", "seqlen")
    title = "published runs: TFLOPS per GPU, and the model's"
    grid = make_table(title, labels, ("published", "by model", "error", "GB", "of"))
    grid.add_column("source, and what the model leaves out")
    for anchor in ANCHORS:
        plan, lo = anchor.plan(), anchor.layout
        sizes = f"{lo.tp} {lo.cp} {lo.pp} {lo.vp} {lo.dp}"
        grid.add_row(
            *(anchor.model, anchor.cluster, anchor.dtype, sizes, f"{anchor.seqlen:,}"),
            *(f"{anchor.tflops:.0f}", f"{plan.tflops:.0f}", f"{anchor.error:+.1%}"),
            *(f"{plan.nbytes / 1e9:.0f}", f"{plan.job.cluster.card.memory_gb:g}"),
            "; ".join(filter(None, (anchor.source, anchor.note))),
        )
    return grid


LEAST_TOKENS = 512  # of a sequence on a GPU: with fewer, a ring's kernels are too small
MOST_CHUNKS = 10  # of a pipeline's stage
MICRO = (1, 2, 4, 8)  # sequences of a microbatch
MOST_MISSING = 2  # one layer at each end of a pipeline, in place of the embedding and the head
SMALL = 0.05  # share of a step: a smaller loss is no limit

Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class Found:
    """Result of a search. ``plans``: the fastest of each (TP, CP, PP, DP) that fits, fastest first. ``free``: seconds
    of the fastest of each in unlimited memory. ``compared``: number of layouts compared."""

    job: Job
    plans: tuple[ClusterPlan, ...]
    free: dict[Sizes, float]
    compared: int

    def limit(self, plan: ClusterPlan) -> str:
        """Limit of a plan's speed: memory, if the same sizes were faster with more of it; else the largest loss of
        time, or computation if all losses are small."""
        if self.free[_sizes(plan.layout)] < (1 - SMALL) * plan.step:
            return "memory"
        lost = {name: time for name, time in plan.seconds.items() if name != "compute"}
        largest = max(lost, key=lost.__getitem__)
        return largest if lost[largest] > SMALL * plan.step else "compute"


def search(job: Job) -> Found:
    """Find the fastest plans of a job.

    Raises
    ------
    OptionError
        No layout divides the heads, layers, tokens and sequences evenly among the GPUs.
    """
    best: dict[Sizes, ClusterPlan] = {}
    free: dict[Sizes, float] = {}
    compared = 0
    for layout in layouts(job):
        key = _sizes(layout)
        fastest = ClusterPlan.of(job, layout)  # regardless of memory: using less of it takes more time
        free[key] = min(fastest.step, free.get(key, fastest.step))
        compared += 1
        if key in best and fastest.step >= best[key].step:
            continue
        for plan in [fastest] if fits(fastest) else _smaller(job, layout):
            compared += 1
            if key not in best or _rank(plan) < _rank(best[key]):
                best[key] = plan
    if not free:
        raise OptionError(
            f"{WHO}: no layout divides {job.cluster.count} GPUs evenly: TP divides a node and the "
            f"{job.config.nheads_kv} key heads, CP half of seqlen {job.seqlen}, PP the {job.config.nlayers} layers "
            f"or up to {MOST_MISSING} more, DP the {job.sequences} sequences; change --batch or the number of GPUs"
        )
    return Found(job, tuple(sorted(best.values(), key=_rank)), free, compared)


def fits(plan: ClusterPlan) -> bool:
    return plan.nbytes <= room(plan.job)


def room(job: Job) -> float:
    """Bytes of a GPU that a plan may use."""
    return USABLE * job.cluster.card.memory_gb * 1e9


def least_memory(job: Job) -> ClusterPlan:
    """Layout that takes the least memory, whether it fits or not."""
    choices = (
        replace(layout, zero=zero, policy=policy)
        for layout in layouts(job)
        for zero in _stages(layout)
        for policy in job.kept
        if layout.micro == 1
    )
    return ClusterPlan.of(job, min(choices, key=lambda layout: sum(memory(job, layout).values())))


def layouts(job: Job) -> Iterator[Layout]:
    """All layouts that divide evenly, with ZeRO 1 and no recomputation: the fastest in unlimited memory."""
    config, cluster = job.config, job.cluster
    for tp in divisors(cluster.node):
        if cluster.count % tp or config.nheads_kv % tp or config.ffn % tp:
            continue
        for cp in divisors(cluster.count // tp):
            if cp > 1 and (job.seqlen % (2 * cp) or job.seqlen < cp * LEAST_TOKENS):
                continue
            for pp in divisors(cluster.count // (tp * cp)):
                dp = cluster.count // (tp * cp * pp)
                if job.sequences % dp == 0:
                    yield from _schedules(job, Layout(tp, cp, pp, dp=dp))


def _schedules(job: Job, layout: Layout) -> Iterator[Layout]:
    sequences, pp, nlayers = job.sequences // layout.dp, layout.pp, job.config.nlayers
    allowed = 0 if nlayers % pp == 0 else MOST_MISSING
    chunks = [
        vp
        for vp in (range(1, MOST_CHUNKS + 1) if pp > 1 else (1,))
        if pp * vp - allowed <= nlayers and -nlayers % (pp * vp) <= allowed
    ]
    for micro in MICRO:
        for vp in chunks:
            # Interleaving alternates between groups of PP microbatches.
            if sequences % (micro * (pp if vp > 1 else 1)) == 0:
                yield replace(layout, vp=vp, micro=micro)


def _stages(layout: Layout) -> tuple[int, ...]:
    """ZeRO stages, fastest first. Stage 3 gathers weights for every microbatch, so not in a pipeline."""
    return (1,) if layout.dp * layout.cp == 1 else (1, 2) if layout.pp > 1 else (1, 2, 3)


def _smaller(job: Job, layout: Layout) -> Iterator[ClusterPlan]:
    """Plan of each ZeRO stage with the first policy that fits, which is the fastest: they are in order of work."""
    for zero in _stages(layout):
        for policy in sorted(job.kept, key=job.recomputed.__getitem__):
            smaller = replace(layout, zero=zero, policy=policy)
            if sum(memory(job, smaller).values()) <= room(job):
                yield ClusterPlan.of(job, smaller)
                break


def _sizes(layout: Layout) -> Sizes:
    return layout.tp, layout.cp, layout.pp, layout.dp


def _rank(plan: ClusterPlan) -> tuple[float, float]:
    return plan.step, plan.nbytes


def divisors(n: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]
