"""Memory and time of a training step under one layout of many GPUs: a model on paper.

GPUs are numbered with TP innermost, then CP, PP and DP, as for Llama 3. Every term is for one GPU, in the fullest
or slowest stage of the pipeline.

===========  =========================================================================================================
term         what it counts
===========  =========================================================================================================
compute      6 flops per token and weight of layers and head; causal attention: 6 hidden x seqlen per token and layer
recompute    ``models.block.recomputed_flops``, where a policy keeps less than everything
TP           per layer four all-gathers and four reduce-scatters of tokens x hidden; norms on shards of tokens (SP)
CP           per layer a ring of keys and values forward, and of them and their float32 gradients backward
PP           per chunk an activation to the next stage and a gradient to the one before
DP           gradients reduced in float32, weights gathered in 16 bits: once a step, or per microbatch by ZeRO stage
optimizer    30 bytes per weight and step through memory: gradient, master and moments, weights
bubble       idle: (PP - 1) / VP microbatches (1F1B, interleaved), and all stages wait for the longest
===========  =========================================================================================================

CP, PP and DP overlap with computation: the model assumes that a share OVERLAP of what could be hidden is hidden.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import ml_dtypes

from gpu_ops.errors import OptionError
from gpu_ops.memory.estimate import kept_bytes
from gpu_ops.models import POLICIES, LlamaConfig
from gpu_ops.models.block import recomputed_flops
from perf.plan_cluster import WHO, Cluster

#: Share of the card's dense peak that a layer reaches between messages, fitted to one run: Llama 3 405B in bf16 on
#: 8192 H100 (arXiv 2407.21783, table 4). fp8 is for the matmuls of layers; attention and the head stay in bf16.
EFFICIENCY = 0.57
ZIGZAG = (
    0.9  # attention's speed in a zigzag ring relative to one GPU (ring-flash-attention's README, 8 x H800)
)
OVERLAP = 0.5
USABLE = 0.9  # share of the memory; the rest is for the CUDA context, NCCL and fragmentation
BF16, FLOAT32 = 2, 4
STATES = 3 * FLOAT32  # master, two moments
OPTIMIZER_TRAFFIC = BF16 + 7 * FLOAT32
NAMES = {"tp": "TP", "cp": "CP", "pp": "PP", "vp": "VP", "dp": "DP", "zero": "ZeRO", "policy": "recompute"}
BUCKETS = 2 * 50e6  # gradients waiting for their reduction, and gradients being reduced


@dataclass(frozen=True)
class Job:
    """Model, data and cluster of a training run. ``sequences``: size of the global batch."""

    config: LlamaConfig
    cluster: Cluster
    seqlen: int
    sequences: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if not self.config.nlayers:
            raise OptionError(f"{WHO}: the model has no layers")
        for dtype in (self.dtype, "bf16"):  # raises
            self.peak(dtype)

    def peak(self, dtype: str) -> float:
        """Flops per second of a card by its data sheet."""
        card = self.cluster.card
        tflops = {"bf16": card.peaks.bfloat16, "fp8": card.peaks.float8}[dtype]
        if tflops is None:
            raise OptionError(
                f"{WHO}: {card.name} has no {dtype} on tensor cores; take another card or --dtype"
            )
        return 1e12 * tflops

    @property
    def tokens(self) -> int:
        return self.sequences * self.seqlen

    @functools.cached_property
    def parameters(self) -> int:
        return self.config.parameters

    @functools.cached_property
    def rates(self) -> tuple[float, float]:
        """Flops per second of layers' matmuls, and of attention and the head."""
        return self.peak(self.dtype) * EFFICIENCY, self.peak("bf16") * EFFICIENCY

    @functools.cached_property
    def layer_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.config.block_shapes().values())

    @functools.cached_property
    def table_weights(self) -> int:
        """Weights of the embedding table, or of the head."""
        return self.config.vocab * self.config.hidden

    @functools.cached_property
    def attention_flops(self) -> float:
        """Forward flops of attention per token and layer, on average."""
        windows = [min(c.window + 1 or self.seqlen, self.seqlen) for c in self.config.by_layer]
        visible = sum(w - w * w / (2 * self.seqlen) for w in windows) / len(windows)
        return 4 * self.config.nheads * self.config.head_dim * visible

    @functools.cached_property
    def flops(self) -> float:
        """Flops per token as MFU counts them: recomputation is not counted."""
        layers = self.config.nlayers * (6 * self.layer_weights + 3 * self.attention_flops)
        return layers + 6 * self.table_weights

    @functools.cached_property
    def kept(self) -> dict[str, float]:
        """Bytes per token that a layer keeps for its backward pass, by policy."""
        return {
            name: kept_bytes(name, self.config, 1, 1, ml_dtypes.bfloat16)
            for name in POLICIES
            if name != "offload"  # which the host's bandwidth decides
        }

    @functools.cached_property
    def recomputed(self) -> dict[str, float]:
        """Seconds per token and layer to recompute what a policy does not keep."""
        matmuls, rest = self.rates
        result = {}
        for name in self.kept:
            again = recomputed_flops(name, self.config, self.seqlen)
            attention = 0.0 if "attn" in POLICIES[name] else min(again, self.attention_flops)
            result[name] = (again - attention) / matmuls + attention / rest
        return result


