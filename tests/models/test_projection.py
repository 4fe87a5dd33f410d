"""LoRA adapters on float and ternary bases, and training of ternary weights."""

from __future__ import annotations

import dataclasses
import weakref

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import inference, models
from gpu_ops.errors import OptionError
from gpu_ops.models import projection
from gpu_ops.models.projection import Codes, Int8Input, normed, project, project_backward
from tests.models.test_block import CONFIG, made, tokens

RANK = 3


BIASED = dataclasses.replace(CONFIG, biases=("qkv", "o", "gate_up", "down"))


def adapters(seed=0):
    """Adapters with nonzero b, as after some steps: zeros would hide a."""
    shapes = models.lora_shapes(CONFIG, RANK)
    arrays = {name: x.astype(np.float64) for name, x in models.initial_lora(shapes, seed=seed).items()}
    rng = np.random.default_rng(seed)
    return {n: 0.1 * rng.standard_normal(x.shape) if n.endswith(".b") else x for n, x in arrays.items()}


@pytest.mark.parametrize("format", ["nf4", "q4_0", "uint4_g32"])
def test_lora_over_a_packed_base(format):
    """QLoRA: loss and gradients have the bits of those over the unpacked base; its tables are packed too."""
    config = models.LlamaConfig(vocab=96, hidden=64, ffn=128, nlayers=2, nheads=4, nheads_kv=2)
    arrays = models.initial_weights(config)
    packed = {name: gpu_ops.quantize(x, format) if x.ndim == 2 else x for name, x in arrays.items()}
    whole = {name: x.dequantize() if hasattr(x, "dequantize") else x for name, x in packed.items()}
    rng = np.random.default_rng(1)
    adapters = {
        name: rng.standard_normal(shape).astype(np.float32) * np.float32(0.05)
        for name, shape in models.lora_shapes(config, 4).items()
    }
    ids = rng.integers(0, 96, (2, 16))
    results = []
    for base in (packed, whole):
        model = models.with_lora(models.Llama.of(base, config), adapters)
        grads = {name: np.zeros_like(x) for name, x in adapters.items()}
        options = {"grads": models.lora_grads(model, grads), "policy": "layer"}
        loss = models.loss_and_grads(ids, np.roll(ids, -1, axis=1), model, config, **options)
        results.append({"loss": loss, **grads, "merged": models.merged(model.layers[0].qkv)})
    for name, right in results[1].items():
        np.testing.assert_array_equal(results[0][name], right, name)
        assert np.any(right)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_floats_decode_with_the_same_bits(dtype, tied):
    config = models.LlamaConfig(vocab=96, hidden=64, ffn=80, nlayers=2, nheads=4, tied=tied)
    arrays = {name: a.astype(dtype) for name, a in models.initial_weights(config).items()}
    weights = models.Llama.of(arrays, config)
    packed = models.with_packed(weights)
    assert packed.layers[0].down is weights.layers[0].down  # rows of 80, no multiple of 32
    assert packed.layers[0].gate_up.formats == ((160, dtype),)
    assert (packed.lm_head is packed.embed) == tied
    results = []
    for model in (weights, packed):
        cache = inference.cache_for(model, config, num_pages=8)
        text = cache.add()
        prompt = inference.next_logits(model, config, cache, cache.reserve({text: [5, 6, 7] * 5}))
        cache.commit()
        step = cache.reserve({text: [9]})
        results.append((prompt, inference.next_logits(model, config, cache, step)))
    for mine, right in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(mine, right)
    assert models.with_packed(packed).layers[0].qkv is packed.layers[0].qkv


def test_packing_a_model_holds_its_floats_once():
    config = models.LlamaConfig(vocab=96, hidden=64, ffn=96, nlayers=1, nheads=4, tied=True)
    weights = models.Llama.of(models.initial_weights(config), config)
    array = weakref.ref(weights.layers[0].down)
    packed = models.with_packed(weights).layers[0].down
    assert np.shares_memory(packed.blocks()[0], array())
    del weights
    gpu_ops.linear(np.ones((1, 96), np.float32), packed)
    assert array() is None
    assert packed.nbytes == 64 * 96 * 4


