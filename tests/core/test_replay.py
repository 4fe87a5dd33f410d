"""Replay: a later call of the same shapes, dtypes and options is computed and judged as the first one was.

Every test has different sizes, so that its first call is the first of the process.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask, RopeScaling
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from tests.support.calls import DTYPES, call
from tests.support.laws import (
    FIRST_OF_OPS,
    NAMES,
    WITH_OUT,
    apart,
    assert_same,
    filled,
    given_out,
    outcome,
    outs_like,
    python_calls,
    quick,
    read_only,
    refused,
    runs,  # noqa: F401 - conftest.py calls it
    sharing,
    unaligned,
    viewed,
    with_result,
)

DEVICES = ("cpu", "emulator", "cuda")
each_name = pytest.mark.parametrize("name", NAMES)
AXES = ("batch", "seqlen", "seqlen_q", "seqlen_new", "total", "rows", "cols", "N")


def is_slow(given):
    """True for slow tests. On the CPU each call of the table runs in one dtype by default."""
    of_its_own = DTYPES[NAMES.index(given["name"]) % len(DTYPES)]
    return given["backend"]["device"] == "cpu" and given["dtype"] != of_its_own


def quick_on_emulator(raw):
    return {"test_computes_what_a_first_call_does": {**quick(raw), "name": FIRST_OF_OPS}}


def sized(name, n, dtype=np.float32, seed=7):
    """Call with size ``n`` for every axis that may have any size."""
    return call(name, dtype, seed, **dict.fromkeys(AXES, n), max_seqlen=28)


def same_memory_order(actual, expected):
    return [x.strides for x in actual] == [x.strides for x in expected]


@each_name
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_computes_what_a_first_call_does(name, dtype, backend, monkeypatch):
    """Results agree with the same numbers, with others, and through a view."""
    case, other = sized(name, 13, dtype), sized(name, 13, dtype, seed=8)
    first = outcome(case, **backend)
    later = outcome(other, **backend)
    again = outcome(case, **backend)
    assert_same(again, first)
    assert same_memory_order(again, first)
    moved = (
        [outcome(viewed(x, apart), **backend) for x in (case, other)] if backend["backend"] != "raw" else []
    )
    for name_, value in backend.items():  # with another choice, a call is again a first one
        monkeypatch.setenv(f"GPU_OPS_{name_.upper()}", value)
    fresh = outcome(other)
    assert_same(later, fresh)
    assert same_memory_order(later, fresh)
    for actual, expected in zip(moved, (first, fresh), strict=False):
        assert_same(actual, expected, "behind a view")


@each_name
def test_a_later_call_does_less(name):
    """Validation and planning are not repeated. The minimum counts, as an import or a collection may interfere."""
    sized(name, 6)()  # imports and compiles
    case = sized(name, 17)
    forget_calls()  # two names can be one call in float32
    first = python_calls(case)
    later = min(python_calls(case) for _ in range(3))
    assert later <= 0.7 * first


@each_name
def test_arrays_are_let_go(name):
    case = sized(name, 18)
    arrays = (*case.inputs.values(), *case.written.values())
    alive = [weakref.ref(x) for x in arrays]
    case()
    case()
    del case, arrays
    if any(x() is not None for x in alive):  # in a cycle, perhaps: a collection takes a second here
        gc.collect()
    assert not [x for x in alive if x() is not None]


# ---- mistakes ----------------------------------------------------------------------------------------------


def with_value(index, value):
    def change(x):
        x = x.copy()
        x[index] = value
        return x

    return change


def two_alike(x):
    x = x.copy()
    x[2] = x[5] = 3
    return x


VALUES = [
    ("attention_decode", "seqused_k", with_value(0, 29), OptionError),
    ("attention_decode", "seqused_k", with_value(-1, -1), OptionError),
    ("attention_decode paged", "seqused_k", with_value(0, 29), OptionError),
    ("attention_decode paged", "block_table", lambda x: np.full_like(x, -1), OptionError),
    ("attention_decode paged", "block_table", lambda x: np.full_like(x, 999), OptionError),
    ("attention_varlen", "cu_seqlens_q", with_value(0, 1), OptionError),
    ("attention_varlen lse", "cu_seqlens_q", with_value(1, 15), OptionError),
    ("attention_varlen", "cu_seqlens_k", with_value(-1, 13), OptionError),
    ("attention_varlen_backward", "cu_seqlens_k", with_value(-1, 15), OptionError),
    ("attention_varlen used", "seqused_k", with_value(-1, 99), OptionError),
    ("attention_varlen pages", "seqused_k", with_value(0, 29), OptionError),
    ("attention_varlen pages", "block_table", lambda x: np.full_like(x, -1), OptionError),
    ("attention_varlen pages", "block_table", lambda x: np.full_like(x, 999), OptionError),
    ("rope positions", "positions", with_value((0, 0), 2**60), OptionError),
    ("rope packed yarn", "positions", with_value(0, -(2**60)), OptionError),
    ("rope_append_kv", "seqused_k", with_value(0, 28), OptionError),
    ("rope_append_kv", "seqused_k", with_value(0, -1), OptionError),
    ("rope_append_kv pages", "block_table", lambda x: np.full_like(x, -1), OptionError),
    ("rope_append_kv slots", "slot_mapping", with_value(1, 9999), OptionError),
    ("rope_append_kv slots", "slot_mapping", two_alike, OptionError),
    ("ternary_quantize", "w", with_value((0, 0), np.nan), OptionError),
    ("ternary_pack", "trits", with_value((0, 0), 2), gpu_ops.errors.FormatError),
    ("ternary_unpack", "packed", with_value((0, 0), 255), gpu_ops.errors.FormatError),
]


@pytest.mark.parametrize(
    ("name", "key", "change", "error"), VALUES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_values_are_judged_every_time(name, key, change, error):
    case = sized(name, 14)
    argument = case.arrays.get(key, case.options.get(key))
    wrong = case.having(**{key: change(argument)})
    first = refused(wrong, error, key if key.endswith(("k", "q")) else "")
    for _ in range(2):
        case()
        assert refused(wrong, error, "") == first


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_is_judged_every_time(name):
    """A mistake, a valid call, and the mistake again: the error is the same."""
    case = sized(name, 15)
    outs = outs_like(case, outcome(sized(name, 15), backend="reference"), filled)
    wrongs = [(with_result(case, outs, 0, read_only(outs[0])), ShapeError)]
    if outs[0].itemsize > 1:
        wrongs.append((with_result(case, outs, 0, unaligned(outs[0])), ShapeError))
    wrongs.append((with_result(case, outs, 0, outs[0].astype(np.uint32)), DTypeError))
    for key, x in case.written.items():
        others = [y for other, y in case.written.items() if other != key]
        taken = [y for y in others if (y.dtype, y.shape) == (x.dtype, x.shape)]
        for bad in (read_only(x), *taken, *(y[::-1] for y in taken)):
            wrongs.append((case.having(**{key: bad}), ShapeError))
    for key, x in case.inputs.items():
        moved, overlapping = sharing(x, outs[0])
        wrongs.append((with_result(case.having(**{key: moved}), outs, 0, overlapping), ShapeError))
    for wrong, error in wrongs:
        first = refused(wrong, error, "")
        for _ in range(2):
            case.having(**given_out(case, outs))()
            assert refused(wrong, error, "") == first


# Replay with options of every type, and with values that change between calls.

SHORT = RopeScaling.dynamic(2.0, 4)
LONG = RopeScaling.longrope([1.0] * 4, [2.0] * 4, original_max_position=6)


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


# ---- options: replayed for any plain type, and distinguished by it -----------------------------------------

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


@pytest.mark.parametrize(("name", "given", "plain"), OPTIONS, ids=str)
def test_options_of_any_plain_type(name, given, plain):
    one = call(name, batch=3, rows=19, nheads=8 + OPTIONS.index((name, given, plain)), nheads_kv=1)
    first = python_calls(lambda: one(**given))
    assert min(python_calls(lambda: one(**given)) for _ in range(3)) <= 0.7 * first
    assert_same(outcome(one, **given), outcome(one, **plain))


def test_numbers_of_other_types_are_told_apart(rng):
    x, w = normal(rng, 3, 20), normal(rng, 20)
    first = gpu_ops.rmsnorm(x, w, eps=0.1)
    for _ in range(2):
        other = gpu_ops.rmsnorm(x, w, eps=np.float16(0.1))
        np.testing.assert_array_equal(other, gpu_ops.rmsnorm(x, w, eps=float(np.float16(0.1))))
        assert not np.array_equal(other, first)
        with pytest.raises(OptionError, match="eps must be a number"):
            gpu_ops.rmsnorm(x, w, eps=np.True_)
        with pytest.raises(OptionError, match="casting"):
            gpu_ops.rmsnorm(x, w, casting=np.int64(1))
    q = normal(rng, 1, 3, 2, 8)
    gpu_ops.attention(q, q, q, window_size=(1, 0))
    for wrong in ((True, False), (1.0, 0.0), [np.True_, 0], (np.timedelta64(1), 0)):
        with pytest.raises(OptionError, match=r"window_size\[0\] must be an integer"):
            gpu_ops.attention(q, q, q, window_size=wrong)


@pytest.mark.parametrize(
    ("name", "option", "right", "wrongs"),
    [
        ("rmsnorm", "eps", 1, (True, "1", [1.0])),
        ("attention", "causal", True, (1, 1.0)),
        ("attention", "q_start", 1, (True, 1.0, -1)),
        ("attention", "window_size", (1, 1), ((1, "a"), ([1], 1), [1.0, 1.0], (2,))),
        ("attention_decode", "num_splits", 1, (True, 1.0)),
        ("rope", "rotary_dim", 4, (4.0,)),
    ],
)
def test_options_that_compare_equal_are_told_apart(name, option, right, wrongs):
    case = call(name)
    for _ in range(2):
        case(**{option: right})
        for wrong in wrongs:
            with pytest.raises(OptionError, match=option):
                case(**{option: wrong})


def test_positional_and_named_arguments_are_told_apart(rng):
    q, k = normal(rng, 1, 5, 2, 8), normal(rng, 1, 5, 2, 8)
    gate, up, bias = normal(rng, 3, 20), normal(rng, 3, 20), normal(rng, 20)
    for _ in range(2):
        np.testing.assert_array_equal(gpu_ops.swiglu(gate, up), gpu_ops.swiglu(up=up, gate=gate))
        plain, other = gpu_ops.layernorm(gate, bias), gpu_ops.layernorm(gate, bias, bias)
        assert not np.array_equal(plain, other)
        np.testing.assert_array_equal(gpu_ops.layernorm(gate, bias, bias=bias), other)
        np.testing.assert_array_equal(gpu_ops.rope(q, k=k)[1], gpu_ops.rope(k))


def test_the_backend_asked_for_by_the_environment_counts(rng, monkeypatch):
    x = normal(rng, 1, 4, 1, 8)
    gpu_ops.rope(x)
    monkeypatch.setenv("GPU_OPS_BACKEND", "nonsense")
    with pytest.raises(OptionError, match="GPU_OPS_BACKEND"):
        gpu_ops.rope(x)


# ---- arrays ------------------------------------------------------------------------------------------------


def mapped(x, folder, mode="r"):
    x.tofile(folder / "x")
    return np.memmap(folder / "x", x.dtype, mode, shape=x.shape)


def test_memory_maps_are_arrays(rng, tmp_path):
    x, w = normal(rng, 3, 28), normal(rng, 28)
    expected, weight = gpu_ops.rmsnorm(x, w), mapped(w, tmp_path)
    for function in (lambda: gpu_ops.rmsnorm(x, weight), lambda: gpu_ops.rmsnorm(x, weight=weight)):
        first = python_calls(function)
        actual = function()
        assert min(python_calls(function) for _ in range(3)) <= 0.7 * first
        assert type(actual) is np.ndarray
        np.testing.assert_array_equal(actual, expected)


def test_a_mapped_cache_is_written(tmp_path):
    case = call("rope_append_kv")
    q, k_cache = case.arrays["q"], case.arrays["k_cache"]
    cache = mapped(k_cache, tmp_path, "r+")
    *_, expected, _ = outcome(case)
    for _ in range(2):
        cache[...] = k_cache
        case.having(k_cache=cache, v_cache=case.arrays["v_cache"].copy())()
        np.testing.assert_array_equal(cache, expected)
    out = mapped(q, tmp_path, "r+")
    for _ in range(2):
        assert gpu_ops.rope(q, out=out) is out
        np.testing.assert_array_equal(out, gpu_ops.rope(q))


def test_other_kinds_of_arrays_are_looked_at():
    x = np.ones((2, 3))
    expected = gpu_ops.swiglu(x, x)
    for _ in range(2):
        with pytest.raises(DTypeError, match="masked array"):
            gpu_ops.swiglu(np.ma.array(x), np.ma.array(x))
        mine = x.view(type("Mine", (np.ndarray,), {}))
        np.testing.assert_array_equal(gpu_ops.swiglu(mine, mine), expected)


def test_in_place_of_one_is_not_in_place_of_another(rng):
    """The shapes are equal, but k's result would overwrite q while it is read."""
    q, k, other = (normal(rng, 1, 5, 2, 8) for _ in range(3))
    gpu_ops.rope(q, k, out=(q, k))
    gpu_ops.rope(q, k, out=(q, other))
    for wrong in ((other, q), (k, q), (q, q)):
        with pytest.raises(ShapeError, match="shares memory"):
            gpu_ops.rope(q, k, out=wrong)
    with pytest.raises(ShapeError, match="shares memory"):
        gpu_ops.rope(q, q, out=(q, other))
    q, k, v = (normal(rng, 1, 5, 2, 8) for _ in range(3))
    gpu_ops.attention(q, k, v, out=np.empty_like(q))
    with pytest.raises(ShapeError, match="shares memory with q"):
        gpu_ops.attention(q, k, v, out=q)