@dataclass(frozen=True)
class Layout:
    """Distribution of a job over GPUs. ``zero``: 1 shards the optimizer over DP and CP, 2 also gradients, 3 also
    weights. ``micro``: sequences of a microbatch; ``policy``: as :func:`gpu_ops.models.block_forward` takes it."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    zero: int = 1
    micro: int = 1
    policy: str = "none"

    def microbatches(self, job: Job) -> int:
        return job.sequences // (self.dp * self.micro)

    def tokens(self, job: Job) -> float:
        """Tokens of a microbatch on one GPU."""
        return self.micro * job.seqlen / self.cp

    def stages(self, job: Job) -> tuple[int, int, int]:
        """Number of layers of the first stage, of a middle stage, and of the last."""
        slots = self.pp * self.vp
        layers = -(-job.config.nlayers // slots) * self.vp
        missing = layers * self.pp - job.config.nlayers
        return layers - missing // 2, layers, layers - (missing + 1) // 2

    def weights(self, job: Job) -> float:
        """Weights per GPU of the stage that has the most."""
        if self.pp == 1:
            return job.parameters / self.tp
        first, middle, last = self.stages(job)
        middle = middle if self.pp > 2 else 0
        ends = max(first, last) * job.layer_weights + job.table_weights
        return max(ends, middle * job.layer_weights) / self.tp

    def __str__(self) -> str:
        return ", ".join(f"{NAMES.get(name, name)} {value}" for name, value in vars(self).items())


def memory(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes of a GPU by term."""
    weights, shards = layout.weights(job), layout.dp * layout.cp
    layers, kept = layout.stages(job)[1], job.kept
    micro, per_token = layout.microbatches(job), layout.tokens(job) / layout.tp
    alive: float = layers * min(layout.pp, micro)
    if layout.vp > 1:
        warm_up = 1 + (layout.pp - 1) / (layout.pp * layout.vp)
        alive = min(job.config.nlayers * warm_up, layers * micro)
    largest = max(job.layer_weights, job.table_weights) / layout.tp
    in_flight = {2: FLOAT32, 3: BF16 + FLOAT32}.get(layout.zero, 0) * 2 * largest
    # Bytes of a layer: what is recomputed, act(gate) * up, and the gradients of that and of the layer's result.
    backward = kept["none"] - kept[layout.policy] + BF16 * (2 * job.config.ffn + job.config.hidden)
    return {
        "weights": BF16 * weights / (shards if layout.zero == 3 else 1),
        "gradients": FLOAT32 * weights / (shards if layout.zero >= 2 else 1),
        "optimizer": STATES * weights / shards,
        "activations": alive * kept[layout.policy] * per_token,
        "buffers": backward * per_token + in_flight + (BUCKETS if shards > 1 else 0),
    }


def exposed(message: float, beside: float) -> float:
    """Seconds of a message that computation does not hide."""
    return message - OVERLAP * min(message, beside)


