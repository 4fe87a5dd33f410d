"""memory.estimate of a training step, and choose_policies within a budget."""

from __future__ import annotations

import math

import numpy as np
import pytest

import gpu_ops
from gpu_ops import memory, models, training
from gpu_ops.errors import DTypeError, OptionError, OutOfMemoryError, ShapeError, UnknownOptionError

CONFIG = models.LlamaConfig(vocab=512, hidden=128, ffn=344, nlayers=8, nheads=4, nheads_kv=2)


def step(batch, seqlen, dtype, policy, config=CONFIG):
    """Estimate of a training step, and a function that runs it."""
    arrays = {n: x.astype(dtype) for n, x in models.initial_weights(config).items()}
    grads = {n: np.zeros(x.shape, np.float32) for n, x in arrays.items()}
    weights, into = models.Llama.of(arrays, config), models.Llama.of(grads, config)
    ids = np.random.default_rng(0).integers(0, config.vocab, (batch, seqlen)).astype(np.int32)

    def run():
        loss = models.loss_and_grads(ids, ids, weights, config, grads=into, policy=policy)
        gpu_ops.global_norm(list(grads.values()))
        return float(loss)

    return run


def test_policies_save_what_they_should():
    took = {
        policy: memory.estimate(CONFIG, batch=8, seqlen=128, policy=policy).parts["activations"]
        for policy in models.POLICIES
    }
    assert list(took.values()) == sorted(took.values(), reverse=True)
    assert took["layer"] <= 0.45 * took["none"]


def test_an_arena_holds_a_training_step():
    run = step(2, 64, np.float32, "mlp")
    with memory.Trace() as trace:
        run()
    arena = memory.Arena(trace)
    assert arena.nbytes <= 1.05 * trace.peak_bytes
    losses = []
    for _ in range(2):
        with arena:
            losses.append(run())
    assert losses == [run()] * 2


def test_a_large_model_is_planned_in_a_moment():
    """Llama-3-8B on an absent card: bytes follow from shapes; activations are kept inputs and one running block."""
    config = models.LlamaConfig(128256, 4096, 14336, 32, 32, 8, theta=500000.0)
    estimate = memory.estimate(
        config, batch=1, seqlen=8192, dtype="float16", policy="layer", device="H100 SXM"
    )
    assert estimate.parts["weights"] == 2 * config.parameters
    assert estimate.parts["optimizer"] == 12 * config.parameters  # a master and two moments
    inputs = 32 * 8192 * 4096 * 2
    assert inputs < estimate.parts["activations"] < 4 * inputs
    assert "MiB" in str(estimate)


LLAMA = models.PRESETS["llama-3-8b"]
SIZES = {"batch": 1, "seqlen": 2048, "dtype": "bfloat16", "policy": "layer", "device": "RTX 4090"}


def test_adapters_on_a_packed_base_of_8b_fit_16_gb():
    plan = memory.estimate(LLAMA, **SIZES, weights=memory.Weights("nf4", rank=16))
    by_projection = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    packed = 32 * sum(rows * cols for rows, cols in by_projection)
    adapters = 32 * sum(16 * (rows + cols) for rows, cols in by_projection)
    assert adapters == 35_651_584
    activations = plan.parts.pop("activations")
    assert plan.parts == {
        "weights": packed // 64 * 36 + 2 * (LLAMA.parameters - packed),
        "adapters": 2 * adapters,
        "gradients": 4 * adapters,
        "optimizer": 12 * adapters,  # a master and two moments
    }
    checkpoints, logits = 32 * 2048 * 4096 * 2, 1024 * 128256 * 4
    assert checkpoints + logits < activations < checkpoints + logits + (100 << 20)
    assert 7.7e9 < plan.state + activations < 7.8e9
    whole = memory.estimate(LLAMA, **SIZES, weights=memory.Weights(rank=16))
    assert whole.peak - plan.state - activations == 2 * packed - packed // 64 * 36
    assert whole.peak > 16e9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_in_8_bits(dtype):
    config = models.LlamaConfig(vocab=512, hidden=256, ffn=704, nlayers=2, nheads=4)
    plan = memory.estimate(config, batch=1, seqlen=32, dtype=dtype, moment_bits=8)
    flat = training.FlatParams.from_shapes(config.shapes(), dtype=dtype, moment_bits=8)
    states = sum(n for name, n in flat.nbytes.items() if name not in ("params", "grads"))
    assert plan.parts["optimizer"] == pytest.approx(states, rel=0.01)
    with pytest.raises(OptionError, match="moment_bits must be 8 or 32"):
        memory.estimate(config, batch=1, seqlen=32, moment_bits=16)