def test_more_kinds_of_calls_than_are_remembered(rng):
    xs = [normal(rng, 1, n, 1, 2) for n in range(1, 1100)]
    expected = [gpu_ops.rope(x) for x in xs]
    for x, y in zip(xs[::50], expected[::50], strict=True):
        np.testing.assert_array_equal(gpu_ops.rope(x), y)


def test_from_many_threads(rng):
    x = normal(rng, 1, 64, 4, 16)
    want = [gpu_ops.attention(x[:, :n], x, x) for n in range(1, 9)]

    def rounds(n):
        return [np.array_equal(gpu_ops.attention(x[:, :n], x, x), want[n - 1]) for _ in range(50)]

    with ThreadPoolExecutor(8) as threads:
        assert all(all(equal) for equal in threads.map(rounds, range(1, 9)))


# ---- values ------------------------------------------------------------------------------------------------


def close_to_the_reference(case, atol=1e-5):
    for actual, expected in zip(outcome(case), outcome(case, backend="reference"), strict=True):
        np.testing.assert_allclose(actual, expected, atol=atol)


def test_a_mask_changed_in_place():
    visible = np.ones((3, 3), np.bool_)
    case = call("attention", seqlen_q=9, seqlen_k=11)
    case = case.having(block_mask=BlockMask(visible, block_q=4, block_k=4), causal=False)
    for hidden in ((0, 2), (2, 0), (1, 1)):
        visible[hidden] = False  # the mask is the same object
        close_to_the_reference(case)
    for other in (BlockMask(visible, block_q=5, block_k=4), BlockMask(visible[:2], block_q=4, block_k=4)):
        with pytest.raises(ShapeError, match="block_mask"):
            case(block_mask=other)
    close_to_the_reference(case.having(block_mask=BlockMask(visible.T, block_q=4, block_k=4)))