def seconds(job: Job, layout: Layout) -> dict[str, float]:
    """Seconds of a step by term."""
    lo, config = layout, job.config
    micro, tokens = lo.microbatches(job), lo.tokens(job)
    first, layers, last = lo.stages(job)
    matmuls, rest = job.rates
    attention = tokens / lo.tp * job.attention_flops / rest / (ZIGZAG if lo.cp > 1 else 1)
    forward = tokens / lo.tp * 2 * job.layer_weights / matmuls + attention
    again = tokens / lo.tp * job.recomputed[lo.policy]
    head = tokens / lo.tp * 6 * job.table_weights / rest

    ends = (first, last + head / (3 * forward)) if lo.pp > 1 else (layers + head / (3 * forward),)
    longest = 3 * forward * max(*ends, layers if lo.pp > 2 else 0)
    mean = (3 * forward * config.nlayers + head) / lo.pp
    terms = {
        "compute": mean,
        "recompute": layers * again,
        "TP": layers * 8 * job.cluster.group((lo.tp, 1)).seconds(BF16 * tokens * config.hidden),
        "CP": layers * _ring(job, lo, attention),
        "PP": _pipeline(job, lo, longest),
    }
    microbatch = longest - mean + sum(terms.values())  # a microbatch in the longest stage
    result = {name: micro * value for name, value in terms.items()}
    result["DP"] = _data(job, lo, forward * layers, (2 * forward + again) * layers)
    traffic = OPTIMIZER_TRAFFIC * lo.weights(job) / (lo.dp * lo.cp)
    result["optimizer"] = traffic / (1e9 * job.cluster.card.memory_gbps)
    result["bubble"] = (lo.pp - 1) / lo.vp * microbatch + micro * max(longest - mean, 0.0)  # not -1e-14
    return result


def _ring(job: Job, layout: Layout, attention: float) -> float:
    """Exposed seconds of a layer, forward and backward. Gradients of keys and values need one more hop."""
    c, group = layout.cp, job.cluster.group((layout.cp, layout.tp))
    kv = 2 * layout.tokens(job) * job.config.nheads_kv / layout.tp * job.config.head_dim
    forward = (c - 1) * group.send(BF16 * kv)
    back = forward + c * group.send(FLOAT32 * kv)
    return exposed(forward, attention) + exposed(back, 2 * attention)


def _pipeline(job: Job, layout: Layout, stage: float) -> float:
    group = job.cluster.group((layout.pp, layout.tp * layout.cp))
    hidden = BF16 * layout.tokens(job) * job.config.hidden / layout.tp
    return exposed(2 * layout.vp * group.send(hidden), stage)


def _data(job: Job, layout: Layout, forward: float, backward: float) -> float:
    """Exposed seconds of a step with a message per layer. ``forward``, ``backward``: seconds of a microbatch."""
    lo, layers = layout, layout.stages(job)[1]
    group = job.cluster.group((lo.cp, lo.tp), (lo.dp, lo.tp * lo.cp * lo.pp))
    layer_weights = lo.weights(job) / layers
    reduce, gather = (layers * group.seconds(size * layer_weights) for size in (FLOAT32, BF16))
    if lo.zero == 3:
        return lo.microbatches(job) * (exposed(gather, forward) + exposed(gather + reduce, backward))
    reductions = lo.microbatches(job) if lo.zero == 2 else 1
    return reductions * exposed(reduce, backward) + exposed(gather, forward)


@dataclass(frozen=True)
class ClusterPlan:
    """A layout, the bytes of its fullest GPU and the seconds of its step, by term."""

    job: Job
    layout: Layout
    memory: dict[str, float]
    seconds: dict[str, float]

    @classmethod
    def of(cls, job: Job, layout: Layout) -> ClusterPlan:
        return cls(job, layout, memory(job, layout), seconds(job, layout))

    @property
    def nbytes(self) -> float:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def tflops(self) -> float:
        """TFLOPS per GPU, without recomputation."""
        return self.job.tokens * self.job.flops / self.job.cluster.count / self.step / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops * 1e12 / self.job.peak(self.job.dtype)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster."""
        return self.job.tokens / self.step
