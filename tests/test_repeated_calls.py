"""Later calls of a kind skip validation: same results, same mistakes answered, nothing of the first call kept."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpu_ops
from gpu_ops import errors
from gpu_ops.core import dispatch, kinds


def f(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def attention(rng):
    return (f(rng, 1, 9, 4, 16), f(rng, 1, 11, 2, 16), f(rng, 1, 11, 2, 16)), {}


def backward(rng):
    (q, k, v), _ = attention(rng)
    out, lse = gpu_ops.attention(q, k, v, return_lse=True)
    return (f(rng, *out.shape), q, k, v, out, lse), {}


LENGTHS_Q, LENGTHS_K = np.array([0, 2, 2, 9], np.int32), np.array([0, 1, 6, 11], np.int32)


def mask(rng):
    return gpu_ops.BlockMask(rng.random((4, 3, 3)) < 0.7, block_q=4, block_k=4)


def varlen(rng):
    q, k, v = (x[0] for x in attention(rng)[0])
    return (q, k, v, LENGTHS_Q.copy(), LENGTHS_K.copy()), {"causal": True, "return_lse": True}


def varlen_backward(rng):
    args, kwargs = varlen(rng)
    out, lse = gpu_ops.attention_varlen(*args, **kwargs)
    return (f(rng, *out.shape), *args[:3], out, lse, *args[3:]), {"causal": True, "max_seqlen_k": 20}


def paged(rng):
    table = np.array([[3, 1, -1], [0, 4, 2]], np.int32)
    used = np.array([rng.integers(0, 9), rng.integers(0, 13)], np.int32)
    args = f(rng, 2, 1, 4, 16), f(rng, 5, 4, 2, 16), f(rng, 5, 4, 2, 16)
    return args, {"seqused_k": used, "block_table": table, "sinks": f(rng, 4)}


def append(rng, **options):
    new, used = (f(rng, 2, 3, 4, 8), f(rng, 2, 3, 2, 8), f(rng, 2, 3, 2, 8)), rng.integers(0, 14, 2)
    options = {"seqused_k": used.astype(np.int32), **options}
    return (*new, *np.zeros((2, 2, 16, 2, 8), np.float32)), options


def append_slots(rng):
    args, _ = append(rng)
    slots = np.append(rng.permutation(32)[:5], -1)
    options = {"slot_mapping": slots, "positions": rng.integers(0, 99, 6)}
    return (*(x.reshape(6, *x.shape[2:]) for x in args[:3]), *args[3:]), options


CALLS = {
    "rope_append_kv": append,
    "rope_append_kv paged": lambda rng: append(
        rng, block_table=np.array([[0], [1]], np.int32), q_weight=f(rng, 8), k_weight=f(rng, 8)
    ),
    "rope_append_kv slots": append_slots,
    "attention": attention,
    "attention sinks bias": lambda rng: (
        attention(rng)[0],
        {"sinks": f(rng, 4), "bias": f(rng, 4, 1, 11), "alibi_slopes": abs(f(rng, 4))},
    ),
    "attention_backward": backward,
    "attention_backward slopes": lambda rng: (backward(rng)[0], {"alibi_slopes": abs(f(rng, 1, 4))}),
    "attention mask": lambda rng: (attention(rng)[0], {"block_mask": mask(rng)}),
    "attention_backward mask": lambda rng: (backward(rng)[0], {"block_mask": mask(rng)}),
    "attention_varlen": varlen,
    "attention_varlen_backward": varlen_backward,
    "attention_decode paged": paged,
    "attention causal lse": lambda rng: (attention(rng)[0], {"causal": True, "return_lse": True}),
    "attention bhsd": lambda rng: (
        tuple(x.swapaxes(1, 2) for x in attention(rng)[0]),
        {"layout": "bhsd", "window_size": (4, 2)},
    ),
    "attention_decode": lambda rng: (
        (f(rng, 2, 1, 4, 16), f(rng, 2, 40, 2, 16), f(rng, 2, 40, 2, 16)),
        {"seqused_k": rng.integers(0, 41, 2).astype(np.int32)},
    ),
    "rope": lambda rng: ((f(rng, 1, 5, 2, 8), f(rng, 1, 5, 1, 8)), {}),
    "rope q": lambda rng: ((f(rng, 1, 5, 2, 8),), {"positions": 7, "interleaved": True}),
    "rope positions": lambda rng: (
        (f(rng, 2, 5, 2, 8), f(rng, 2, 5, 1, 8)),
        {"positions": rng.integers(0, 99, (2, 5))},
    ),
    "rope yarn": lambda rng: (
        (f(rng, 5, 2, 8),),
        {"positions": rng.integers(-9, 9, 5), "scaling": gpu_ops.RopeScaling.yarn(4.0, 64)},
    ),
    "rope llama3": lambda rng: ((f(rng, 1, 5, 2, 8),), {"scaling": gpu_ops.RopeScaling.llama3(8.0, 64)}),
    "rope_backward": lambda rng: ((f(rng, 2, 5, 2, 8), f(rng, 2, 5, 1, 8)), {}),
    "rmsnorm": lambda rng: ((f(rng, 2, 3, 24), f(rng, 24)), {}),
    "rmsnorm sum": lambda rng: (
        (f(rng, 3, 24), f(rng, 24)),
        {"residual": f(rng, 3, 24), "return_rstd": True},
    ),
    "rmsnorm alone": lambda rng: (
        (f(rng, 3, 24), f(rng, 24)),
        {"residual": f(rng, 3, 24), "return_sum": False},
    ),
    "rmsnorm_backward": lambda rng: ((f(rng, 3, 24), f(rng, 3, 24), f(rng, 24), abs(f(rng, 3))), {}),
    "layernorm": lambda rng: ((f(rng, 3, 24), f(rng, 24), f(rng, 24)), {"return_stats": True}),
    "layernorm_backward": lambda rng: (
        (f(rng, 3, 24), f(rng, 3, 24), f(rng, 24), f(rng, 3), abs(f(rng, 3))),
        {"dresidual": f(rng, 3, 24)},
    ),
    "swiglu": lambda rng: ((f(rng, 3, 8), f(rng, 3, 8)), {"activation": "gelu_tanh"}),
    "swiglu packed": lambda rng: ((f(rng, 3, 8),), {}),
    "swiglu_backward": lambda rng: ((f(rng, 3, 8), f(rng, 3, 8), f(rng, 3, 8)), {}),
    "swiglu_backward packed": lambda rng: ((f(rng, 3, 4), f(rng, 3, 8)), {}),
    "rmsnorm_quant_int8": lambda rng: ((f(rng, 3, 24), f(rng, 24)), {"residual": f(rng, 3, 24)}),
    "ternary_matmul": lambda rng: ((f(rng, 3, 24), gpu_ops.ternary_quantize(f(rng, 5, 24))), {}),
    "ternary_matmul base3": lambda rng: (
        (f(rng, 3, 24), gpu_ops.ternary_quantize(f(rng, 5, 24), group_size=8).to("base3")),
        {"activations": "native"},
    ),
    "attention_backward extra": lambda rng: (
        backward(rng)[0],
        {"sinks": f(rng, 4), "bias": f(rng, 4, 1, 11), "return_extra": True},
    ),
    "attention_varlen_backward extra": lambda rng: (
        varlen_backward(rng)[0],
        {"causal": True, "sinks": f(rng, 4), "return_extra": True},
    ),
    "swiglu_mlp_backward": lambda rng: (
        (f(rng, 3, 8), f(rng, 3, 8), f(rng, 12, 8), f(rng, 12, 8), f(rng, 8, 12)),
        {"activation": "gelu"},
    ),
    "ternary_matmul_backward": lambda rng: (
        (f(rng, 3, 5), f(rng, 3, 24), gpu_ops.ternary_quantize(f(rng, 5, 24), group_size=8)),
        {},
    ),
    "ternary_matmul both": lambda rng: (
        (gpu_ops.ternary_quantize(f(rng, 17, 24)), gpu_ops.ternary_quantize(f(rng, 5, 24)).to("base3")),
        {},
    ),
    "ternary_quantize": lambda rng: ((f(rng, 5, 24),), {"method": "twn", "group_size": 8}),
    "ternary_pack": lambda rng: ((rng.integers(-1, 2, (3, 24)).astype(np.int8), "base3"), {}),
    "ternary_unpack": lambda rng: (
        (rng.integers(0, 243, (3, 5)).astype(np.uint8), (3, 24), "base3"),
        {"strict": False},
    ),
    "swiglu_mlp": lambda rng: ((f(rng, 3, 8), f(rng, 12, 8), f(rng, 12, 8), f(rng, 8, 12)), {}),
}


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def op_of(name):
    return getattr(gpu_ops, name.split()[0])


def flat(results):
    if isinstance(results, gpu_ops.TernaryMatrix):
        return results.codes, results.scale
    arrays = results if isinstance(results, tuple) else (results,)
    return (*arrays[:-1], *arrays[-1].values()) if isinstance(arrays[-1], dict) else arrays


@pytest.mark.parametrize("name", CALLS)
def test_later_calls_equal_first_ones(name, rng):
    op = op_of(name)
    op(*CALLS[name](rng)[0], **CALLS[name](rng)[1])
    args, kwargs = CALLS[name](rng)
    again = op(*args, **kwargs)
    first = op.plan(*args, **kwargs).run()
    for x, y in zip(flat(again), flat(first), strict=True):
        assert x.dtype == y.dtype
        assert x.strides == y.strides
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", CALLS)
def test_are_not_planned(name, rng, monkeypatch):
    op = op_of(name)
    op(*CALLS[name](rng)[0], **CALLS[name](rng)[1])

    def refuse(*_, **__):
        raise AssertionError("planned again")

    args, kwargs = CALLS[name](rng)
    monkeypatch.setattr("gpu_ops.core.dispatch._setting", refuse)
    op(*args, **kwargs)
    with pytest.raises(AssertionError, match="planned again"):
        op(*args, **kwargs, device=None)
    if any(isinstance(x, np.ndarray) for x in args):
        with pytest.raises((AssertionError, errors.GpuOpsError)):
            op(*(x.astype(np.float64) if isinstance(x, np.ndarray) else x for x in args), **kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_are_let_go(name, rng):
    args, kwargs = CALLS[name](rng)
    alive = [weakref.ref(x) for x in (*args, *kwargs.values()) if isinstance(x, np.ndarray)]
    op_of(name)(*args, **kwargs)
    op_of(name)(*args, **kwargs)
    del args, kwargs
    if any(x() is not None for x in alive):  # in a cycle, perhaps: a collection takes a second here
        gc.collect()
    assert not [x for x in alive if x() is not None]


WITH_OUT = (
    "rmsnorm", "layernorm", "swiglu", "swiglu_mlp", "ternary_matmul", "attention mask", "attention",
    "attention_varlen", "attention_decode", "rope q",
)  # fmt: skip
WITH_SEVERAL = {
    "rope": "out", "rope_backward": "out", "swiglu_backward": "out", "rmsnorm_quant_int8": "out",
    "swiglu_mlp_backward": "out", "ternary_matmul_backward": "out",
    "attention_backward": "grads", "attention_backward extra": "grads", "attention_varlen_backward": "grads",
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_OUT)
def test_results_into_arrays_of_the_caller(name, rng):
    op = op_of(name)
    for _ in range(3):
        args, kwargs = CALLS[name](rng)
        want = flat(op(*args, **kwargs))[0]
        out = np.empty_like(want)
        assert flat(op(*args, **kwargs, out=out))[0] is out
        np.testing.assert_array_equal(out, want)
    first = args[0]
    both = np.zeros(first.size + out.size - 1, np.float32)  # they have one element in common
    overlapping = both[first.size - 1 :].reshape(out.shape)
    closed = np.zeros_like(out)
    closed.flags.writeable = False
    for x, wrong in ((first, closed), (both[: first.size].reshape(first.shape), overlapping)):
        with pytest.raises(errors.ShapeError, match="out"):
            op(x, *args[1:], **kwargs, out=wrong)
        assert not wrong.any()


@pytest.mark.parametrize(("name", "out"), WITH_SEVERAL.items(), ids=str)
def test_several_results_into_arrays_of_the_caller(name, out, rng):
    op = op_of(name)
    for _ in range(3):
        args, kwargs = CALLS[name](rng)
        want = flat(op(*args, **kwargs))
        given = tuple(map(np.empty_like, want))[: 4 if "mlp" in name else 3]
        found = op(*args, **kwargs, **{out: given})
        assert all(x is y for x, y in zip(found, given, strict=False))
        for x, y in zip(flat(found), want, strict=True):
            np.testing.assert_array_equal(x, y)
    same = (given[0], *given[:-1]) if given[0].shape == given[1].shape else (given[0][:0], *given[1:])
    with pytest.raises(errors.GpuOpsError, match=out):
        op(*args, **kwargs, **{out: same})


def test_an_input_is_not_overwritten(rng):
    (q, k, v), _ = attention(rng)
    gpu_ops.attention(q, k, v, out=np.empty_like(q))
    with pytest.raises(errors.ShapeError, match="shares memory with q"):
        gpu_ops.attention(q, k, v, out=q)


def test_in_place_of_one_is_not_in_place_of_another(rng):
    """The same shapes, but k's result would overwrite q while it is read."""
    q, k, other = f(rng, 1, 5, 2, 8), f(rng, 1, 5, 2, 8), f(rng, 1, 5, 2, 8)
    gpu_ops.rope(q, k, out=(q, k))
    gpu_ops.rope(q, k, out=(q, other))
    for wrong in ((other, q), (k, q), (q, q)):
        with pytest.raises(errors.ShapeError, match="shares memory"):
            gpu_ops.rope(q, k, out=wrong)
    with pytest.raises(errors.ShapeError, match="shares memory"):
        gpu_ops.rope(q, q, out=(q, other))


