"""Command ``gpu-ops presets``: the cards, and the resources of each kernel on one of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpu_ops.cli.terminal import make_console, print_json, print_table
from gpu_ops.core.checks import FLOAT_DTYPES
from gpu_ops.core.dispatch import unavailable
from gpu_ops.core.op import op_named
from gpu_ops.kernels.compiler.kernel import short_label
from gpu_ops.kernels.program import Launch, Limits, lower
from gpu_ops.presets import PRESETS, DevicePreset, select_preset

__all__ = ["card_limits", "kernel_rows", "run"]

_DTYPES = ("float16", "bfloat16", "float32")
_HEAD_DIMS = (64, 128, 256)


def card_limits(preset: DevicePreset) -> Limits:
    """Limits of a card, for lowering."""
    arch = preset.arch
    return Limits(arch.name, preset.sms, arch.smem_per_block_optin, "", preset.name)


def run(options: argparse.Namespace) -> int:
    """Print all presets, or one with the kernels that typical calls would launch."""
    presets = [select_preset(options.card)] if options.card else list(PRESETS.values())
    if options.json:
        print_json([_entries(preset) for preset in presets])
    elif options.card:
        _show_card(presets[0], make_console())
    else:
        _show_cards(make_console())
    return 0


def _entries(preset: DevicePreset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "arch": preset.arch.name,
        "sms": preset.sms,
        "shared_bytes_per_block": preset.arch.smem_per_block_optin,
        "l2_bytes": preset.l2_bytes,
        "memory_gbps": preset.memory_gbps,
        "memory_gb": preset.memory_gb,
        "tflops": {"float16": preset.peaks.float16, "float32": preset.peaks.float32},
        "source": preset.source,
    }


def _show_cards(console: Console) -> None:
    table = Table("preset", "arch", "SMs", "KiB", "L2 MiB", "GB/s", "GB", "TFLOPS", box=None)
    for p in PRESETS.values():
        shared, l2 = f"{p.arch.smem_per_block_optin >> 10}", f"{p.l2_bytes >> 20}"
        like = f" (as {p.like})" if p.like else ""
        row = (f"{p.memory_gbps:g}", f"{p.memory_gb:g}", f"{p.peaks.float16:g}")
        table.add_row(escape(p.name + like), p.arch.name, str(p.sms), shared, l2, *row)
    print_table(console, table)
    console.print("KiB: shared memory of a block; TFLOPS: in 16 bits, dense", style="dim", highlight=False)


def _show_card(preset: DevicePreset, console: Console) -> None:
    limits, peaks = card_limits(preset), preset.peaks
    console.print(
        f"{escape(preset.name)}: {limits.arch}, {preset.sms} SMs, {limits.smem_per_block_optin >> 10} KiB shared "
        f"memory per block, {preset.l2_bytes >> 20} MiB L2, {preset.memory_gbps:g} GB/s, {preset.memory_gb:g} GB, "
        f"{peaks.float16:g} TFLOPS float16, {peaks.float32:g} float32\nsource: {escape(preset.source)}"
    )
    if missing := unavailable("emulator", _backend(limits)):
        console.print(f"The kernels of typical calls are left out: {missing}", markup=False, highlight=False)
        return
    table = Table("op", "dtype", "kernel", "grid", "threads", "shared", box=None)
    for row in kernel_rows(limits):
        table.add_row(*map(escape, row))
    print_table(console, table)


def _backend(limits: Limits) -> str:
    return "raw" if int(limits.arch[3:].rstrip("af")) >= 80 else "numba"


def kernel_rows(limits: Limits) -> Iterator[tuple[str, ...]]:
    """Rows (op, dtype, kernel, grid, threads of a block, shared memory) of each launch of typical calls."""
    backend = _backend(limits)
    for dtype in _DTYPES:
        for title, op, arguments, options in _typical_calls(FLOAT_DTYPES[dtype]):
            bound = op_named("presets", op).binder(*arguments, **options, device="emulator", backend=backend)
            program, _ = lower(bound.spec, backend, limits)
            for step in program.steps:
                if isinstance(step, Launch):
                    grid = " x ".join(str(n) for n in step.grid if n > 1) or "1"
                    shared = f"{step.shared / 1024:.3g} KiB" if step.shared else ""
                    yield (
                        title,
                        dtype,
                        short_label(step.kernel.label),
                        grid,
                        str(math.prod(step.block)),
                        shared,
                    )
                    title = ""


def _typical_calls(dtype: np.dtype[Any]) -> Iterator[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """Typical calls as (title, op, arrays, options). The arrays are never accessed."""

    def array(*shape: int) -> np.ndarray[Any, Any]:
        return np.empty(shape, dtype)

    for head_dim in _HEAD_DIMS:
        q, kv = array(1, 4096, 32, head_dim), array(1, 4096, 8, head_dim)
        yield f"attention, causal, head_dim {head_dim}", "attention", (q, kv, kv), {"causal": True}
    for head_dim in _HEAD_DIMS:
        q, kv = array(8, 1, 32, head_dim), array(8, 4096, 8, head_dim)
        used = {"seqused_k": np.full(8, 4096, np.int32)}
        yield f"attention_decode, head_dim {head_dim}", "attention_decode", (q, kv, kv), used
    rows, weight = array(4096, 4096), array(4096)
    yield "rmsnorm, 4096 x 4096", "rmsnorm", (rows, weight), {}
    yield "rmsnorm_backward", "rmsnorm_backward", (rows, rows, weight, np.empty(4096, np.float32)), {}
    yield "rope, 32/8 heads of 128", "rope", (array(1, 4096, 32, 128), array(1, 4096, 8, 128)), {}
    yield "swiglu, 4096 x 14336", "swiglu", (array(4096, 14336), array(4096, 14336)), {}
    gate, down = array(14336, 4096), array(4096, 14336)
    yield "swiglu_mlp, 64 tokens", "swiglu_mlp", (array(64, 4096), gate, gate, down), {}
