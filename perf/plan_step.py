"""Memory and time of a training step under one layout of many GPUs, on paper; clusters and their messages.

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
import re
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes

from gpu_ops.core.checks import one_of
from gpu_ops.errors import OptionError
from gpu_ops.memory.estimate import kept_bytes
from gpu_ops.models import POLICIES, LlamaConfig
from gpu_ops.models.block import recomputed_flops
from gpu_ops.presets import PRESETS, DevicePreset

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


# Clusters of GPUs, and the time of messages between them, by the model that NCCL itself plans with.
#
# An all-gather or a reduce-scatter over a ring of n ranks has n - 1 steps and takes
# ``base + (n - 1) * latency + (n - 1) / n * bytes / bandwidth``. NCCL has three protocols and takes the fastest: LL
# and LL128 start sooner, Simple moves more bytes. Source: NCCL, src/graph/tuning.cc (base and latencies), topo.h
# (links).

WHO = "plan"
MOST_GPUS = 1 << 20


@dataclass(frozen=True)
class Link:
    """A link between GPUs. ``gbps``: GB/s that one GPU sends in one direction, as a plan may count on.
    ``latency_us``: latency of a ring's step, for LL, LL128 and Simple."""

    name: str
    gbps: float
    latency_us: tuple[float, float, float]


_NVLINK, _PCIE, _NETWORK = (0.6, 1.9, 3.4), (1.0, 2.5, 5.7), (2.7, 4.0, 14.0)
_BASE_US = (6.6, 14.0, 8.4)
_SHARE = (0.5, 0.92, 1.0)  # of the bandwidth
_LL_GBPS = 141.0  # maximum of LL on a Hopper node
_PLATEAU = 1.4  # factor of Simple's latency in a ring over several nodes

#: NVLink: 0.85 of what NCCL counts per link, 20.0 GB/s x 12 of an A100, 20.6 x 18 of an H100, 40.1 x 18 of a B200.
#: A PCIe card without peer access copies through the host, at half the rate.
LINKS = {
    link.name: link
    for link in (
        Link("NVLink3", 204, _NVLINK),
        Link("NVLink4", 315, _NVLINK),
        Link("NVLink5", 610, _NVLINK),
        Link("PCIe 3", 12, _PCIE),
        Link("PCIe 4", 24, _PCIE),
        Link("PCIe 4, by the host", 12, _PCIE),
        Link("PCIe 5", 48, _PCIE),
        Link("PCIe 5, by the host", 24, _PCIE),
        Link("HDR 200G", 22.5, _NETWORK),
        Link("NDR 400G", 45, _NETWORK),
    )
}

# (preset, GPUs of a node, link inside it, link between nodes, one for each GPU)
KINDS = {
    "a100": ("A100-80", 8, "NVLink3", "HDR 200G"),
    "a100-40": ("A100-40", 8, "NVLink3", "HDR 200G"),
    "h100": ("H100 SXM", 8, "NVLink4", "NDR 400G"),
    "h100-pcie": ("H100 PCIe", 8, "PCIe 5", "NDR 400G"),
    "h200": ("H200", 8, "NVLink4", "NDR 400G"),
    "b200": ("B200", 8, "NVLink5", "NDR 400G"),
    "gb200": ("B200", 72, "NVLink5", "NDR 400G"),  # NVL72, with the figures of a B200 in a node of 8
    "l40s": ("L40S", 8, "PCIe 4", "HDR 200G"),
    "t4": ("T4", 8, "PCIe 3", "HDR 200G"),
    "rtx3090ti": ("RTX 3090 Ti", 8, "PCIe 4, by the host", "HDR 200G"),
    "rtx4090": ("RTX 4090", 8, "PCIe 4, by the host", "HDR 200G"),
    "rtx5080": ("RTX 5080", 8, "PCIe 5, by the host", "HDR 200G"),
    "rtx5090": ("RTX 5090", 8, "PCIe 5, by the host", "HDR 200G"),
}


