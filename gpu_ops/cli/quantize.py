"""Command ``python -m gpu_ops quantize``: writes a model's folder to a GGUF file, and prints what is in it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from gpu_ops.cli.terminal import make_console
from gpu_ops.errors import GpuOpsError
from gpu_ops.models import export_gguf

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Write the file and print its size and formats; after an error print one line and return 2."""
    start = time.perf_counter()
    try:
        formats = export_gguf(options.model, options.output, options.format)
    except GpuOpsError as error:
        words = " ".join(str(error).split())
        print(f"quantize: {words}", file=sys.stderr)
        return 2
    if not Path(options.model, "tokenizer.json").exists():
        print(
            f"there is no tokenizer.json in {options.model}: the file has no tokens, and llama.cpp will not load it",
            file=sys.stderr,
        )
    path, seconds = Path(options.output), time.perf_counter() - start
    counts = ", ".join(f"{count} {format}" for format, count in Counter(formats.values()).most_common())
    make_console().print(
        f"{path}: {path.stat().st_size / 2**20:,.1f} MiB in {seconds:.0f} s; tensors: {counts}",
        markup=False,
        highlight=False,
    )
    return 0