def test_other_lengths():
    case = call("attention_varlen lse", total=9)
    case()
    for offsets in ([0, 9, 9, 9, 9], [0, 0, 4, 4, 9]):
        close_to_the_reference(case.having(cu_seqlens_q=np.array(offsets, np.int32)))
    for wrong in ([0, 3, 2, 9, 9], [1, 2, 2, 9, 9], [0, 2, 2, 2, 8]):
        with pytest.raises(OptionError, match="cu_seqlens_q must start at 0"):
            case.having(cu_seqlens_q=np.array(wrong, np.int32))()
    case = call("attention_varlen_backward")
    longest = int(np.diff(case.arrays["cu_seqlens_k"]).max())
    case(max_seqlen_k=longest)
    with pytest.raises(OptionError, match="longest sequence has 11"):
        case.having(cu_seqlens_k=np.array([0, 1, 12], np.int32))(max_seqlen_k=longest)
    case = call("attention_decode paged")
    case()
    table = case.options["block_table"]
    moved = {"block_table": table[:, ::-1].copy(), "seqused_k": np.array([0, 16], np.int32)}
    moved["block_table"][1] = [2, 0, 3, 1]
    close_to_the_reference(case.having(**moved))


def test_two_tokens_of_one_slot():
    case = call("rope_append_kv slots", total=6)
    case()
    padding = np.array([-1, -7, -1, 4, 20, -1])  # tokens in no slot may share
    case.having(slot_mapping=padding)()
    for slots in ([3, 3, 0, 1, 2, 4], [31, -1, 5, -1, 4, 31], [16, 0, 1, 17, 18, 0]):
        twice = next(s for s in slots if s >= 0 and slots.count(s) == 2)
        i, j = (n for n, s in enumerate(slots) if s == twice)
        before = [x.copy() for x in case.arrays.values()]
        with pytest.raises(OptionError, match=rf"\[{i}\] and slot_mapping\[{j}\] are both {twice};"):
            case.having(slot_mapping=np.array(slots))()
        assert_same(list(case.arrays.values()), before)
    # five pages of four rows, two per sequence
    case = call("rope_append_kv pages", max_seqlen=8, page_size=4)
    for table, used, clash in (
        ([[0, 4], [1, 4]], (2, 2), True),  # separate rows 2, 3, then row 0 of page 4
        ([[2, 2], [1, 1]], (3, 5), False),  # one page twice, and other rows of it
        ([[3, 0], [1, 3]], (1, 4), True),
        ([[0, 3], [3, 4]], (5, 0), True),
        ([[2, 4], [4, 1]], (4, 3), False),
    ):
        changes = {"block_table": np.array(table, np.int32), "seqused_k": np.array(used, np.int32)}
        if not clash:
            case.having(**changes)()
            continue
        with pytest.raises(OptionError, match=r"of sequence 0 and token \d of sequence 1 both go to row"):
            case.having(**changes)()


