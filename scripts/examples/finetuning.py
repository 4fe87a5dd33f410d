"""Train a small Llama on Python's standard library, then fit LoRA adapters to other text. No framework.

    python scripts/examples/finetuning.py                          300 steps, then 100 of the adapters
    python scripts/examples/finetuning.py --format nf4             adapters on a base packed in 4 bits (QLoRA)
    python scripts/examples/finetuning.py --dtype bfloat16 --folder runs/small
    python scripts/examples/finetuning.py --dtype bfloat16 --folder runs/small --steps 2000    goes on from step 300

Shows loss, tokens per second and memory while it runs, and text from the model at the end. ``--plot curve.svg``
draws the losses (the ``plot`` extra). Ctrl-C loses only the steps after the last saved state.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TimeRemainingColumn

import gpu_ops
from gpu_ops import memory, models, training
from gpu_ops.cli.terminal import make_console

TINY = {"hidden": 64, "ffn": 64, "nlayers": 1, "nheads": 2, "nheads_kv": 1}
SMALL = {"hidden": 256, "ffn": 704, "nlayers": 4, "nheads": 4, "nheads_kv": 2}


def learning_rate(step: int, peak: float, warm: int = 30) -> float:
    """Linear warm-up, then an inverse square root. It is independent of the number of steps, so runs can continue."""
    return peak * min((step + 1) / warm, (warm / (step + 1)) ** 0.5)


def train(
    o: argparse.Namespace,
    flat: training.FlatParams,
    model: tuple[models.Llama, models.Llama, models.LlamaConfig],
    tokens: Any,
    *,
    steps: int,
    lr: float,
    states: training.Checkpoints | None = None,
) -> list[float]:
    """Run steps of AdamW with gradients clipped to norm 1. Returns losses. ``model``: weights, gradients, config."""
    weights, grads, config = model
    batches = training.Batches(tokens, o.batch, o.seqlen, seed=o.seed)
    losses: list[float] = []
    console, first, started = make_console(), flat.steps, time.perf_counter()
    columns = "[progress.description]{task.description}", BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("step 1", total=steps, completed=first)
        for step in range(first, steps):
            flat.zero_grad()
            ids, targets = batches.at(step)
            loss = models.loss_and_grads(ids, targets, weights, config, grads=grads, policy=o.policy)
            losses.append(float(loss))
            norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
            options = {"grad_scale": training.clip_coefficient(norm, 1.0), "skip": found_inf}
            flat.step(lr=learning_rate(step, lr), betas=(0.9, 0.95), weight_decay=0.1, **options)
            if states and ((step + 1) % 100 == 0 or step + 1 == steps):
                states.save(step + 1, flat.state())
            rate = o.batch * o.seqlen * len(losses) / (time.perf_counter() - started)
            text = f"step {step + 1} of {steps}, loss {losses[-1]:.3f}, {rate:,.0f} tokens/s, {resident():,.0f} MiB"
            bar.update(task, advance=1, description=text)
            if not console.is_terminal and (step + 1) % max(steps // 30, 1) == 0:
                print(text, flush=True)
    return losses


def resident() -> float:
    """Peak memory of the process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def pretrain(o: argparse.Namespace, config: models.LlamaConfig, tokens: Any) -> tuple[Any, list[float]]:
    flat = training.FlatParams.from_shapes(config.shapes(), dtype=o.dtype)
    flat.assign(models.initial_weights(config, seed=o.seed))
    states = training.Checkpoints(o.folder) if o.folder else None
    if states and states.latest():
        training.load_state(states.latest(), like=flat.state())
        print(f"goes on after step {flat.steps}, from {states.latest()}")
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)
    return weights, train(o, flat, (weights, grads, config), tokens, steps=o.steps, lr=o.lr, states=states)


def fit_adapters(
    o: argparse.Namespace, config: models.LlamaConfig, base: Any, tokens: Any
) -> tuple[Any, list[float]]:
    shapes = models.lora_shapes(config, o.rank)
    if o.format:
        arrays = base.arrays()
        packed = {n: gpu_ops.quantize(x, o.format) for n, x in arrays.items() if f"{n}.a" in shapes}
        base = models.Llama.of(arrays | packed, config)
    flat = training.FlatParams.from_shapes(shapes, dtype=o.dtype)
    flat.assign(models.initial_lora(shapes, seed=o.seed))
    weights, grads = models.with_lora(base, flat.params), models.lora_grads(base, flat.grads)
    return weights, train(o, flat, (weights, grads, config), tokens, steps=o.lora_steps, lr=3 * o.lr)


def write(weights: Any, config: models.LlamaConfig, codec: Any, start: bytes, length: int, seed: int) -> str:
    """Text that the model writes after ``start``, at temperature 0.7."""
    rng, ids = np.random.default_rng(seed), list(codec.encode(start))
    for _ in range(length):
        z = models.logits(np.asarray(ids, np.int32)[None], weights, config)[0, -1:].astype(np.float32)
        p = gpu_ops.softmax(z, scale=1 / 0.7)[0].astype(np.float64)
        ids.append(int(rng.choice(len(p), p=p / p.sum())))
    return codec.decode(np.asarray(ids)).decode(errors="replace")


def plot(path: str, curves: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for label, losses in curves.items():
        axes.plot(np.arange(1, len(losses) + 1), losses, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"steps": 300, "lora-steps": 100, "batch": 8, "seqlen": 256, "vocab": 512, "rank": 8, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--format", choices=("nf4", "nf4_nested", "q4_0", "q8_0"), help="pack the base of the adapters"
    )
    parser.add_argument("--policy", choices=models.POLICIES, default="none")
    parser.add_argument("--folder", help="keeps the last two states here")
    parser.add_argument("--plot", help="an SVG or PNG of the losses")
    parser.add_argument("--tiny", action="store_true", help="a model that only shows that it runs")
    o = parser.parse_args(argv)
    config = models.LlamaConfig(vocab=o.vocab, **(TINY if o.tiny else SMALL))
    text = training.stdlib_text()[: (1 << 16) if o.tiny else None]
    codec = training.BytePairEncoding.train(text[: 1 << 20], o.vocab)
    plan = memory.estimate(config, batch=o.batch, seqlen=o.seqlen, dtype=o.dtype, policy=o.policy)
    text_of = f"text of Python {sys.version.split()[0]}"
    print(f"{config.parameters:,} parameters, {plan.peak / 2**20:.0f} MiB a step; {text_of}")
    base, losses = pretrain(o, config, codec.encode(text))
    print(write(base, config, codec, b"def main(", 8 if o.tiny else 64, o.seed))
    other = codec.encode("\n".join(topics.values()))
    tuned, more = fit_adapters(o, config, base, other)
    print(write(tuned, config, codec, b"The ", 8 if o.tiny else 64, o.seed))
    if o.plot:
        plot(o.plot, {"standard library": losses, "LoRA on the help topics": more})
    return 0


if __name__ == "__main__":
    sys.exit(main())