def test_in_place_again(rng):
    x, w = f(rng, 3, 24), f(rng, 24)
    want = gpu_ops.rmsnorm(x, w)
    for _ in range(2):
        y = x.copy()
        assert gpu_ops.rmsnorm(y, w, out=y) is y
        np.testing.assert_array_equal(y, want)


def test_arrays_that_are_copied_are_not_remembered(rng):
    x, w = f(rng, 3, 48)[:, ::2], f(rng, 24)
    for _ in range(2):
        np.testing.assert_array_equal(gpu_ops.rmsnorm(x, w), gpu_ops.rmsnorm(x.copy(), w))


def test_the_backend_asked_for_by_the_environment_counts(rng, monkeypatch):
    x = f(rng, 1, 4, 1, 8)
    gpu_ops.rope(x)
    monkeypatch.setenv("GPU_OPS_BACKEND", "nonsense")
    with pytest.raises(errors.OptionError, match="GPU_OPS_BACKEND"):
        gpu_ops.rope(x)


def test_options_that_compare_equal_are_told_apart():
    assert kinds.kind_of((), {"a": 1}) != kinds.kind_of((), {"a": True}) != kinds.kind_of((), {"a": 1.0})
    assert kinds.kind_of((1,), {}) != dispatch.kind_of((), {"a": 1})
    assert kinds.kind_of(([1],), {}) != kinds.kind_of(((1,),), {}) != kinds.kind_of(((2,),), {})
    assert kinds.kind_of(([1.0],), {}) is None
    assert kinds.kind_of(((1, "a"),), {}) is None


def test_remembers_a_bounded_number_of_kinds(rng, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_KINDS", 3)
    for n in (*range(1, 9), 2):
        x = f(rng, 1, n, 1, 8)
        np.testing.assert_array_equal(gpu_ops.rope(x), gpu_ops.rope.plan(x).run())


def test_from_many_threads(rng):
    x = f(rng, 1, 64, 4, 16)
    expected = [gpu_ops.attention(x[:, :n], x, x) for n in range(1, 9)]
    wrong = []

    def call(n):
        for _ in range(50):
            if not np.array_equal(gpu_ops.attention(x[:, :n], x, x), expected[n - 1]):
                wrong.append(n)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(call, range(1, 9)))
    assert not wrong
