"""``python -m perf.tune``: autotune's choices for common attention problems on this card, a JSON line for each.

Needs a GPU and CuPy; ``--list`` does not. The choices are kept in the cache folder, as :func:`gpu_ops.autotune` does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.cli.terminal import run_command
from perf.attention_grids import Shape
from perf.build import normal
from perf.case import DTYPES, to_device

# The most used first.
PROBLEMS = [
    ("attention", Shape(1, 4096, 4096, 32, 8, 128), "bfloat16", {"causal": True}),
    ("attention", Shape(4, 4096, 4096, 32, 32, 64), "bfloat16", {"causal": True}),
    ("attention_decode", Shape(8, 1, 8192, 32, 8, 128), "bfloat16", {}),
    ("attention", Shape(1, 4096, 4096, 32, 8, 128), "float32", {"causal": True}),
    ("attention", Shape(1, 4096, 4096, 16, 16, 256), "bfloat16", {"causal": True}),
    ("attention", Shape(4, 1024, 1024, 32, 8, 128), "bfloat16", {"causal": False}),
    ("attention", Shape(1, 4096, 4096, 32, 32, 96), "bfloat16", {"causal": True}),
    ("attention_decode", Shape(1, 1, 32768, 32, 8, 128), "bfloat16", {}),
    ("attention", Shape(1, 16384, 16384, 32, 8, 128), "bfloat16", {"causal": True}),
]


def label(op: str, shape: Shape, dtype: str, options: dict[str, Any]) -> str:
    return " | ".join((op, str(shape), dtype, *(name for name, value in options.items() if value)))


def measure(op: str, shape: Shape, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """Report of autotune as a dict that JSON can hold."""
    import gpu_ops

    rng = np.random.default_rng(1)
    lengths = {"q": (shape.seqlen_q, shape.nheads)} | dict.fromkeys("kv", (shape.seqlen_k, shape.nheads_kv))
    arrays = {
        name: normal(rng, (shape.batch, *sizes, shape.head_dim), DTYPES[dtype])
        for name, sizes in lengths.items()
    }
    if op == "attention_decode":
        arrays["seqused_k"] = np.full(shape.batch, shape.seqlen_k, np.int32)
    inputs = to_device(arrays)
    q, k, v = (inputs.pop(name) for name in "qkv")
    report = gpu_ops.autotune(op, q, k, v, **options, **inputs)
    return {**asdict(report), "path": str(report.path)}


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m perf.tune", description=__doc__.partition("\n")[0])
    p.add_argument("--list", action="store_true", help="print the problems and measure nothing")
    p.add_argument("--save", type=Path, metavar="FILE", help="append a JSON line per problem")
    args = p.parse_args(argv)
    failed = False
    for problem in PROBLEMS:
        name = label(*problem)
        print(name, flush=True)
        if args.list:
            continue
        try:
            report = measure(*problem)
            print(f"  {report['winner']}; the model: {report['model']}", flush=True)
        except Exception as error:  # one problem must not hide the others
            failed, report = True, {"error": f"{type(error).__name__}: {error}"}
            print(f"  FAILED: {report['error']}", flush=True)
        if args.save:
            with args.save.open("a") as file:
                file.write(json.dumps({"name": name, **report}) + "\n")
    return int(failed)


if __name__ == "__main__":
    run_command(main)
