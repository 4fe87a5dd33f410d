"""Attention through the steps of a paged cache equals attention without a cache."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gpu_ops
from gpu_ops.inference import PagedKVCache
from gpu_ops.reference.attention.quantized_pages import dequantize, quantize
from tests.support.compilers import needs_numba_cuda, needs_nvrtc
from tests.support.fake_cupy import FakeArray


class Run:
    """Model of one layer: queries, keys and values are looked up by token; attention uses the steps of a cache."""

    def __init__(self, device="cpu", backend=None, **options):
        rng = np.random.default_rng(1)
        self.q = rng.standard_normal((50, 4, 16), dtype=np.float32)
        self.k, self.v = rng.standard_normal((2, 50, 2, 16), dtype=np.float32)
        self.where = {"device": device, "backend": backend}
        self.cache = PagedKVCache(1, 2, 16, num_pages=40, page_size=4, device=device, **options)
        self.window = {"window_size": (self.cache.window, 0), "causal": True}

    def step(self, new, out=None, decode=False):
        """Output of the new tokens of each sequence."""
        step = self.cache.reserve(new, out=out)
        keys, values = self.cache.keys[0], self.cache.values[0]
        q, k, v = (x[step.tokens] for x in (self.q, self.k, self.v))
        scales = {"k_scale": self.cache.key_scales[0], "v_scale": self.cache.value_scales[0]}
        places = {"slot_mapping": step.slot_mapping, "positions": step.positions, **scales}
        q = gpu_ops.rope_append_kv(q, k, v, keys, values, **places, **self.where)
        tables = {"block_table": step.block_table, "seqused_k": step.seqused_k, **scales}
        if decode:
            out_rows = gpu_ops.attention_decode(
                q[:, None], keys, values, **tables, **self.window, **self.where
            )[:, 0]
        else:
            starts = {"cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": step.max_seqlen_q}
            out_rows = gpu_ops.attention_varlen(
                q, keys, values, **starts, **tables, **self.window, **self.where
            )
        self.cache.commit()
        return [out_rows[a:b] for a, b in itertools.pairwise(step.cu_seqlens_q[: len(new) + 1])]

    def dense(self, tokens):
        """Output of all tokens without a cache, in one call."""
        q, k, v = (x[None, tokens] for x in (self.q, self.k, self.v))
        q, k = gpu_ops.rope(q, k, backend="reference")
        if self.cache.key_scales[0] is not None:
            k, v = (dequantize(*quantize(x, self.cache.keys[0].dtype)).astype(np.float32) for x in (k, v))
        return gpu_ops.attention(q, k, v, **self.window, backend="reference")[0]


@pytest.mark.parametrize(
    "where",
    [
        ("cpu", None),
        ("cpu", "reference"),
        pytest.param(("emulator", "raw"), marks=needs_nvrtc),
        pytest.param(("emulator", "numba"), marks=needs_numba_cuda),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [-1, 5])
def test_attention_through_steps_is_attention(where, window):
    check_steps(Run(*where, window=window), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("window", [-1, 5])
def test_attention_through_quantized_pages_is_attention_of_their_numbers(dtype, window):
    check_steps(Run(dtype=dtype, window=window), rtol=0, atol=0.02)  # where a code is off by one


def check_steps(run, **tolerance):
    """Check chunks of prompts with single tokens, padding, a fork, a shared prefix; the null page is poisoned."""
    cache = run.cache
    if cache.window >= 0:
        poisoned = (
            (cache.keys, cache.values)
            if cache.key_scales[0] is None
            else (cache.key_scales, cache.value_scales)
        )
        for arrays in poisoned:
            arrays[0][0] = np.nan
    rng = np.random.default_rng(2)
    out = cache.empty_step(tokens=24, batch=5, width=20)
    a, prompt = cache.add(), rng.integers(0, 50, 19).tolist()
    outputs = {a: [run.step({a: prompt[:11]}, out)[0]]}
    b = cache.add(rest := [*prompt[:6], 7, 8])
    outputs[b] = [run.dense(prompt[:4])]
    assert cache.length(b) == 4
    results = run.step({a: prompt[11:], b: rest[4:]})
    c = cache.fork(a)
    outputs[c] = [*outputs[a], results[0]]
    outputs[a].append(results[0])
    outputs[b].append(results[1])
    for _ in range(3):
        new = {h: [int(rng.integers(50))] for h in (a, b, c)}
        fixed = cache.empty_step(tokens=4, batch=4, width=20, max_seqlen_q=1)
        for handle, y in zip(new, run.step(new, fixed, decode=True), strict=True):
            outputs[handle].append(y)
    for handle, parts in outputs.items():
        np.testing.assert_allclose(np.concatenate(parts), run.dense(cache.tokens(handle)), **tolerance)


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_shared_pages_give_the_bits_of_own_ones(dtype):
    shared, alone = Run(dtype=dtype), Run(dtype=dtype)
    prompt, tails = list(range(18)), ([3, 4], [5, 6, 7])
    a = prefill_run(shared, prompt)
    forks = [a, shared.cache.fork(a)]
    separate = [prefill_run(alone, prompt) for _ in tails]
    assert alone.cache.stats.tokens_hit == 16
    for _ in range(2):
        actual = shared.step(dict(zip(forks, tails, strict=True)))
        for handle, tail, y in zip(separate, tails, actual, strict=True):
            assert (alone.step({handle: tail})[0] == y).all()
    again = shared.cache.add([*prompt, 40, 41])
    assert shared.cache.length(again) == 16
    fresh = Run(dtype=dtype)
    b = fresh.cache.add()
    fresh.step({b: prompt[:16]})
    tokens = [*prompt[16:], 40, 41]
    assert (shared.step({again: tokens})[0] == fresh.step({b: tokens})[0]).all()
    for handle in forks:
        shared.cache.free(handle)
    assert shared.cache.defragment()
    assert (shared.step({again: [8]})[0] == fresh.step({b: [8]})[0]).all()


def prefill_run(run, tokens):
    handle = run.cache.add(tokens)
    run.step({handle: tokens[run.cache.length(handle) :]})
    return handle


@needs_nvrtc
def test_a_captured_graph_decodes_step_after_step(cupy):
    """The graph holds the addresses of a step of fixed shapes; CuPy is a fake, see fake_cupy.py."""
    cache = PagedKVCache(1, 1, 16, num_pages=6, page_size=2, device="cuda")
    keys, values = cache.keys[0], cache.values[0]
    step = cache.empty_step(tokens=2, batch=2, width=4, max_seqlen_q=1)
    rng = np.random.default_rng(3)
    q, k, v = (FakeArray(rng.standard_normal((2, 1, 16), dtype=np.float32)) for _ in range(3))
    rotated, out = (FakeArray(np.zeros((2, 1, 16), np.float32)) for _ in range(2))

    def forward():
        places = {"slot_mapping": step.slot_mapping, "positions": step.positions}
        gpu_ops.rope_append_kv(q, k, v, keys, values, **places, out=rotated, backend="raw")
        tables = {"block_table": step.block_table, "seqused_k": step.seqused_k, "num_splits": 1}
        into = {"out": out.reshape(2, 1, 1, 16), "backend": "raw"}
        gpu_ops.attention_decode(rotated.reshape(2, 1, 1, 16), keys, values, **tables, **into)

    forward()  # compiles; a step of padding only stores nothing
    assert not keys.host.any()
    with cupy.capture():
        forward()
    seen = {cache.add(): [] for _ in range(2)}
    for handles in ((0, 1), (1,), (0, 1)):
        for x in (q, k, v):
            x.host[...] = rng.standard_normal(x.shape)
        cache.reserve({handle: [5] for handle in handles}, out=step)
        cache.commit()
        cupy.replay()
        for row, handle in enumerate(handles):
            seen[handle].append([x.host[row].copy() for x in (q, k, v)])
            dense = [np.array(x)[None] for x in zip(*seen[handle], strict=True)]
            rope = gpu_ops.rope(dense[0], dense[1], device="cpu")
            expected = gpu_ops.attention(*rope, dense[2], causal=True, device="cpu")[0, -1]
            np.testing.assert_allclose(out.host[row], expected, rtol=2e-5, atol=2e-6)
        assert not out.host[len(handles) :].any()
