"""A forward pass over a paged cache, against transformers: reading a prompt, and one token for each of several texts.

``python perf/bench_generate.py --device cpu --dtype bfloat16 --seqlen 512`` (seqlen: tokens of the prompt, or in the
cache)
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file: import perf from the repository root
    sys.path[0] += "/.."

import os
import tempfile
from typing import Any
from unittest import mock

import numpy as np

import gpu_ops
from gpu_ops import inference, models
from gpu_ops.core.state_arrays import to_device
from gpu_ops.inference.captured import Graphs
from gpu_ops.models.projection import PROJECTIONS
from gpu_ops.reference.precision import Precision
from perf.case import DTYPES, Call, Case, Inputs, RunOptions, device_of

CONFIG = models.LlamaConfig(vocab=32000, hidden=768, ffn=2048, nlayers=12, nheads=12, nheads_kv=4, tied=True)
SMALL = models.LlamaConfig(vocab=40, hidden=32, ffn=48, nlayers=2, nheads=2, nheads_kv=1, tied=True)


def cases(config: RunOptions) -> list[Case]:
    """Cases. ``ternary``: projections have 2-bit weights; embedding and output layer are unchanged. ``ternary int8``:
    projections after a norm take its int8 output.
    """
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for length in config.seqlens or (512,):
            result += [forward(0, length, 1, dtype), forward(length, 1, 1, dtype)]
            if not config.quick:
                result += [forward(length, 1, 16, dtype)]
                result += [
                    forward(length, 1, 1, dtype, weights=weights) for weights in ("ternary", "ternary int8")
                ]
    return result


def forward(context: int, new: int, batch: int, dtype: str, *, weights: str = "") -> Case:
    c = CONFIG
    head = c.vocab * c.hidden
    matrices = sum(n * k for n, k in (s for s in c.shapes().values() if len(s) == 2)) - head
    pairs = batch * new * (context + (new + 1) / 2)
    itemsize = DTYPES[dtype].itemsize
    cached = 2 * c.nlayers * c.nheads_kv * c.head_dim * itemsize * batch * (context + new)
    what = "prefill" if not context else "decode"
    return Case(
        op="generate",
        name=f"{what}, {weights}" if weights else what,
        shape=f"{c.parameters / 1e6:.0f}M parameters, {batch} x {new} tokens, {context} in the cache",
        dtype=dtype,
        flops=2.0 * (matrices * new + head) * batch + 4.0 * pairs * c.nheads * c.head_dim * c.nlayers,
        bytes=(matrices / 4 if weights else matrices * itemsize) + head * itemsize + cached,
        make=lambda rng: data(rng, c, batch, context, new, dtype, weights),
        make_small=lambda rng: data(rng, SMALL, 2, 3 if context else 0, 1 if context else 5, dtype, weights),
        ours=ours,
        reference=last_logits,
        torch=None if weights else torch_forward,
        tokens=batch * new,
    )


def data(
    rng: np.random.Generator,
    config: models.LlamaConfig,
    batch: int,
    context: int,
    new: int,
    dtype: str,
    kind: str,
) -> Inputs:
    weights = models.initial_weights(config, seed=int(rng.integers(1 << 30)), std=0.05)
    arrays: Inputs = {"ids": rng.integers(0, config.vocab, (batch, context + new)), "new": new}
    arrays["weights"] = {name: x.astype(DTYPES[dtype]) for name, x in weights.items()}
    return arrays | {"kind": kind}


def model_of(x: Inputs, arrays: dict[str, Any]) -> tuple[models.Llama, models.LlamaConfig]:
    config = SMALL if arrays["embed"].shape[0] == SMALL.vocab else CONFIG
    weights = models.Llama.of(arrays, config)
    if x["kind"]:
        for layer in weights.layers:
            for part in PROJECTIONS:
                setattr(layer, part, gpu_ops.ternary_quantize(getattr(layer, part).astype(np.float32)))
    return models.with_int8_input(weights) if x["kind"] == "ternary int8" else weights, config


def ours(x: Inputs, **how: Any) -> Call:
    """Forward pass of the last tokens; the others are in the cache."""
    weights, config = model_of(x, {n: to_device(w, device_of(x)) for n, w in x["weights"].items()})
    ids, new = x["ids"].tolist(), x["new"]
    cache = inference.cache_for(weights, config, lengths=[len(text) for text in ids])
    handles = [cache.add() for _ in ids]
    if new < len(ids[0]):
        before = {h: text[:-new] for h, text in zip(handles, ids, strict=True)}
        inference.next_logits(weights, config, cache, cache.reserve(before))
        cache.commit()
    last = {h: text[-new:] for h, text in zip(handles, ids, strict=True)}
    graphs = (
        Graphs(weights, config, cache, cache.length(handles[0]) + new) if cache.device == "cuda" else None
    )

    def run() -> Any:
        """Run a pass as an engine does: on a GPU a pass of single tokens replays a graph."""
        into = graphs and graphs.step_for(last)
        step = cache.reserve(last, out=into)
        logits = (
            graphs.logits(step, len(last)) if into else inference.next_logits(weights, config, cache, step)
        )
        cache.rollback()
        return logits

    return run


def last_logits(x: Inputs, precision: Precision) -> Any:
    """Logits by the references of the ops, without a cache, and with floats between a norm and its projections."""
    dtype = np.float64 if precision == "float64" else x["weights"]["embed"].dtype
    weights, config = model_of(x, {name: w.astype(dtype) for name, w in x["weights"].items()})
    with mock.patch.dict(os.environ, GPU_OPS_DEVICE="cpu", GPU_OPS_BACKEND="reference"):
        return models.logits(x["ids"], weights, config)[:, -1]


def torch_forward(x: Inputs) -> Call:
    """Forward pass of transformers, with its DynamicCache."""
    import torch
    import transformers

    weights, config = model_of(x, x["weights"])
    device = device_of(x)
    with tempfile.TemporaryDirectory() as folder:
        models.save(folder, weights, config)
        dtype = getattr(torch, x["weights"]["embed"].dtype.name)
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    ids, new = torch.tensor(x["ids"].tolist(), device=device), x["new"]
    context = ids.shape[1] - new

    def forward(part: Any, cache: Any) -> Any:
        with torch.inference_mode():
            return model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    past = transformers.DynamicCache()
    if context:
        forward(ids[:, :context], past)

    def run() -> Any:
        logits = forward(ids[:, context:], past if context else transformers.DynamicCache())
        if context:
            past.crop(-new)
        return logits

    return run


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("generate")
