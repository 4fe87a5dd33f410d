"""Memory of a training step, known before it runs; the recomputation that makes it fit; one buffer for all of it.

    python scripts/examples/memory_optimization.py
    python scripts/examples/memory_optimization.py --seqlen 1024 --budget 0.5

There are four parts. First, every recomputation policy: the plan's bytes and the measured time of a step, whose loss
is the same. Second, a budget, and the policies of the layers that keep to it. Third, an arena: one allocation for all
of a step's arrays, reused by every step. Last, a model too large for this machine, Llama-3-8B on an H100, from its
shapes alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from rich.table import Table

import gpu_ops
from gpu_ops import memory, models, training
from gpu_ops.cli.terminal import make_console, print_table

TINY = {"hidden": 64, "ffn": 96, "nlayers": 2, "nheads": 2, "nheads_kv": 1}
SMALL = {"hidden": 256, "ffn": 688, "nlayers": 8, "nheads": 4, "nheads_kv": 2}
LLAMA_3_8B = models.LlamaConfig(128256, 4096, 14336, nlayers=32, nheads=32, nheads_kv=8, theta=500000.0)
LARGE = {"batch": 1, "seqlen": 8192, "dtype": "float16", "device": "H100 SXM"}


def make_step(config: models.LlamaConfig, o: argparse.Namespace) -> Callable[[str | Sequence[str]], float]:
    """Function from a policy to loss, gradients and their norm."""
    flat = training.FlatParams.from_shapes(config.shapes(), dtype="float32")
    flat.assign(models.initial_weights(config, seed=o.seed))
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)
    tokens = np.frombuffer(training.stdlib_text(), np.uint8)
    ids, targets = training.Batches(tokens, o.batch, o.seqlen, seed=o.seed).at(0)

    def step(policy: str | Sequence[str]) -> float:
        flat.zero_grad()
        loss = models.loss_and_grads(ids, targets, weights, config, grads=grads, policy=policy)
        gpu_ops.global_norm(flat.buffers["grads"])
        return float(loss)

    return step


def milliseconds(call: Callable[[], object]) -> str:
    """Best of three calls, in milliseconds."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return f"{1e3 * min(times):.0f} ms"


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {"batch": 4, "seqlen": 256, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", type=float, default=0.5, help="0: the least possible, 1: all is kept")
    parser.add_argument("--tiny", action="store_true", help="a model that only shows that it runs")
    o = parser.parse_args(argv)
    config = models.LlamaConfig(vocab=256, **(TINY if o.tiny else SMALL))
    sizes = {"batch": o.batch, "seqlen": o.seqlen}
    step, console = make_step(config, o), make_console()

    table = Table("policy", "activations", "peak", "time of a step", "loss", title="what a step keeps")
    plans = {policy: memory.estimate(config, **sizes, policy=policy) for policy in models.POLICIES}
    losses = {policy: step(policy) for policy in plans}  # compiles, too
    for policy, plan in plans.items():
        took = milliseconds(lambda policy=policy: step(policy))
        nbytes = mib(plan.parts["activations"]), mib(plan.peak)
        table.add_row(policy, *nbytes, took, f"{losses[policy]:.6f}")
    print_table(console, table)

    upper, lower = plans["none"].peak, plans["layer"].peak
    budget = round(lower + o.budget * (upper - lower))
    chosen = memory.choose_policies(config, **sizes, budget=budget)
    planned = memory.estimate(config, **sizes, policy=chosen)
    layers = ", ".join(f"{n} x {policy}" for policy, n in Counter(chosen).items())
    took = milliseconds(lambda: step(chosen))
    print(f"a budget of {mib(budget)}: {layers}; {mib(planned.peak)}, {took} a step")

    with memory.Trace() as trace:
        step(chosen)
    arena = memory.Arena(trace)
    with arena:
        loss = step(chosen)
    total = sum(buffer.nbytes for buffer in trace.buffers)
    print(
        f"an arena of {mib(arena.nbytes)} holds {len(trace.buffers)} allocations of {mib(total)}; loss {loss:.6f}"
    )

    start = time.perf_counter()
    large = {policy: memory.estimate(LLAMA_3_8B, policy=policy, **LARGE) for policy in models.POLICIES}
    took = time.perf_counter() - start
    title = "Llama-3-8B on an H100 SXM, float16, 1 x 8192 tokens"
    table = Table("policy", *large["none"].parts, "peak", title=title)
    for policy, plan in large.items():
        table.add_row(policy, *(f"{n / 2**30:.1f} GiB" for n in (*plan.parts.values(), plan.peak)))
    print_table(console, table)
    print(f"planned in {took:.1f} s, without the card, which has 80 GB: the state alone is larger")
    if len({*losses.values(), loss}) > 1:
        print("the losses differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
