"""Models on a real GPU against the CPU: logits, training, decoding by CUDA graphs, caches, captured calls, memory."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import inference, memory, models, training
from gpu_ops.inference import Engine, Sampling
from tests.support.calls import ADDED, OUT, call, results
from tests.support.cuda_cases import CAPTURED, case_id, to_cupy, to_numpy

pytestmark = pytest.mark.gpu

CONFIG = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
IDS = np.random.default_rng(3).integers(0, CONFIG.vocab, (2, 40))
CODES = ("int8", "float8_e4m3fn")
PROMPTS, MOST = [[5, 6, 7, 8, 5, 6, 7], [9], [11, 12] * 20], [12, 5, 9]


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="needs CuPy: pip install '.[cuda13]'")


@pytest.fixture(params=["raw", "numba"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", request.param)
    return request.param


def model(of=lambda x: x, dtype=np.float32):
    arrays = models.initial_weights(CONFIG, std=0.2)
    return models.Llama.of({name: of(x.astype(dtype)) for name, x in arrays.items()}, CONFIG)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-5), ("bfloat16", 4e-2), ("float16", 5e-3)])
def test_logits(cupy, on_cpu, kernels, dtype, error):
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    logits = to_numpy(models.logits(to_cupy(IDS), model(to_cupy, numpy_dtype), CONFIG)).astype(np.float32)
    assert np.abs(logits - on_cpu.logits).max() <= error * np.abs(on_cpu.logits).max()


def losses(device, place, steps=4):
    flat = training.FlatParams.from_shapes(CONFIG.shapes(), dtype="float32", device=device)
    flat.assign(models.initial_weights(CONFIG))
    weights, grads = models.Llama.of(flat.params, CONFIG), models.Llama.of(flat.grads, CONFIG)
    results_of_steps = []
    for ids, targets in map(training.Batches(np.arange(4096) % 256, 4, 32).at, range(steps)):
        flat.zero_grad()
        options = {"grads": grads, "policy": "layer"}
        results_of_steps.append(models.loss_and_grads(place(ids), place(targets), weights, CONFIG, **options))
        norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
        flat.step(lr=3e-3, grad_scale=training.clip_coefficient(norm, 1.0), skip=found_inf)
    return [float(x) for x in results_of_steps]


def test_training_steps(cupy, on_cpu, kernels):
    actual = losses("cuda", to_cupy)
    np.testing.assert_allclose(actual, on_cpu.losses, rtol=1e-4)
    assert actual[-1] < actual[0]


def tokens_of(weights, **options):
    """Tokens by request; those of the second are sampled."""
    sizes = {"num_pages": 64, "page_size": 4}
    engine = Engine(weights, CONFIG, inference.cache_for(weights, CONFIG, **sizes), **options)
    for i, prompt in enumerate(PROMPTS):
        drawn = Sampling(temperature=float(i == 1), seed=3)
        engine.submit(prompt, max_new_tokens=MOST[i], sampling=drawn)
    tokens = [[] for _ in PROMPTS]
    for token in engine.run():
        tokens[token.request].append(token.token)
    return tokens, engine


@pytest.mark.parametrize(
    "options",
    [{"capture": True}, {"capture": False}, {"draft": inference.prompt_lookup}],
    ids=["graphs", "no graphs", "drafts"],
)
def test_tokens_are_those_of_the_cpu(cupy, on_cpu, kernels, options):
    tokens, engine = tokens_of(model(to_cupy), **options)
    assert tokens == on_cpu.tokens
    if options == {"capture": True}:
        assert len(engine._graphs._kept) > 0  # sizes that were captured


def last_logits(weights, codes):
    cache = inference.cache_for(weights, CONFIG, num_pages=64, page_size=8, dtype=codes)
    parts = {cache.add(): prompt for prompt in PROMPTS}
    return inference.next_logits(weights, CONFIG, cache, cache.reserve(parts))


@pytest.mark.parametrize("codes", CODES)
def test_a_quantized_cache(cupy, on_cpu, kernels, codes):
    expected, actual = on_cpu.of_codes[codes], to_numpy(last_logits(model(to_cupy), codes))
    assert np.abs(actual - expected).max() <= 2e-2 * np.abs(expected).max()


@pytest.fixture(scope="module")
def on_cpu():
    """Results of the CPU."""
    weights = model()
    return SimpleNamespace(
        logits=models.logits(IDS, weights, CONFIG),
        losses=losses("cpu", lambda x: x),
        tokens=tokens_of(weights)[0],
        of_codes={codes: last_logits(weights, codes) for codes in CODES},
    )


@pytest.mark.parametrize(("op", "form", "names"), CAPTURED, ids=map(case_id, CAPTURED))
def test_a_captured_call_replays(cupy, op, form, names):
    """The graph of a call gives the same bits as the call, each time."""
    case = call(op)
    placed = {
        n: to_cupy(x) if isinstance(x, np.ndarray) else x
        for n, x in (case.arrays | case.options | form).items()
    }
    case = case.having(**placed)
    state = {n: x.copy() for n, x in (case.arrays | case.options).items() if isinstance(x, cupy.ndarray)}
    expected = [to_numpy(x).tobytes() for x in results(case(backend=names))]

    def restore():
        for name, x in state.items():
            (case.arrays | case.options)[name][...] = x

    restore()
    outs = tuple(cupy.zeros_like(x) for x in results(case(backend=names)))
    keyword = OUT[op][0] if op in OUT else ADDED.get(op, ("",))[0]
    out = {keyword: outs if len(outs) > 1 else outs[0]} if outs and keyword else {}
    size = gpu_ops.workspace_size(op, *case.arrays.values(), **case.options, backend=names)
    workspace = cupy.full(size, 0xFF, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    restore()
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        case(backend=names, workspace=workspace, **out)
        graph = stream.end_capture()
    for _ in range(2):
        restore()
        for x in outs:
            x.reshape(-1).view(np.uint8)[...] = 0xFF if op in OUT else 0
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        if out:
            assert [to_numpy(x).tobytes() for x in outs] == expected


@pytest.mark.parametrize("policy", ["none", "layer"])
def test_an_estimate_is_the_peak_of_cupys_pool(cupy, policy):
    config = models.LlamaConfig(vocab=4096, hidden=512, ffn=1408, nlayers=4, nheads=8, nheads_kv=4)
    options = {"batch": 4, "seqlen": 512, "dtype": "bfloat16", "policy": policy, "optimizer": "adamw"}
    pool = cupy.get_default_memory_pool()

    class Peak(cupy.cuda.MemoryHook):
        bytes = 0

        def malloc_postprocess(self, **_):
            self.bytes = max(self.bytes, pool.used_bytes())

    before = pool.used_bytes()
    with Peak() as peak:
        ids = to_cupy(np.zeros((4, 512), np.int32))
        flat = training.FlatParams.from_shapes(config.shapes(), dtype="bfloat16", device="cuda")
        weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)
        for _ in range(2):
            models.loss_and_grads(ids, ids, weights, config, grads=grads, policy=policy)
            gpu_ops.global_norm(flat.buffers["grads"])
            flat.step(lr=1e-3)
    actual = peak.bytes - before
    assert abs(actual - memory.estimate(config, **options, device="cuda").peak) <= 0.02 * actual
