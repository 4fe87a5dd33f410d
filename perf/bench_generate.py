"""A forward pass over a paged cache, against transformers, or against llama.cpp with the same GGUF file: reading a
prompt, and one token for each of several texts.

``python perf/bench_generate.py --device cpu --dtype bfloat16 --seqlen 512`` (seqlen: tokens of the prompt, or in the
cache)
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file: import perf from the repository root
    sys.path[0] += "/.."

import os
import tempfile
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

import gpu_ops
from gpu_ops import inference, models
from gpu_ops.core.state_arrays import to_device
from gpu_ops.inference.captured import Graphs, Recordings
from gpu_ops.models.projection import PROJECTIONS
from gpu_ops.reference.precision import Precision
from perf.case import DTYPES, Call, Case, Inputs, RunOptions, device_of
from perf.gguf_peer import gguf_file, llama_cpp_peers, load

CONFIG = models.LlamaConfig(vocab=32000, hidden=768, ffn=2048, nlayers=12, nheads=12, nheads_kv=4, tied=True)
SMALL = models.LlamaConfig(vocab=40, hidden=32, ffn=48, nlayers=2, nheads=2, nheads_kv=1, tied=True)
SMALL_PACKED = replace(SMALL, ffn=64)  # rows that are whole blocks
PACKED = {"q8_0": (8.5, 8.5), "q4_0": (4.5, 6.5625), "q4_k_m": (4.79, 6.5625)}
"""Bits per weight of the matrices and of the output layer in files of these formats."""


def cases(config: RunOptions) -> list[Case]:
    """Cases. ``ternary``: projections have 2-bit weights; embedding and output layer are unchanged. ``ternary int8``:
    projections after a norm take its int8 output. ``q8_0`` and so on: all matrices are those of a GGUF file, with
    int8 activations.
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
    if config.device == "cpu" and "float32" in (config.dtypes or ("float32",)):
        for length in config.seqlens or (512,):
            for weights in ("q4_0",) if config.quick else PACKED:
                result += [
                    forward(*sizes, "float32", weights=weights) for sizes in ((0, length, 1), (length, 1, 1))
                ]
                result += [] if config.quick else [forward(length, 1, 16, "float32", weights=weights)]
    return result


def forward(context: int, new: int, batch: int, dtype: str, *, weights: str = "") -> Case:
    c = CONFIG
    head = c.vocab * c.hidden
    matrices = sum(n * k for n, k in (s for s in c.shapes().values() if len(s) == 2)) - head
    pairs = batch * new * (context + (new + 1) / 2)
    itemsize = DTYPES[dtype].itemsize
    cached = 2 * c.nlayers * c.nheads_kv * c.head_dim * itemsize * batch * (context + new)
    what = "prefill" if not context else "decode"
    bits, head_bits = PACKED.get(weights, (2 if weights else 8 * itemsize, 8 * itemsize))
    small = SMALL_PACKED if weights in PACKED else SMALL
    return Case(
        op="generate",
        name=f"{what}, {weights}" if weights else what,
        shape=f"{c.parameters / 1e6:.0f}M parameters, {batch} x {new} tokens, {context} in the cache",
        dtype=dtype,
        flops=2.0 * (matrices * new + head) * batch + 4.0 * pairs * c.nheads * c.head_dim * c.nlayers,
        bytes=(matrices * bits + head * head_bits) / 8 + cached,
        make=lambda rng: data(rng, c, batch, context, new, dtype, weights),
        make_small=lambda rng: data(rng, small, 2, 3 if context else 0, 1 if context else 5, dtype, weights),
        ours=ours,
        reference=last_logits,
        torch=None if weights else torch_forward,
        cpu_peers=llama_cpp_peers() if weights in PACKED else {},
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
    if kind in PACKED:
        # the error is that of native activations: int8 codes of float32 and float64 sums differ here and there
        mode = "native" if config is SMALL_PACKED else "int8"
        return arrays | {"kind": kind, "file": gguf_file(weights, config, kind), "activations": mode}
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
    if x["kind"] in PACKED:
        weights, config = load(x["file"], activations=x["activations"])
    else:
        weights, config = model_of(x, {n: to_device(w, device_of(x)) for n, w in x["weights"].items()})
    ids, new = x["ids"].tolist(), x["new"]
    cache = inference.cache_for(weights, config, lengths=[len(text) for text in ids])
    handles = [cache.add() for _ in ids]
    if new < len(ids[0]):
        before = {h: text[:-new] for h, text in zip(handles, ids, strict=True)}
        inference.next_logits(weights, config, cache, cache.reserve(before))
        cache.commit()
    kept = Graphs if cache.device == "cuda" else Recordings
    passes = kept(weights, config, cache, cache.length(handles[0]) + new)

    def run(shift: int = 0) -> Any:
        """Run a pass as an engine does: a pass of single tokens replays a graph, or a recording."""
        last = {
            h: [(i + shift) % config.vocab for i in text[-new:]] for h, text in zip(handles, ids, strict=True)
        }
        step = cache.reserve(last, out=passes.step_for(last))
        logits = passes.logits(step, len(last))
        cache.rollback()
        return logits

    run(1)  # a recording is compared with a pass of other tokens before it counts
    return run


def last_logits(x: Inputs, precision: Precision) -> Any:
    """Logits by the references of the ops, without a cache, and with floats between a norm and its projections."""
    with mock.patch.dict(os.environ, GPU_OPS_DEVICE="cpu", GPU_OPS_BACKEND="reference"):
        if x["kind"] in PACKED:
            weights, config = load(x["file"], dtype=np.float64 if precision == "float64" else np.float32)
        else:
            dtype = np.float64 if precision == "float64" else x["weights"]["embed"].dtype
            weights, config = model_of(x, {name: w.astype(dtype) for name, w in x["weights"].items()})
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
