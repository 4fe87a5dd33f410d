"""Command ``gpu-ops cache``: what is kept of compiled kernels."""

from __future__ import annotations

import argparse

from rich.markup import escape

from gpu_ops.cli.terminal import make_console, plain_table, print_json, print_table
from gpu_ops.kernels.compiler import cache
from gpu_ops.kernels.compiler.progress import several

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the cache folder and its contents, after clearing it if requested; return 1 if it cannot be used."""
    console = make_console()
    problem = cache.folder_problem()
    if problem is not None:
        if options.json:
            print_json({"problem": problem})
        else:
            console.print(f"[red]the kernel cache is not used[/]: {escape(problem)}", highlight=False)
        return 1
    files, removed = cache.contents(), (0, 0)
    if options.clear is not None:
        removed = cache.clear(f for f in files if f.old or options.clear == "all")
        files = cache.contents()
    groups = {label: [f for f in files if f.kind == label] for label in dict.fromkeys(f.kind for f in files)}
    rows = {
        label: {"files": len(group), "bytes": sum(f.nbytes for f in group), "old": sum(f.old for f in group)}
        for label, group in groups.items()
    }
    if options.json:
        print_json({"folder": str(cache.root()), "kernels": rows, "removed": removed[0]})
        return 0
    if options.clear is not None:
        text = f"{several(removed[0], 'file')} removed, {removed[1] / 2**20:.1f} MiB"
        console.print(text, highlight=False)
    table = plain_table(f"kept in {escape(str(cache.root()))}")
    for label, row in rows.items():
        old = f"{row['old']} of sources that have changed" if row["old"] else ""
        table.add_row(label, str(row["files"]), f"{row['bytes'] / 2**20:.1f} MiB", old)
    if not rows:
        table.add_row("nothing")
    print_table(console, table)
    return 0