def test_the_largest_unpacked_matrix_is_planned():
    """At the peak: the matrix of down in its backward; 16,384 rows of a packed head in the loss."""
    layer = memory.estimate(LLAMA, **SIZES, chunk=64, weights=memory.Weights("q4_0", rank=16))
    assert ("linear_backward workspace: unpacked weight", 4096 * 14336 * 2) in layer.largest
    head = memory.estimate(LLAMA, **SIZES, weights=memory.Weights("nf4", True, rank=16))
    assert ("linear_cross_entropy workspace: unpacked weight", 16384 * 4096 * 2) in head.largest
    tables = 2 * 128256 * 4096
    assert head.parts["weights"] == (LLAMA.parameters - 65 * 4096) // 64 * 36 + 65 * 4096 * 2
    assert head.parts["weights"] < layer.parts["weights"] - tables
    inference = memory.estimate_inference(LLAMA, batch=1, seqlen=8, weights=memory.Weights("nf4", True))
    assert inference.parts["weights"] == head.parts["weights"]
    assert "adapters" not in inference.parts


def test_formats_with_smaller_scales_take_the_bytes_of_their_panels():
    """q4_k's 6-bit scales are bytes in panels: 148 bytes per block of 256, for 144 in files."""
    config = models.LlamaConfig(vocab=512, hidden=256, ffn=512, nlayers=2, nheads=4)
    packed = config.parameters - 2 * 512 * 256 - 5 * 256
    plan = memory.estimate_inference(
        config, batch=1, seqlen=8, dtype="float32", weights=memory.Weights("q4_k")
    )
    assert plan.parts["weights"] == packed // 256 * 148 + 4 * (config.parameters - packed)


def test_nested_scales_take_a_byte_of_64_weights():
    """A block of 4096, or 2048 in rows of 14336, has two floats."""
    plan = memory.estimate(LLAMA, **SIZES, weights=memory.Weights("nf4_nested", rank=16))
    of_4096, of_14336 = 32 * (6144 + 4096 + 28672) * 4096, 32 * 4096 * 14336
    packed = of_4096 // 4096 * (8 + 64 + 2048) + of_14336 // 2048 * (8 + 32 + 1024)
    assert plan.parts["weights"] == packed + 2 * (LLAMA.parameters - of_4096 - of_14336)
    assert 8 * packed / (of_4096 + of_14336) < 4.15


