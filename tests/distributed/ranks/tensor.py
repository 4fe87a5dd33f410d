"""Models whose weights are divided among ranks, against the whole model on each rank."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpu_ops import inference, models, training
from gpu_ops.distributed import Mesh, TensorParallel
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.models import Layer, LlamaConfig
from gpu_ops.reference.tolerance import FORWARD, GRADIENT, error_report, tolerance
from tests.attention.cases import DTYPES
from tests.models.test_block import made, tokens
from tests.support.compare import naive_ops

VOCAB = 29  # which 2, 3 and 4 ranks do not divide
ALL_BIASES = ("qkv", "o", "gate_up", "down")
FACTORS = {"embedding_scale": None, "residual_scale": 0.5, "logits_scaling": 2.0, "softmax_scale": 0.3}
GEMMA = {"post_norms": True, "weight_offset": 1.0, "softcap": 5.0, "logits_softcap": 4.0}


def config_for(comm, **changes):
    """Config with two query heads and one KV head per rank."""
    p = comm.size
    sizes = {"vocab": VOCAB, "hidden": 20, "ffn": 6 * p, "nlayers": 2, "head_dim": 8}
    return LlamaConfig(**({**sizes, "nheads": 2 * p, "nheads_kv": p} | changes))


# query heads and KV heads by number of ranks, where ranks do not divide KV heads: these are on two ranks, or three
UNEVEN = {1: (3, 1), 2: (6, 3), 3: (12, 2), 4: (12, 6)}


def configs(comm):
    """Configs, some with fewer KV heads than ranks."""
    windows = (Layer(None, None, 3), Layer(500.0))
    yield config_for(comm)
    nheads, nheads_kv = UNEVEN[comm.size]
    yield config_for(comm, nheads=nheads, nheads_kv=nheads_kv, biases=("qkv",), qk_norm=True)
    yield config_for(comm, nheads_kv=1, tied=True, **GEMMA, **FACTORS)
    yield config_for(comm, nheads_kv=max(1, comm.size // 2), biases=ALL_BIASES, qk_norm=True, layers=windows)


def layouts(comm, config):
    return [TensorParallel(config, comm, sequence_parallel=divided) for divided in (False, True)]


def batch(seqlen):
    ids, targets = tokens((2, seqlen)), tokens((2, seqlen), 2)
    targets[0, 3] = -100
    return ids, targets


def of_whole(config, dtype, ids, targets, **options):
    """Loss, and gradients by name."""
    arrays, grads = made(config, dtype)
    weights, into = models.Llama.of(arrays, config), models.Llama.of(grads, config)
    return models.loss_and_grads(ids, targets, weights, config, grads=into, **options), grads


def of_parts(parts, dtype, ids, targets, **options):
    """Loss and whole gradients of all ranks, and the gradients of this rank."""
    arrays, grads = (parts.shard_weights(x) for x in made(parts.whole, dtype))
    weights, into = parts.model(arrays), parts.grads(grads)
    loss = models.loss_and_grads(ids, targets, weights, parts.config, grads=into, **options)
    parts.sum_shared_grads(into)
    return loss, parts.gather_weights(into), grads


def close(actual, expected, name=""):
    largest = max(1.0, np.abs(expected).max(initial=0))
    assert np.abs(actual - expected).max(initial=0) <= 1e-12 * largest, name


def same_on_all(comm, x):
    x = np.atleast_1d(x)
    for other in comm.all_gather(x[None].view(np.uint8)):
        np.testing.assert_array_equal(other, x.view(np.uint8))


def check_weights_come_back(comm):
    for config in configs(comm):
        parts, (arrays, _) = TensorParallel(config, comm), made(config)
        mine = parts.shard_weights(models.Llama.of(arrays, config))
        assert {name: x.shape for name, x in mine.items()} == parts.shapes()
        assert not any(np.shares_memory(x, arrays[name]) for name, x in mine.items())
        whole = parts.gather_weights(mine)
        assert whole.keys() == arrays.keys()
        for name, x in whole.items():
            np.testing.assert_array_equal(x, arrays[name])


def check_copies_of_heads(comm):
    """KV heads are copied as often as the query heads of the ranks need, and no more."""
    p, heads = comm.size, {"nheads": 8 * comm.size}
    for nheads_kv, held, copies in ((8 * p, 8, 1), (2 * p, 2, 1), (p, 1, 1), (1, 1, p)):
        parts = TensorParallel(config_for(comm, **heads, nheads_kv=nheads_kv), comm)
        assert (parts.config.nheads_kv, parts.replicas) == (held, copies)
    nheads, nheads_kv = UNEVEN[p]
    parts = TensorParallel(config_for(comm, nheads=nheads, nheads_kv=nheads_kv), comm)
    each = {1: (1, 1), 2: (3, 2), 3: (2, 3), 4: (3, 2)}[p]
    assert (parts.config.nheads_kv, parts.replicas) == each


def check_gradients_in_float64(comm):
    """Check gradients of every weight and their norm; ranks that hold the same array have the same bits."""
    ids, targets = batch(4 * comm.size)
    for config in configs(comm):
        expected_loss, expected = of_whole(config, np.float64, ids, targets, reduction="sum")
        norm = np.sqrt(sum(np.vdot(x, x) for x in expected.values()))
        for parts in layouts(comm, config):
            loss, grads, mine = of_parts(parts, np.float64, ids, targets, reduction="sum")
            close(loss, expected_loss)
            for name, x in expected.items():
                close(grads[name], x, name)
            close(parts.grad_norm(mine), norm)
            for x in (loss, *(x for name, x in mine.items() if not parts.pieces(name)[1])):
                same_on_all(comm, x)


def check_policies_and_packed_sequences(comm):
    lengths = [3, 6 * comm.size - 4, 1]
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    sequences = models.Sequences(positions=positions, cu_seqlens=starts)
    ids, targets = tokens((6 * comm.size,)), tokens((6 * comm.size,), 2)
    *_, config = configs(comm)
    expected_loss, expected = of_whole(config, np.float64, ids, targets, sequences=sequences)
    for parts in layouts(comm, config):
        first = None
        for policy in ("none", "layer"):
            loss, grads, mine = of_parts(parts, np.float64, ids, targets, sequences=sequences, policy=policy)
            close(loss, expected_loss)
            for name, x in expected.items():
                close(grads[name], x, name)
            for name, x in (first or mine).items():
                np.testing.assert_array_equal(mine[name], x)
            first = mine


def check_gradients_in_other_dtypes(comm):
    """Check gradients by the tolerance rule, with textbook code of every op."""
    ids, targets = batch(6 * comm.size)
    *_, config = configs(comm)
    config = dataclasses.replace(config, tied=True)
    for dtype in ("float32", "bfloat16"):
        param_dtype = DTYPES[dtype]
        rounded = {name: x.astype(np.float64) for name, x in made(config, param_dtype)[0].items()}
        exact = {name: np.zeros(x.shape) for name, x in rounded.items()}
        weights, into = models.Llama.of(rounded, config), models.Llama.of(exact, config)
        exact["loss"] = models.loss_and_grads(ids, targets, weights, config, grads=into, reduction="sum")
        with naive_ops():
            loss, grads = of_whole(config, param_dtype, ids, targets, reduction="sum")
        textbook = {"loss": loss, **grads}
        for parts in layouts(comm, config):
            loss, grads, _ = of_parts(parts, param_dtype, ids, targets, reduction="sum")
            actual_values = {"loss": loss, **grads}
            for name, ref in exact.items():
                x, factor = actual_values[name], FORWARD if name == "loss" else GRADIENT
                problem = error_report(x, ref, tolerance(ref, textbook[name], x.dtype, factor))
                assert problem is None, f"{name} in {dtype}: {problem}"


def check_a_block(comm):
    """Check output and dx of a block, equal bits on all ranks, and the bytes sent."""
    p, config = comm.size, next(configs(comm))
    arrays, grads = made(config)
    rng = np.random.default_rng(5)
    x, dy = rng.standard_normal((2, 2, 4 * p, config.hidden))
    whole = models.Llama.of(arrays, config).layers[0]
    expected, saved = models.block_forward(x, whole, config)
    want_dx = models.block_backward(dy, whole, saved, config, grads=models.Llama.of(grads, config).layers[0])
    for parts, sent in zip(layouts(comm, config), (8, 10), strict=True):
        layer = parts.model(parts.shard_weights(arrays)).layers[0]
        mine = slice(None)
        if parts.stream.divided:
            mine = slice(comm.rank * 4, comm.rank * 4 + 4)
        into = parts.grads({name: np.zeros(shape) for name, shape in parts.shapes().items()}).layers[0]
        before = sum(comm.bytes_sent.values())
        y, saved = models.block_forward(x[:, mine], layer, parts.config)
        dx = models.block_backward(dy[:, mine], layer, saved, parts.config, grads=into)
        assert sum(comm.bytes_sent.values()) - before == sent * x.nbytes * (p - 1) // p
        for actual, ref in ((y, expected), (dx, want_dx)):
            close(actual, ref[:, mine])
            if not parts.stream.divided:
                same_on_all(comm, actual)


def check_gradients_add_up(comm):
    """Gradients of parts of a batch add up; shared ones are summed once, frozen weights are omitted."""
    ids, targets = batch(4 * comm.size)
    *_, config = configs(comm)
    _, expected = of_whole(config, np.float64, ids, targets, denominator=targets.size - 1)
    for parts in layouts(comm, config):
        arrays, zeros = (parts.shard_weights(x) for x in made(config))
        weights, grads = parts.model(arrays), parts.grads(zeros)
        grads.embed = grads.layers[0].qkv = None
        for row in range(2):
            rows = slice(row, row + 1)
            models.loss_and_grads(
                ids[rows], targets[rows], weights, parts.config, grads=grads, denominator=targets.size - 1
            )
        parts.sum_shared_grads(grads)
        assert not zeros["embed"].any()
        assert not zeros["layers.0.qkv"].any()
        whole = parts.gather_weights(zeros)
        for name, x in expected.items():
            if name not in ("embed", "layers.0.qkv"):
                close(whole[name], x, name)


def check_training(comm):
    """Losses match one rank, on ranks that also divide the batch and clip gradients."""
    tp = 2 if comm.size % 2 == 0 else comm.size
    mesh = Mesh(comm, tp=tp, dp=comm.size // tp)
    config = config_for(mesh.tp, nlayers=1, nheads_kv=1, qk_norm=True)
    parts = TensorParallel(config, mesh.tp, sequence_parallel=True)
    start, ids = models.initial_weights(config, std=0.2), tokens((2 * comm.size, 12))
    targets = np.roll(ids, -1, axis=1)

    def losses(shapes, values, model, into, run, share, steps=20):
        flat = training.FlatParams.from_shapes(shapes, dtype="float64", device="cpu")
        flat.assign(values)
        weights, grads, history = model(flat.params), into(flat.grads), []
        for _ in range(steps):
            flat.zero_grad()
            history.append(models.loss_and_grads(ids[share], targets[share], weights, run, grads=grads))
            norm = yield flat, history
            flat.step(lr=3e-3, weight_decay=0.1, grad_scale=min(1.0, 0.5 / norm))

    def whole(arrays):
        return models.Llama.of(arrays, config)

    single_run = losses(config.shapes(), start, whole, whole, config, slice(None))
    rows = slice(mesh.dp.rank, None, mesh.dp.size)
    split_run = losses(
        parts.shapes(), parts.shard_weights(start), parts.model, parts.grads, parts.config, rows
    )
    norms: list = [None, None]
    while True:
        try:
            flat, expected = single_run.send(norms[0])
            parted, history = split_run.send(norms[1])
        except StopIteration:
            break
        norms[0] = np.sqrt(sum(np.vdot(x, x) for x in flat.grads.values()))
        parts.sum_shared_grads(parted.grads)
        summed = parted.buffers["grads"]
        mesh.dp.all_reduce(summed, out=summed)
        summed /= mesh.dp.size
        norms[1] = parts.grad_norm(parted.grads)
    assert len(expected) == len(history) == 20
    assert expected[-1] < expected[0] - 0.5
    mean = mesh.dp.all_reduce(np.array(history)) / mesh.dp.size
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-9)


def check_next_logits(comm):
    """Check prompts in parts and single tokens over caches of the heads of this rank, and whole texts."""
    for config in configs(comm):
        arrays, _ = made(config)
        whole, parts = models.Llama.of(arrays, config), TensorParallel(config, comm)
        model, text = parts.model(parts.shard_weights(arrays)), tokens((2, 11)).tolist()
        runs = ((whole, config), (model, parts.config))
        caches = [inference.cache_for(*run, num_pages=8, page_size=4) for run in runs]
        assert caches[1].keys[0].shape[2] == parts.config.nheads_kv
        for start, stop in ((0, 7), (7, 10), (10, 11)):
            logits = []
            for cache, run in zip(caches, runs, strict=True):
                handles = cache.handles or (cache.add(), cache.add())
                new = {h: row[start:stop] for h, row in zip(handles, text, strict=True)}
                logits.append(inference.next_logits(*run, cache, cache.reserve(new)))
                cache.commit()
            close(logits[1], logits[0])
            same_on_all(comm, logits[1])
        expected = models.logits(np.array(text), whole, config)
        for each in layouts(comm, config)[: 1 if 11 % comm.size else 2]:
            close(
                models.logits(np.array(text), each.model(each.shard_weights(arrays)), each.config), expected
            )


def check_generation(comm):
    """Every rank draws the same tokens as a single rank."""
    config = config_for(comm)
    arrays, parts = made(config)[0], TensorParallel(config, comm)
    prompts = tokens((3, 5)).tolist()
    sampling = inference.Sampling(temperature=0.8, seed=4)
    texts = [
        inference.generate(weights, run_config, prompts, max_new_tokens=6, sampling=sampling)
        for weights, run_config in (
            (models.Llama.of(arrays, config), config),
            (parts.model(parts.shard_weights(arrays)), parts.config),
        )
    ]
    assert texts[0] == texts[1]


def check_what_cannot_be_divided(comm):
    """Errors are raised on one rank alone, with nothing sent."""
    p, config = comm.size, config_for(comm)
    parts = TensorParallel(config, comm)
    arrays, _ = made(config)
    mine = parts.shard_weights(arrays)
    ids, targets = batch(4 * p)
    wrong = parts.grads(mine | {"lm_head": mine["lm_head"].astype(np.float32)})
    before = dict(comm.bytes_sent)
    run = (ids, targets, parts.model(mine), parts.config)
    model, locked = parts.model(mine), {name: x.view() for name, x in mine.items()}
    locked["norm"].flags.writeable = False
    bitnet = dataclasses.replace(config, sub_norms=True)
    adapters = models.initial_lora(models.lora_shapes(parts.config, 2))
    mistakes = [
        (OptionError, "layers.0.qkv is divided among ranks", lambda: models.with_lora(model, adapters)),
        (DTypeError, "gather_weights: embed.*VocabularyRows", lambda: parts.gather_weights(model)),
        (DTypeError, "grad_norm: embed.*VocabularyRows", lambda: parts.grad_norm(model)),
        (ShapeError, "norm is read-only", lambda: parts.sum_shared_grads(locked)),
        (OptionError, "no array 'norm'", lambda: parts.model({k: x for k, x in mine.items() if k != "norm"})),
        (ShapeError, "layers.0.o has shape", lambda: parts.grads(mine | {"layers.0.o": arrays["norm"]})),
        (OptionError, "cannot be divided", lambda: TensorParallel(bitnet, comm)),
        (OptionError, "cannot be divided", lambda: parts.grad_norm({"layers.0.qkv.a": arrays["norm"]})),
        (DTypeError, "grads.lm_head is float32", lambda: models.loss_and_grads(*run, grads=wrong)),
        (OptionError, "sequence_parallel", lambda: TensorParallel(config, comm, sequence_parallel=1)),
    ]
    if p > 1:
        other = dataclasses.replace
        mistakes += [
            (OptionError, "nheads=", lambda: TensorParallel(config_for(comm, nheads=2 * p + 1, nheads_kv=1), comm)),
            (OptionError, "ffn=", lambda: TensorParallel(other(config, ffn=6 * p + 1), comm)),
            (OptionError, "vocab=1", lambda: TensorParallel(other(config, vocab=1), comm)),
            (ShapeError, "embed has shape", lambda: parts.model(arrays)),
        ]  # fmt: skip
    divided = TensorParallel(config, comm, sequence_parallel=True)
    model = divided.model(mine)
    cache = inference.cache_for(model, parts.config, num_pages=2)
    cache.add()
    step = cache.reserve({0: [1] * p})
    call = (model, parts.config, cache, step)
    mistakes.append((OptionError, "sequence_parallel=False", lambda: inference.next_logits(*call)))
    for error, message, call_ in mistakes:
        for _ in range(2):
            with pytest.raises(error, match=message):
                call_()
    assert dict(comm.bytes_sent) == before
    if p > 1:
        with pytest.raises(ShapeError, match="do not divide"):
            models.logits(ids[:, 1:], model, parts.config)
