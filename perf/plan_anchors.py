"""Published training runs, and the planner's figures for them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from gpu_ops.models.presets import find_config
from perf.plan_cluster import Cluster
from perf.plan_step import ClusterPlan, Job, Layout
from perf.report import make_table

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
            *(f"{anchor.tflops:.0f}", f"{plan.tflops:.0f}", f"{plan.tflops / anchor.tflops - 1:+.1%}"),
            *(f"{plan.nbytes / 1e9:.0f}", f"{plan.job.cluster.card.memory_gb:g}"),
            "; ".join(filter(None, (anchor.source, anchor.note))),
        )
    return grid
