"""One small Llama, trained in float32, bfloat16 and float16: requirements in addition to the 16-bit weights.

    python scripts/examples/mixed_precision.py
    python scripts/examples/mixed_precision.py --steps 100 --init-scale 65536

16-bit weights have float32 masters, which AdamW updates: an update is often smaller than the distance to the next
16-bit number. float16 also needs a loss scale, or small gradients vanish; a scale that is too large makes gradients
overflow. The first scale here is so large that they do: ``GradScaler`` skips those steps, halves the scale, and
training continues. bfloat16 has the exponents of float32 and needs no scale.

Prints losses side by side, the scale at each step, and bytes. The text is Python's standard library, one byte per
token.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

import gpu_ops
from gpu_ops import models, training
from gpu_ops.cli.terminal import make_console, print_table

DTYPES = ("float32", "bfloat16", "float16")
TINY = {"hidden": 32, "ffn": 48, "nlayers": 1, "nheads": 2, "nheads_kv": 1}
SMALL = {"hidden": 128, "ffn": 352, "nlayers": 2, "nheads": 4, "nheads_kv": 2}


@dataclass
class Run:
    """Results of a training run, step by step."""

    nbytes: dict[str, int]
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def train(dtype: str, config: models.LlamaConfig, batches: training.Batches, o: argparse.Namespace) -> Run:
    flat = training.FlatParams.from_shapes(config.shapes(), dtype=dtype)
    flat.assign(models.initial_weights(config, seed=o.seed))
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)
    fp16 = dtype == "float16"  # the others have a scale of 1, which changes no bit, so one loop serves all
    scaler = training.GradScaler(
        o.init_scale if fp16 else 1.0, growth_interval=o.growth_interval if fp16 else 2000
    )
    run = Run(flat.nbytes)
    for step in range(o.steps):
        flat.zero_grad()
        loss = models.loss_and_grads(*batches.at(step), weights, config, grads=grads, dloss=scaler.scale)
        norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
        factor = scaler.inv_scale * training.clip_coefficient(norm * scaler.inv_scale, 1.0)
        flat.step(lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1, grad_scale=factor, skip=found_inf)
        run.losses.append(float(loss))
        run.scales.append(float(scaler.scale))
        if found_inf:
            run.skipped.append(step)
        scaler.update(found_inf)
    return run


def report(runs: dict[str, Run], title: str) -> None:
    console, fp16 = make_console(), runs["float16"]
    steps = len(fp16.losses)
    shown = {*range(0, steps, max(steps // 15, 1)), *fp16.skipped, steps - 1}
    table = Table("step", *runs, "scale of float16", "", title=title)
    for step in sorted(shown):
        losses = (f"{run.losses[step]:.4f}" for run in runs.values())
        note = "overflow: skipped" if step in fp16.skipped else ""
        table.add_row(str(step + 1), *losses, f"2^{np.log2(fp16.scales[step]):g}", note)
    print_table(console, table)

    parts = list(fp16.nbytes)
    table = Table("KiB", *parts, "all", title="parameters, gradients, moments and masters")
    for dtype, run in runs.items():
        sizes = [run.nbytes.get(part, 0) for part in parts]
        table.add_row(dtype, *(f"{n / 2**10:,.0f}" for n in (*sizes, sum(sizes))))
    print_table(console, table)
    for dtype in ("bfloat16", "float16"):
        gap = runs[dtype].losses[-1] - runs["float32"].losses[-1]
        print(
            f"last loss of {dtype} minus that of float32: {gap:+.4f}, {len(runs[dtype].skipped)} steps skipped"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {"steps": 40, "batch": 8, "seqlen": 128, "growth-interval": 10, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--init-scale", type=float, default=2.0**23)
    parser.add_argument("--tiny", action="store_true", help="a model that only shows that it runs")
    o = parser.parse_args(argv)
    config = models.LlamaConfig(vocab=256, **(TINY if o.tiny else SMALL))
    batches = training.Batches(
        np.frombuffer(training.stdlib_text(), np.uint8), o.batch, o.seqlen, seed=o.seed
    )
    runs = {dtype: train(dtype, config, batches, o) for dtype in DTYPES}
    report(runs, f"losses, {config.parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
