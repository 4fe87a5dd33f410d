"""Whole training step of CUDA kernels, on the emulator under the sanitizer, against the reference in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import gpu_ops
from gpu_ops import models, training
from gpu_ops.reference.tolerance import GRADIENT, error_report, tolerance
from tests.attention.cases import DTYPES
from tests.support.compare import naive_ops
from tests.support.compilers import needs_nvrtc

pytestmark = needs_nvrtc
CONFIG = models.LlamaConfig(vocab=32, hidden=64, ffn=96, nlayers=2, nheads=4, nheads_kv=2)
GEMMA = dataclasses.replace(
    CONFIG, weight_offset=1.0, post_norms=True, embedding_scale=None, activation="gelu_tanh", tied=True
)
FAMILIES = {
    "llama": CONFIG,
    "qwen2": dataclasses.replace(CONFIG, biases=("qkv",), nlayers=1),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, head_dim=32, nlayers=1),
    "granite": dataclasses.replace(
        CONFIG, embedding_scale=3.0, residual_scale=0.5, logits_scaling=4.0, nlayers=1
    ),
    "bitnet": dataclasses.replace(CONFIG, sub_norms=True, activation="relu2", nlayers=1),
    "gemma2": dataclasses.replace(
        GEMMA,
        softcap=2.0,
        logits_softcap=3.0,
        softmax_scale=0.2,
        layers=(models.Layer(window=5), models.Layer()),
    ),
    "gemma3": dataclasses.replace(GEMMA, qk_norm=True, head_dim=32, window=5, nlayers=1),
    "smollm3": dataclasses.replace(CONFIG, layers=(models.Layer(), models.Layer(None, None, 5))),
}
SLOW = [
    pytest.param(kernels, "llama", dtype, policy, marks=pytest.mark.slow)
    for kernels in ("raw", "numba")
    for dtype, policy in (("float32", "none"), ("bfloat16", "none"), ("float16", "layer"))
]
BRIEF = [
    ("raw", "llama", "bfloat16", "mlp"),
    ("raw", "qwen2", "float16", "none"),
    ("raw", "qwen3", "bfloat16", "norms"),
]
SLOW += [
    pytest.param(kernels, family, dtype, "layer", marks=pytest.mark.slow)
    for kernels, dtype in (("raw", "float32"), ("numba", "bfloat16"))
    for family in list(FAMILIES)[1:]
]


def step(config, dtype, policy, weights_dtype):
    """Loss, gradients, and updated weights, from weights rounded to ``weights_dtype``."""
    flat = training.FlatParams.from_shapes(config.shapes(), dtype=dtype)
    start = models.initial_weights(config, std=0.1)
    flat.assign({name: x.astype(DTYPES[weights_dtype]).astype(x.dtype) for name, x in start.items()})
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)
    ids = np.random.default_rng(0).integers(0, config.vocab, (2, 16)).astype(np.int32)
    targets = np.roll(ids, -1, 1)
    targets[:, -1] = -100
    loss = models.loss_and_grads(ids, targets, weights, config, grads=grads, policy=policy)
    norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
    scale = training.clip_coefficient(norm, 1.0)
    grads_copy = {name: x.copy() for name, x in flat.grads.items()}
    flat.step(lr=1e-3, weight_decay=0.1, grad_scale=scale, skip=found_inf)
    return float(loss), grads_copy, {name: x.astype(np.float64) for name, x in flat.params.items()}


@pytest.mark.parametrize(("kernels", "family", "dtype", "policy"), [*BRIEF, *SLOW], ids=str)
def test_a_step_obeys_the_tolerance_rule(kernels, family, dtype, policy, monkeypatch):
    config = FAMILIES[family]
    with naive_ops():
        loss, grads, _ = step(config, "float64", policy, dtype)
        textbook, of_textbook, weights = step(config, dtype, policy, dtype)
    monkeypatch.setenv("GPU_OPS_DEVICE", "emulator")
    monkeypatch.setenv("GPU_OPS_BACKEND", kernels)
    actual, actual_grads, updated = step(config, dtype, policy, dtype)
    assert abs(actual - loss) <= tolerance(np.array(loss), np.array(textbook), np.float32)
    for name, g in grads.items():
        problem = error_report(actual_grads[name], g, tolerance(g, of_textbook[name], np.float32, GRADIENT))
        assert problem is None, f"{name}: {problem}"
    ulp = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    for name, w in weights.items():
        assert np.abs(updated[name] - w).max() < 2e-3 + 2 * ulp * np.abs(w).max(), name
