"""Parts of the kernel pages: the head comment of each source file, and the GPU resources of its kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gpu_ops.cli.preset_report import card_limits
from gpu_ops.core.checks import FLOAT_DTYPES
from gpu_ops.core.op import op_named
from gpu_ops.kernels.compiler import jit
from gpu_ops.kernels.compiler.kernel import CudaKernel, short_label
from gpu_ops.kernels.program import Launch, lower
from gpu_ops.presets import PRESETS
from scripts import inspect_kernels

ROOT = Path(__file__).resolve().parent.parent.parent

ARCH = "sm_90"  # architecture of the tables, that of the card that the kernels have run on
MOST = 2  # variants of one entry in a table
KERNELS = ROOT / "kernels"
RESOURCES: dict[str, list[inspect_kernels.KernelReport]] = {}


def kernels(*stems: str) -> str:
    """Head and resource table of each source file."""
    return "\n\n".join(f"### {stem}.cu\n\n{head(stem)}\n\n{resources(stem)}" for stem in stems)


def head(stem: str) -> str:
    """Comment at the top of a source file: formula, shapes, memory layout, macros."""
    lines = (KERNELS / f"{stem}.cu").read_text(encoding="utf-8").splitlines()
    comment = [
        line[2:].removeprefix(" ") for line in itertools.takewhile(lambda x: x.startswith("//"), lines)
    ]
    text = "\n".join(comment)
    return f"`kernels/{stem}.cu` begins with\n\n```text\n{text}\n```"


def resources(stem: str) -> str:
    """Registers, shared memory and occupancy of typical variants, as compiled for this build."""
    rows = RESOURCES.get(stem, [])
    if not rows:
        return ""
    table = [
        f"Compiled for {ARCH}:\n",
        "| kernel | threads | registers | spilled | shared memory | blocks per SM | occupancy | limited by |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        shared = (row.static_shared or 0) + (row.dynamic_shared or 0)
        cells = (
            short_label(row.kernel),
            str(row.threads),
            str(row.registers),
            f"{row.spill_bytes} B",
            f"{shared / 1024:.3g} KiB" if shared else "0",
            str(row.blocks_per_sm),
            f"{row.occupancy or 0:.0%}",
            row.limiter,
        )
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def compile_kernels() -> None:
    """Compile the variants of the tables; a cached kernel costs milliseconds."""
    tasks = [(variant, ARCH) for variant in typical()]
    for (variant, _), row in zip(
        tasks, inspect_kernels.inspect_all(tasks, False, set(), Console(stderr=True)), strict=True
    ):
        assert isinstance(variant.kernel, CudaKernel)
        RESOURCES.setdefault(variant.kernel.stem, []).append(row)


def typical() -> Iterator[jit.Variant]:
    """A few variants of each entry, bfloat16 first."""
    groups: dict[tuple[str, str], list[jit.Variant]] = {}
    for variant in jit.all_variants(ARCH):
        if isinstance(variant.kernel, CudaKernel):
            groups.setdefault((variant.kernel.stem, variant.kernel.entry), []).append(variant)
    for variants in groups.values():
        limit = 3 * MOST if variants[0].kernel.entry == "attention_forward" else MOST
        by_preference = sorted(variants, key=lambda v: "bf16" not in dict(v.kernel.defines).values())  # type: ignore[union-attr]
        yield from by_preference[:limit]


def tiles() -> str:
    """Tile of attention on every card, by head_dim, as ``select_config`` chooses it; no card is needed."""
    head_dims = (64, 128, 256)
    rows = [
        "| card | " + " | ".join(f"head_dim {d}" for d in head_dims) + " |",
        "|---|" + "--:|" * len(head_dims),
    ]
    for preset in PRESETS.values():
        if preset.generic or preset.arch.compute_capability < (8, 0):
            continue
        cells = [attention_tile(d, card_limits(preset)) for d in head_dims]
        rows.append(f"| {preset.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def attention_tile(head_dim: int, limits: Any) -> str:
    q, kv = (np.empty((1, 4096, heads, head_dim), FLOAT_DTYPES["bfloat16"]) for heads in (32, 8))
    bound = op_named("docs", "attention").binder(q, kv, kv, causal=True, device="emulator", backend="raw")
    program, _ = lower(bound.spec, "raw", limits)
    launch = next(step for step in program.steps if isinstance(step, Launch))
    made: dict[str, Any] = dict(launch.kernel.defines)  # type: ignore[union-attr]
    tile = f"{made['BLOCK_M']} x {made['BLOCK_N']}, {made['WARPS_M']} x {made['WARPS_N']} warps"
    return f"{tile}, {launch.shared / 1024:.3g} KiB"


def cards() -> str:
    """Presets: the figures that tiles are chosen by."""
    rows = [
        "| card | | SMs | shared memory per block | L2 | GB/s | TFLOPS, 16 bit | source |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for p in PRESETS.values():
        if not p.generic:
            sizes = f"{p.arch.smem_per_block_optin >> 10} KiB | {p.l2_bytes >> 20} MiB"
            speeds = f"{p.memory_gbps:g} | {p.peaks.float16:g}"
            rows.append(f"| {p.name} | {p.arch.name} | {p.sms} | {sizes} | {speeds} | {p.source} |")
    return "\n".join(rows)