def test_packed_floats_take_the_bytes_of_arrays():
    config = models.LlamaConfig(vocab=512, hidden=256, ffn=512, nlayers=2, nheads=4)
    sizes = {"batch": 1, "seqlen": 8, "dtype": "bfloat16", "device": "cpu"}
    plan = memory.estimate_inference(config, **sizes, weights=memory.Weights("bfloat16", True))
    assert plan.parts["weights"] == memory.estimate_inference(config, **sizes).parts["weights"]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: memory.Weights("nf5"), OptionError, r"did you mean 'nf4'\? allowed: 'q4_0', "),
        (lambda: memory.Weights(tables=True), OptionError, "format="),
        (lambda: memory.Weights(rank=0), OptionError, "rank"),
        (lambda: memory.Weights(rank=4, projections=("q",)), OptionError, "'qkv'"),
        (
            lambda: memory.estimate(LLAMA, batch=1, seqlen=8, weights=memory.Weights("nf4")),
            OptionError,
            "frozen",
        ),
        (lambda: memory.estimate(CONFIG, batch=1, seqlen=8, weights="nf4"), OptionError, "Weights, got str"),
        (
            lambda: memory.fit(CONFIG, "1 GB", batch=1, weights=memory.Weights("nf4")),
            ShapeError,
            "multiple of 64, in layers.0.down",
        ),
    ],
)
def test_mistakes_in_the_form_of_weights(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_budget_is_kept():
    sizes = {"batch": 4, "seqlen": 128}
    peak = memory.estimate(CONFIG, **sizes).peak
    smallest = memory.estimate(CONFIG, **sizes, policy="layer").peak
    assert memory.choose_policies(CONFIG, **sizes, budget=peak) == ["none"] * 8
    assert memory.choose_policies(CONFIG, **sizes, budget=smallest) != ["none"] * 8
    for share in (0.0, 0.2, 0.5, 0.9):
        budget = int(smallest + share * (peak - smallest))
        chosen = memory.choose_policies(CONFIG, **sizes, budget=budget)
        assert memory.estimate(CONFIG, **sizes, policy=chosen).peak <= budget
    with pytest.raises(OutOfMemoryError) as refused:
        memory.choose_policies(CONFIG, **sizes, budget=smallest // 2)
    assert (refused.value.required, refused.value.available) == (smallest, smallest // 2)


@pytest.mark.parametrize(
    "change",
    [{"batch": 0}, {"optimizer": "sgd"}, {"policy": "some"}, {"device": "RTX 1"}, {"policy": ["none"]}],
)
def test_mistakes_are_typed(change):
    with pytest.raises(OptionError):
        memory.estimate(CONFIG, **({"batch": 1, "seqlen": 8} | change))


@pytest.mark.parametrize("device", [None, "sm_80", "H100 SXM", "T4"])
def test_a_call_is_planned_for_a_card(device):
    shape = (2, 64, 4, 64)
    lse = ((2, 4, 64), "float32")
    estimate = memory.estimate_call(
        gpu_ops.attention_backward, shape, shape, shape, shape, shape, lse=lse, device=device
    )
    nbytes = 4 * math.prod(shape)
    assert estimate.parts["arguments"] == 5 * nbytes + 4 * 2 * 4 * 64
    assert estimate.parts["results"] == 3 * nbytes
    assert estimate.parts["workspaces"] > 0
    assert estimate.peak == sum(estimate.parts.values())
    assert memory.estimate_call("global_norm", [shape, (shape, "float16")]).parts["arguments"] == 1.5 * nbytes
    if device is not None:
        half = memory.estimate_call("softmax", shape, dtype="float16", device=device)
        assert half.parts == {"arguments": nbytes / 2, "results": nbytes / 2, "workspaces": 0}


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        (("attentoin", (1, 2)), {}, OptionError),
        (("softmax", (1, 2)), {"dtype": "float17"}, DTypeError),
        (("softmax", (1, 2)), {"dtype": object}, DTypeError),
        (("softmax", (1, -2)), {}, OptionError),
        (("softmax", (1, 2.5)), {}, OptionError),
        (("softmax", (1, 2)), {"device": "RTX 1"}, OptionError),
        (("softmax", (1, 2)), {"sclae": 1.0}, UnknownOptionError),
        (("softmax", (1, 2), (3,), (4,)), {}, TypeError),
        (("rmsnorm", (1, 2), (3,)), {}, ShapeError),
    ],
)
def test_mistakes_in_a_call_are_those_of_the_op(args, options, error):
    with pytest.raises(error):
        memory.estimate_call(*args, **options)


def test_a_shorter_prompt_and_a_smaller_cache():
    sizes = {"batch": 2, "seqlen": 512, "dtype": "float16"}
    whole = memory.estimate_inference(CONFIG, **sizes)
    part = memory.estimate_inference(CONFIG, **sizes, prompt=64, cache_dtype=np.int8)
    numbers, scales = whole.parts["KV cache"] // 2, 2 * CONFIG.nlayers * CONFIG.nheads_kv * 2 * 512 * 4
    assert part.parts["KV cache"] == numbers + scales
    assert part.parts["activations"] < 0.2 * whole.parts["activations"]
    assert memory.kv_cache_bytes(models.PRESETS["llama-3-8b"], batch=2, seqlen=3) == 6 << 17


@pytest.mark.parametrize("sought", ["batch", "seqlen"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("device", ["cpu", "H100 SXM"])
def test_one_more_would_not_fit(sought, train, device):
    sizes = {"seqlen": 64} if sought == "batch" else {"batch": 3}
    run = memory.estimate if train else memory.estimate_inference

    def takes(n):
        return run(CONFIG, **sizes, **{sought: n}, dtype="float16", device=device).peak

    for limit in (1, 37):
        for budget in (takes(limit), takes(limit + 1) - 1):
            size = memory.fit(CONFIG, budget, **sizes, train=train, dtype="float16", device=device)
            assert takes(size) <= budget < takes(size + 1)
            assert size >= limit
    with pytest.raises(OutOfMemoryError, match=f"{sought} 1 takes") as refused:
        memory.fit(CONFIG, takes(1) - 1, **sizes, train=train, dtype="float16", device=device)
    assert (refused.value.required, refused.value.available) == (takes(1), takes(1) - 1)


def test_budgets():
    llama = models.PRESETS["llama-3-8b"]
    card = memory.fit(llama, "RTX 4090", seqlen=4096)
    assert card == memory.fit(llama, 24 * 10**9, seqlen=4096, device="RTX 4090")
    assert memory.fit(llama, "24 GB", seqlen=4096) == memory.fit(llama, 24 * 10**9, seqlen=4096)
    assert memory.fit(CONFIG, 1 << 60, seqlen=1 << 14, prompt=1) == 1 << 10  # where the search ends
    with pytest.raises(OutOfMemoryError, match="takes"):
        memory.fit(llama, "RTX 4090", seqlen=4096, train=True)
    for budget in ("RTX 1", "24 XB", -1, 1.5, None):
        with pytest.raises(OptionError, match=r"^(memory\.)?fit: budget"):
            memory.fit(llama, budget, batch=1)
    for sizes in ({}, {"batch": 1, "seqlen": 1}):
        with pytest.raises(OptionError, match="one of batch= and seqlen="):
            memory.fit(llama, "24 GB", **sizes)
    for change in ({"batch": 0}, {"seqlen": 2.5}, {"dtype": "half!"}, {"prompt": 9}):
        with pytest.raises((OptionError, DTypeError)):
            memory.estimate_inference(CONFIG, **({"batch": 1, "seqlen": 8} | change))


def test_presets_have_the_published_numbers_of_parameters():
    published = {
        "smollm2-135m": 134_515_008,
        "tinyllama-1.1b": 1_100_048_384,
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "llama-3-405b": 405_853_388_800,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "mistral-7b": 7_241_732_096,
        "bitnet-b1.58-2b": 2_412_820_480,
        "gemma-2-2b": 2_614_341_888,
        "gemma-3-1b": 999_885_952,
    }
    assert {name: config.parameters for name, config in models.PRESETS.items()} == published