def test_other_positions(rng):
    q = normal(rng, 1, 5, 2, 8)
    for scaling in (None, SHORT):
        for positions in (np.arange(5), np.array([3, 99, -2, 0, 7])):
            options = {"positions": positions, "scaling": scaling}
            expected = gpu_ops.rope(q, **options, backend="reference")
            np.testing.assert_allclose(gpu_ops.rope(q, **options), expected, atol=1e-5)
    with pytest.raises(OptionError, match=r"2\*\*53"):
        gpu_ops.rope(q, positions=np.array([0, 0, 0, 0, 2**60]))


@pytest.mark.parametrize("scaling", [None, SHORT, LONG], ids=["default", "dynamic", "longrope"])
def test_another_first_position(rng, scaling):
    """A decoding step is replayed for any step number, and the number is checked."""
    q = normal(rng, 2, 3, 2, 8)
    values = (-3, 0, 2, np.int32(5), np.uint8(7), 99)
    expected = [gpu_ops.rope(q, positions=int(at) + np.arange(3), scaling=scaling) for at in values]
    first = python_calls(lambda: gpu_ops.rope(q, positions=1, scaling=scaling))
    for at, y in zip(values, expected, strict=True):
        np.testing.assert_array_equal(gpu_ops.rope(q, positions=at, scaling=scaling), y)
    assert python_calls(lambda: gpu_ops.rope(q, positions=98, scaling=scaling)) <= 0.7 * first
    for wrong, error in (
        (2**60, OptionError),
        (2**80, OptionError),
        (True, OptionError),
        (np.timedelta64(1), OptionError),
        (int, DTypeError),
    ):
        with pytest.raises(error, match="positions"):
            gpu_ops.rope(q, positions=wrong, scaling=scaling)


@pytest.mark.parametrize("scaling", [SHORT, LONG], ids=["dynamic", "longrope"])
def test_another_length_of_the_cache(scaling):
    """The frequencies of these scalings depend on it."""
    case = call("rope_append_kv", nheads=5).having(scaling=scaling)
    lengths = [np.array(used, np.int32) for used in ([0, 0], [3, 1], [2, 9], [0, 2])]
    outcomes = [outcome(case.having(seqused_k=used)) for used in lengths]
    for used, rotated in zip(lengths, outcomes, strict=True):
        fresh = outcome(case.having(seqused_k=used), backend="numba")
        assert_same(rotated, fresh)
        expected, *_ = outcome(case.having(seqused_k=used), backend="reference")
        np.testing.assert_allclose(rotated[0], expected, atol=1e-5)
    assert not np.array_equal(outcomes[1][0], outcomes[2][0])