def test_adapters_start_as_their_base():
    arrays, _ = made()
    base = models.Llama.of(arrays, CONFIG)
    start = models.initial_lora(models.lora_shapes(CONFIG, RANK))
    tuned = models.with_lora(base, {name: x.astype(np.float64) for name, x in start.items()})
    ids = tokens((1, 6))
    assert np.array_equal(models.logits(ids, tuned, CONFIG), models.logits(ids, base, CONFIG))


@pytest.mark.parametrize("policy", ["none", "layer"])
def test_gradients_of_adapters_by_finite_differences(policy):
    arrays, _ = made()
    base = models.Llama.of(arrays, CONFIG)
    pairs = adapters()
    ids, targets = tokens((2, 5)), tokens((2, 5), 2)
    grads = {name: np.zeros_like(x) for name, x in pairs.items()}
    before = {name: x.copy() for name, x in arrays.items()}
    tuned = models.with_lora(base, pairs)
    into = models.lora_grads(base, grads)
    models.loss_and_grads(ids, targets, tuned, CONFIG, grads=into, policy=policy)
    assert all(np.array_equal(arrays[name], x) for name, x in before.items())
    rng = np.random.default_rng(3)
    for name, x in pairs.items():
        direction = rng.standard_normal(x.shape)
        direction /= np.linalg.norm(direction)
        ends = []
        for sign in (1, -1):
            moved = models.with_lora(base, pairs | {name: x + sign * 1e-5 * direction})
            ends.append(float(models.loss(ids, targets, moved, CONFIG)))
        assert abs((ends[0] - ends[1]) / 2e-5 - np.vdot(grads[name], direction)) < 1e-8, name


def test_an_adapter_merges_into_its_base():
    rng = np.random.default_rng(0)
    x, base = rng.standard_normal((4, 8)), rng.standard_normal((6, 8))
    lora = models.Lora(base, rng.standard_normal((RANK, 8)), rng.standard_normal((6, RANK)))
    np.testing.assert_allclose(gpu_ops.linear(x, models.merged(lora)), project(x, lora), rtol=1e-12)


