"""Train a small Llama on Python's standard library, then fit LoRA adapters to other text. No framework.

    python scripts/examples/finetuning.py                          300 steps, then 100 of the adapters
    python scripts/examples/finetuning.py --steps 2000 --dtype bfloat16 --folder runs/small
    python scripts/examples/finetuning.py --folder runs/small      goes on where the last run stopped

Shows loss, tokens per second and memory while it runs, and what the model writes at the end. ``--plot curve.svg``
draws the losses (the ``plot`` extra). Ctrl-C loses what came after the last saved state, no more.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TimeRemainingColumn

import gpu_ops
from gpu_ops import memory, models, training
from gpu_ops.terminal import make_console

TINY = {"hidden": 32, "ffn": 48, "nlayers": 1, "nheads": 2, "nheads_kv": 1}
SMALL = {"hidden": 256, "ffn": 688, "nlayers": 4, "nheads": 4, "nheads_kv": 2}


def schedule(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth, then a cosine to a tenth of the peak."""
    warm = max(steps // 10, 1)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * np.cos(np.pi * (step - warm) / max(steps - warm, 1)))


def train(
    step_loss: Callable[[int], Any],
    flat: training.FlatParams,
    *,
    steps: int,
    lr: float,
    tokens: int,
    save: Callable[[int], Any] = lambda step: None,
) -> list[float]:
    """Steps of AdamW with gradients clipped to norm 1; the losses."""
    losses: list[float] = []
    console, first, started = make_console(), flat.steps, time.perf_counter()
    columns = "[progress.description]{task.description}", BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("step 1", total=steps, completed=first)
        for step in range(first, steps):
            flat.zero_grad()
            losses.append(float(step_loss(step)))
            norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
            scale = training.clip_coefficient(norm, 1.0)
            options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
            flat.step(lr=schedule(step, steps, lr), grad_scale=scale, skip=found_inf, **options)
            save(step + 1)
            rate = tokens * len(losses) / (time.perf_counter() - started)
            text = f"step {step + 1} of {steps}, loss {losses[-1]:.3f}, {rate:,.0f} tokens/s, {resident():,.0f} MiB"
            bar.update(task, advance=1, description=text)
            if not console.is_terminal and (step + 1) % max(steps // 30, 1) == 0:
                print(text, flush=True)
    return losses


def resident() -> float:
    """The most memory that the process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def pretrain(o: argparse.Namespace, config: models.LlamaConfig, tokens: Any) -> tuple[Any, list[float]]:
    flat = training.FlatParams.from_shapes(config.shapes(), dtype=o.dtype)
    flat.assign(models.initial_weights(config, seed=o.seed))
    states = training.Checkpoints(o.folder) if o.folder else None
    if states and states.latest():
        training.load_state(states.latest(), like=flat.state())
        print(f"goes on after step {flat.steps}, from {states.latest()}")
    batches = training.Batches(tokens, o.batch, o.seqlen, seed=o.seed)
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)

    def step_loss(step: int) -> Any:
        return models.loss_and_grads(*batches.at(step), weights, config, grads=grads, policy=o.policy)

    def save(step: int) -> None:
        if states and (step % 100 == 0 or step == o.steps):
            states.save(step, flat.state())

    losses = train(step_loss, flat, steps=o.steps, lr=o.lr, tokens=o.batch * o.seqlen, save=save)
    return weights, losses


def fit_adapters(
    o: argparse.Namespace, config: models.LlamaConfig, base: Any, tokens: Any
) -> tuple[Any, list[float]]:
    shapes = models.lora_shapes(config, o.rank)
    flat = training.FlatParams.from_shapes(shapes, dtype=o.dtype)
    flat.assign(models.initial_lora(shapes, seed=o.seed))
    weights, grads = models.with_lora(base, flat.params), models.lora_grads(base, flat.grads)
    batches = training.Batches(tokens, o.batch, o.seqlen, seed=o.seed)

    def step_loss(step: int) -> Any:
        return models.loss_and_grads(*batches.at(step), weights, config, grads=grads, policy=o.policy)

    return weights, train(step_loss, flat, steps=o.lora_steps, lr=3 * o.lr, tokens=o.batch * o.seqlen)


def write(weights: Any, config: models.LlamaConfig, codec: Any, start: bytes, length: int, seed: int) -> str:
    """What the model writes after ``start``, at temperature 0.7."""
    rng, ids = np.random.default_rng(seed), list(codec.encode(start))
    for _ in range(length):
        z = models.logits(np.asarray(ids, np.int32)[None], weights, config)[0, -1:].astype(np.float32)
        p = gpu_ops.softmax(z, scale=1 / 0.7)[0].astype(np.float64)
        ids.append(int(rng.choice(len(p), p=p / p.sum())))
    return codec.decode(np.asarray(ids)).decode(errors="replace")


def plot(path: str, curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for label, losses in curves.items():
        axes.plot(np.arange(1, len(losses) + 1), losses, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {
        "steps": 300,
        "lora-steps": 100,
        "batch": 8,
        "seqlen": 256,
        "vocab": 512,
        "rank": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--policy", choices=models.POLICIES, default="none")
    parser.add_argument("--folder", help="keeps the last two states here")
    parser.add_argument("--plot", help="an SVG or PNG of the losses")
    parser.add_argument("--tiny", action="store_true", help="a model that only shows that it runs")
    o = parser.parse_args(argv)
    config = models.LlamaConfig(vocab=o.vocab, **(TINY if o.tiny else SMALL))
    text = training.stdlib_text()[: (1 << 16) if o.tiny else None]
    codec = training.BytePairEncoding.train(text[: 1 << 20], o.vocab)
    plan = memory.estimate(config, batch=o.batch, seqlen=o.seqlen, dtype=o.dtype, policy=o.policy)
    print(
        f"{config.parameters:,} parameters, a step takes {plan.peak / 2**20:.0f} MiB; Python {sys.version.split()[0]}"
    )
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
