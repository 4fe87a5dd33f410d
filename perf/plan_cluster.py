"""Clusters of GPUs, and the time of messages between them, by the model that NCCL itself plans with.

An all-gather or a reduce-scatter over a ring of n ranks has n - 1 steps and takes
``base + (n - 1) * latency + (n - 1) / n * bytes / bandwidth``. NCCL has three protocols and takes the fastest: LL and
LL128 start sooner, Simple moves more bytes. Source: NCCL, src/graph/tuning.cc (base and latencies), topo.h (links).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_ops.core.checks import one_of
from gpu_ops.errors import OptionError
from gpu_ops.presets import PRESETS, DevicePreset

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
