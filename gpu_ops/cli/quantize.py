"""Command ``gpu-ops quantize``: writes a model's folder to a GGUF file, and prints what is in it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from gpu_ops.cli.parser import check_folder
from gpu_ops.cli.terminal import make_console, print_json
from gpu_ops.formats.files import path_of, system_errors
from gpu_ops.formats.gguf_mix import substitutes
from gpu_ops.models import export_gguf

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Write the file and print its size and formats."""
    start = time.perf_counter()
    check_folder("quantize", "--model", options.model, "config.json")
    path = path_of("quantize", options.output)
    with system_errors("quantize", path):
        verb = "replaced" if path.exists() else "written"
    formats = export_gguf(options.model, options.output, options.format)
    if not Path(options.model, "tokenizer.json").exists():
        print(
            f"there is no tokenizer.json in {options.model}: the file has no tokens, and llama.cpp will not load it",
            file=sys.stderr,
        )
    seconds = time.perf_counter() - start
    if options.json:
        print_json({"file": str(path), "bytes": path.stat().st_size, "seconds": seconds, "formats": formats})
        return 0
    counts = ", ".join(f"{count} {format}" for format, count in Counter(formats.values()).most_common())
    other = " and ".join(sorted(substitutes(options.format).intersection(formats.values())))
    make_console().print(
        f"{path} {verb}: {path.stat().st_size / 2**20:,.1f} MiB in {seconds:.0f} s; tensors: {counts}"
        + (f"; {other} where 256 does not divide the rows" if other else ""),
        markup=False,
        highlight=False,
    )
    return 0