@dataclass(frozen=True)
class Cluster:
    """Cluster of ``count`` GPUs in nodes of ``node``."""

    card: DevicePreset
    count: int
    node: int
    link: Link
    network: Link

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """
        >>> cluster = Cluster.parse("h100x64")
        >>> cluster.card.name, cluster.count, cluster.node, cluster.link.gbps
        ('H100 SXM', 64, 8, 315)
        """
        match = re.fullmatch(r"\s*(\S+?)\s*x\s*(\d{1,9})\s*", text, re.ASCII | re.IGNORECASE)
        count = int(match[2]) if match else 0
        if match is None or text.lower() in KINDS or not 1 <= count <= MOST_GPUS:  # not 4090 of "rt"
            raise OptionError(
                f"{WHO}: --cluster {text!r} must be NAMExCOUNT, such as h100x64, with 1 to {MOST_GPUS:,} GPUs; "
                f"names: {', '.join(KINDS)}"
            )
        card = one_of(WHO, "--cluster's card", match[1].lower(), KINDS, meant=_OTHER_NAMES)
        preset, node, link, network = KINDS[card]
        return cls(PRESETS[preset], count, min(node, count), LINKS[link], LINKS[network])

    def group(self, *sizes: tuple[int, int]) -> Group:
        """Ranks that run along axes of a layout, each of (size, GPUs from one rank to the next)."""
        size = inside = 1
        for n, stride in sizes:
            size, inside = size * n, inside * math.gcd(n, max(1, self.node // stride))
        return Group(self, size, inside)

    def __str__(self) -> str:
        inside = f"{self.link.name} {self.link.gbps:g} GB/s"
        if self.count == self.node:
            return f"{self.count} x {self.card.name}, {inside}"
        between = f"{self.network.name} {self.network.gbps:g} GB/s"
        return f"{self.count} x {self.card.name}, {self.node} to a node: {inside}, between nodes {between}"


# Other names of presets, as hints.
_OTHER_NAMES: Mapping[str, str] = {
    "".join(name.lower().split()): kind for kind, (name, *_) in KINDS.items() if kind != "gb200"
} | {"nvl72": "gb200", "3090ti": "rtx3090ti", "4090": "rtx4090", "5080": "rtx5080", "5090": "rtx5090"}


@dataclass(frozen=True)
class Group:
    """Ranks of a ring: their number, and the number in each node."""

    cluster: Cluster
    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)

    @property
    def gbps(self) -> float:
        """Bandwidth of the whole ring, per rank: between nodes each rank has its own network card."""
        inside, between = self.cluster.link.gbps, self.cluster.network.gbps * self.per_node
        return inside if self.nodes == 1 else min(inside, between)

    def seconds(self, nbytes: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``nbytes``, the whole array."""
        if self.size == 1:
            return 0.0
        between = self.nodes - 1
        within = self.size - 1 - between
        return min(
            (base + within * self.cluster.link.latency_us[i] + between * self._network_us(i)) * 1e-6
            + nbytes * (self.size - 1) / self.size / _bandwidth(i, self.gbps)
            for i, base in enumerate(_BASE_US)
        )

    def send(self, nbytes: float) -> float:
        """Seconds that each rank takes to send its neighbour ``nbytes``."""
        if self.size == 1:
            return 0.0
        link = self.cluster.link if self.nodes == 1 else self.cluster.network
        return min(
            (base + link.latency_us[i]) * 1e-6 + nbytes / _bandwidth(i, link.gbps)
            for i, base in enumerate(_BASE_US)
        )

    def _network_us(self, protocol: int) -> float:
        return self.cluster.network.latency_us[protocol] * (_PLATEAU if protocol == 2 else 1.0)


def _bandwidth(protocol: int, gbps: float) -> float:
    """Bytes per second."""
    return 1e9 * min(gbps * _SHARE[protocol], _LL_GBPS if protocol == 0 else gbps)
