"""Decoder block and Llama: gradients by finite differences, policies bit for bit, packed sequences."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import models
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.kernels.common.cpu import parallel
from gpu_ops.models import Layer, LlamaConfig
from tests.support.compare import assert_close, naive_ops

CONFIG = LlamaConfig(vocab=29, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)
BIASES = dataclasses.replace(CONFIG, biases=("qkv", "o", "gate_up", "down"))
GEMMA = dataclasses.replace(
    CONFIG, weight_offset=1.0, post_norms=True, embedding_scale=None, activation="gelu_tanh", tied=True
)
FAMILIES = {
    "llama": CONFIG,
    "biases": BIASES,
    "qwen2": dataclasses.replace(CONFIG, biases=("qkv",)),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, head_dim=16),
    "granite": dataclasses.replace(
        BIASES, embedding_scale=3.0, residual_scale=0.4, logits_scaling=6.0, softmax_scale=0.5
    ),
    "bitnet": dataclasses.replace(CONFIG, sub_norms=True, activation="relu2"),
    "gemma2": dataclasses.replace(GEMMA, softcap=2.0, logits_softcap=1.5, layers=(Layer(window=3), Layer())),
    "gemma3": dataclasses.replace(GEMMA, qk_norm=True, layers=(Layer(100.0, window=3), Layer(1e4))),
    "everything": dataclasses.replace(GEMMA, sub_norms=True, residual_scale=0.5, qk_norm=True),
    "mixed": dataclasses.replace(BIASES, qk_norm=True, layers=(Layer(None, None, 3), Layer(500.0))),
}
DTYPES = [np.float64, np.float32, ml_dtypes.bfloat16, np.float16]


def made(config=CONFIG, dtype=np.float64, seed=0):
    """Weights by name, and zeros for their gradients."""
    start = models.initial_weights(config, seed=seed, std=0.15)
    rng = np.random.default_rng((seed, 99))
    start |= {
        n: x + 0.2 * rng.standard_normal(x.shape) for n, x in start.items() if n.endswith(("_bias", "_norm"))
    }
    arrays = {n: x.astype(dtype) for n, x in start.items()}
    grad_dtype = np.float64 if dtype == np.float64 else np.float32
    return arrays, {n: np.zeros(x.shape, grad_dtype) for n, x in arrays.items()}


def tokens(shape, seed=1, vocab=CONFIG.vocab):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


def loss_and_grads(ids, targets, config=CONFIG, dtype=np.float64, **options):
    arrays, grads = made(config, dtype)
    loss = models.loss_and_grads(
        ids,
        targets,
        models.Llama.of(arrays, config),
        config,
        grads=models.Llama.of(grads, config),
        **options,
    )
    return loss, grads


SHAPES = [(dataclasses.replace(CONFIG, tied=t, window=w), f"{t}-{w}") for t in (False, True) for w in (-1, 2)]


@pytest.mark.parametrize(
    "config", [pytest.param(c, id=i) for c, i in (*SHAPES, *((c, n) for n, c in FAMILIES.items()))]
)
def test_gradients_by_finite_differences(config):
    ids, targets = tokens((2, 7)), tokens((2, 7), 2)
    targets[0, 3] = -100
    loss, grads = loss_and_grads(ids, targets, config)
    arrays, _ = made(config)
    rng = np.random.default_rng(3)
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        direction /= np.linalg.norm(direction)
        step = 1e-5
        values = []
        for sign in (1, -1):
            moved = arrays | {name: array + sign * step * direction}
            values.append(float(models.loss(ids, targets, models.Llama.of(moved, config), config)))
        slope = (values[0] - values[1]) / (2 * step)
        assert abs(slope - np.vdot(grads[name], direction)) < 1e-8, name
    assert abs(float(loss) - sum(values) / 2) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_policies_give_the_same_bits(dtype, family):
    ids, targets = tokens((2, 33)), tokens((2, 33), 2)
    loss, grads = loss_and_grads(ids, targets, FAMILIES[family], dtype)
    assert all(g.any() for g in grads.values())
    for policy in (*models.POLICIES, ["mlp", "layer"]):
        other, again = loss_and_grads(ids, targets, FAMILIES[family], dtype, policy=policy)
        assert other == loss
        assert all(np.array_equal(again[name], g) for name, g in grads.items()), policy


def test_the_same_bits_for_any_number_of_threads(monkeypatch):
    ids, targets = tokens((3, 150)), tokens((3, 150), 2)
    results = []
    for count in (1, 2, 5):
        monkeypatch.setattr(parallel, "thread_count", lambda count=count: count)
        gpu_ops.core.op.forget_calls()
        results.append(loss_and_grads(ids, targets, dtype=np.float32))
    for loss, grads in results[1:]:
        assert loss == results[0][0]
        assert all(np.array_equal(grads[name], g) for name, g in results[0][1].items())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_policy_keeps_what_it_says(family):
    config = FAMILIES[family]
    arrays, _ = made(config, np.float32)
    layer = models.Llama.of(arrays, config).layers[0]
    absent = set() if config.qk_norm else {"q", "k", "rstd_q", "rstd_k"}
    absent |= set() if config.post_norms else {"o", "rstd_o", "down", "rstd_down"}
    x = np.random.default_rng(0).standard_normal((1, 8, 32)).astype(np.float32)
    kept = {}
    for policy, names in models.POLICIES.items():
        _, saved = models.block_forward(x, layer, config, policy=policy)
        held = {f.name for f in dataclasses.fields(saved) if getattr(saved, f.name) is not None}
        assert held == (names | {"x"}) - absent
        kept[policy] = saved.nbytes
    assert list(kept.values()) == sorted(kept.values(), reverse=True)
    assert kept["layer"] == x.nbytes


def test_a_scaled_residual_stream_is_a_model_of_scaled_branches():
    """Logits of residual_scale r are those of a scale of 1 with r times the outputs of both branches."""
    config = dataclasses.replace(CONFIG, eps=0.01, embedding_scale=3.0, residual_scale=0.4)
    arrays, _ = made(config)
    ids = tokens((2, 9))
    logits = models.logits(ids, models.Llama.of(arrays, config), config)
    branches = {n: 0.4 * x for n, x in arrays.items() if n.endswith((".o", ".down"))}
    assert len(branches) == 2 * config.nlayers
    plain = dataclasses.replace(config, residual_scale=1.0)
    expected = models.logits(ids, models.Llama.of(arrays | branches, plain), plain)
    np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-12)


def test_gradients_add_up():
    ids, targets = tokens((2, 9)), tokens((2, 9), 2)
    _, grads = loss_and_grads(ids, targets)
    arrays, sums = made()
    weights, into = models.Llama.of(arrays, CONFIG), models.Llama.of(sums, CONFIG)
    for row in range(2):  # the mean over all 18 targets, one sequence at a time
        part = slice(row, row + 1)
        models.loss_and_grads(ids[part], targets[part], weights, CONFIG, grads=into, denominator=18)
    for name, g in grads.items():
        np.testing.assert_allclose(sums[name], g, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("family", ["llama", "mixed"])
@pytest.mark.parametrize("policy", ["none", "layer"])
def test_packed_sequences_do_not_see_each_other(policy, family):
    config = FAMILIES[family]
    lengths = [3, 7, 1]
    ids, targets = tokens((11,)), tokens((11,), 2)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    packed = models.Sequences(positions=positions, cu_seqlens=cu)
    loss, grads = loss_and_grads(ids, targets, config, sequences=packed, policy=policy)
    arrays, sums = made(config)
    weights, into = models.Llama.of(arrays, config), models.Llama.of(sums, config)
    total = 0.0
    for start, end in itertools.pairwise(cu):
        batch = ids[None, start:end], targets[None, start:end]
        total += float(models.loss_and_grads(*batch, weights, config, grads=into, denominator=11))
    assert abs(float(loss) - total) < 1e-12
    for name, g in grads.items():
        np.testing.assert_allclose(sums[name], g, rtol=1e-10, atol=1e-13)


def test_logits_and_loss_agree():
    arrays, _ = made()
    weights = models.Llama.of(arrays, CONFIG)
    ids, targets = tokens((2, 5)), tokens((2, 5), 2)
    z = models.logits(ids, weights, CONFIG)
    assert z.shape == (2, 5, CONFIG.vocab)
    loss = models.loss(ids, targets, weights, CONFIG)
    assert abs(float(loss) - float(gpu_ops.cross_entropy(z, targets))) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_obey_the_tolerance_rule(family):
    """Logits obey the rule with textbook code of every op."""
    config, ids = FAMILIES[family], tokens((2, 40))
    arrays, _ = made(config, ml_dtypes.bfloat16)
    weights = models.Llama.of(arrays, config)
    exact = models.logits(
        ids, models.Llama.of({n: x.astype(np.float64) for n, x in arrays.items()}, config), config
    )
    with naive_ops():
        textbook = models.logits(ids, weights, config)
    assert_close(models.logits(ids, weights, config), exact, textbook, ml_dtypes.bfloat16)


def test_mistakes_are_typed_and_add_nothing():
    arrays, grads = made()
    with pytest.raises(ShapeError, match=r"layers\.1\.qkv has shape \(3,\)"):
        models.Llama.of(arrays | {"layers.1.qkv": np.zeros(3)}, CONFIG)
    del arrays["norm"]
    with pytest.raises(OptionError, match="'norm'"):
        models.Llama.of(arrays, CONFIG)
    ids = tokens((1, 4))
    arrays, grads = made()
    weights = models.Llama.of(arrays, CONFIG)
    wrong = models.Llama.of(grads | {"layers.0.down": np.zeros((32, 48))}, CONFIG)
    wrong.layers[0].down = np.zeros((3, 3))
    fewer = dataclasses.replace(CONFIG, nlayers=1)
    for into, config, options, error in (
        (wrong, CONFIG, {}, ShapeError),
        (models.Llama.of(grads, CONFIG), fewer, {}, OptionError),
        (models.Llama.of(grads, CONFIG), CONFIG, {"return_lse": True}, OptionError),
        (models.Llama.of(grads, CONFIG), CONFIG, {"policy": "all"}, OptionError),
        (models.Llama.of(grads, CONFIG), CONFIG, {"policy": ["none"]}, OptionError),
        (models.Llama.of(grads, CONFIG), CONFIG, {"reduction": "some"}, OptionError),
    ):
        with pytest.raises(error):
            models.loss_and_grads(ids, ids, weights, config, grads=into, **options)
    assert not any(g.any() for g in grads.values())


@pytest.mark.parametrize(("family", "part"), [("qwen2", "qkv_bias"), ("qwen3", "k_norm, q_norm")])
def test_weights_of_another_family_are_refused(family, part):
    other = FAMILIES[family]
    for a, b in ((CONFIG, other), (other, CONFIG)):
        a = dataclasses.replace(a, head_dim=other.head_dim)
        weights = models.Llama.of(made(a)[0], a)
        with pytest.raises(OptionError, match=part):
            models.logits(tokens((1, 4)), weights, dataclasses.replace(b, head_dim=other.head_dim))


def test_a_batch_without_targets():
    ids = tokens((1, 4))
    loss, grads = loss_and_grads(ids, np.full((1, 4), -100))
    assert loss == 0
    assert not any(g.any() for g in grads.values())
