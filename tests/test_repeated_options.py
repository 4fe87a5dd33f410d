"""Later calls are not planned again whatever plain type an option has: NumPy's numbers, lists, memory maps."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import errors
from gpu_ops.core import kinds
from tests.test_repeated_calls import CALLS, f

OPTIONS = [
    ("attention_decode", {"softmax_scale": 1 / np.sqrt(64)}, {"softmax_scale": 0.125}),
    ("attention_decode", {"causal": np.bool_(True)}, {"causal": True}),
    ("attention_decode", {"window_size": [4, 0]}, {"window_size": (4, 0)}),
    ("attention_decode", {"window_size": (np.int64(4), np.int32(0))}, {"window_size": (4, 0)}),
    ("rmsnorm", {"eps": np.float32(0.1)}, {"eps": float(np.float32(0.1))}),
    ("rmsnorm", {"eps": np.longdouble(0.1)}, {"eps": 0.1}),
    ("rope", {"positions": np.int64(5)}, {"positions": 5}),
    ("swiglu", {"activation": np.str_("gelu")}, {"activation": "gelu"}),
]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def no_planning(monkeypatch):
    """A function after whose call nothing is planned any more."""

    def refuse(*_, **__):
        raise AssertionError("planned again")

    return lambda: monkeypatch.setattr("gpu_ops.core.dispatch._setting", refuse)


def flat(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize(("name", "given", "plain"), OPTIONS, ids=str)
def test_options_of_plain_types_are_not_planned_again(name, given, plain, rng, no_planning):
    op, (args, kwargs) = getattr(gpu_ops, name), CALLS[name](rng)
    kwargs = {key: x for key, x in kwargs.items() if key not in given}
    want = op(*args, **kwargs, **plain)
    op(*args, **kwargs, **given)
    no_planning()
    for x, y in zip(flat(op(*args, **kwargs, **given)), flat(want), strict=True):
        np.testing.assert_array_equal(x, y)


def test_numbers_of_other_types_are_told_apart(rng):
    x, w = f(rng, 3, 24), f(rng, 24)
    first = gpu_ops.rmsnorm(x, w, eps=0.1)
    for _ in range(2):
        other = gpu_ops.rmsnorm(x, w, eps=np.float16(0.1))
        np.testing.assert_array_equal(other, gpu_ops.rmsnorm.plan(x, w, eps=float(np.float16(0.1))).run())
        assert not np.array_equal(other, first)
        with pytest.raises(errors.OptionError, match="eps must be a number"):
            gpu_ops.rmsnorm(x, w, eps=np.True_)
        with pytest.raises(errors.OptionError, match="casting"):
            gpu_ops.rmsnorm(x, w, casting=np.int64(1))
    q = f(rng, 1, 3, 2, 8)
    gpu_ops.attention(q, q, q, window_size=(1, 0))
    for wrong in ((True, False), (1.0, 0.0), [np.True_, 0], (np.timedelta64(1), 0)):
        with pytest.raises(errors.OptionError, match=r"window_size\[0\] must be an integer"):
            gpu_ops.attention(q, q, q, window_size=wrong)


def mapped(x, folder, mode="r"):
    x.tofile(folder / "x")
    return np.memmap(folder / "x", x.dtype, mode, shape=x.shape)


def test_memory_maps_are_arrays(rng, tmp_path, no_planning):
    x, w = f(rng, 3, 24), f(rng, 24)
    want, weight = gpu_ops.rmsnorm(x, w), mapped(w, tmp_path)
    gpu_ops.rmsnorm(x, weight)
    gpu_ops.rmsnorm(x, weight=weight)
    no_planning()
    for found in (gpu_ops.rmsnorm(x, weight), gpu_ops.rmsnorm(x, weight=weight)):
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, want)


def test_a_mapped_cache_is_written(rng, tmp_path):
    args, kwargs = CALLS["rope_append_kv"](rng)
    q, k, v, k_cache, v_cache = args
    cache = mapped(k_cache, tmp_path, "r+")
    want = k_cache.copy()
    for _ in range(2):
        gpu_ops.rope_append_kv(q, k, v, want, v_cache.copy(), **kwargs)
        cache[...] = k_cache
        gpu_ops.rope_append_kv(q, k, v, cache, v_cache, **kwargs)
        np.testing.assert_array_equal(cache, want)
    out = mapped(q, tmp_path, "r+")
    for _ in range(2):
        assert gpu_ops.rope(q, out=out) is out
        np.testing.assert_array_equal(out, gpu_ops.rope(q))


def test_other_kinds_of_arrays_are_planned():
    x = np.ones((2, 3))
    for other in (np.ma.array(x), x.view(type("Mine", (np.ndarray,), {}))):
        assert kinds.kind_of((other,), {}) is None
    with pytest.raises(errors.DTypeError, match="masked array"):
        gpu_ops.swiglu(np.ma.array(x), np.ma.array(x))
