"""Memory of calls, training steps and inference by tracemalloc, with the estimates: one line of JSON each.

Runs in a separate process, ``python -m tests.memory.measured NAME ...``: ``NUMBA_NUM_THREADS`` sets the number of
threads with separate memory, and how many of them take part in a call depends on how soon they wake.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from dataclasses import replace

import numpy as np

import gpu_ops
from gpu_ops import inference, memory, models, training
from gpu_ops.reference.weights.packed_formats import FORMATS

CONFIG = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=3, nheads=4, nheads_kv=2)
WIDE = replace(CONFIG, hidden=256, ffn=688, vocab=512)
# all biases, normalised heads, an MLP that is not gated by silu, a window
FAMILY = replace(
    CONFIG,
    hidden=128,
    ffn=512,
    biases=("qkv", "o", "gate_up", "down"),
    qk_norm=True,
    activation="gelu_tanh",
    window=64,
)
NORMS = replace(FAMILY, sub_norms=True, post_norms=True, activation="relu2", tied=True)
CONFIGS = {"llama": CONFIG, "wide": WIDE, "family": FAMILY, "norms": NORMS}
SHAPES = {"short": (4, 128), "long": (1, 512)}

# A training step: family, shape, dtype, policy, optimizer.
STEPS = [
    *(("llama", "short", "float32", policy, "adamw") for policy in models.POLICIES),
    *(("llama", "long", "bfloat16", policy, None) for policy in ("none", "norms", "layer")),
    *(("family", "short", "bfloat16", policy, "adamw") for policy in ("none", "mlp", "attention")),
    *(("family", "long", "float32", policy, None) for policy in ("none", "attention", "layer")),
    *(("norms", "short", "float32", policy, None) for policy in ("none", "layer")),
    ("wide", "short", "float32", "mlp", None),
    ("wide", "long", "float16", "layer", "adamw"),
]
ALL_STEPS = [
    (family, shape, dtype, policy, optimizer)
    for family in CONFIGS
    for shape in SHAPES
    for dtype in ("float32", "bfloat16", "float16", "float64")
    for policy in models.POLICIES
    for optimizer in ("adamw", None)
]
# A training step of adapters on a packed base: shape, dtype, format, whether the tables are packed, policy.
ADAPTED = [
    ("short", "float32", "nf4", False, "layer"),
    ("short", "bfloat16", "q4_0", False, "none"),
    ("long", "bfloat16", "nf4", True, "layer"),
    ("long", "float32", "q4_0", True, "none"),
]
# Inference: family, batch, tokens in the cache, tokens of the prompt, dtype.
PROMPTS = [
    ("llama", 4, 128, None, "float32"),
    ("llama", 2, 512, 256, "bfloat16"),
    ("family", 2, 256, None, "bfloat16"),
    ("wide", 1, 512, None, "float32"),
    ("wide", 8, 64, 16, "float16"),
]
HEADS, ROWS, SQUARE, TARGETS = (1, 1024, 4, 64), (8192, 256), (256, 256), ((65536,), "int32")
HALF, LSE = (HEADS, "bfloat16"), ((1, 4, 1024), "float32")
KEYS = ((1, 4096, 2, 64), (1, 4096, 2, 64))
CALLS = {
    "attention": ((HEADS, HEADS, HEADS), {"causal": True}),
    "attention in bfloat16": ((HALF, HALF, HALF), {"causal": True}),
    "attention of few queries": (((1, 4, 64, 64), *KEYS), {}),
    "attention of few queries and heads": (((8, 24, 4, 64), *(((8, 4096, 2, 64),) * 2)), {}),
    "attention_backward": ((*(HEADS,) * 5, LSE), {"causal": True}),
    "attention_backward in bfloat16": ((*(HALF,) * 5, LSE), {"causal": True}),
    "attention_backward of one KV head": ((HEADS, HEADS, *((1, 1024, 1, 64),) * 2, HEADS, LSE), {}),
    "cross_entropy": (((65536, 16), TARGETS), {}),
    "cross_entropy_backward": ((((), "float32"), (65536, 16), TARGETS, ((65536,), "float32")), {}),
    "embedding": ((((1, 8192), "int64"), SQUARE), {}),
    "layernorm": ((ROWS, (256,), (256,)), {"return_stats": True}),
    "linear": (((512, 256), SQUARE), {"bias": ((256,), "float32")}),
    "linear_backward": (((512, 256), (512, 256), SQUARE), {}),
    "linear_cross_entropy": (((2048, 64), (256, 64), ((2048,), "int32")), {"grads": True}),
    "rmsnorm": ((ROWS, (256,)), {"residual": (ROWS, "float32")}),
    "rope": ((HEADS, HEADS), {}),
    "softmax": ((ROWS,), {"mask": (ROWS, "bool")}),
    "swiglu_mlp": (((512, 256), (688, 256), (688, 256), (256, 688)), {}),
    "swiglu_mlp_backward": (((512, 256), (512, 256), (688, 256), (688, 256), (256, 688)), {}),
}


def step(family, shape, dtype, policy, optimizer):
    """Estimate, and a function that makes the state of a model and takes a step."""
    config, (batch, seqlen) = CONFIGS[family], SHAPES[shape]
    weight_dtype, shapes = np.dtype(dtype), config.shapes()
    sizes = {"batch": batch, "seqlen": seqlen, "dtype": weight_dtype, "policy": policy}
    ids = np.zeros((batch, seqlen), np.int32)

    def run():
        if optimizer is None:
            grad_dtype = np.float64 if weight_dtype == np.float64 else np.float32
            params = {n: np.zeros(shape, weight_dtype) for n, shape in shapes.items()}
            grads = {n: np.zeros(shape, grad_dtype) for n, shape in shapes.items()}
            buffers = list(grads.values())
            if weight_dtype != grad_dtype:
                masters = [np.zeros(shape, grad_dtype) for shape in shapes.values()]
                assert masters
        else:
            flat = training.FlatParams.from_shapes(shapes, dtype=weight_dtype, device="cpu")
            params, grads, buffers = flat.params, flat.grads, flat.buffers["grads"]
        weights, into = models.Llama.of(params, config), models.Llama.of(grads, config)
        models.loss_and_grads(ids, ids, weights, config, grads=into, policy=policy)
        gpu_ops.global_norm(buffers)
        if optimizer is not None:
            flat.step(lr=1e-3)

    return memory.estimate(config, **sizes, optimizer=optimizer).peak, run


def adapted(shape, dtype, format, tables, policy):
    """Estimate, and a function that makes a packed base with adapters and takes a few steps."""
    config, (batch, seqlen) = replace(WIDE, ffn=704), SHAPES[shape]
    form, sizes = memory.Weights(format, tables, rank=8), {"batch": batch, "seqlen": seqlen, "dtype": dtype}
    ids = np.zeros((batch, seqlen), np.int32)

    def run():
        weights = {}
        for name, shape in config.shapes().items():
            is_packed = len(shape) == 2 and (tables or name not in ("embed", "lm_head"))
            if is_packed:
                blocks = FORMATS[format].for_columns(shape[1])
                bytes_ = np.zeros((shape[0], shape[1] // blocks.block * blocks.nbytes), np.uint8)
                weights[name] = gpu_ops.PackedMatrix(bytes_, shape, format, dtype=dtype)
                del bytes_
            else:
                weights[name] = np.zeros(shape, dtype)
        flat = training.FlatParams.from_shapes(models.lora_shapes(config, 8), dtype=dtype, device="cpu")
        model = models.with_lora(models.Llama.of(weights, config), flat.params)
        grads = models.lora_grads(model, flat.grads)
        for _ in range(3):
            flat.zero_grad()
            models.loss_and_grads(ids, ids, model, config, grads=grads, policy=policy)
            gpu_ops.global_norm(flat.buffers["grads"])
            flat.step(lr=1e-3)

    return memory.estimate(config, **sizes, policy=policy, weights=form).peak, run


def prompt(family, batch, seqlen, tokens, dtype):
    """Estimate, and a function that reads a prompt with a KV cache allocated."""
    config, kind = CONFIGS[family], np.dtype(dtype)
    estimated = memory.estimate_inference(config, batch=batch, seqlen=seqlen, prompt=tokens, dtype=kind)
    ids = np.zeros((batch, tokens or seqlen), np.int32)

    def run():
        weights = models.Llama.of({n: np.zeros(s, kind) for n, s in config.shapes().items()}, config)
        heads = config.nlayers, config.nheads_kv, config.head_dim
        cache = inference.PagedKVCache(*heads, num_pages=batch * seqlen // 16, dtype=kind)
        states = models.hidden_states(ids, weights, config)
        gpu_ops.linear(states[:, -1], weights.lm_head)
        return cache

    return estimated.peak, run


def call(name):
    """Estimate of one call without its arguments, and a function that makes the call."""
    op, (shapes, options) = name.split()[0], CALLS[name]
    estimated = memory.estimate_call(op, *shapes, **options)
    arguments = [array_of(x) for x in shapes]
    named = {n: array_of(x) if isinstance(x, tuple) else x for n, x in options.items()}
    return estimated.peak - estimated.state, lambda: getattr(gpu_ops, op)(*arguments, **named)


def array_of(shape):
    """Array of zeros from an argument of an estimate: a shape, or a shape and a dtype."""
    return np.zeros(*(shape if shape and isinstance(shape[0], tuple) else (shape, "float32")))


MAKERS = {
    **{" ".join(map(str, ("step", *case))): (step, case) for case in ALL_STEPS},
    **{" ".join(map(str, ("adapted", *case))): (adapted, case) for case in ADAPTED},
    **{" ".join(map(str, ("prompt", *case))): (prompt, case) for case in PROMPTS},
    **{f"call {name}": (call, (name,)) for name in CALLS},
}
CHOSEN = [name for name, (make, case) in MAKERS.items() if make is not step or case in STEPS]


def peak_of(run):
    """Peak bytes of a second run."""
    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main():
    gpu_ops.memory_pool.POOL.limit = 0  # so that NumPy allocates, and tracemalloc sees it
    for name in sys.argv[1:]:
        make, case = MAKERS[name]
        estimated, run = make(*case)
        print(json.dumps({"name": name, "estimated": estimated, "measured": peak_of(run)}), flush=True)


if __name__ == "__main__":
    main()
