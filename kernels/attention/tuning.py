"""Candidates of ``gpu_ops.autotune`` for the tensor-core attention kernel, and buckets of problems.

A candidate is a tile, whether the heads of a group are packed, and how the keys are split: not at all, or into as
many parts as the model chooses, half as many, or twice as many. Its label omits the number of parts, so that it means
the same for other lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from gpu_ops.kernels.attention.config import (
    DeviceLimits,
    ForwardConfig,
    ForwardProblem,
    configs,
    head_dims,
    select_config,
)
from gpu_ops.kernels.common.arguments import power_of_two
from gpu_ops.kernels.common.tuning import Space

__all__ = ["SPACE", "bucket", "candidates", "label"]

_MOST = 8  # tiles with or without packing; up to three ways to split the keys of each
_WORTH_MEASURING = 2.0  # times the least cost by the model; slower tiles are not worth a measurement


@functools.lru_cache(maxsize=64)  # a search takes some milliseconds, and each measured call asks again
def candidates(problem: ForwardProblem, device: DeviceLimits) -> Mapping[str, ForwardConfig]:
    """Candidates by label: the model's choice first, then by modelled cost."""
    ranked = sorted(configs(problem, device, measured=True), key=lambda pair: pair[0])
    if problem.num_splits > 1:  # set by the caller
        max_splits = max(config.num_splits for _, config in ranked)
        ranked = [(cost, config) for cost, config in ranked if config.num_splits == max_splits]
    near = [config for cost, config in ranked if cost <= _WORTH_MEASURING * ranked[0][0]]
    near = list(dict.fromkeys([select_config(problem, device), *near]))[:_MOST]
    ways = {label(config): config for config in near}
    for config in near:
        if config.num_splits > 1 and problem.num_splits == 0:
            for parts, suffix in ((config.num_splits // 2, " / 2"), (config.num_splits * 2, " x 2")):
                other = _divided(problem, device, config, parts)
                if other.num_splits == parts > 1:
                    ways[label(config) + suffix] = other
    return ways


def bucket(problem: ForwardProblem) -> str:
    """Key of a problem: lengths and sequences times key heads rounded up to a power of two; other inputs exactly.

    What the model does not know, such as sinks or pages, changes the kernel but not the merits of a tile.
    """
    p = problem
    head_dim, head_dim_v, parts = head_dims(p.itemsize, p.head_dim, p.head_dim_v)
    words = [
        f"{p.itemsize} bytes",
        f"head_dim {head_dim}/{head_dim_v * parts}",
        f"group {p.group}",
        p.mask,
        f"batch * nheads_kv <= {power_of_two(p.batch * p.nheads_kv)}",
        f"seqlen <= {power_of_two(p.seqlen_q)} x {power_of_two(p.seqlen_k)}",
    ]
    words += [f"window <= {power_of_two(p.window)}"] if p.window else []
    words += ["block mask"] if p.block_mask else []
    words += ["varlen"] if p.varlen else []
    words += ["quantized"] if p.quantized else []
    words += [] if p.lean else ["not lean"]
    words += ["float32 out"] if p.wide_out else []
    words += [f"num_splits {p.num_splits}"] if p.num_splits else []
    return ", ".join(words)


def label(config: ForwardConfig) -> str:
    """Label such as ``16 x 64 on 1 x 4 warps, packed, divided``."""
    t = config.tile
    words = [f"{t.block_m} x {t.block_n} on {t.warps_m} x {t.warps_n} warps"]
    words += ["one K"] if t.one_k else []
    words += ["packed"] if config.pack_gqa else []
    words += ["divided"] if config.num_splits > 1 else []
    return ", ".join(words)


SPACE = Space("attention", ("attention/forward_sm80", "attention/combine"), bucket, select_config, candidates)


def _divided(problem: ForwardProblem, device: DeviceLimits, like: ForwardConfig, parts: int) -> ForwardConfig:
    """Configuration with the tile of ``like`` and the keys in ``parts`` parts, or in as many as there can be."""
    for _, config in configs(replace(problem, num_splits=max(parts, 2)), device, measured=True):
        if (config.tile, config.pack_gqa) == (like.tile, like.pack_gqa) and config.num_splits > 1:
            return config
    return like