def test_adapters_on_a_ternary_base():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((5, 64)), rng.standard_normal((5, 16))
    packed = gpu_ops.ternary_quantize(rng.standard_normal((16, 64)))
    lora = models.Lora(packed, rng.standard_normal((RANK, 64)), rng.standard_normal((16, RANK)))
    residual = rng.standard_normal((5, 16))
    y = project(x, lora, residual)
    right = gpu_ops.ternary_matmul(x, packed) + residual + x @ lora.a.T @ lora.b.T
    np.testing.assert_allclose(y, right, rtol=1e-12, atol=1e-12)
    grad = models.Lora(None, np.zeros_like(lora.a), np.zeros_like(lora.b))
    dx = project_backward(dy, x, lora, grad)
    whole = packed.dequantize().astype(np.float64) + lora.b @ lora.a
    np.testing.assert_allclose(dx, dy @ whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(grad.a, (dy @ lora.b).T @ x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(grad.b, dy.T @ (x @ lora.a.T), rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_has_no_gradient():
    rng = np.random.default_rng(0)
    x, weight, dy = (rng.standard_normal(shape) for shape in ((5, 8), (6, 8), (5, 6)))
    np.testing.assert_allclose(project_backward(dy, x, weight, None), dy @ weight, rtol=1e-12)


def test_latent_weights_learn_through_ternary_ones():
    """The loss of a ternary model falls, and its gradient is that of the weights it multiplies by."""
    rng = np.random.default_rng(0)
    latent = models.Latent(rng.standard_normal((16, 64)))
    x, dy = rng.standard_normal((5, 64)), rng.standard_normal((5, 16))
    grad = np.ones((16, 64))
    dx = project_backward(dy, x, latent, grad)
    right = gpu_ops.ternary_matmul_backward(dy, x, latent.quantized())
    assert np.array_equal(dx, right[0])
    assert np.array_equal(grad, 1 + right[1])

    arrays, _ = made()
    ternary = models.with_latent(models.Llama.of(arrays, CONFIG))
    ids, targets = tokens((4, 16)), tokens((4, 16), 2)
    losses = []
    for _ in range(30):
        grads = {name: np.zeros_like(x) for name, x in arrays.items()}
        into = models.Llama.of(grads, CONFIG)
        losses.append(float(models.loss_and_grads(ids, targets, ternary, CONFIG, grads=into)))
        for name, g in grads.items():
            arrays[name] -= 0.3 * g
    assert losses[-1] < 0.8 * losses[0]


def test_mistakes_are_typed():
    arrays, _ = made()
    base = models.Llama.of(arrays, CONFIG)
    with pytest.raises(OptionError, match=r"1 of 17 adapters belong to no projection"):
        models.with_lora(base, adapters() | {"layers.9.qkv.a": np.zeros(1)})
    with pytest.raises(OptionError, match="gateup"):
        models.lora_shapes(CONFIG, RANK, ["gateup"])
    with pytest.raises(OptionError, match="rank"):
        models.lora_shapes(CONFIG, 0)


@pytest.mark.parametrize("kind", ["array", "frozen", "lora", "ternary"])
def test_gradients_of_biases(kind):
    """Gradients of biases do not depend on the type of the weight, or whether it is trained."""
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((6, 8)), rng.standard_normal(6)
    x, dy = rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 5, 6))
    base = weight
    if kind == "lora":
        weight = models.Lora(weight, rng.standard_normal((RANK, 8)), rng.standard_normal((6, RANK)))
    if kind == "ternary":
        weight = models.Latent(weight, "native")
    residual = rng.standard_normal((2, 5, 6))
    plain = project(x, weight)
    np.testing.assert_allclose(
        project(x, weight, bias, residual), plain + bias + residual, rtol=1e-12, atol=1e-12
    )
    dbias = np.ones(6)
    grad = None if kind in ("frozen", "lora") else np.zeros_like(base)
    dx = project_backward(dy, x, weight, grad, dbias)
    np.testing.assert_allclose(dbias, 1 + dy.sum((0, 1)), rtol=1e-12)
    np.testing.assert_array_equal(dx, project_backward(dy, x, weight, None))


def test_adapters_on_a_model_with_biases():
    """The biases are those of the base, frozen or not."""
    arrays, zeros = made(BIASED)
    base, pairs = models.Llama.of(arrays, BIASED), adapters()
    tuned = models.with_lora(base, pairs)
    ids, targets = tokens((2, 5)), tokens((2, 5), 2)
    whole = models.Llama.of(zeros, BIASED)
    grads = {name: np.zeros_like(x) for name, x in pairs.items()}
    into = models.lora_grads(base, grads)
    for layer, biases in zip(into.layers, whole.layers, strict=True):
        layer.qkv_bias, layer.down_bias = biases.qkv_bias, biases.down_bias
    models.loss_and_grads(ids, targets, tuned, BIASED, grads=into)
    merged = models.Llama.of(arrays, BIASED)
    merged.layers = [
        dataclasses.replace(
            plain, **{part: models.merged(getattr(layer, part)) for part in ("qkv", "o", "gate_up", "down")}
        )
        for plain, layer in zip(base.layers, tuned.layers, strict=True)
    ]
    bias_grads = {name: x.copy() for name, x in zeros.items() if name.endswith(("qkv_bias", "down_bias"))}
    for x in zeros.values():
        x[...] = 0
    models.loss_and_grads(ids, targets, merged, BIASED, grads=whole)
    for name, x in bias_grads.items():
        np.testing.assert_allclose(x, zeros[name], rtol=1e-10, atol=1e-13)


def ternary_model(dtype, config=BIASED):
    """Ternary model, and its twin whose projections take int8 from the norms."""
    arrays = models.initial_weights(config, std=0.3)
    arrays = {n: x if x.ndim > 1 else x + 0.1 * np.sin(np.arange(x.size)) for n, x in arrays.items()}
    weights = models.Llama.of({n: x.astype(dtype) for n, x in arrays.items()}, config)
    for layer in weights.layers:
        for part in models.config.PROJECTIONS:
            setattr(layer, part, gpu_ops.ternary_quantize(getattr(layer, part)))
    return weights, models.with_int8_input(weights)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_int8_from_the_norm_is_what_project_multiplies(dtype):
    rng = np.random.default_rng(1)
    x, norm = rng.standard_normal((5, 32)).astype(dtype), rng.standard_normal(32).astype(dtype)
    bias, residual = (rng.standard_normal(n).astype(dtype) for n in (24, (5, 24)))
    w = gpu_ops.ternary_quantize(rng.standard_normal((24, 32)).astype(np.float32))
    codes = normed(x, norm, Int8Input(w), eps=1e-3)
    q, scale, _ = gpu_ops.rmsnorm_quant_int8(x, norm, eps=1e-3)
    assert isinstance(codes, Codes)
    np.testing.assert_array_equal(codes.q, q)
    y = project(codes, Int8Input(w), bias, residual)
    assert y.dtype == dtype
    expected = gpu_ops.ternary_matmul(q, w, x_scale=scale, out_dtype=dtype)
    np.testing.assert_array_equal(y, expected + bias + residual)
    # with float inputs, as for the matrix alone
    np.testing.assert_array_equal(normed(x, norm, w, eps=1e-3), gpu_ops.rmsnorm(x, norm, eps=1e-3))
    np.testing.assert_array_equal(project(x, Int8Input(w), bias), project(x, w, bias))
    dy = rng.standard_normal((5, 24)).astype(dtype)
    np.testing.assert_array_equal(
        project_backward(dy, x, Int8Input(w), None), project_backward(dy, x, w, None)
    )


def test_inference_takes_int8_where_the_weights_ask_for_it(monkeypatch):
    """int8 is used twice per layer, and logits stay within its rounding; a plain TernaryMatrix is not affected."""
    plain, int8_model = ternary_model(np.float32)
    calls = []

    def counted(*arrays, **options):
        calls.append(arrays[0].shape)
        return gpu_ops.rmsnorm_quant_int8(*arrays, **options)

    monkeypatch.setattr(projection, "rmsnorm_quant_int8", counted)

    def logits(weights):
        cache = inference.cache_for(weights, BIASED, lengths=[9])
        text = cache.add()
        actual = []
        for ids in ([3, 1, 4, 1, 5, 9, 2], [6]):  # a prompt, then a token
            actual.append(inference.next_logits(weights, BIASED, cache, cache.reserve({text: ids})))
            cache.commit()
        return np.concatenate(actual)

    expected = logits(plain)
    assert not calls
    actual = logits(int8_model)
    assert [rows for rows, _ in calls] == [7] * 2 * BIASED.nlayers + [1] * 2 * BIASED.nlayers
    assert np.linalg.norm(actual - expected) < 0.02 * np.linalg.norm(expected)
    assert not np.array_equal(actual, expected)
    ids = tokens((1, 6))
    np.testing.assert_array_equal(models.logits(ids, int8_model, BIASED), models.logits(ids, plain, BIASED))


def test_int8_input_wants_packed_weights():
    arrays, _ = made()
    with pytest.raises(OptionError, match=r"layers.0.qkv is ndarray, not a TernaryMatrix"):
        models.with_int8_input(models.Llama.of(arrays, CONFIG))
    arrays["layers.0.qkv"] = gpu_ops.quantize(arrays["layers.0.qkv"], "q4_0")
    with pytest.raises(
        OptionError, match=r"layers.0.qkv: TernaryMatrix.from_packed: .* q4_0; expected tq1_0"
    ):
        models.with_int8_input(models.Llama.of(arrays, CONFIG))
    with pytest.raises(OptionError, match="gate"):
        models.with_int8_input(ternary_model(np.float32)[0], ("gate",))
