"""Command ``gpu-ops`` without a subcommand: devices, backends, versions and caches."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape

from gpu_ops.cli.terminal import make_console, plain_table, print_json, print_table
from gpu_ops.environment import VARIABLES, Environment, environment
from gpu_ops.kernels.compiler.progress import several

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the environment."""
    report = environment()
    if options.json:
        print_json(report.to_dict())
    else:
        _show(report, make_console())
    return 0


def _show(report: Environment, console: Console) -> None:
    """Print the environment as tables."""
    memory = f"{report.cpu.memory_bytes / 2**30:.0f} GiB"
    devices = plain_table("devices")
    devices.add_row("cpu", escape(report.cpu.model), f"{several(report.cpu.threads, 'thread')}, {memory}")
    for card in report.cuda_devices:
        arch = "sm_{}{}".format(*card.compute_capability)
        facts = f"{arch}, {card.memory_bytes / 2**30:.0f} GiB, preset {card.preset or 'none: too old'}"
        devices.add_row(f"cuda {card.index}", escape(card.name), facts)
    if report.cuda_missing:
        devices.add_row("cuda", "[yellow]none[/]", escape(report.cuda_missing))
    if report.driver:
        devices.add_row("driver", escape(report.driver), "")
    devices.add_row("preset", report.preset or "none", escape(report.preset_reason))
    print_table(console, devices)

    backends = plain_table("backends, best first")
    hints = {""}
    for row in report.backends:
        reason, _, hint = (row.missing or "").partition("; ")
        text = reason if hint in hints else row.missing  # each command to install something is shown once
        backends.add_row(
            row.device, row.backend, f"[yellow]no[/]: {escape(text)}" if text else "[green]ready[/]"
        )
        hints.add(hint)
    print_table(console, backends)

    for title, pairs in (
        ("versions", report.versions),
        ("compiled kernels are kept in", report.caches),
    ):
        table = plain_table(title)
        for name, value in pairs.items():
            table.add_row(name, escape(value))
        print_table(console, table)
    table = plain_table("environment variables")
    for name in dict.fromkeys((*VARIABLES, *report.variables)):
        table.add_row(
            name, escape(report.variables.get(name, "")) or "[dim]not set[/]", VARIABLES.get(name, "")
        )
    print_table(console, table)
