"""Search for the fastest layouts that fit, among all that divide a job evenly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_ops.errors import OptionError
from perf.plan_cluster import WHO
from perf.plan_step import USABLE, ClusterPlan, Job, Layout, memory

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
